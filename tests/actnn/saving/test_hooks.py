"""The context: what is saved, shared, detected and released."""

import gc
import threading

import pytest
import torch
from actnn_models import Block, compressed_copy, conv_input, conv_net, gradients
from torch import nn

import actnn
from actnn import codec
from actnn.saving import Choice, Saving
from actnn.saving.active import pack_in_step


def saved(saving: Saving, reason: str) -> list:
    return [record for record in saving.records if record.reason == reason]


def test_a_linear_layer_keeps_codes_of_its_input_and_its_own_weight():
    layer = nn.Linear(64, 32)
    saving = Saving(bits=4, min_bytes=0, model=layer)
    x = torch.randn(128, 64, requires_grad=True)
    hidden = x * 1
    for _ in range(2):  # the first step holds more: see test_divisors.py
        with saving:
            y = layer(hidden)
    compressed, weight = saving.records[0], saving.records[-1]
    assert compressed.reason == "compressed"
    assert compressed.held == codec.bytes_of(128 * 64, 4) == saving.held_bytes
    assert compressed.nbytes == 128 * 64 * 4
    assert (weight.reason, weight.held) == ("view of a parameter", 0)
    y.sum().backward(retain_graph=True)
    exact = torch.autograd.grad(layer(hidden).sum(), [x, layer.bias])
    assert torch.equal(x.grad, exact[0])
    assert torch.equal(layer.bias.grad, exact[1])


def test_weight_gradients_are_unbiased():
    layer = nn.Linear(32, 4, bias=False).double()
    x = torch.randn(16, 32, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad((layer(x * 1) ** 2).sum(), layer.weight)
    saving, draws = Saving(bits=2, min_bytes=0, group=32, model=layer), []
    for _ in range(200):
        with saving:
            y = layer(x * 1)
        dy = 2 * y.detach()
        draws.append(torch.autograd.grad(y, layer.weight, dy)[0])
    draws = torch.stack(draws)
    error = draws.mean(0) - exact
    assert (error.abs() < 5 * draws.std(0) / len(draws) ** 0.5).all()
    assert draws.std(0).min() > 0


FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nonlinear_functions_have_a_small_bias_at_2_bits(name):
    """Their results keep at least 8 bits."""
    x = torch.randn(64, 64, requires_grad=True)
    weights = torch.randn(64, 64)
    (exact,) = torch.autograd.grad((FUNCTIONS[name](x * 1) @ weights).sum(), x)
    saving, draws = Saving(bits=2, min_bytes=0), []
    for _ in range(50):
        with saving:
            y = (FUNCTIONS[name](x * 1) @ weights).sum()
            saving.look_at(y)  # nothing divides by it
        draws.append(torch.autograd.grad(y, x)[0])
    draws = torch.stack(draws)
    error = draws.mean(0) - exact
    noise = draws.var(0).sum() / len(draws)
    # The mean of draws has noise, too; a tenth is five deviations of its sum over all elements.
    assert error.square().sum() <= 1.1 * noise + (1e-3 * exact.norm()) ** 2
    assert 0 < noise < (0.01 * exact.norm()) ** 2


def test_one_storage_is_compressed_once():
    x = torch.randn(64, 64, requires_grad=True)
    saving = Saving(bits=8, min_bytes=0)
    for _ in range(2):  # the first step holds more: see test_divisors.py
        with saving:
            y = x * 1
            z = (y * y + y @ y.t()).sum() + (y.view(32, 128) @ torch.ones(128, 1)).sum()
            z = z + y.sin().sum()
    assert len(saved(saving, "compressed")) == 1
    first = saved(saving, "compressed")[0]
    assert len(saved(saving, f"shared with {first.index}")) >= 4
    assert saving.held_bytes < 64 * 64 * 4
    z.backward()
    assert x.grad is not None


def test_a_tensor_that_one_node_saved_twice_is_decoded_once(monkeypatch):
    x = torch.randn(64, 64, requires_grad=True)
    calls, make = [], codec.coder_of

    def counting(*arguments):
        coder = make(*arguments)
        return coder._replace(decode=lambda codes: calls.append(0) or coder.decode(codes))

    monkeypatch.setattr(codec, "coder_of", counting)
    with Saving(bits=8, min_bytes=0):
        y = x * 1
        z = (y * y).sum()
    z.backward()
    assert len(calls) == 1


def test_versions_of_one_storage_are_distinct():
    x = torch.randn(64, 64, requires_grad=True)
    saving = Saving(bits=8, min_bytes=0)
    with saving:
        y = x * 1
        z = y.sin().sum()
        y.add_(1)
        z = z + y.sin().sum()
    assert len(saved(saving, "compressed")) == 2
    z.backward()
    expected = x.detach().cos() + (x.detach() + 1).cos()
    assert (x.grad - expected).abs().max() < 0.1


def test_a_new_storage_at_an_old_address_is_not_the_old_one():
    saving = Saving(bits=8, min_bytes=0)
    x = torch.zeros(512, requires_grad=True)
    with saving:
        total = x.sum()
        for value in range(20):
            total = total + (x + value).sin().sum()
    total.backward()
    expected = 1 + torch.tensor([float(v) for v in range(20)]).cos().sum()
    assert (x.grad - expected).abs().max() < 1e-2


@pytest.mark.parametrize("kept", [torch.int64, torch.bool, torch.float32])
def test_in_place_changes_of_kept_tensors_are_errors(kept):
    x = torch.randn(8, 8, requires_grad=True)
    other = torch.ones(8, 8).to(kept)
    with Saving(bits=4, min_bytes=0):
        y = (x * other).sum()
    other.zero_()
    with pytest.raises(RuntimeError, match="stay as it was"):
        y.backward()


def test_compressed_values_are_those_at_the_time_of_saving():
    x = torch.randn(32, 32, requires_grad=True)
    with Saving(bits=8, min_bytes=0):
        y = x * 1
        z = (y * torch.ones(())).sin().sum() + y.sin().sum()
        y.zero_()
    z.backward()
    assert (x.grad - 2 * x.detach().cos()).abs().max() < 0.1


def test_retain_graph_decodes_again():
    model, x = compressed_copy(conv_net(), bits=2), conv_input()
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivatives_are_errors_or_exact():
    x = torch.randn(16, 16, requires_grad=True)
    with Saving(bits=4, min_bytes=0):
        y = (x * 1).sin().sum()
    with pytest.raises(actnn.ActNNError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)
    with Saving(bits=32, min_bytes=0):
        y = (x * 1).sin().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, -x.sin())


