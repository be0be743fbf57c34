"""Prepared launches in native code: what a driver gets to see, told by one that records it."""

import ctypes
import threading

import pytest
import torch

from quant_gru.kernel_runtime import _native
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
HERE, OTHER = 0x7000, 0x8000  # contexts
KERNEL = Kernel.of("probe", "probe", {})


class Driver:
    """Functions of a driver that records what it gets."""

    def __init__(self):
        self.context, self.launched, self.fails = OTHER, [], {}

        @ctypes.CFUNCTYPE(ctypes.c_int, *[Pointer] * 4)
        def launch(config, function, parameters, extra):
            status = self.fails.get(len(self.launched), 0)
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

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Pointer))
        def get(to):
            to[0] = self.context
            return self.fails.get("get", 0)

        @ctypes.CFUNCTYPE(ctypes.c_int, Pointer)
        def set_(context):
            self.context = context
            return self.fails.get("set", 0)

        self._functions = (launch, get, set_)
        addresses = [ctypes.cast(each, Pointer).value for each in self._functions]
        self.native = _native.Driver(*addresses, HERE)


class Device(driver.Device):
    """A device of a recording driver."""

    def __init__(self, recording):
        self.native, self.loaded, self.index = recording.native, {}, 0
        self.stream = lambda: 3
        self.has_clusters = True
        self._modules = {(KERNEL.source, KERNEL.macros): None}

    def _ready(self, kernel, grid):
        return self.loaded.setdefault(grid, driver.Loaded(40 + len(self.loaded), 0))

    def raise_for(self, status):
        raise KernelError(f"status {status}")


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


class Attributes:
    """A driver that knows functions and their attributes."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = "shared"
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = "clusters"

    def __init__(self):
        self.of = {}

    def cuModuleGetFunction(self, module, name):
        return 0, hash(name)

    def cuFuncSetAttribute(self, function, name, value):
        self.of[function, name] = value
        return (0,)


def test_a_function_keeps_the_shared_memory_of_all_that_launch_it(recording, monkeypatch):
    device, attributes = Device(recording), Attributes()
    device._driver, device._lock = attributes, threading.RLock()
    device._loaded, device._shared, device._modules = {}, {}, {(KERNEL.source, KERNEL.macros): 1}
    monkeypatch.setattr(device, "_check", lambda result: result[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    large, small = (Grid((8, 1), 32, n, size) for n, size in ((1, 150_000), (4, 70_000)))
    for grid, expected in ((small, 70_000), (large, 150_000), (small, 150_000)):
        device._load(KERNEL, grid)
        assert [v for (_, name), v in attributes.of.items() if name == "shared"] == [expected]


def test_an_early_launch_says_so_where_the_device_knows(recording):
    device = Device(recording)
    grid = Grid((2, 1), 32, early=True)
    for knows, attribute in ((True, (6, 1, 0, 0)), (False, None)):
        device.has_clusters = knows
        device.prepare(KERNEL, grid, two(1, 1)).start(5)
        assert recording.launched[-1][3] == attribute


@pytest.mark.parametrize("failing", [0, 1, "get", "set"])
def test_the_first_failure_is_told_and_ends_it(recording, failing):
    device = Device(recording)
    launches = [device.prepare(KERNEL, Grid((1, 1), 32), two(i, i)) for i in range(3)]
    joined = device.join(launches)
    recording.context, recording.fails = OTHER, {failing: 719}
    with pytest.raises(KernelError, match="719"):
        joined.start(1)
    assert len(recording.launched) == (failing + 1 if isinstance(failing, int) else 0)
    recording.context, recording.fails = HERE, {}
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
    recording.fails = {"set": 1}
    recording.context = HERE
    launch.start(0)
    recording.context = OTHER
    with pytest.raises(KernelError, match="status 1"):
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
