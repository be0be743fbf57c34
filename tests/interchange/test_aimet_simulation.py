"""AIMET's own simulation of a float model with our encodings. Run with `pip install aimet-onnx`."""

import numpy as np
import pytest
import torch

from quant_gru import QuantConfig, QuantGRU, export_onnx, float_state_dict

onnx = pytest.importorskip("onnx")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _aimet():
    """Import it where tests run, not where they are collected: it takes seconds."""
    global quantsim
    quantsim = pytest.importorskip("aimet_onnx.quantsim")


VERSIONS = ("0.6.1", "1.0.0", "2.0.0")
C, H = 40, 64
TIED = QuantConfig.int8().replace_globals(tie_x_and_h=True)
PER_TENSOR = TIED
for _name in ("W", "R", "bw", "br"):
    PER_TENSOR = PER_TENSOR.replace(_name, granularity="tensor")


class OnlyOutput(torch.nn.Module):
    """A model that does not use h_n."""

    def __init__(self, gru):
        super().__init__()
        self.gru = gru

    def forward(self, x):
        return self.gru(x)[0]


class Case:
    """A calibrated GRU, its float model in ONNX, and an input that calibration did not see."""

    def __init__(self, config, folder, exporter="ours", **options):
        torch.manual_seed(0)
        self.gru = QuantGRU(C, H, batch_first=True, config=config, **options).eval()
        self.seen, self.x = torch.randn(4, 33, C), torch.randn(4, 33, C)
        self.gru.calibrate(self.seen)
        self.gru.finalize_calibration()
        self.gru.use_quantization = True
        self.model = folder / "float.onnx"
        plain = torch.nn.GRU(C, H, batch_first=True, **options).eval()
        plain.load_state_dict(float_state_dict(self.gru))
        if exporter == "ours":
            export_onnx(self.gru, self.model, self.x, profile="float", verify=False)
        else:
            torch.onnx.export(OnlyOutput(plain), (self.x,), self.model, dynamo=False)
        with torch.no_grad():
            self.expected = plain(self.x)[0].numpy()

    def simulation(self):
        return quantsim.QuantizationSimModel(
            onnx.load(self.model), param_type="int8", activation_type="int8"
        )

    def loaded(self, version, folder):
        self.gru.export_encodings(folder / "g.encodings", version, onnx=self.model)
        simulation = self.simulation()
        load(simulation, folder / "g.encodings")
        # the rest of a model; what was loaded stays
        simulation.compute_encodings(lambda session: run(session, self.seen))
        return simulation

    def db(self, simulation):
        """Signal to noise of the simulation against the float GRU."""
        found = run(simulation.session, self.x)
        noise = np.square(found - self.expected).sum()
        return float(10 * np.log10(np.square(self.expected).sum() / noise))

    def aimets_own(self):
        simulation = self.simulation()
        simulation.compute_encodings(lambda session: run(session, self.seen))
        return self.db(simulation)


def load(simulation, path):
    """The call of docs/interchange.md."""
    quantsim.load_encodings_to_sim(
        simulation, str(path), strict=False, allow_overwrite=False, disable_missing_quantizers=False
    )


def run(session, x):
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("exporter", ["ours", "torch"])
@pytest.mark.parametrize(
    ("config", "versions", "options"),
    [
        (PER_TENSOR, VERSIONS, {}),
        (PER_TENSOR, VERSIONS, {"num_layers": 2}),
        (PER_TENSOR, VERSIONS, {"bidirectional": True}),
        (TIED, VERSIONS[2:], {}),
        (TIED, VERSIONS[2:], {"num_layers": 2}),
    ],
    ids=["tensor", "tensor-layers", "tensor-directions", "channel", "channel-layers"],
)
def test_the_simulation_is_as_good_as_aimets_own(config, versions, options, exporter, tmp_path):
    case = Case(config, tmp_path, exporter, **options)
    own = case.aimets_own()
    assert own > 20
    for version in versions:
        simulation = case.loaded(version, tmp_path)
        assert abs(case.db(simulation) - own) < 1, version
        # one quantizer for the input and all states, and it is on
        shared = simulation.qc_quantize_op_dict[simulation.session.get_inputs()[0].name]
        scale = case.gru.get_quant_config("h")["scale"]
        assert shared.enabled
        assert [encoding.delta for encoding in shared.get_encodings()] == [scale]


def test_separate_scales_are_lost(tmp_path):
    """Why export_encodings warns: one quantizer serves the input and the states of a node."""
    case = Case(TIED.replace_globals(tie_x_and_h=False), tmp_path)
    case.gru.export_encodings(tmp_path / "g.encodings", "2.0.0", onnx=case.model)
    simulation = case.simulation()
    quantsim.load_encodings_to_sim(simulation, str(tmp_path / "g.encodings"), strict=False)
    quantizers = simulation.qc_quantize_op_dict
    assert quantizers["input"] is quantizers["h_n"]
    assert case.db(simulation) < case.aimets_own() - 10


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_aimet_loads_channels_of_a_gru_in_version_2_only(version, tmp_path):
    """Files of older versions have no axis, and AIMET knows none for a GRU; its own neither."""
    case = Case(TIED, tmp_path)
    with pytest.raises(RuntimeError, match="Cannot determine correct channel axis"):
        case.loaded(version, tmp_path)
    case.loaded("2.0.0", tmp_path).export(str(tmp_path), "own", encoding_version=version)
    with pytest.raises(RuntimeError, match="Cannot determine correct channel axis"):
        load(case.simulation(), tmp_path / "own.encodings")
