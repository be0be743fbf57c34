"""Launches that repeat become graphs: a driver that records what it gets counts how often."""

import ctypes

import pytest
from fake_driver import GRAPHS, FakeDriver

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid

Pointer = ctypes.c_void_p
OneC = structure("OneC", value=ctypes.c_int64)
BEGIN = "cuStreamBeginCapture_v2"
OWN, MINE = 900, 5  # the stream that records, and that of the caller
RELAXED, GLOBAL = 2, 0
STREAM_OFFSET = 32  # of a launch configuration


class Driver(FakeDriver):
    """`seen` are kernels on streams, and graphs as lists of kernels."""

    def __init__(self, without=()):
        super().__init__(without)
        self.seen, self.recorded, self.graphs, self.instances = [], None, {}, {}
        self.capturing, self.mode, self.uploaded = 0, GLOBAL, set()
        self.gpu = self.device(graphs=True)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        stream = Pointer.from_address(config + STREAM_OFFSET).value
        value = ctypes.cast(parameters, ctypes.POINTER(ctypes.POINTER(OneC)))[0].contents.value
        if stream == OWN:
            assert self.mode == RELAXED
            if "launch" in self.fails:
                return 900
            self.recorded.append((function, value))
        else:
            self.seen.append((function, value, stream))
        return 0

    def cuStreamCreate(self, to, flags):
        assert flags == 1
        to[0] = OWN

    def cuStreamIsCapturing(self, stream, to):
        to[0] = self.capturing

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert (stream, mode) == (OWN, RELAXED)
        self.recorded = []

    def cuStreamEndCapture(self, stream, to):
        to[0] = number = 100 + len(self.graphs)
        self.graphs[number], self.recorded = self.recorded, None

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode[0] = mode[0], self.mode

    def cuGraphInstantiateWithFlags(self, to, graph, flags):
        assert flags == 0
        to[0] = number = 200 + len(self.instances)
        self.instances[number] = self.graphs[graph]

    def cuGraphUpload(self, graph, stream):
        assert (self.mode, stream) == (RELAXED, MINE)
        self.uploaded.add(graph)

    def cuGraphLaunch(self, graph, stream):
        assert graph in self.uploaded
        self.seen.append((self.instances[graph], stream))

    def cuGraphDestroy(self, graph):
        del self.graphs[graph]

    def cuGraphExecDestroy(self, graph):
        assert self.mode == RELAXED
        self.instances[graph] = None


@pytest.fixture
def driver():
    return Driver()


class Listed:
    """Launches of kernels 40, 41, .. with the values 0, 1, .."""

    def __init__(self, driver, count=3):
        self.values = [OneC(i) for i in range(count)]
        self.native = _native.Launches(driver.gpu)
        for i, each in enumerate(self.values):
            self.native.add(40 + i, Grid((1, 1), 32), ctypes.addressof(each))
        self._driver = driver  # whose functions free graphs

    def start(self, *key, stream=MINE):
        return self.native.start(stream, key)

    def each(self, stream=MINE):
        return [(40 + i, each.value, stream) for i, each in enumerate(self.values)]

    def graph(self, stream=MINE):
        return ([each[:2] for each in self.each()], stream)


def test_the_third_start_with_a_key_is_recorded(driver):
    listed = Listed(driver)
    for _ in range(2):
        assert listed.start(7, 8) == 0
    assert driver.seen == 2 * listed.each()
    for stream in (MINE, MINE, 6):
        assert listed.start(7, 8, stream=stream) == 0
    assert driver.seen[6:] == [listed.graph(), listed.graph(), listed.graph(6)]
    assert driver.mode == GLOBAL
    assert not driver.graphs
    assert driver.calls.count(BEGIN) == 1


def test_other_keys_have_arguments_of_their_own(driver):
    listed = Listed(driver)
    for _ in range(4):
        for key in (1, 2):
            listed.values[0].value = 10 * key
            driver.seen.clear()
            listed.start(key)
    listed.values[0].value = 10
    listed.start(1)
    assert driver.seen[-1] == listed.graph()
    # a key that was not seen reads the arguments as they are
    listed.values[0].value = 30
    driver.seen.clear()
    listed.start(3)
    assert driver.seen == listed.each()


@pytest.mark.parametrize("way", ["without a key", "one launch", "without graphs", *GRAPHS])
def test_what_is_never_a_graph(driver, way):
    if way in GRAPHS:  # the driver does not have it
        driver = Driver(without=(way,))
    if way == "without graphs":
        driver.gpu = driver.device()
    listed = Listed(driver, 1 if way == "one launch" else 3)
    for _ in range(6):
        listed.native.start(MINE) if way == "without a key" else listed.start(7)
    assert driver.seen == 6 * listed.each()
    assert not GRAPHS.keys() & set(driver.calls)