def test_no_grad_keeps_nothing():
    model, x = compressed_copy(conv_net()), conv_input()
    with torch.no_grad():
        model(x)
    assert model.actnn.records == []
    assert model.actnn.held_bytes == 0


def test_everything_is_released_after_backward_and_nothing_leaks():
    model, x = compressed_copy(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))), None
    gc.collect()
    gc.disable()
    try:
        for step in range(100):
            x = torch.randn(4, 8, requires_grad=True)
            loss = model(x).sum()
            assert model.actnn.held_bytes > 0
            loss.backward()
            assert model.actnn.held_bytes == 0
            del loss
            if step == 10:
                objects = sum(1 for _ in gc.get_objects())
        grown = sum(1 for _ in gc.get_objects()) - objects
        assert grown < 90  # fewer than one object per step
    finally:
        gc.enable()


def test_a_leaf_is_held_itself_and_other_tensors_without_their_graph():
    leaf, x = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    with Saving(bits=32, min_bytes=0):
        assert pack_in_step(leaf).tensor is leaf
        assert pack_in_step(x).tensor is x
        y = x * 1
        assert pack_in_step(y).tensor.grad_fn is None
    leaf.add_(1)
    with Saving(bits=32, min_bytes=0):
        z = (x * leaf).sum()
    leaf.add_(1)
    with pytest.raises(RuntimeError, match="in-place"):
        z.backward()


def test_a_tensor_that_is_kept_and_saved_twice_is_one_object():
    x = torch.randn(8, 4, requires_grad=True)
    with Saving(bits=32, min_bytes=0):
        y = x * 1
        held = pack_in_step(y)
        assert pack_in_step(y) is held
        for view in (y.view(4, 8), y.t(), y[2:]):
            assert torch.equal(pack_in_step(view).unpack(), view)


def test_steps_make_no_records_that_nobody_reads(monkeypatch):
    model, made = compressed_copy(conv_net(), bits=2), []
    for step in range(8):
        if step == 5:  # after the first trial
            monkeypatch.setattr("actnn.saving.step.Record", lambda *fields: made.append(fields))
        model(conv_input()).square().sum().backward()
    assert not made
    assert list(model.actnn.records)
    assert made


def test_a_graph_that_is_dropped_releases_its_codes():
    model = compressed_copy(conv_net())
    loss = model(conv_input())
    assert model.actnn.held_bytes > 0
    del loss
    assert model.actnn.held_bytes == 0


def test_records_equal_what_is_held():
    model = compressed_copy(Block(), bits=4)
    y = model(torch.randn(2, 16, 32, requires_grad=True) * 1)
    assert model.actnn.held_bytes == sum(record.held for record in model.actnn.records)
    assert {"mlp.0", "norm1", "qkv", "out", ""} <= {r.module for r in model.actnn.records}
    y.sum().backward()


