"""From nn.GRU to a microcontroller: train, quantize, write C, test it on the target.

    python examples/deploy_microcontroller.py --output digits_firmware

Handwritten digits, a row of 8 pixels a step. For each target with its tools installed, the golden
vectors run first, then a firmware that names 20 test images. Targets are this machine and, in the
emulator qemu, Cortex-M4 and Cortex-M55 (on Debian: apt-get install gcc-arm-none-eabi
libnewlib-arm-none-eabi qemu-system-arm). It takes well under a minute.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quant_gru import FrozenQuantGRU, QuantConfig, calibrate_model, convert_model
from quant_gru.demo import SequenceClassifier
from quant_gru.demo.data import Task, digits_task
from quant_gru.demo.training import train

BOARD = Path(__file__).parents[1] / "benchmarks" / "cortex_m"  # start of a bare-metal program
NAME = "digits"
IMAGES = 20


@dataclass(frozen=True)
class Target:
    """How to build and run a program.

    Attributes:
        build: The compiler and its options.
        run: The command in front of the program; for an emulator the program follows it.
    """

    build: tuple[str, ...]
    run: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return the name of a tool that is not installed, or None."""
        tools = (self.build[0], *self.run[:1])
        return next((tool for tool in tools if shutil.which(tool) is None), None)


def cortex(cpu: str, board: str, abi: str) -> Target:
    """Return a bare-metal target of the emulator."""
    build = ("arm-none-eabi-gcc", f"-mcpu={cpu}", "-mthumb", f"-mfloat-abi={abi}")
    start = ("--specs=rdimon.specs", "-nostartfiles", "-T", str(BOARD / "flat.ld"))
    emulator = ("qemu-system-arm", "-M", board, "-nographic")
    semihosting = ("-semihosting-config", "enable=on,target=native", "-kernel")
    return Target((*build, *start, str(BOARD / "startup.c")), (*emulator, *semihosting))


TARGETS = {
    "this machine": Target(("cc",)),
    "Cortex-M4": cortex("cortex-m4", "mps2-an386", "soft"),
    "Cortex-M55": cortex("cortex-m55", "mps3-an547", "hard"),
}

# What a firmware does: quantize a row of features, step, and read the state at the end.
FIRMWARE = """
#include <stdio.h>
#include "{name}.h"

static const float images[{images}][8][8] = {{{pixels}}};
static const int expected[{images}] = {{{classes}}};
static const float weight[10][{H}] = {{{weight}}};
static const float bias[10] = {{{bias}}};
static {name}_state state;

/* The linear layer of the model, in float: argmax of weight * h + bias. */
static int best_class(const {name}_code *h) {{
    int best = 0, c, i;
    float most = 0.0f;
    for (c = 0; c < 10; ++c) {{
        float score = bias[c];
        for (i = 0; i < {H}; ++i) score += weight[c][i] * {name}_dequantize(h[i], 0);
        if (c == 0 || score > most) {{ most = score; best = c; }}
    }}
    return best;
}}

int main(void) {{
    int n, t, i, equal = 0;
    for (n = 0; n < {images}; ++n) {{
        {name}_init(&state);
        for (t = 0; t < 8; ++t) {{
            {name}_input x[8];
            {name}_code y[{H}];
            for (i = 0; i < 8; ++i) x[i] = {name}_quantize(images[n][t][i]);
            {name}_step(&state, x, y);
        }}
        equal += best_class(state.h[0]) == expected[n];
    }}
    printf("%d of {images} images have the class of PyTorch\\n", equal);
    return equal != {images};
}}
"""


def trained(task: Task, hidden_size: int, epochs: int) -> SequenceClassifier:
    """Return a float model with an nn.GRU inside."""
    torch.manual_seed(0)
    model = SequenceClassifier(task.n_features, hidden_size, task.n_classes)
    train(model, task.train, epochs, 0)
    return model.eval()


def accuracy(model: torch.nn.Module, task: Task) -> float:
    """Return the share of test images that are named correctly."""
    with torch.no_grad():
        found = model(task.test.features).argmax(1)
    return float((found == task.test.labels).float().mean())


def numbers(values: Tensor) -> str:
    """Return float values as C text, exact."""
    return ", ".join(f"{float.hex(v)}f" for v in values.flatten().tolist())


def firmware(model: torch.nn.Module, task: Task) -> str:
    """Return the source of a program that names the first test images."""
    images = task.test.features[:IMAGES]
    with torch.no_grad():
        classes = model(images).argmax(1).tolist()
    head: torch.nn.Linear = model.head
    return FIRMWARE.format(
        name=NAME,
        images=IMAGES,
        H=head.in_features,
        pixels=numbers(images),
        classes=", ".join(map(str, classes)),
        weight=numbers(head.weight.detach()),
        bias=numbers(head.bias.detach()),
    )


def output_of(folder: Path, target: Target, main: str) -> str:
    """Build a program from the exported source and a file with `main`, and run it."""
    program = f"./{Path(main).stem}.program"
    flags = ["-std=gnu99", "-O3", "-Wno-missing-braces"]
    command = [*target.build, *flags, f"{NAME}.c", main, "-o", program]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run(
        [*target.run, program], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise SystemExit(f"Expected a program without errors, got: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("digits_firmware"), help="a folder")
    parser.add_argument("--hidden-size", type=int, default=32, help="units of the GRU")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data")
    options = parser.parse_args(arguments)

    task = digits_task(0)
    model = trained(task, options.hidden_size, options.epochs)
    quantized = convert_model(model, QuantConfig.int8_wide())
    calibrate_model(quantized, [task.train.features[:256]])
    print(f"accuracy: float {accuracy(model, task):.1%}, integers {accuracy(quantized, task):.1%}")

    options.output.mkdir(parents=True, exist_ok=True)
    quantized.gru.freeze().save(options.output / f"{NAME}.safetensors")
    frozen = FrozenQuantGRU.load(options.output / f"{NAME}.safetensors")
    report = frozen.export_c(options.output, NAME)
    print(
        f"{options.output}/{NAME}.c: {report.flash_bytes} bytes of constants, {report.ram_bytes} "
        f"bytes of RAM, {report.macs} multiply-accumulates a step"
    )
    (options.output / "firmware.c").write_text(firmware(quantized, task))

    for name, target in TARGETS.items():
        missing = target.missing()
        if missing:
            print(f"{name}: left out, {missing} is not installed")
            continue
        golden = output_of(options.output, target, f"{NAME}_selftest.c")
        found = re.search(r": (equal \(\d+ codes\)|\d+ of \d+ codes differ)", golden)
        assert found, golden
        print(f"{name}: {found[1]}; {output_of(options.output, target, 'firmware.c')}")


if __name__ == "__main__":
    main()
