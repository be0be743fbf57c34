"""Errors of whole gradients, held bytes and time of published models of small sizes.

    python benchmarks/actnn.py costs                     # all models
    python benchmarks/actnn.py costs llama efficientnet_b0 --steps 100 --device cuda

Needs timm, transformers and peft; nothing is downloaded. For each model and way: the error of the
gradient (norm of the difference from the exact one over its norm, root mean square over four
batches), held bytes and the time of a step as shares of exact training, and with --steps the loss
after training with AdamW, with a new batch for each step: images with a mean for each class, tokens
of which four may follow each. "equal" has 2 bits for all tensors.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actnn
from actnn.adapting.measured import Measured

Model = tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor], int]
LANGUAGE = ("bert", "gpt2", "llama", "lora", "mixtral", "t5", "whisper")
VISION = (
    "efficientnet_b0",
    "mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "resnet18",
    "swin_tiny_patch4_window7_224",
    "convnext_atto",
    "vit_tiny_patch16_224",
)
BATCHES, WARM = 8, 4
device = torch.device("cpu")


class PostNorm(nn.Module):
    """A language model of Transformer layers with the norm after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting the next token, ids: (N, T)."""
        y = self.head(self.blocks(self.embedding(ids)))
        return F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def model_of(name: str, side: int = 64) -> Model:
    """Return how to make a model, its loss for a batch by number, and `min_bytes`.

    Args:
        name: The model.
        side: Of the images that models of timm take.
    """
    if name == "postnorm":
        return PostNorm, lambda m, i: m(tokens(i, 16)), 1 << 14
    if name == "denoiser":
        return Denoiser, _denoising_loss, 1 << 16
    if name in LANGUAGE:
        return _language_model(name)
    timm = _timm()
    sizes: dict[str, Any] = {}
    if name.startswith("vit"):
        sizes = {"img_size": side, "patch_size": 8, "depth": 6}
    elif name.startswith("swin"):
        sizes = {"img_size": side, "depths": (2, 2, 2, 2)}
    if not name.startswith("resnet"):
        sizes |= {"drop_rate": 0.0, "drop_path_rate": 0.0}

    def make() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=10, **sizes)
        return model

    def loss(m: nn.Module, i: int) -> Tensor:
        x, y = images(i, side)
        return F.cross_entropy(m(x), y)

    return make, loss, 16 * side * side


def images(index: int, side: int = 64) -> tuple[Tensor, Tensor]:
    """Return images (8, 3, side, side) of a batch, whose classes have means, and the classes (8,).

    Three of ten classes are wrong, so that the loss has a floor.
    """
    random = torch.Generator().manual_seed(index)
    means = torch.randn(10, 3, 1, 1, generator=torch.Generator().manual_seed(0)) * 1.5
    y = torch.randint(10, (8,), generator=random)
    x = torch.randn(8, 3, side, side, generator=random) + means[y]
    wrong = torch.rand(8, generator=random) < 0.3
    y = torch.where(wrong, torch.randint(10, (8,), generator=random), y)
    return x.to(device), y.to(device)


def tokens(index: int, count: int = 8) -> Tensor:
    """Return sequences (count, 64) of a batch: each token has four that may follow."""
    random = torch.Generator().manual_seed(index)
    ids = [torch.randint(64, (count,), generator=random)]
    for _ in range(63):
        ids.append((ids[-1] * 5 + torch.randint(4, (count,), generator=random)) % 64)
    return torch.stack(ids, 1).to(device)


class Denoiser(nn.Module):
    """A diffusion U-Net: two resolutions, group norms, attention, and the step as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first, self.down = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 64, 3, 2, 1)
        self.inner, self.outer = self._block(64, 64), self._block(96, 32)
        self.norm, self.attention = nn.GroupNorm(8, 64), nn.MultiheadAttention(64, 4)
        self.last = nn.Conv2d(32, 3, 3, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            *(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, 1, 1)),
            *(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, 1, 1)),
        )

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Return the noise in images x (N, 3, 64, 64) at steps (N,) between 0 and 1."""
        wide = self.first(x)
        y = self.down(wide) + self.time(step[:, None])[:, :, None, None]
        y = y + self.inner(y)
        rows = self.norm(F.avg_pool2d(y, 4)).flatten(2).permute(2, 0, 1)
        found = self.attention(rows, rows, rows, need_weights=False)[0]
        maps = found.permute(1, 2, 0).unflatten(2, (8, 8))
        y = torch.cat(
            [F.interpolate(y + F.interpolate(maps, scale_factor=4), scale_factor=2), wide], 1
        )
        return self.last(self.outer(y))  # type: ignore[no-any-return]


def _denoising_loss(m: nn.Module, i: int) -> Tensor:
    x, _ = images(i)
    random = torch.Generator().manual_seed(i)
    noise = torch.randn(x.shape, generator=random).to(device)
    step = torch.rand(len(x), generator=random).to(device)
    share = step[:, None, None, None]
    return F.mse_loss(m(x * (1 - share) + noise * share, step), noise)


def _language_model(name: str) -> Model:
    _timm()  # transformers imports torchvision, too
    import transformers as tf

    small: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4}
    decoder = small | {"num_key_value_heads": 2, "intermediate_size": 128, "use_cache": False}

    def bert() -> Any:
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = small | {"num_hidden_layers": 4, "intermediate_size": 128}
        return tf.BertForSequenceClassification(tf.BertConfig(**sizes, **rates))

    def gpt2() -> Any:
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
        return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **rates))

    def llama() -> Any:
        return tf.LlamaForCausalLM(tf.LlamaConfig(**decoder, num_hidden_layers=4))

    def lora() -> Any:
        import peft

        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear"))

    def mixtral() -> Any:
        sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        return tf.MixtralForCausalLM(tf.MixtralConfig(**decoder, **sizes))

    def t5() -> Any:
        sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
        rest = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
        return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, **rest, num_layers=3))

    def whisper() -> Any:
        each = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
        sizes = {f"{end}_{key}": n for end in ("encoder", "decoder") for key, n in each.items()}
        rest = {"vocab_size": 256, "d_model": 64, "num_mel_bins": 16, "max_source_positions": 64}
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        rest |= {**ids, "decoder_start_token_id": 0, "dropout": 0.0, "use_cache": False}
        return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**sizes, **rest))

    def loss(m: nn.Module, i: int) -> Tensor:
        x = tokens(i)
        given: dict[str, Tensor] = {"input_ids": x, "labels": x}
        if name == "bert":
            given["labels"] = ((x[:, :16] % 2).sum(1) > 8).long()
        elif name == "t5":
            given["labels"] = (x * 3 + 1) % 64
        elif name == "whisper":  # sounds: a band for each token
            bands = F.one_hot(x % 16, 16).float().transpose(1, 2).repeat_interleave(2, 2)
            given = {"input_features": bands, "labels": x}
        return m(**given).loss  # type: ignore[no-any-return]

    makers = (bert, gpt2, llama, lora, mixtral, t5, whisper)
    return {each.__name__: each for each in makers}[name], loss, 1 << 14


def _timm() -> Any:
    """Import timm; compiled operators of torchvision are not needed."""
    library = torch.library.Library
    kept: Any = library.impl, library._register_fake

    def quiet(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except RuntimeError:
                return None

        return call

    library.impl, library._register_fake = map(quiet, kept)  # type: ignore[method-assign]
    try:
        import torchvision  # noqa: F401
    finally:
        library.impl, library._register_fake = kept  # type: ignore[method-assign]
    import timm

    return timm


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with the same weights every time."""
    torch.manual_seed(seed)
    return make().to(device).train()


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the whole gradient, flat."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def flat(model: nn.Module, least: int) -> nn.Module:
    """Compress a model with equal bits for all tensors: level L3 before it has measured."""
    actnn.compress(model, level="L3", min_bytes=least)
    model.actnn.adaptive = Equal(model, 2, 256)  # type: ignore[assignment]
    return model


