"""The names of the notes do what the notes say."""

import copy

import pytest
import torch
from torch import nn

import actnn


@pytest.fixture(autouse=True)
def _fresh():
    yield
    actnn.config.reset()
    actnn.QScheme.reset()


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 32 * 32, 10),
    )  # fmt: skip


def batch():
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def step(net, x, y):
    net.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return float(loss.detach())


one_batch = pytest.mark.filterwarnings("ignore:Compression adds")  # its gradient has no variance

LEVELS = ["L0", "L1", "L2", "L3", "L3.1", "L4", "L5", "swap"]


@one_batch
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_pretrained_weights_with_the_exact_loss(level):
    x, y = batch()
    pretrained = model()
    exact = step(copy.deepcopy(pretrained), x, y)
    actnn.set_optimization_level(level)
    net = actnn.QModule(pretrained)
    losses = [step(net, x, y) for _ in range(3)]
    assert losses == [exact] * 3
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_levels_keep_what_they_say():
    x, y = batch()
    held = {}
    for level in ("L0", "L1", "L2", "L3"):
        actnn.set_optimization_level(level)
        net = actnn.QModule(model())
        step(net, x, y)
        held[level] = sum(record.held for record in net.saving.records)
        norm = [r for r in net.saving.records if r.module == "1" and r.nbytes > 1000]
        assert ("compressed" in {r.reason for r in norm}) == (level in ("L2", "L3"))
    assert held["L0"] > held["L1"] > held["L2"] > held["L3"]


def test_a_level_inherits_nothing():
    actnn.set_optimization_level("L1")
    actnn.set_optimization_level("L3")
    assert actnn.config.activation_compression_bits == [2, 8, 8]
    assert actnn.config.enable_quantized_bn
    assert actnn.config.adaptive_scheme
    with pytest.raises(actnn.ActNNError, match="level to be one of"):
        actnn.set_optimization_level("L9")


def test_checkpoints_are_those_of_the_model():
    plain = model()
    net = actnn.QModule(copy.deepcopy(plain))
    assert set(net.state_dict()) == set(plain.state_dict())
    net.load_state_dict(plain.state_dict())
    net.eval()
    assert not actnn.config.training
    with torch.no_grad():
        assert torch.equal(net(batch()[0]), plain.eval()(batch()[0])) is False  # other data
        x, _ = batch()
        assert torch.equal(net(x), plain(x))
    net.train()
    assert actnn.config.training


def test_an_uncompressed_qmodule_runs_its_model():
    x, y = batch()
    exact = model()
    step(exact, x, y)
    inner = actnn.QModule(model())
    with pytest.warns(actnn.ActNNWarning, match="replaces the settings of 'model'"):
        outer = actnn.QModule(inner)
    for net in (actnn.QModule(model()), outer):
        step(net, x, y)
        assert actnn.report(net).held < actnn.report(net).nbytes
        step(actnn.uncompress(net), x, y)
        same = zip(exact.parameters(), net.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in same)
        if not isinstance(net.model, actnn.QModule):
            with pytest.raises(actnn.ActNNError, match=r"got one after uncompress"):
                net.saving  # noqa: B018


def test_config_knows_its_fields():
    with pytest.raises(actnn.ActNNError, match="nearest is 'group_size'"):
        actnn.config.group_sizes = 128
    with pytest.raises(actnn.ActNNError, match=r"actnn\.report"):
        actnn.config.debug_memory = True
    with pytest.raises(actnn.ActNNError, match="pergroup to be True"):
        actnn.config.pergroup = False
    with pytest.warns(actnn.ActNNWarning, match="no effect"):
        actnn.config.pipeline_threshold = 3 * 2**30
    for name, value in [
        ("activation_compression_bits", 4),
        ("activation_compression_bits", []),
        ("activation_compression_bits", [2, 9]),
        ("activation_compression_bits", ["2"]),
        ("empty_cache_threshold", "0.2"),
        ("group_size", 100),
        ("initial_bits", 2.5),
        ("refresh", 0),
        ("empty_cache_threshold", 20),
        ("swap", "yes"),
    ]:
        with pytest.raises(actnn.ActNNError, match=rf"config\.{name} to be"):
            setattr(actnn.config, name, value)
    actnn.config.adaptive_scheme = False
    assert not actnn.config.adaptive_conv_scheme
    assert not actnn.config.adaptive_bn_scheme


