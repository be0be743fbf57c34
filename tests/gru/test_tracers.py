"""torch.fx records a call as one node, as it does nn.GRU's; the older ONNX exporter takes it."""

import io

import onnx
import pytest
import torch
from gru_helpers import C, quantized, seeded

from quant_gru import QuantGRU


class Model(torch.nn.Module):
    def __init__(self, gru):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"gru": gru})

    def forward(self, x, hx=None):
        y, h_n = self.inner["gru"](x, hx)
        return torch.relu(y).sum(-1), h_n


@pytest.mark.parametrize("kind", ["float", "quantized", "frozen", "nn.GRU"])
@pytest.mark.parametrize("with_states", [False, True])
def test_symbolic_trace_records_one_node(kind, with_states):
    gru = torch.nn.GRU(C, 6) if kind == "nn.GRU" else quantized()
    if kind == "float":
        gru.use_quantization = False
    model = Model(gru.freeze() if kind == "frozen" else gru).eval()
    concrete = {} if with_states else {"hx": None}
    with torch.no_grad():
        for _ in range(2):  # from then on calls are prepared
            model(seeded(5, 3, C))
    traced = torch.fx.symbolic_trace(model, concrete_args=concrete)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["inner.gru"]
    x, hx = seeded(5, 3, C), torch.full((1, 3, gru.hidden_size), 0.25)
    given = (x, hx) if with_states else (x, None)
    with torch.no_grad():
        for ours, theirs in zip(traced(*given), model(*given), strict=True):
            assert torch.equal(ours, theirs)


def test_training_of_a_traced_model():
    gru = quantized().train()
    traced = torch.fx.symbolic_trace(Model(gru), concrete_args={"hx": None})
    traced(seeded(5, 3, C), None)[0].sum().backward()
    assert gru.weight_ih_l0.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("with_states", [False, True])
def test_the_older_onnx_exporter_takes_the_float_mode(options, with_states):
    files = []
    for kind in (torch.nn.GRU, QuantGRU):
        torch.manual_seed(0)
        gru, x = kind(C, 6, **options).eval(), torch.randn(5, 3, C)
        given = (x, torch.randn(gru.num_layers * (1 + gru.bidirectional), 3, 6))
        file = io.BytesIO()
        torch.onnx.export(gru, given if with_states else given[:1], file, dynamo=False)
        files.append(onnx.load_from_string(file.getvalue()).graph)
    theirs, ours = files
    assert [node.op_type for node in ours.node] == [node.op_type for node in theirs.node]
    assert sum(node.op_type == "GRU" for node in ours.node) == options.get("num_layers", 1)
    weights = [{each.name: each.raw_data for each in graph.initializer} for graph in files]
    assert list(weights[0].values()) == list(weights[1].values())