class Equal(Measured):
    """Level L3 that measures nothing."""

    def watch(self, *arguments: Any) -> None:
        """Never measure."""

    def _take(self, name: str, saved: Any) -> int:
        return int(self.average)


WAYS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "bits=4": lambda m, least: actnn.compress(m, bits=4, min_bytes=least),
    "equal": flat,
    "bits=2": lambda m, least: actnn.compress(m, bits=2, min_bytes=least),
    "L3": lambda m, least: actnn.compress(m, level="L3", min_bytes=least),
}


class Found(NamedTuple):
    """What a way does to a model.

    Attributes:
        error: Of the gradient, over its norm.
        held: Bytes.
        exact: Bytes that exact training holds.
        time: Of a step, as a share of exact training.
    """

    error: float
    held: int
    exact: int
    time: float


def errors(
    name: str, ways: Iterable[str] = tuple(WAYS), rounds: int = 0, side: int = 64
) -> dict[str, Found]:
    """Return what each way does to a model.

    Args:
        name: The model.
        ways: The ways.
        rounds: Steps whose time is taken; with 0, times are NaN.
        side: Of the images that models of timm take.
    """
    make, loss, least = model_of(name, side)
    exact_model = made(make)
    exact = {i: gradient(exact_model, loss(exact_model, i)) for i in range(WARM, BATCHES)}
    found = {}
    for way in ways:
        model = WAYS[way](made(make), least)
        for i in range(WARM):
            gradient(model, loss(model, i))
        squares = []
        for i in range(WARM, BATCHES):
            value = loss(model, i)
            records: Any = list(model.actnn.records)  # type: ignore[union-attr]
            g = gradient(model, value)
            squares.append(float((g - exact[i]).square().sum() / exact[i].square().sum()))
        times = [(_seconds(model, loss), _seconds(exact_model, loss)) for _ in range(rounds)]
        share = statistics.median(a / b for a, b in times) if times else math.nan
        error = math.sqrt(sum(squares) / len(squares))
        bytes_of = (sum(getattr(each, kind) for each in records) for kind in ("held", "nbytes"))
        found[way] = Found(error, *bytes_of, share)
        if way == "L3":
            adaptive: Any = model.actnn.adaptive
            print(f"  {adaptive._trials.runs} extra steps, {len(adaptive.bits)} tensors, "
                  f"own estimate {adaptive.error}, bits {adaptive.budget}")  # fmt: skip
    return found