@pytest.mark.parametrize("what", ["captures", "cannot say"])
def test_launches_belong_to_a_graph_of_the_caller(driver, what):
    listed = Listed(driver)
    for _ in range(5):
        listed.start(7)
    driver.seen.clear()
    if what == "captures":
        driver.capturing = 1
    else:
        driver.fails["cuStreamIsCapturing"] = 700
    listed.start(7)
    assert driver.seen == listed.each()
    driver.capturing, driver.fails = 0, {}
    listed.start(7)
    assert driver.seen[3:] == [listed.graph()]


RECORD = [*GRAPHS][:1] + [*GRAPHS][2:7]


@pytest.mark.parametrize("fails", [*RECORD, "launch"])
def test_launches_start_one_by_one_if_the_driver_does_not_record(driver, fails):
    driver.fails[fails] = 700
    listed = Listed(driver)
    for _ in range(99):
        assert listed.start(7) == 0
    assert driver.seen == 99 * listed.each()
    assert driver.mode == GLOBAL
    assert driver.calls.count(BEGIN) <= 1
    assert not driver.graphs
    assert not any(driver.instances.values())


def test_a_failing_start_of_a_graph_is_told(driver):
    listed = Listed(driver)
    driver.fails["cuGraphLaunch"] = 700
    assert [listed.start(7) for _ in range(4)] == [0, 0, 700, 700]


def test_addresses_that_rarely_repeat_are_rarely_recorded(driver):
    listed = Listed(driver)
    for key in range(1000):
        listed.start(key)
    assert BEGIN not in driver.calls
    # addresses that stay for a few starts
    for key in range(1000):
        for _ in range(4):
            listed.start(key)
    assert driver.calls.count(BEGIN) <= 4000 / 16 + 4
    # and those that stay at last
    for _ in range(40):
        listed.start(-1 & (1 << 64) - 1)
    assert driver.seen[-1] == listed.graph()


def test_graphs_are_freed(driver):
    listed = Listed(driver)
    for key in range(6):
        for _ in range(30):
            listed.start(key)
    assert [each is None for each in driver.instances.values()] == [True, True] + 4 * [False]
    del listed
    assert set(driver.instances.values()) == {None}
    assert driver.mode == GLOBAL


def test_steps_tell_all_addresses(driver):
    """`_native.Steps` passes what fields follow, and what else the caller names, as the key."""
    from quant_gru.kernels import _native as kernels

    listed = Listed(driver)
    fields = _native.Fields()
    fields.add(ctypes.addressof(listed.values[0]), 1)
    steps = kernels.Steps([listed.native], [[0]], [fields], lambda status: None, listed)
    for _ in range(3):
        for base, more in ((100, 1), (200, 1), (100, 2)):
            listed.values[2].value = more
            steps.start(MINE, [base, more])
    listed.values[2].value = 7
    for base, more in ((100, 1), (200, 1), (100, 2)):
        steps.start(MINE, [base, more])
        assert driver.seen[-1] == ([(40, base + 1), (41, 1), (42, more)], MINE)


def test_launches_that_repeat_are_graphs_beside_others(driver):
    """A step knows what its arguments follow: an address of others that changes does not matter."""
    from quant_gru.kernels import _native as kernels

    changing, repeated = Listed(driver), Listed(driver)
    fields = [_native.Fields(), _native.Fields()]
    for each, listed in zip(fields, (changing, repeated), strict=True):
        each.add(ctypes.addressof(listed.values[0]), 1)
    keep = changing, repeated
    both = [each.native for each in keep]
    steps = kernels.Steps(both, [[0], [1]], fields, lambda status: None, keep)
    for base in range(100, 120):
        steps.start(MINE, [base, 50])
    found = driver.seen[-4:]
    assert found == [(40, 120, MINE), (41, 1, MINE), (42, 2, MINE), repeated.graph()]
    steps.start(MINE, [119, 51])
    assert driver.seen[-3:] == [(40, 52, MINE), (41, 1, MINE), (42, 2, MINE)]


@pytest.mark.parametrize("uses", [[], [[1]]])
def test_what_steps_use_is_checked(driver, uses):
    from quant_gru.kernels import _native as kernels

    listed = Listed(driver)
    with pytest.raises((ValueError, IndexError), match="address"):
        kernels.Steps([listed.native], uses, [_native.Fields()], lambda status: None, listed)


def test_graphs_of_all_lists_are_limited(driver):
    lists = [Listed(driver) for _ in range(260)]
    for _ in range(4):
        for each in lists:
            each.start(7)
    assert len(driver.instances) == 256
    del lists[:10]
    for each in lists:
        each.start(7)
    assert sum(each is not None for each in driver.instances.values()) == 250
