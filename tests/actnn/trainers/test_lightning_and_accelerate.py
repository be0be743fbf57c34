"""Lightning and accelerate train compressed models as they train others; timm's models, too."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_models import ids, llama
from trainer_packages import package

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from actnn_parts import costs

import actnn
from sweeps import first_of

pytestmark = [  # what these packages warn of is theirs
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::actnn.ActNNWarning"),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))


def batches():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader([(row, row.sum(0, True)) for row in x], batch_size=4)


def task(calls_itself):
    """A LightningModule that keeps the losses of its steps."""
    lightning = package("lightning")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = network(), []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            result = self(x) if calls_itself else self.net(x)
            loss = (result - y).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Task()


def lightning_losses(model, **settings):
    trainer = package("lightning").Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        **settings,
    )
    trainer.fit(model, batches())
    return model.losses


@pytest.mark.parametrize("settings", first_of([{}, {"precision": "bf16-mixed"}], 1))
@pytest.mark.parametrize("whole", [True, False])
def test_lightning(whole, settings):
    exact = lightning_losses(task(whole), **settings)
    model = task(whole)
    compressed = actnn.compress(model if whole else model.net, bits=32, min_bytes=0)
    assert lightning_losses(model, **settings) == exact
    assert len(exact) == 4
    assert compressed.actnn.records


@pytest.mark.slow
def test_a_lightning_module_that_does_not_call_itself_says_so():
    model = actnn.compress(task(calls_itself=False), bits=4, min_bytes=0)
    with pytest.warns(actnn.ActNNWarning, match="the compressed Task itself.*'net'"):
        lightning_losses(model)


def accelerated(model, compressed, **settings):
    """Losses of an accelerate loop, with the model compressed before or after `prepare`."""
    accelerate = package("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compressed == "before":
        actnn.compress(model, bits=32, min_bytes=0)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    if compressed == "after":
        actnn.compress(prepared, bits=32, min_bytes=0)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(prepared):
            loss = (prepared(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if compressed != "no":
        assert accelerator.unwrap_model(prepared).actnn.records
    return losses


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bfloat16": {"mixed_precision": "bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_accelerate_prepares_a_compressed_model(settings):
    exact = accelerated(network(), "no", **settings)
    assert accelerated(network(), "before", **settings) == exact


@pytest.mark.slow
def test_a_model_can_be_compressed_after_accelerate_has_prepared_it():
    assert accelerated(network(), "after") == accelerated(network(), "no")
    with pytest.raises(actnn.ActNNError, match="set on this Sequential; compress it before"):
        accelerated(network(), "after", mixed_precision="bf16")


IMAGE_MODELS = {
    "convnext_atto": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_100": {},
    "mobilenetv4_conv_small": {},
    "resnet10t": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {"img_size": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_results_and_gradients_of_published_image_models(name):
    """Results are exact at any width, gradients without rounding."""
    timm = package("timm")
    x, results, gradients = torch.randn(2, 3, 64, 64), {}, {}
    for bits in (None, 32, 4):
        torch.manual_seed(0)
        settings = {"drop_path_rate": 0.0, **IMAGE_MODELS[name]}
        model = timm.create_model(name, num_classes=4, **settings).train()
        if bits:
            actnn.compress(model, bits=bits, min_bytes=0)
        results[bits] = model(x)
        results[bits].square().mean().backward()
        gradients[bits] = [parameter.grad for parameter in model.parameters()]
    assert torch.equal(results[32], results[None])
    assert torch.equal(results[4], results[None])
    for exact, ours in zip(gradients[None], gradients[32], strict=True):
        assert (exact - ours).norm() <= 1e-5 * exact.norm() + 1e-7


def first_step(name, bits):
    """Return the loss of a first step, and the gradients."""
    make, loss, least = costs.model_of(name)
    with torch.random.fork_rng(devices=[]):
        model = costs.made(make)
    if bits:
        actnn.compress(model, bits=bits, min_bytes=least)
    value = loss(model, 0)
    value.backward()
    return value.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*costs.LANGUAGE, "denoiser"])
def test_the_first_loss_of_published_models(name):
    """It is exact at any width, bit for bit; gradients without rounding."""
    package("transformers"), package("timm"), package("peft")
    loss, gradients = first_step(name, None)
    same, ours = first_step(name, 32)
    rounded, others = first_step(name, 4)
    assert torch.equal(same, loss)
    assert torch.equal(rounded, loss)
    for exact, found in zip(gradients, ours, strict=True):
        assert (exact - found).norm() <= 1e-5 * exact.norm() + 1e-9
    assert any(not torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@pytest.mark.slow
def test_linear_attention_of_a_published_model():
    timm = package("timm")
    torch.manual_seed(0)
    model = timm.create_model("efficientvit_b0", num_classes=10).train()
    batches = [torch.randn(4, 3, 64, 64) for _ in range(4)]
    parameters = list(model.parameters())

    def gradients():
        for x in batches:
            loss = nn.functional.cross_entropy(model(x), torch.arange(4))
            yield torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])

    exact = list(gradients())
    actnn.compress(model, bits=8, min_bytes=1 << 14)
    for wanted, got in zip(exact, gradients(), strict=True):
        assert (got - wanted).norm() < 0.05 * wanted.norm()
    assert "divided by in backward" in {record.reason for record in model.actnn.records}


@pytest.mark.slow
def test_a_compressed_model_is_exported_with_the_names_of_its_inputs():
    model, batch = llama(use_cache=False).eval(), {"input_ids": ids(2, 16)}
    plain = torch.export.export(model, (), batch).graph_signature.user_inputs
    actnn.compress(model, bits=4)
    assert torch.export.export(model, (), batch).graph_signature.user_inputs == plain
