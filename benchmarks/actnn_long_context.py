"""Tokens of one sequence that a training step of a large language model holds on one GPU.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/actnn_long_context.py

The model is a decoder like Llama 3 8B with random weights in bfloat16, with LoRA of rank 16 on all
linear layers of its blocks, trained by AdamW. Attention is PyTorch's flash kernel, and the loss is
computed in chunks of tokens. The ways:

- checkpoint: torch.utils.checkpoint of each block;
- host: the same, and inputs of blocks are in host memory (`torch.autograd.graph.save_on_cpu`);
- ours: the same, and inputs of blocks are codes of 4 bits in host memory (`Choice("offload", 4)`);
  norms and multilayer perceptrons run in chunks (`actnn.in_chunks`);
- ours, 8 bits: the same with codes of 8 bits;
- ours on the device: as ours, and the codes stay on the device.

Not all 32 blocks are run: a few are, and tensors without content stand for the weights, LoRA states
and inputs of the others on the device. Bytes and times per block are equal, so that `tokens/s` of
32 blocks follows from the time of the blocks that are run and that of the rest of the step. What
the others would have in host memory is computed. First of all, the tokens that fit are predicted
from bytes. Then short sequences measure bytes per token, from which the largest length follows, and
a step of that length is run. Each way is a process of its own. The last one runs all 32 blocks on a
short sequence: times, and the error of gradients. Two steps of one way differ by what the order of
sums in the flash kernel does.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path.append(sys.path.pop(0))  # actnn.py in this folder does not hide the package

import actnn
from actnn import Choice
from actnn.saving.offload import PREFETCH, part_sizes

GIB = 2**30
HIDDEN, BLOCKS, HEADS, KV_HEADS, INNER, VOCABULARY = 4096, 32, 32, 8, 14336, 128256
RANK = 16
CHUNK = 4096  # tokens of norms and multilayer perceptrons
LOSS_CHUNK = 2048
COMPARE = "compare"
SPARE = 0.985  # of the memory; the allocator cannot fill all gaps


@dataclass(frozen=True)
class Way:
    """How a step is run.

    Attributes:
        bits: Of the codes of inputs of blocks; None for no codes.
        host: Whether inputs of blocks are in host memory.
        chunks: Whether norms and multilayer perceptrons run in chunks.
    """

    bits: int | None
    host: bool
    chunks: bool

    def boundary(self) -> tuple[float, float]:
        """Bytes per token of the input of a block: on the device, in host memory."""
        data = 2 * HIDDEN if self.bits is None else HIDDEN * self.bits / 8
        params = 0 if self.bits is None else HIDDEN * 4 / 256  # of groups, on the device
        return (params, data) if self.host else (params + data, 0)

    def working(self) -> int:
        """Bytes per token, predicted, at the peak within a block in backward, without its input.

        Elements have 2 bytes; those of norms and of the sums of dq in the flash kernel have 4.
        """
        x, kv, inner = 2 * HIDDEN, 2 * HIDDEN * KV_HEADS // HEADS, 2 * INNER
        attention = x + 2 * kv + x  # q, k, v and the result
        outside = x + x  # the leaf behind the embedding, the gradient of the block's result
        if self.chunks:  # peak in the backward of attention
            saved = x + x + attention  # input, normalized input
            gradients = x + (x + 2 * x) + 2 * (x + kv)  # result, dq and its sums, dk and dv
            return outside + saved + gradients
        saved = 2 * (2 * x + x) + attention  # both norms in float32 and normalized
        # the gate, its activation and the other half, and gradients of these
        return outside + saved + 3 * inner + 3 * inner

    def per_token(self) -> float:
        """Bytes per token on the device, predicted."""
        device, host = self.boundary()
        ahead = 0 if self.bits is None else PREFETCH * host
        return self.working() + BLOCKS * device + ahead

    def pinned(self, tokens: int) -> list[int]:
        """Sizes in bytes of what one block has in pinned host memory."""
        each = int(tokens * self.boundary()[1])
        return part_sizes(each) if self.bits is not None else [each] if each else []

    def host_bytes(self, tokens: int) -> int:
        """Bytes of host memory for all blocks: PyTorch takes powers of 2 of pinned memory."""
        return BLOCKS * sum(1 << (size - 1).bit_length() for size in self.pinned(tokens))


WAYS = {
    "checkpoint": Way(None, host=False, chunks=False),
    "host": Way(None, host=True, chunks=False),
    "ours": Way(4, host=True, chunks=True),
    "ours, 8 bits": Way(8, host=True, chunks=True),
    "ours on the device": Way(4, host=False, chunks=True),
}


def block_bytes() -> tuple[int, int]:
    """Bytes of a block: its weights; its LoRA weights with gradients and two states of AdamW."""
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, kv)] * 2 + [(HIDDEN, INNER)] * 3
    weights = sum(a * b for a, b in shapes) + 2 * HIDDEN
    return 2 * weights, 4 * 2 * sum(RANK * (a + b) for a, b in shapes)


class Lora(nn.Module):
    """A linear layer with a correction of low rank, as that of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., D)."""
        return self.base(x) + self.b(self.a(x))


def decoder(blocks: int, sizes: dict[str, int] | None = None) -> Any:
    """Return a model with random weights in bfloat16 of which LoRA is trained."""
    import transformers

    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2**20,
    }
    config = transformers.LlamaConfig(
        **(shape | (sizes or {})), num_hidden_layers=blocks, use_cache=False
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    for block in model.model.layers:
        for module in (block.self_attn, block.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Lora(child).to(child.weight))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Hugging Face makes the result of the embedding a leaf, which stays alive. The input of the
    # first block is another tensor, so that it is held as those of all blocks.
    zero = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    model.model.embed_tokens.register_forward_hook(lambda module, given, result: result + zero)
    return model.train()


def prepare(model: Any, way: Way) -> AbstractContextManager[Any]:
    """Set a model up for a way, and return the context of a forward pass."""
    if way.chunks:
        parts = [model.model.norm]
        for block in model.model.layers:
            parts += [block.input_layernorm, block.post_attention_layernorm, block.mlp]
        for part in parts:
            actnn.in_chunks(part, CHUNK)
    if way.bits is not None:
        inputs = Choice("offload" if way.host else "compress", way.bits)
        return actnn.compressed(
            policy=lambda info: inputs if info.op == "checkpoint" else Choice("keep"), model=model
        )
    if way.host:
        for block in model.model.layers:
            block._gradient_checkpointing_func = checkpoint_in_host_memory
    return nullcontext()


def checkpoint_in_host_memory(run: Any, *arguments: Any) -> Any:
    """torch.utils.checkpoint, with its inputs in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(run, *arguments, use_reentrant=False)