def test_attention_and_nonlinear_results_keep_more_bits():
    saving = Saving(bits=2, min_bytes=0)
    model = Block()
    saving.bind(model)
    with saving:
        y = model(torch.randn(2, 16, 32))
        torch.softmax(y, -1).square().sum().backward()
    bits = {record.choice.bits for record in saving.records if "Softmax" in record.op}
    assert bits == {8}
    heads = [r for r in saving.records if r.shape[-1] == 96 and r.reason == "compressed"]
    assert [record.choice.bits for record in heads] == [4]


def test_each_step_and_rank_has_its_own_noise(monkeypatch):
    x = torch.randn(64, 64, requires_grad=True)

    def decoded(saving):
        with saving:
            y = (x * 1).sin().sum()
        return torch.autograd.grad(y, x)[0]

    saving = Saving(bits=2, min_bytes=0)
    first, second = decoded(saving), decoded(saving)
    assert not torch.equal(first, second)
    assert torch.equal(first, decoded(Saving(bits=2, min_bytes=0)))
    assert not torch.equal(first, decoded(Saving(bits=2, min_bytes=0, seed=1)))
    monkeypatch.setattr("actnn.saving.noise_states._rank", lambda: 1)
    assert not torch.equal(first, decoded(Saving(bits=2, min_bytes=0)))


def test_choices_name_modules_or_single_tensors():
    model, x = compressed_copy(conv_net(), bits=4), conv_input()
    model(x)
    conv = next(r for r in model.actnn.records if r.module == "4" and r.reason == "compressed")
    model.actnn.set_choices(
        {("4", conv.index): Choice("compress", 8), "1": Choice("keep"), "": Choice("compress", 3)}
    )
    model(x)
    by_module = {r.module: r for r in model.actnn.records if r.nbytes >= 4096}
    assert by_module["4"].choice.bits == 8
    assert by_module["1"].reason == "kept"
    assert by_module["10"].choice.bits == 3
    with pytest.raises(actnn.ActNNError, match="path of a module"):
        model.actnn.set_choices({("4", 1): Choice("recompute")})
    with pytest.raises(actnn.ActNNError, match="inside the model"):
        model.actnn.set_choices({"nowhere": Choice("recompute")})


def test_a_policy_sees_each_tensor():
    seen = []

    def policy(info):
        seen.append(info)
        return Choice("keep") if info.op == "ConvolutionBackward0" else Choice("compress", 8)

    model = compressed_copy(conv_net(), policy=policy)
    model(conv_input())
    assert [r.reason for r in model.actnn.records if r.op == "ConvolutionBackward0"] == ["kept"]
    assert {info.module for info in seen} >= {"1", "4", "10"}


def test_parts_of_large_storages_do_not_hold_them():
    x = torch.randn(64, 1024, requires_grad=True)
    saving = Saving(bits=4)
    with saving:
        hidden = x * 1
        y = hidden[:, -1].sin().sum()
        storage = torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage())
        del hidden
    assert storage.expired()
    y.backward()


@pytest.mark.parametrize("parts", [4, 64])  # at least `min_bytes`, and less
def test_parts_of_a_storage_that_is_held_as_a_whole_take_no_more(parts):
    saving = actnn.compressed(bits=32, min_bytes=4096)
    x = torch.randn(parts, 8192 // parts, requires_grad=True)
    with saving:
        y = x.exp()  # saves its result
        loss = torch.stack([part.square().sum() for part in y]).sum()
    assert saving.held_bytes == y.nbytes
    loss.backward()
    assert torch.allclose(x.grad, 2 * (2 * x).exp())


def test_threads_have_steps_of_their_own():
    model = compressed_copy(conv_net(), bits=32)
    results, expected = {}, {}

    def run(seed):
        x = conv_input(seed).requires_grad_()
        results[seed] = torch.autograd.grad(model(x).square().sum(), x)[0]

    model.eval()
    for seed in range(4):
        run(seed)
    expected.update(results)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(expected[seed], results[seed]) for seed in range(4))


def test_contexts_may_be_nested_and_survive_errors():
    model = compressed_copy(conv_net())
    outer = Saving(bits=8, min_bytes=0)
    with outer:
        model(conv_input())
        y = torch.randn(32, 32, requires_grad=True).sin().sin()
    assert model.actnn.records
    assert {record.module for record in outer.records} == {""}
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 1))
    with outer, outer:
        y = y.sin()
    assert len(outer.records) == 1