@one_batch
def test_schemes_show_what_training_learned():
    x, y = batch()
    net = actnn.QModule(model())
    for _ in range(4):
        step(net, x, y)
    layers = actnn.QScheme.layers
    assert actnn.QScheme.num_layers == len(layers) == 4
    assert [type(each).__name__ for each in layers] == [
        "QScheme", "QBNScheme", "QScheme", "QScheme",
    ]  # fmt: skip
    second = layers[2]
    assert second.C.shape == (4,)
    assert len({layers[1].bits, layers[2].bits, layers[3].bits}) > 1


def test_a_scheme_by_hand():
    scheme = actnn.QScheme(num_locations=9, group=0, depthwise_groups=1)
    norm = actnn.QBNScheme()
    x = torch.randn(8, 4, 16, 16) * torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)
    assert scheme.C is None
    assert scheme.compute_quantization_bits(x).tolist() == [2] * 8  # no statistics of gradients
    assert actnn.QScheme.prev_layer is scheme
    scheme.set_scale(torch.randn(8, 4, 16, 16))
    bits = scheme.compute_quantization_bits(x)
    assert bits.sum() <= 16
    assert bits[-1] > bits[0]
    norm.compute_quantization_bits(x)
    scheme.if_allocate_perlayer()
    assert scheme.bits <= 2
    assert norm.compute_quantization_bits(x).sum() <= 8 * scheme.bits
    with pytest.raises(actnn.ActNNError, match="index of config"):
        actnn.QScheme(group=3)


def test_the_first_layer_allocates_across_layers():
    layers = [actnn.QScheme(9), actnn.QScheme(1), actnn.QBNScheme()]
    x = torch.randn(8, 4, 16, 16)
    for gradient, layer in zip((1e-3, 1.0, 1.0), layers, strict=True):
        layer.set_scale(torch.full((8, 4, 16, 16), gradient))
        layer.compute_quantization_bits(x)
    for other in layers[1:]:
        other.if_allocate_perlayer()
    actnn.config.perlayer = False
    layers[0].if_allocate_perlayer()
    assert [layer.bits for layer in layers] == [2, 2, 2]
    actnn.config.perlayer = True
    layers[0].if_allocate_perlayer()
    first, second, _ = (layer.bits for layer in layers)
    assert first < 2 < second
    assert first + 2 * second <= 3 * 2  # the normalization has the bits of the layer before it
    assert layers[2].compute_quantization_bits(x).sum() <= 8 * second
    layers[0].set_scale(torch.full((8, 4, 16, 16), 1e3))
    layers[0].compute_quantization_bits(x)
    actnn.QBNScheme.allocate_perlayer()  # for all layers
    assert layers[0].bits > first


@one_batch
def test_gradient_statistics_of_each_sample():
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 32, 32), torch.arange(12) % 10)
    actnn.config.use_gradient = True
    with pytest.raises(actnn.ActNNError, match="num_samples"):
        actnn.QModule(model())
    actnn.QScheme.num_samples = len(data)
    net = actnn.QModule(model())
    seen = []
    for _ in range(2):
        for indices, (x, y) in actnn.DataLoader(data, batch_size=4, shuffle=True):
            actnn.QScheme.batch = indices
            step(net, x, y)
            seen += indices.tolist()
    assert sorted(seen) == sorted([*range(12)] * 2)
    energy = net.saving.adaptive.statistics._energy["3"]
    assert energy.shape == (12,)
    assert not energy.isnan().any()
    for wrong, message in [([0, 12], "from 0 to 11 .*got 0 to 12"), ([0], "each of 2 samples")]:
        actnn.QScheme.batch = wrong
        with pytest.raises(actnn.ActNNError, match=message):
            step(net, *(each[:2] for each in batch()))
    actnn.QScheme.batch = None
    with pytest.raises(actnn.ActNNError, match=r"QScheme\.batch"):
        net(data[0][0][None])