def _seconds(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> float:
    """Return the time of a step of training."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    gradient(model, loss(model, WARM))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trained(name: str, way: str, steps: int, rate: float, seed: int = 0) -> float:
    """Return the mean loss of the last 20 steps of AdamW, with weights and batches of a seed."""
    make, loss, least = model_of(name)
    model = made(make, seed)
    if way != "exact":
        WAYS[way](model, least)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, BATCHES + step + 1_000_000 * seed)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    return sum(values[-20:]) / len(values[-20:])


def main() -> None:
    global device
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["postnorm", "denoiser", *LANGUAGE, *VISION])
    parser.add_argument("--steps", type=int, default=0, help="steps of training to compare")
    parser.add_argument("--rounds", type=int, default=20, help="steps whose time is taken")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seeds", type=int, default=1, help="how often these steps run")
    parser.add_argument("--device", type=torch.device, default=device, help="where models run")
    options = parser.parse_args()
    device = options.device
    print(f"PyTorch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    warnings.simplefilter("always")
    for name in options.models:
        start = time.perf_counter()
        for way, each in errors(name, rounds=options.rounds).items():
            size = f"bytes {each.held / each.exact:.3f} of {each.exact / 2**20:6.1f} MiB"
            print(
                f"{name:30} {way:8} error {each.error:8.3g}  {size}  time {each.time:.2f}",
                flush=True,
            )
        if options.steps:
            losses: dict[str, list[float]] = {"exact": [], "L3": []}
            for seed in range(options.seeds):
                for way, values in losses.items():
                    values.append(trained(name, way, options.steps, options.rate, seed))
                    print(f"{name:30} {way:8} loss {values[-1]:.4f}", flush=True)
            if options.seeds > 1:
                shares = [b / a - 1 for a, b in zip(*losses.values(), strict=True)]
                spread = statistics.stdev(shares) / math.sqrt(len(shares))
                mean = statistics.fmean(shares)
                print(f"{name:30} L3 over exact: {mean:+.1%}, standard error {spread:.1%}")
        print(f"{name:30} {time.perf_counter() - start:.0f} s", flush=True)