def loss_of(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, of which logits exist for few tokens at a time."""

    def summed(part: Tensor, target: Tensor) -> Tensor:
        logits = head(part).float().flatten(0, -2)
        return nn.functional.cross_entropy(logits, target.flatten(), reduction="sum")

    parts = zip(hidden.split(LOSS_CHUNK, 1), targets.split(LOSS_CHUNK, 1), strict=True)
    losses = [checkpoint(summed, part, target, use_reentrant=False) for part, target in parts]
    return torch.stack(losses).sum() / targets.numel()


def flash() -> AbstractContextManager[Any]:
    """Attention by PyTorch's flash kernel alone."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


class Trainer:
    """A model with its optimizer and the way of its steps."""

    def __init__(self, way: Way, blocks: int, device: str, sizes: Any = None) -> None:
        self.way, self.blocks, self.device = way, blocks, device
        torch.manual_seed(0)
        with torch.device(device):
            self.model = decoder(blocks, sizes)
        self.context = prepare(self.model, way)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        self.vocabulary = self.model.config.vocab_size

    def texts(self, tokens: int) -> Tensor:
        """Random token ids, (1, tokens)."""
        return torch.randint(self.vocabulary, (1, tokens), device=self.device)

    def backward(self, texts: Tensor) -> Tensor:
        """Compute the gradients, and return the loss."""
        with flash():
            with self.context:
                hidden = self.model.model(input_ids=texts).last_hidden_state
            loss = loss_of(self.model.lm_head, hidden, texts)
            del hidden
            loss.backward()
        return loss.detach()

    def step(self, tokens: int) -> dict[str, float]:
        """Run a step beside what stands for the other blocks; return its seconds and peak."""
        others = BLOCKS - self.blocks
        device, host = self.way.boundary()
        missing = 0 if self.way.bits is None else max(0, PREFETCH + 1 - self.blocks)
        held = tokens * (others * device + missing * host)  # missing: not fetched ahead
        texts = self.texts(tokens)
        ballast = [torch.empty(int(held), dtype=torch.uint8, device=self.device)]
        ballast += [
            torch.empty(part, dtype=torch.uint8, device=self.device)
            for part in block_bytes()
            for _ in range(others)
        ]
        pinned = [  # the step takes this memory again
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            for size in self.way.pinned(tokens)
            for _ in range(self.blocks)
        ]
        del pinned
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = self.backward(texts)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated()
        del ballast
        return {"tokens": tokens, "seconds": seconds, "peak": peak, "loss": float(loss)}

    def rest(self, tokens: int) -> float:
        """Return the seconds of a step without blocks: embedding, norm, loss and optimizer."""
        layers, self.model.model.layers = self.model.model.layers, nn.ModuleList()
        shown, self.model.config.num_hidden_layers = self.model.config.num_hidden_layers, 0
        texts = self.texts(tokens)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.backward(texts)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.model.model.layers, self.model.config.num_hidden_layers = layers, shown
        return seconds


def limit(gib: float) -> None:
    """Let this process have so much of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))


def measure(name: str, settings: argparse.Namespace) -> None:
    """Measure a way, and print each result as a line of JSON."""
    way = WAYS[name]
    limit(settings.memory)
    trainer = Trainer(way, settings.blocks, "cuda")

    def show(kind: str, **what: Any) -> None:
        print(json.dumps({"way": name, "kind": kind, **what}), flush=True)

    short = [trainer.step(tokens) for tokens in settings.short]
    per_token = (short[-1]["peak"] - short[-2]["peak"]) / (settings.short[-1] - settings.short[-2])
    fixed = short[-1]["peak"] - per_token * settings.short[-1]
    room = settings.memory * GIB * SPARE - fixed
    most = int(room / per_token) // 1024 * 1024
    show(
        "bytes", predicted=way.per_token(), per_token=per_token, fixed=fixed, most=most, short=short
    )
    for length in settings.tokens or [0]:
        tokens = length or most
        torch.cuda.empty_cache()
        try:
            found = trainer.step(tokens)
        except torch.OutOfMemoryError as error:
            show("out of memory", tokens=tokens, error=str(error)[:300])
            continue
        rest = trainer.rest(tokens)
        whole = rest + (found["seconds"] - rest) * BLOCKS / settings.blocks
        host = way.host_bytes(tokens)
        show("step", **found, rest=rest, tokens_per_s=tokens / whole, host=host)


def compare(settings: argparse.Namespace) -> None:
    """Run all blocks on a short sequence in each way: seconds, and errors of gradients."""
    exact: list[Tensor] = []
    for name, way in WAYS.items():
        trainer = Trainer(way, BLOCKS, "cuda")
        texts = trainer.texts(settings.compared)
        trained = [each for each in trainer.model.parameters() if each.requires_grad]
        times = []
        for _ in range(3):
            trainer.optimizer.zero_grad()
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = trainer.backward(texts)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found = [each.grad for each in trained]
        exact = exact or found
        norm = sum(each.double().square().sum() for each in exact) ** 0.5
        off = (
            sum((a.double() - b.double()).square().sum() for a, b in zip(exact, found, strict=True))
            ** 0.5
        )
        line = {"way": name, "kind": "all blocks", "tokens": settings.compared}
        line |= {"seconds": min(times), "loss": float(loss), "error": float(off / norm)}
        print(json.dumps(line), flush=True)
        del trainer, trained, loss, found
        gc.collect()
        torch.cuda.empty_cache()


def predict(memory: float) -> None:
    """Print the tokens that fit, from bytes."""
    weights, trained = block_bytes()
    fixed = BLOCKS * (weights + trained) + 2 * 2 * VOCABULARY * HIDDEN
    print(f"predicted, with {fixed / GIB:.1f} GiB of weights and states of LoRA:")
    for name, way in WAYS.items():
        each = way.per_token()
        tokens = (memory * GIB * SPARE - fixed) / each
        host = way.host_bytes(int(tokens)) / GIB
        text = f"{each / 1e3:.0f} kB a token, {tokens:,.0f} tokens, {host:.0f} GiB in host memory"
        print(f"  {name}: {text}")


def text_of(line: dict[str, Any]) -> str:
    """Return a result as a line of text."""
    tokens = f"{line['tokens']:,} tokens" if "tokens" in line else ""
    if line["kind"] == "bytes":
        largest = f"{line['most']:,} tokens should fit"
        return f"measured {line['per_token'] / 1e3:.0f} kB a token, {largest}"
    if line["kind"] == "step":
        speed = f"{line['tokens_per_s']:.0f} tokens/s, peak {line['peak'] / GIB:.1f} GiB"
        return f"{tokens}: {speed}, {line['host'] / GIB:.0f} GiB in host memory"
    if line["kind"] == "all blocks":
        error = f"error {line['error']:.3f} of the gradient's norm"
        return f"{tokens}, all blocks run: {line['seconds']:.2f} s a step, {error}"
    return f"{tokens}: out of memory"


def run(name: str, lengths: Sequence[int], settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a way in a process of its own, and return its results."""
    command = [sys.executable, *sys.argv, "--process", name]
    command += ["--tokens", *map(str, lengths)] if lengths else []
    limit = settings.seconds
    try:
        out = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, check=False).stdout
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        print(f"{name}: stopped after {limit:g} s")
    lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    if not lines:
        print(f"{name}: no results")
    for line in lines:
        print(f"{line['way']}: {text_of(line)}", flush=True)
    if settings.json:
        with settings.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths; 0: the largest that fits")
    parser.add_argument("--short", type=int, nargs=2, default=[65536, 98304])
    parser.add_argument("--blocks", type=int, default=2, help="blocks that are run")
    parser.add_argument("--memory", type=float, default=78.0, help="GiB of the GPU")
    parser.add_argument("--compared", type=int, default=8192, help="tokens for all blocks; 0: none")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most for each process")
    parser.add_argument("--json", type=Path, help="appends the results")
    parser.add_argument("--process", choices=[*WAYS, COMPARE], help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.process == COMPARE:
        compare(settings)
    elif settings.process:
        measure(settings.process, settings)
    else:
        gpu = torch.cuda.get_device_name()
        print(f"{settings.memory:g} GiB of an {gpu}, PyTorch {torch.__version__}")
        predict(settings.memory)
        lengths = settings.tokens or []
        for name in settings.ways:
            lines = run(name, lengths, settings)
            if name == "host" and lines and not settings.tokens:  # the others at its length, too
                lengths = [lines[0]["most"], 2 * lines[0]["most"], 0]
        if settings.compared:
            run(COMPARE, [], settings)


if __name__ == "__main__":
    main()
