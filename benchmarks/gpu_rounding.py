"""What each rule of rounding costs on a GPU beside `half_even`, with codes compared first.

    python benchmarks/gpu_rounding.py [--repeats 9] [--configs int8 w8a16] [--shapes 3] [--rules ..]

Times are relative to those of `half_even`, in CUDA graphs: the median of ratios of calls in turn.
A call has real inputs and outputs. A training step is forward and backward with weights that are
quantized anew. The output and the gradients of some steps are compared with those of the CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from cpu_rounding import CONFIGS
from gpu import Engine, graph_of, in_a_row

from quant_gru import QuantConfig, QuantGRU

RULES = ["half_away", "half_up", "floor"]
SHAPES = [(1, 1000, 128, 256), (32, 200, 128, 256), (64, 200, 256, 512), (256, 50, 128, 128)]
TRAINED = [(32, 200, 128, 256), (64, 200, 256, 512)]
FEW = 12  # steps that are compared


def made(shape: tuple[int, int, int, int], config: QuantConfig) -> tuple[QuantGRU, torch.Tensor]:
    """A calibrated GRU and an input (T, N, C) on the GPU."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru, x = QuantGRU(C, H, config=config), torch.randn(T, N, C)
    gru.calibrate(x[:100, :32])
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru.cuda(), x.cuda()


def results(gru: QuantGRU, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of a step, on the CPU."""
    x = x.to(str(gru.weight_ih_l0.device)).detach().requires_grad_()
    y = gru(x)[0]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
    found = torch.autograd.grad((y * weights).sum(), [x, *gru.parameters()])
    return [y.detach().cpu(), *(each.cpu().double() for each in found)]


def compared(gru: QuantGRU, x: torch.Tensor) -> str:
    """How many outputs of some steps differ from the CPU's, and how far gradients are."""
    gru = copy.deepcopy(gru).train()
    ours, theirs = results(gru, x[:FEW]), results(copy.deepcopy(gru).cpu(), x[:FEW])
    differing = int((ours[0] != theirs[0]).sum())
    far = max(
        float((a - b).norm() / b.norm().clamp(min=1e-12))
        for a, b in zip(ours[1:], theirs[1:], strict=True)
    )
    return f"{differing} of {ours[0].numel()} differ, gradients {far:.0e}"


def engine_of(gru: QuantGRU, x: torch.Tensor, grad: torch.Tensor | None) -> Engine:
    """A call in a graph, or a training step from a gradient of the output. It keeps no memory."""
    gru.train(grad is not None)
    if grad is None:
        with torch.no_grad():
            return graph_of(lambda: gru(x)).replay
    parameters = list(gru.parameters())

    def step() -> None:
        torch.autograd.grad(gru(x)[0], parameters, grad)

    return graph_of(step).replay


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first ones")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--only", choices=("calls", "training"), help="one of both kinds of rows")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; N,T,C,H; us in graphs")
    print(f"{'':36}{'half_even':>10}" + "".join(f"{rule:>10}" for rule in args.rules))
    rows = [(shape, False) for shape in SHAPES[: args.shapes] if args.only != "training"]
    rows += [(shape, True) for shape in TRAINED[: args.shapes] if args.only != "calls"]
    for key in args.configs:
        for shape, trains in rows:
            engines, right, kept = {}, {}, []
            for rule in ("half_even", *args.rules):
                gru, x = made(shape, CONFIGS[key].replace_globals(rounding=rule))
                if trains:
                    right[rule] = compared(gru, x)
                grad = torch.randn(*x.shape[:2], gru.hidden_size, device="cuda") if trains else None
                engines[rule] = engine_of(gru, x, grad)
                kept.append((gru, x, grad))
            once = in_a_row(engines["half_even"], 3)
            loops = max(2, round(4e3 / once))
            times: dict[str, list[float]] = {rule: [] for rule in engines}
            for _ in range(args.repeats):
                for rule, engine in engines.items():
                    times[rule].append(in_a_row(engine, loops))
            even = times["half_even"]
            ratios = (
                statistics.median(a / b for a, b in zip(times[rule], even, strict=True))
                for rule in args.rules
            )
            name = f"{key}, {','.join(map(str, shape))}{', training' if trains else ''}"
            line = "".join(f"{ratio:>10.3f}" for ratio in ratios)
            print(f"{name:36}{statistics.median(even):>10.1f}{line}", flush=True)
            for rule, text in right.items():
                print(f"    {rule}: {text}", flush=True)


if __name__ == "__main__":
    main()