def test_bit_width_32_gives_the_gradients_of_torch():
    for model, x in ((conv_net(), conv_input()), (Block(), torch.randn(2, 16, 32))):
        for settings in ({"bits": 32}, {"level": "L0"}):
            exact = gradients(model, x)
            same = gradients(compressed_copy(model, **settings), x)
            assert len(exact) == len(same)
            assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 9},
        {"bits": 0},
        {"bits": True},
        {"bits": 4.0},
        {"stochastic": 1},
        {"group": 64.0},
        {"group": 48},
        {"group": 0},
        {"min_bytes": -1},
        {"min_bytes": "1 MB"},
        {"seed": 0.5},
        {"policy": 3},
    ],
    ids=str,
)
def test_wrong_settings_are_errors(settings):
    with pytest.raises(actnn.ActNNError, match="Expected"):
        Saving(**settings)


def test_wrong_choices_are_errors():
    with pytest.raises(actnn.ActNNError, match="action"):
        Choice("drop")
    with pytest.raises(actnn.ActNNError, match="bits"):
        Choice("compress", 11)
    with pytest.raises(actnn.ActNNError, match="Expected a Choice"):
        Saving().set_choices({"": 4})
    model = compressed_copy(conv_net(), policy=lambda info: None)
    with pytest.raises(actnn.ActNNError, match="policy to return a Choice, got None"):
        model(conv_input())
    with pytest.raises(actnn.ActNNError, match="inside the model, got 'layer1'"):
        model.actnn.set_choices({("layer1", 3): Choice("keep")})


def test_a_module_that_is_kept_as_a_whole_runs_without_hooks():
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8))
    ours, x = compressed_copy(net, min_bytes=0), torch.randn(4, 8)
    ours.actnn.set_choices({"1": Choice("keep")})
    ours(x).sum().backward()
    assert {record.module for record in ours.actnn.records} == {"0", "2"}
    ours.actnn.set_choices({"1": Choice("keep"), "1.0": Choice("compress", 8)})
    ours(x).sum().backward()
    assert {"1.0", "1.1", "1.2"} < {record.module for record in ours.actnn.records}
    for special in (False, True):
        choices = {"1": Choice("keep"), **({("0", 0): Choice("keep")} if special else {})}
        ours.actnn.set_choices(choices)
        with pytest.raises(RuntimeError, match="shape"), ours.actnn:
            ours[1](torch.ones(4, 9))
        ours(x).sum().backward()  # the hooks are there after an error
        assert {"0", "2"} <= {record.module for record in ours.actnn.records}
        assert special == ("1.0" in {record.module for record in ours.actnn.records})


def test_parts_of_one_tensor_share_its_codes():
    saving = Saving(bits=8, min_bytes=0)
    whole = torch.randn(4, 6, 10, requires_grad=True)
    with saving:
        made = (whole * 1).transpose(0, 1)
        parts = made[1:].split(3, -1)
        y = parts[0] * parts[1] * parts[2].exp()
    first = saving.records[0]
    assert (first.shape, first.held) == (whole.shape, codec.bytes_of(240, 8))
    saved_parts = [getattr(y.grad_fn.next_functions[0][0], f"_saved_{name}") for name in ("self",)]
    for found, part in zip(saved_parts, parts, strict=False):
        assert found.stride() == part.stride()
        assert (found - part).abs().max() < 0.05
    assert len(saved(saving, "compressed")) < 4


def test_an_error_in_a_first_step_leaves_nothing_half_made(monkeypatch):
    x = torch.randn(64, 64, requires_grad=True)
    saving, make = Saving(bits=8, min_bytes=0), codec.coder_of
    saving_again = Saving(bits=8, min_bytes=0)

    def fail(*arguments):
        raise actnn.ActNNError("no kernel")

    monkeypatch.setattr(codec, "coder_of", fail)
    with pytest.raises(actnn.ActNNError, match="no kernel"), saving:
        (x * 2).sin()
    monkeypatch.setattr(codec, "coder_of", make)
    found = []
    for each in (saving, saving_again):
        with each:
            y = (x * 2).sin()
        found.append(torch.autograd.grad(y.sum(), x)[0])
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


# As torch before 2.13 has it: the hooks stay while somebody holds the error.
OLD_CHECKPOINT = """
def checkpoint(function, x):
    def hooks():
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            yield
    gen = hooks()
    next(gen)
    result = function(x)
    next(gen, None)
    return result
"""


def test_an_error_in_a_checkpoint_leaves_no_hooks():
    namespace = {"saved_tensors_hooks": torch.autograd.graph.saved_tensors_hooks}
    exec(compile(OLD_CHECKPOINT, torch.utils.checkpoint.__file__, "exec"), namespace)
    x = torch.randn(4, 4, requires_grad=True)

    class Fails(nn.Module):
        def forward(self, x):
            return namespace["checkpoint"](lambda x: (x * x) @ torch.ones(3), x)

    model = actnn.compress(nn.Sequential(nn.Linear(4, 4), Fails()), min_bytes=0)
    with pytest.raises(RuntimeError) as held:
        model(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x)
    del held