@pytest.mark.parametrize("adaptive", [False, True])
def test_operations(adaptive):
    actnn.config.adaptive_scheme = adaptive
    actnn.config.activation_compression_bits = [4, 8, 8]
    scheme = actnn.QScheme()
    x = torch.randn(4, 512)
    quantized = actnn.ops.quantize_activation(x, scheme)
    codes, bits, scale, low = quantized
    back = actnn.ops.dequantize_activation(quantized, x.shape)
    assert scale.shape == low.shape == (8,)
    steps = scale.float().repeat_interleave(256).view_as(x)
    assert ((back - x).abs() <= steps * 1.01).all()
    assert isinstance(bits, torch.Tensor) == adaptive
    assert actnn.compute_tensor_bytes(codes) == codes.nbytes
    with pytest.raises(actnn.ActNNError, match="shape to be"):
        actnn.ops.dequantize_activation(quantized, torch.Size([512, 4]))
    codes, scale = actnn.ops.quantize_and_pack(x.view(4, 2, 256), 8, None, None)
    assert codes.bits == 8
    assert scale.shape == (8,)


def test_memory_accounting():
    x = torch.zeros(10, dtype=torch.int8)
    assert actnn.compute_tensor_bytes([x, {"a": x.double()}, (None, 3)]) == 90
    assert actnn.compute_tensor_bytes([x, x, x[2:]]) == 10
    with pytest.raises(actnn.ActNNError, match="Expected tensors"):
        actnn.compute_tensor_bytes("x")


def test_memory_in_use(capsys):
    x = torch.ones(1000, device="cuda" if torch.cuda.is_available() else "cpu")
    assert x.sum() == 1000
    assert actnn.get_memory_usage(print_info=True) > 0
    assert "in use" in capsys.readouterr().out


def test_tags_choose_bits_of_their_own():
    net = model()
    net[3].actnn_group = 1
    actnn.config.adaptive_scheme = False
    net = actnn.QModule(net)
    step(net, *batch())
    bits = {r.module: r.choice.bits for r in net.saving.records if r.reason == "compressed"}
    assert bits["3"] == 8
    assert bits["6"] == 2


def test_fields_of_config_reach_the_training():
    actnn.config.group_size, actnn.config.initial_bits = 64, 3
    actnn.config.activation_compression_bits = [1.5, 8, 8]
    actnn.config.stochastic, actnn.config.perlayer = False, False
    net = actnn.QModule(model())
    x, y = batch()
    x = x * torch.logspace(-3, 2, 4).view(-1, 1, 1, 1)
    for _ in range(3):
        step(net, x, y)
    assert (net.saving.group, net.saving.stochastic) == (64, False)
    statistics = net.saving.adaptive.statistics
    assert (statistics.average, statistics.most, statistics.per_layer) == (1.5, 3, False)
    held = [r for r in net.saving.records if r.reason == "compressed"]
    elements = sum(r.shape.numel() for r in held)
    assert sum(r.held for r in held) <= elements * (1.5 / 8 + 4 / 64)
    first = [p.grad.clone() for p in net.parameters()]
    actnn.QScheme.reset()
    again = actnn.QModule(model())
    for _ in range(3):
        step(again, x, y)
    assert all(torch.equal(a, p.grad) for a, p in zip(first, again.parameters(), strict=True))


def test_kernel_positions_and_groups_scale_the_sensitivity():
    x = torch.randn(4, 8, 10, 10)
    found = []
    for positions, groups in ((1, 1), (9, 1), (9, 4)):
        scheme = actnn.QScheme(num_locations=positions, depthwise_groups=groups)
        scheme.set_scale(torch.ones(4, 8, 10, 10))
        scheme.compute_quantization_bits(x)
        found.append(scheme.C)
    torch.testing.assert_close(found[1], 9 * found[0])
    torch.testing.assert_close(found[2], found[1] / 4)


def test_workspaces_and_free_blocks_of_a_gpu(monkeypatch):
    """L3.1 turns cuDNN's trials off, and returns free blocks when few are in use."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(0))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    actnn.set_optimization_level("L3.1")
    net = actnn.QModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert torch.backends.cudnn.benchmark is False
    for used, count in ((500, 0), (199, 1)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda used=used: used)
        net(torch.randn(2, 4))
        assert len(calls) == count
