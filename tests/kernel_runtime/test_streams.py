"""Which streams wait for which, told by a torch that records it."""

from types import SimpleNamespace

import pytest
import torch

from quant_gru.kernel_runtime.cuda.streams import Streams, made_on, native_streams


class Recorded:
    """A torch with streams."""

    def __init__(self, monkeypatch):
        self.now, self.capturing, self.waited = 1, False, []
        raw = torch._C
        monkeypatch.setattr(
            raw, "_cuda_getCurrentRawStream", lambda index: self.now + 100 * index, raising=False
        )
        monkeypatch.setattr(
            raw, "_cuda_isCurrentStreamCapturing", lambda: self.capturing, raising=False
        )
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)

    def stream(self, index):
        one = SimpleNamespace(number=self.now)
        one.wait_stream = lambda other: self.waited.append((one.number, other.number))
        return one


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


def test_streams_wait_once_for_what_was_made(recorded):
    streams = Streams(2)
    assert streams.current() == 201
    recorded.now = 2
    assert streams.current() == 202
    assert recorded.waited == []
    streams.made()
    for recorded.now in (2, 1, 1, 3, 2, 3):
        assert streams.current() == 200 + recorded.now
    assert recorded.waited == [(1, 2), (3, 2)]


def test_what_is_made_comes_behind_what_was(recorded):
    """Who waits for the last maker has waited for all."""
    streams = Streams(0)
    streams.made()
    recorded.now = 2
    streams.made()
    assert recorded.waited == [(2, 1)]
    streams.made()
    recorded.now = 1
    streams.current()
    recorded.now = 3
    streams.current()
    assert recorded.waited == [(2, 1), (1, 2), (3, 2)]


def test_captures_do_not_wait(recorded):
    streams = Streams(0)
    streams.made()
    recorded.now, recorded.capturing = 2, True
    assert streams.current() == 2
    assert recorded.waited == []
    recorded.capturing = False
    streams.current()
    assert recorded.waited == [(2, 1)]


def test_native_code_asks_for_the_stream_without_python(recorded):
    machine = SimpleNamespace(stream=lambda: 7)
    assert native_streams(machine.stream, torch.device("cpu")) == (machine.stream, machine.stream)
    quick, follow = native_streams(machine.stream, torch.device("cuda", 3))
    assert (quick(), follow) == (301, machine.stream)
    made_on(torch.device("cpu"))
