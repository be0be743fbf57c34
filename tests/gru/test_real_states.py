"""Real states where codes are kept: streams that start from them, and their codes."""

import pytest
import torch
from gru_helpers import C, H, quantized, seeded, states

from quant_gru import QuantConfig, QuantGRUCell, QuantGRUError


@pytest.mark.parametrize("config", ["pot8", "pot8-symmetric", "pot16", "free8"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_stream_starts_from_a_real_state(config, frozen):
    gru = quantized(config, num_layers=2)
    gru = gru.freeze() if frozen else gru
    x, hx = seeded(6, 3, C), states(quantized(config, num_layers=2), 3, scale=2.0)
    stream = gru.stream(3)
    stream.state = hx
    with torch.no_grad():
        y, h_n = gru(x, hx)
    assert torch.equal(stream.state.long(), gru.quantize_state(hx).long())
    assert torch.equal(torch.stack([stream(step) for step in x]), y)
    # what forward returns gives back its codes
    assert torch.equal(gru.quantize_state(h_n).long(), stream.state.long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_states_of_other_dtypes(dtype):
    gru = quantized()
    hx = states(gru, 2).to(dtype).requires_grad_()
    stream = gru.stream(2)
    stream.state = hx
    with torch.no_grad():
        assert torch.equal(stream(seeded(2, C)), gru(seeded(1, 2, C), hx.float())[0][0])
    assert gru.quantize_state(hx).dtype is torch.int8


def test_an_encoder_hands_its_state_to_a_decoder():
    encoder, decoder = quantized("pot8"), quantized("pot16")
    with torch.no_grad():
        _, h = encoder(seeded(5, 2, C))
        expected, _ = decoder(seeded(4, 2, C, seed=2), h)
    codes = decoder.quantize_state(h)
    y, _ = decoder.forward_integer(
        decoder._plan().cells[0][0].x.quantize(seeded(4, 2, C, seed=2)), codes
    )
    assert torch.equal(decoder._plan().cells[0][0].h.dequantize(y), expected)


def test_codes_have_the_shape_of_states():
    gru = quantized(num_layers=2, bidirectional=True)
    hx = states(gru, 3)
    codes = gru.quantize_state(hx)
    assert codes.shape == hx.shape
    assert codes.dtype is torch.int8
    assert torch.equal(gru.quantize_state(hx[:, 1]), codes[:, 1])
    assert torch.equal(gru.freeze().quantize_state(hx), codes)
    far = gru.quantize_state(torch.full_like(hx, torch.inf))
    assert (far == 127).all()


def test_cells():
    cell = QuantGRUCell(C, H, config=QuantConfig.int8()).eval()
    cell.calibrate(seeded(40, C))
    cell.finalize_calibration()
    cell.use_quantization = True
    h = seeded(3, H, scale=0.3)
    for each in (cell, cell.freeze()):
        codes = each.quantize_state(h)
        assert codes.shape == (3, H)
        assert torch.equal(each.quantize_state(h[0]), codes[0])
        with torch.no_grad():
            after = each(seeded(3, C), h)
        x_codes = cell._plan().cells[0][0].x.quantize(seeded(3, C))
        found = each.forward_integer(x_codes, codes)
        assert torch.equal(each.quantize_state(after), found.to(codes.dtype))
        with pytest.raises(QuantGRUError, match=r"\(N, H\) or \(H,\), got \(1, 3, 6\)"):
            each.quantize_state(h[None])
        stream = each.stream(3)
        stream.state = h[None]
        assert torch.equal(stream(seeded(3, C)), after)


def test_rows_with_nan_stay_nan():
    gru = quantized(num_layers=2)
    hx = states(gru, 3)
    hx[1, 2, 0] = torch.nan
    stream, x = gru.stream(3), seeded(2, 3, C)
    stream.state = hx
    with torch.no_grad():
        y, _ = gru(x, hx)
    assert torch.equal(stream(x[0]).isnan().any(-1), torch.tensor([False, False, True]))
    torch.testing.assert_close(stream(x[1]), y[1], rtol=0, atol=0, equal_nan=True)
    stream.state = gru.quantize_state(torch.nan_to_num(hx))
    assert not stream(x[0]).isnan().any()


def test_bad_states():
    gru = quantized()
    with pytest.raises(QuantGRUError, match=r"hx to be of shape \(1, N, 6\), got \(2, 3, 6\)"):
        gru.quantize_state(seeded(2, 3, H))
    with pytest.raises(QuantGRUError, match=r"hx to be floating point, got torch.int64"):
        gru.quantize_state(torch.zeros(1, 3, H, dtype=torch.int64))
    with pytest.raises(QuantGRUError, match=r"hx to be a tensor, got list"):
        gru.quantize_state([0.0])
    with pytest.raises(QuantGRUError, match=r"hx without NaN, .*'output.h'"):
        gru.quantize_state(torch.full((1, 3, H), torch.nan))
    stream = gru.stream(3)
    with pytest.raises(QuantGRUError, match=r"a state of shape \(1, 3, 6\), got \(1, 2, 6\)"):
        stream.state = seeded(1, 2, H)
    with pytest.raises(QuantGRUError, match=r"state to be integers, got torch.bool"):
        stream.state = torch.zeros(1, 3, H, dtype=torch.bool)
