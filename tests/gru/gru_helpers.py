"""Small GRUs and configurations that several test files share."""

import contextlib
import copy
import io
import warnings

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import quant_gru
from quant_gru import QuantConfig, QuantGRU, QuantGRUWarning

FUSIBLE = ("op.rRh", "op.old_contrib", "op.new_contrib")
C, H = 5, 6


def fused(config):
    for name in FUSIBLE:
        config = config.replace(name, bitwidth=None)
    return config


def free(config):
    return config.replace_globals(scale_kind="free")


CONFIGS = {
    "pot8": QuantConfig.int8(),
    "pot8-symmetric": QuantConfig(),
    "pot8-fused": fused(QuantConfig.int8()),
    "pot16": QuantConfig.int16(),
    "w8a16-fused": fused(QuantConfig.w8a16()),
    "free8": free(QuantConfig.int8()),
    "free8-fused": free(fused(QuantConfig.int8())),
}


def seeded(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


_made = {}


def quantized(config="pot8", **options):
    """A QuantGRU in eval mode with larger weights than usual, calibrated and switched on."""
    if not isinstance(config, str) or "data" in options:
        return _quantized(config, **options)
    key = (config, *sorted(options.items()))
    if key not in _made:
        _made[key] = _quantized(config, **options)
    return copy.deepcopy(_made[key])


def _quantized(config, *, input_size=C, hidden_size=H, data=None, method=None, **options):
    config = CONFIGS[config] if isinstance(config, str) else config
    torch.manual_seed(1)
    gru = QuantGRU(input_size, hidden_size, config=config, **options).eval()
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.mul_(1.5)
    if method:
        gru.calibration_method = method
    if data is None:
        steps = seeded(12, 4, input_size, seed=7)
        data = steps.transpose(0, 1) if gru.batch_first else steps
    gru.calibrate(data.to(gru.weight_ih_l0.dtype))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def states(gru, N, seed=3, scale=0.4):
    directions = 2 if gru.bidirectional else 1
    return seeded(gru.num_layers * directions, N, gru.hidden_size, seed=seed, scale=scale)


def packed(*lengths, input_size=C, seed=5):
    """A PackedSequence of rows in the given, any, order; and the rows."""
    rows = [seeded(T, input_size, seed=seed + i) for i, T in enumerate(lengths)]
    return pack_sequence(rows, enforce_sorted=False), rows


def unpacked(output):
    """Rows of a PackedSequence, in the order in which they were packed."""
    assert isinstance(output, PackedSequence)
    padded, lengths = pad_packed_sequence(output)
    return [padded[:T, i] for i, T in enumerate(lengths.tolist())]


def same(a, b):
    """Bit for bit equal, NaN equal to NaN; dtype, too."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    pairs = [(a, b)] if isinstance(a, torch.Tensor) else zip(a, b, strict=True)
    for ours, theirs in pairs:
        if isinstance(ours, torch.Tensor) and ours.is_floating_point():
            signs = ours.signbit() & (ours == 0), theirs.signbit() & (theirs == 0)
            assert torch.equal(*signs), "signs of zeros differ"


def saved_and_loaded(value, **options):
    """What torch.load returns of a file that torch.save has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def onnx_run(path, *inputs):
    """The outputs of an ONNX file for inputs in its order, by ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.register_custom_ops_library(quant_gru.onnx_operator_library())
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feeds = dict(zip(names, (each.numpy() for each in inputs), strict=True))
    return [torch.from_numpy(each) for each in session.run(None, feeds)]


def calibrated_alike(gru, *batches):
    """What a QuantGRU with the weights of `gru` reports after these batches, one by one."""
    other = QuantGRU(C, H, batch_first=gru.batch_first, config=gru.config)
    other.load_state_dict({name: p.detach() for name, p in gru.named_parameters()})
    for batch in batches:
        other.calibrate(*batch if isinstance(batch, tuple) else (batch,))
    other.finalize_calibration()
    return other.get_quant_config()


class Reaching(torch.nn.Module):
    """Two GRUs, the second of which forward may not reach."""

    def __init__(self):
        super().__init__()
        self.used, self.idle, self.reach = QuantGRU(C, H), QuantGRU(C, H), False

    def forward(self, x):
        y = self.used(x)[0]
        return y + self.idle(x)[0] if self.reach else y


@contextlib.contextmanager
def finalizing():
    """The first quantized use finalizes, and says so once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [w for w in caught if issubclass(w.category, QuantGRUWarning)]
    assert [type(w.message) for w in caught] == [QuantGRUWarning], [str(w.message) for w in caught]
    assert "finalize" in str(told[0].message)
