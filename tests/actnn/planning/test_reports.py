"""Estimates before training, and reports after a step."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import actnn


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 256, 10),
    )  # fmt: skip


def test_an_estimate_is_what_a_step_holds():
    net, x = model(), torch.randn(8, 3, 16, 16)
    before = actnn.estimate(net, x, bits=(4,))
    actnn.compress(net, bits=4)
    with pytest.raises(actnn.ActNNError, match="not compressed"):
        actnn.estimate(net, x)
    net(x).square().mean().backward()
    total = actnn.report(net)
    # The loss is outside of the model: the estimate has it, the report has not.
    outside = before.rows["(elsewhere)"].exact
    assert before.total.exact - outside == pytest.approx(total.nbytes, rel=0.001)
    compressed = before.total.compressed[4] - before.rows["(elsewhere)"].compressed[4]
    assert compressed == pytest.approx(total.held, rel=0.05)


def test_an_estimate_needs_no_memory_and_changes_nothing():
    net = model()
    huge = torch.empty(1, 3, 16, 16).expand(2**20, 3, 16, 16)  # 51 GB of activations
    estimate = actnn.estimate(net, huge)
    assert estimate.total.exact > 2**35
    assert "in all" in str(estimate)
    assert all(p.grad is None for p in net.parameters())


def test_an_estimate_of_a_model_with_made_weights():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(512, 64)
    prune.l1_unstructured(net[1], "weight", 0.5)
    assert actnn.estimate(net, x).rows["1"].exact >= 512 * 64 * 4


def test_wrong_arguments_of_an_estimate():
    for arguments, message in [
        ({"bits": 4}, "widths such as"),
        ({"bits": (9,)}, "bits to be 1 to 8"),
        ({"model": 3}, "torch.nn.Module, got int"),
    ]:
        with pytest.raises(actnn.ActNNError, match=message):
            actnn.estimate(**{"model": model(), "example": torch.randn(2, 3, 16, 16)} | arguments)


def test_a_forward_that_depends_on_values_is_run():
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x[x.sum(1) > 0])

    assert actnn.estimate(Depends(), torch.randn(64, 64)).total.exact > 0


def test_a_report_says_what_is_held_by_whom_and_why():
    net, x = model(), torch.randn(4, 3, 16, 16)
    with pytest.raises(actnn.ActNNError, match=r"after actnn\.compress"):
        actnn.report(net)
    actnn.compress(net, bits=4, min_bytes=0)
    with pytest.raises(actnn.ActNNError, match="training step before"):
        actnn.report(net)
    report = actnn.report(net, lambda: net(x).square().mean())
    assert report.by_reason()["compressed"][0] >= 2
    assert report.by_module()["2"][1] < report.by_module()["2"][0] / 6
    assert report.held < report.nbytes
    assert report.peak > report.held
    text = str(report)
    for word in ("parameter", "compressed", "peak", "(model)" if "" in report.by_module() else "3"):
        assert word in text


def test_a_report_says_that_a_comparison_raises_the_peak():
    net, x = model(), torch.randn(16, 3, 16, 16)
    actnn.compress(net, bits=8, min_bytes=0)
    found = []
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        found.append(actnn.report(net, lambda: net(x).square().mean()))
    assert [each.comparisons > 0 for each in found] == [False, True, False]
    assert ["comparison with exact tensors" in str(each) for each in found] == [False, True, False]
    assert found[1].peak > found[2].peak


def test_a_report_of_a_model_in_a_wrapper():
    net, x = actnn.compress(model(), bits=4), torch.randn(4, 3, 16, 16)
    wrapper = nn.ModuleList([net])
    net(x).sum().backward()
    assert str(actnn.report(wrapper)) == str(actnn.report(net))
    assert actnn.report(wrapper, lambda: net(x).sum()).peak > 0
    actnn.compress(net[2])
    assert actnn.report(net, lambda: net(x).sum()).held > 0
    with pytest.raises(actnn.ActNNError, match="got ModuleList with 2"):
        actnn.report(nn.ModuleList([actnn.compress(model()), actnn.compress(model())]))
    with pytest.raises(actnn.ActNNError, match="step to be a function without arguments, got 3"):
        actnn.report(net, 3)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda loss: loss.detach(), r"a tensor \(\), requires_grad=False"),
        (lambda loss: loss.backward(), "NoneType"),
        (lambda loss: loss * torch.ones(2), r"a tensor \(2,\)"),
    ],
)
def test_a_step_of_a_report_returns_its_loss(step, what):
    net, x = actnn.compress(model(), bits=4, min_bytes=0), torch.randn(4, 3, 16, 16)
    with pytest.raises(actnn.ActNNError, match=rf"step to return the loss.*{what}"):
        actnn.report(net, lambda: step(net(x).sum()))
    assert actnn.report(net, lambda: net(x).sum()).held > 0


def test_sparse_inputs():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 2)

        def forward(self, edges, x):
            return self.b(torch.sparse.mm(edges, self.a(x).relu()))

    net, edges, x = Graph(), torch.eye(512).to_sparse(), torch.randn(512, 8)
    assert actnn.estimate(net, (edges, x)).total.exact >= 512 * 64 * 4
    actnn.compress(net, bits=4)
    net(edges, x).sum().backward()
    assert actnn.report(net).held < actnn.report(net).nbytes


def test_a_plot_needs_a_timeline(tmp_path):
    net, x = model(), torch.randn(4, 3, 16, 16)
    actnn.compress(net)
    net(x).sum().backward()
    with pytest.raises(actnn.ActNNError, match="timeline"):
        actnn.report(net).plot(tmp_path / "memory.png")
    report = actnn.report(net, lambda: net(x).square().mean())
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(actnn.ActNNError, match="matplotlib"):
            report.plot(tmp_path / "memory.png")
    else:
        report.plot(tmp_path / "memory.png")
        assert (tmp_path / "memory.png").stat().st_size > 1000
