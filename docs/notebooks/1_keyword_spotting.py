# %% [markdown]
# # Keyword spotting, from float to a microcontroller
#
# A GRU learns to tell ten spoken commands apart. It is then put into integers, written as C99 and
# run: on this machine and, if its tools are installed, on an emulated Cortex-M4. All of them
# compute the same codes.
#
# The notebook takes half a minute on two cores. It needs a clone of the repository, the program
# `espeak-ng`, which speaks the commands, and a C compiler. For recordings of people, take
# `examples/keyword_spotting.py` with the data set that its help names.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from quant_gru import FrozenQuantGRU, calibrate_model, compare, convert_model, operator_gain

ROOT = next(
    p for p in [Path.cwd(), *Path.cwd().parents] if (p / "examples/real_common.py").exists()
)
sys.path.insert(0, str(ROOT / "examples"))

from deploy_microcontroller import TARGETS
from real_common import RATE, speech

from quant_gru.demo.frontend import LogMel

torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small

# %% [markdown]
# ## Data
#
# Twelve voices say ten words, each at three speeds. Three of the voices are for the test: training
# never hears them. Features are the logarithms of 32 mel bands, one row for each 16 ms.

# %%
WORDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]
VOICES = [
    *[("en-us", 50), ("en-gb+f3", 60), ("en-us+m4", 35), ("en-gb-x-rp+f2", 70), ("en-029+f1", 65)],
    *[("en-us+f4", 55), ("en-gb+m7", 30), ("en-gb-scotland+m2", 45), ("en-us+m3", 40)],
]
TEST_VOICES = [("en-us+f1", 50), ("en-gb+m1", 40), ("en-gb-x-gbclan+f5", 60)]
front_end = LogMel(RATE, n_mels=32)


def features_of(word, voice, pitch, speed, noise):
    """Features (60, 32) of a word in noise that is `noise` times as loud as its peaks."""
    samples = speech(word, voice, speed, pitch)[:RATE]
    samples = torch.nn.functional.pad(samples, (0, RATE - len(samples)))
    return front_end(samples + noise * torch.randn(RATE))[:60]


def dataset(voices, repeats):
    """Inputs (N, 60, 32) and classes (N,) of all words by some voices."""
    rows, labels = [], []
    for voice, pitch in voices:
        for label, word in enumerate(WORDS):
            for speed in (140, 165, 190):
                for _ in range(repeats):
                    noise = float(torch.rand(())) * 0.05
                    rows.append(features_of(word, voice, pitch, speed, noise))
                    labels.append(label)
    return pad_sequence(rows, batch_first=True), torch.tensor(labels)


x_train, y_train = dataset(VOICES, repeats=3)
x_test, y_test = dataset(TEST_VOICES, repeats=2)
mean, deviation = x_train.mean((0, 1)), x_train.std((0, 1))
x_train, x_test = (x_train - mean) / deviation, (x_test - mean) / deviation
print(f"{len(x_train)} clips for training, {len(x_test)} of other voices for the test")

# %% [markdown]
# ## A float model
#
# Plain PyTorch: nothing here knows of quantization.

# %%


class KeywordSpotter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, len(WORDS))

    def forward(self, x):
        y, _ = self.gru(x)
        return self.head(y.mean(1))


def accuracy(model):
    model.eval()
    with torch.no_grad():
        return float((model(x_test).argmax(1) == y_test).float().mean())


def train(model, epochs, rate):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x_train)).split(64):
            loss = torch.nn.functional.cross_entropy(model(x_train[index]), y_train[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


model = train(KeywordSpotter(), epochs=15, rate=5e-3)
print(f"float: {accuracy(model):.1%} of the test clips")

# %% [markdown]
# ## Integers
#
# `convert_model` replaces `nn.GRU`, and `calibrate_model` chooses the scales from real inputs.
# `compare` shows what each preset costs and gains.

# %%
presets = {}
for preset in ("int8", "int8_wide", "int16"):
    presets[preset] = convert_model(model, preset)
    calibrate_model(presets[preset], x_train[::8].split(64), progress=False)

print(compare(model, presets, x_test.split(60), accuracy, progress=False))

# %% [markdown]
# `operator_gain` says which operators are worth more bits. Here no change is needed, but this is
# the place to look if a model loses accuracy.

# %%
print(
    "\n".join(str(operator_gain(presets["int8"], [x_test[:60]], progress=False)).splitlines()[:8])
)

# %% [markdown]
# ## C source
#
# No preset loses a clip, so the smallest one goes to the target. `freeze` makes an integer-only
# module. Its file is all that a target needs.

# %%
folder = Path(tempfile.mkdtemp())
frozen = presets["int8"].gru.freeze()
frozen.save(folder / "spotter.safetensors")
assert torch.equal(
    FrozenQuantGRU.load(folder / "spotter.safetensors")(x_test)[0], frozen(x_test)[0]
)

report = frozen.export_c(folder, "spotter")
floats = 4 * sum(p.numel() for p in model.gru.parameters())
print(", ".join(report.files))
print(f"flash: {report.flash_bytes} bytes of constants, where the float weights are {floats}")
print(f"RAM: {report.ram_bytes} bytes; {report.macs} multiply-accumulates a step")
print("\n".join((folder / "spotter.h").read_text().splitlines()[:12]))

# %% [markdown]
# ## On the targets
#
# The self-test runs golden vectors from Python and compares every code.

# %%
for name in ("this machine", "Cortex-M4"):
    target = TARGETS[name]
    missing = target.missing()
    if missing:
        print(f"{name}: {missing} is not installed")
        continue
    sources = ["spotter.c", "spotter_selftest.c"]
    command = [*target.build, "-std=gnu99", "-O3", *sources, "-o", "selftest"]
    subprocess.run(command, cwd=folder, check=True)
    ran = subprocess.run(
        [*target.run, "./selftest"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    print(f"{name}: {ran.stdout.strip()}")
    assert ran.returncode == 0
