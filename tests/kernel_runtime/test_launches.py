"""Prepared launches in native code: what a driver gets to see, told by one that records it."""

import ctypes

import pytest
import torch
from fake_driver import HERE, OTHER, FakeDriver

from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernel_runtime.errors import KernelError

Pointer = ctypes.c_void_p
TwoC = structure("TwoC", first=Pointer, second=Pointer * 2, count=ctypes.c_int64)
AttributeC = structure("AttributeC", id=ctypes.c_int, pad=ctypes.c_int, value=ctypes.c_uint32 * 16)
ConfigC = structure(
    "ConfigC",
    grid=ctypes.c_uint * 3,
    block=ctypes.c_uint * 3,
    shared_bytes=ctypes.c_uint,
    stream=Pointer,
    attributes=Pointer,
    count=ctypes.c_uint,
)
KERNEL = Kernel.of("probe", "probe", {})


class Driver(FakeDriver):
    """Records launches. `failing` are those that fail, by their places."""

    def __init__(self):
        super().__init__()
        self.launched, self.failing = [], {}

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        status = self.failing.get(len(self.launched), 0)
        given = ctypes.cast(parameters, ctypes.POINTER(ctypes.POINTER(TwoC)))[0].contents
        c = ConfigC.from_address(config)
        cluster = None
        if c.count:
            attribute = AttributeC.from_address(c.attributes)
            cluster = (attribute.id, *attribute.value[:3])
        sizes = (*c.grid, *c.block, c.shared_bytes)
        fields = (given.first, *given.second, given.count)
        self.launched.append((function, sizes, c.stream, cluster, fields, extra, self.context))
        return status


class Device(driver.Device):
    """A device of a recording driver, on which each grid has a function of its own."""

    def __init__(self, recording):
        self.native, self.loaded, self.index = recording.device(), {}, 0
        self.stream = lambda: 3
        self.has_clusters, self._error = True, KernelError

    def _ready(self, kernel, grid):
        return self.loaded.setdefault(grid, 40 + len(self.loaded))


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 3, raising=False)
    return Driver()


def two(first, count):
    record = TwoC()
    record.first, record.count = first, count
    return record


def test_launches_one_after_the_other(recording):
    device = Device(recording)
    a, b = two(1, 10), two(2, 20)
    grids = (Grid((3, 5), 64), Grid((8, 1), 128, 4, 1000))
    prepared = [device.prepare(KERNEL, *each) for each in zip(grids, (a, b), strict=True)]
    joined = device.join([device.join(prepared[:1]), prepared[1]])
    del prepared
    recording.context = OTHER
    joined.start(77)
    expected = [
        (40, (3, 5, 1, 64, 1, 1, 0), 77, None, (1, None, None, 10), None, HERE),
        (41, (8, 1, 1, 128, 1, 1, 1000), 77, (4, 4, 1, 1), (2, None, None, 20), None, HERE),
    ]
    assert recording.launched == expected
    # arguments are read at each start
    a.first = 9
    joined.start(78)
    assert [(each[2], each[4][0]) for each in recording.launched[2:]] == [(78, 9), (78, 2)]


def test_launches_of_a_kernel_have_configurations_of_their_own(recording):
    device = Device(recording)
    grid = Grid((2, 1), 32)
    a, b = (device.prepare(KERNEL, grid, two(i, i)) for i in (1, 2))
    b.start(5)
    a.start(6)
    assert [(each[2], each[4][0]) for each in recording.launched] == [(5, 2), (6, 1)]


def test_an_early_launch_says_so_where_the_device_knows(recording):
    device = Device(recording)
    grid = Grid((2, 1), 32, early=True)
    for knows, attribute in ((True, (6, 1, 0, 0)), (False, None)):
        device.has_clusters = knows
        device.prepare(KERNEL, grid, two(1, 1)).start(5)
        assert recording.launched[-1][3] == attribute


@pytest.mark.parametrize("failing", [0, 1, "cuCtxGetCurrent", "cuCtxSetCurrent"])
def test_the_first_failure_is_told_and_ends_it(recording, failing):
    device = Device(recording)
    launches = [device.prepare(KERNEL, Grid((1, 1), 32), two(i, i)) for i in range(3)]
    joined = device.join(launches)
    is_launch = isinstance(failing, int)
    (recording.failing if is_launch else recording.fails)[failing] = 719
    with pytest.raises(KernelError, match="got CUDA_ERROR_LAUNCH_FAILED"):
        joined.start(1)
    assert len(recording.launched) == (failing + 1 if is_launch else 0)
    recording.context, recording.fails, recording.failing = HERE, {}, {}
    recording.launched.clear()
    joined.start(1)
    assert len(recording.launched) == 3


def test_the_context_is_another_only_while_it_launches(recording):
    device = Device(recording)
    launch = device.prepare(KERNEL, Grid((1, 1), 32), two(0, 0))
    for before in (HERE, OTHER, None):
        recording.context = before
        launch.start(0)
        assert recording.context == before
        device.launch(KERNEL, Grid((1, 1), 32), two(1, 1))
        assert recording.context == before
        assert {each[-1] for each in recording.launched} == {HERE}
    # nothing is set where it is current
    recording.fails = {"cuCtxSetCurrent": 1}
    recording.context = HERE
    launch.start(0)
    recording.context = OTHER
    with pytest.raises(KernelError, match="succeed, got 1"):
        launch.start(0)


def test_fields_follow_their_memory():
    record, memory = TwoC(), Memory()
    memory.take(10)
    at = memory.take(300)
    assert (at, memory.size) == (256, 768)
    memory.point(record, "first")
    memory.point(record, "second", at + 4, 1)
    assert (record.first, *record.second) == (None, None, None)
    for base in (1 << 40, 1 << 41, 1 << 41):
        memory.move(base)
        assert (record.first, *record.second) == (base, None, base + 260)
    memory.move(0)
    assert (record.first, *record.second, record.count) == (None, None, None, 0)
