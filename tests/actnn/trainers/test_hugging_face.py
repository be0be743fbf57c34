"""Trainer and generate of Hugging Face, and peft, take compressed models as any others."""

import copy
import warnings

import pytest
import torch
from torch import nn
from trained_models import gpt2, ids, llama, with_lora
from trainer_packages import package

import actnn

pytestmark = [  # what these packages warn of is theirs
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::actnn.ActNNWarning"),
]


class Regression(nn.Module):
    """A model that takes no keywords but its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x, labels=None):
        y = self.net(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


def regression():
    torch.manual_seed(0)
    return Regression()


def texts(count=16):
    return [{"input_ids": row, "labels": row} for row in ids(count, 32)]


def numbers(count=16):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum()} for row in x]


def trained(model, data, **settings):
    """Losses of three steps by Trainer, and the loss of its evaluation."""
    transformers = package("transformers")
    arguments = transformers.TrainingArguments(
        "trainer",
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    steps = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    return [*steps, trainer.evaluate()["eval_loss"]]


SETTINGS = {
    "default": {},
    "columns": {"remove_unused_columns": False},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"bf16": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_losses_of_a_trainer_are_those_of_plain_training(settings):
    exact = trained(llama(), texts(), **settings)
    model = actnn.compress(llama(), bits=32, min_bytes=0)
    assert trained(model, texts(), **settings) == exact
    assert model.actnn.records
    rounded = trained(actnn.compress(llama(), bits=4, min_bytes=0), texts(), **settings)
    assert rounded[0] == pytest.approx(exact[0], rel=1e-6)  # the forward is exact
    assert rounded == pytest.approx(exact, abs=0.02)
    assert exact[0] - exact[-1] > 0.02


@pytest.mark.parametrize("name", ["default", "accumulation"])
def test_a_model_without_other_keywords_gets_none(name):
    exact = trained(regression(), numbers(), **SETTINGS[name])
    model = actnn.compress(regression(), bits=32, min_bytes=0)
    assert trained(model, numbers(), **SETTINGS[name]) == exact


def test_dropout_of_torch_gives_the_losses_of_plain_training():
    exact = trained(gpt2(), texts())
    model = actnn.compress(gpt2(), bits=32, min_bytes=0, dropout="torch")
    assert trained(model, texts()) == exact


def test_a_trainer_takes_a_model_that_fits_a_budget():
    exact = trained(llama(use_cache=False), texts())
    batch = {"input_ids": ids(16, 32), "labels": ids(16, 32)}
    model = llama(use_cache=False)
    free = actnn.fit(copy.deepcopy(model), batch, "1 GiB").peak
    plan = actnn.fit(model, batch, int(0.8 * free), bits=())
    assert "recompute" in {choice.action for choice in plan.choices.values()}
    assert trained(model, texts()) == pytest.approx(exact, rel=1e-6)


def cached(kind):
    """A model whose forward fills a cache of keys and values by default, and a batch."""
    transformers = package("transformers")
    torch.manual_seed(0)
    tokens, mask = ids(4, 32), torch.ones(4, 32, dtype=torch.long)
    mask[0, 20:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    if kind == "llama":
        return llama(), batch
    if kind == "peft":
        return with_lora(llama()), batch
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return gpt2(**rates), batch
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, vocab_size=256,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config), batch
    sizes = {"d_model": 64, "vocab_size": 256, "decoder_start_token_id": 1, "pad_token_id": 0}
    if kind == "t5":
        config = transformers.T5Config(
            num_layers=2, num_heads=4, d_kv=16, d_ff=128, dropout_rate=0.0, **sizes
        )
        return transformers.T5ForConditionalGeneration(config), batch
    layers = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
    config = transformers.WhisperConfig(
        num_mel_bins=8, max_source_positions=64, bos_token_id=1, eos_token_id=2,
        **layers, **heads, **widths, **sizes,
    )  # fmt: skip
    batch = {"input_features": torch.randn(4, 8, 128), "labels": tokens}
    return transformers.WhisperForConditionalGeneration(config), batch


@pytest.mark.parametrize("kind", ["llama", "peft", "gpt2", "mixtral", "t5", "whisper"])
def test_a_model_that_fills_a_cache_fits_a_budget_with_the_gradients_of_plain_training(kind):
    model, batch = cached(kind)
    model.train()

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact = gradients()
    with pytest.raises(actnn.ActNNError, match="Expected budget to be at least") as caught:
        actnn.fit(model, batch, "1 KiB", bits=())
    least = int(str(caught.value).split("at least ")[1].split()[0])
    plan = actnn.fit(model, batch, int(1.05 * least), bits=())
    found = gradients()
    assert (found - exact).norm() <= 1e-5 * exact.norm(), plan


def test_level_3_measures_the_layers_that_are_no_linear_layers():
    model = actnn.compress(gpt2(), level="L3", min_bytes=1 << 11)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Compression adds|Level L3 uses")
        for seed in range(6):
            tokens = ids(4, 32) + seed % 2
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
    bits = {r.choice.bits for r in model.actnn.records if "Addmm" in r.op or "mlp" in r.module}
    assert len(bits - {None}) > 1


def test_lora():
    """Of a compressed model, and compressed with it."""
    exact = trained(with_lora(llama()), texts())
    settings = {"bits": 32, "min_bytes": 0}
    for model in (
        with_lora(actnn.compress(llama(), **settings)),
        actnn.compress(with_lora(llama()), **settings),
    ):
        assert trained(model, texts()) == exact
        assert model.actnn.records


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_generated_texts_of_padded_batches_stay(make, masked):
    model = make(initializer_range=0.3).eval()
    x = ids(3, 12)
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    x[mask == 0] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    if masked:
        settings["attention_mask"] = mask
    exact = model.generate(x, **settings)
    actnn.compress(model, bits=4, min_bytes=0).eval()
    assert torch.equal(model.generate(x, **settings), exact)


def test_a_saved_model_is_the_model(tmp_path):
    model = actnn.compress(llama(), bits=4)
    model.save_pretrained(tmp_path)
    loaded = type(llama()).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    for name, value in llama().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_the_loss_of_a_model_is_the_loss_of_a_step():
    from actnn.planning.training_step import default_loss

    model, batch = llama(), {"input_ids": ids(8, 64), "labels": ids(8, 64)}
    assert torch.equal(default_loss(model, batch), model(**batch).loss)
    by_hand = actnn.estimate(model, batch, loss=lambda model, batch: model(**batch).loss)
    tokens = package("transformers").BatchEncoding(batch)
    assert actnn.estimate(model, batch) == actnn.estimate(model, tokens) == by_hand
    with actnn.compress(model, level="L0").actnn:  # no layer makes a mask of its own
        loss = model(**batch).loss
    assert by_hand.total.exact == pytest.approx(model.actnn.held_bytes, rel=0.01)
    del loss


def test_estimates_of_operators_whose_fake_version_is_wrong(caplog):
    transformers = package("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    batch = {"input_ids": ids(8, 32), "labels": ids(8, 32)}
    estimate = actnn.estimate(model, batch)
    assert not caplog.records
    assert estimate == actnn.estimate(model, batch, loss=lambda model, batch: model(**batch).loss)
    actnn.compress(model, level="L0")
    loss = model(**batch).loss
    held = model.actnn.held_bytes
    del loss
    assert estimate.total.exact == pytest.approx(held, rel=0.01)


def test_checkpoints_with_chunks_have_the_gradients_of_a_plain_model():
    """The norms and multilayer perceptrons of blocks with LoRA, and codes of the blocks' inputs."""
    x = ids(2, 50)
    plain, ours = with_lora(llama(use_cache=False)), with_lora(llama(use_cache=False))
    for model in (plain, ours):
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    for block in ours.base_model.model.model.layers:
        for part in (block.input_layernorm, block.post_attention_layernorm, block.mlp):
            actnn.in_chunks(part, 16)
    plain(input_ids=x, labels=x).loss.backward()
    exact = [each.grad for each in plain.parameters() if each.requires_grad]
    errors = {}
    for bits in (32, 8):
        inputs = actnn.Choice("compress", bits)
        saving = actnn.compressed(
            policy=lambda info, inputs=inputs: (
                inputs if info.op == "checkpoint" else actnn.Choice("keep")
            ),
            min_bytes=0,
            model=ours,
        )
        ours.zero_grad()
        with saving:
            loss = ours(input_ids=x, labels=x).loss
        loss.backward()
        found = [each.grad for each in ours.parameters() if each.requires_grad]
        off = sum((a - b).square().sum() for a, b in zip(exact, found, strict=True))
        errors[bits] = float((off / sum(each.square().sum() for each in exact)).sqrt())
        reasons = [record.reason for record in saving.records if record.op == "checkpoint"]
        assert reasons == ["kept" if bits == 32 else "compressed"]  # the first input is a leaf
    assert errors[32] < 1e-5
    assert 1e-4 < errors[8] < 0.05
