"""Stands in for the CUDA driver: functions of Python that record what they get."""

import ctypes

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda import driver

Int, UInt, Pointer, Text = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p
Number, Out, Name = (ctypes.POINTER(each) for each in (Int, Pointer, Text))
MEMORY = ("MemAlloc_v2", "MemFree_v2", "MemcpyHtoD_v2", "MemcpyDtoH_v2")
GRAPHS = {
    "cuStreamCreate": (Out, UInt),
    "cuStreamIsCapturing": (Pointer, Number),
    "cuStreamBeginCapture_v2": (Pointer, Int),
    "cuStreamEndCapture": (Pointer, Out),
    "cuThreadExchangeStreamCaptureMode": (Number,),
    "cuGraphInstantiateWithFlags": (Out, Pointer, ctypes.c_ulonglong),
    "cuGraphUpload": (Pointer, Pointer),
    "cuGraphLaunch": (Pointer, Pointer),
    "cuGraphDestroy": (Pointer,),
    "cuGraphExecDestroy": (Pointer,),
}
FUNCTIONS = {
    "cuInit": (UInt,),
    "cuDriverGetVersion": (Number,),
    "cuGetErrorName": (Int, Name),
    "cuDeviceGetCount": (Number,),
    "cuDeviceGet": (Number, Int),
    "cuDeviceGetAttribute": (Number, Int, Int),
    "cuDevicePrimaryCtxRetain": (Out, Int),
    "cuCtxGetCurrent": (Out,),
    "cuCtxSetCurrent": (Pointer,),
    "cuModuleLoadData": (Out, Text),
    "cuModuleGetFunction": (Out, Pointer, Text),
    "cuFuncSetAttribute": (Pointer, Int, Int),
    "cuLaunchKernelEx": (Pointer, Pointer, Pointer, Pointer),
    "cuOccupancyMaxActiveClusters": (Number, Pointer, Pointer),
    "cuStreamSynchronize": (Pointer,),
    **dict.fromkeys((f"cu{each}" for each in MEMORY), ()),
    **GRAPHS,
}
HERE, OTHER = 0x7000, 0x8000  # the context of the GPU, and another one
SHARED, ANY_CLUSTER = 8, 14  # attributes of functions


class FakeDriver:
    """One GPU. Subclasses define functions of the driver; those that none defines only succeed.

    Args:
        without: Functions that the driver does not have.
        capability: Compute capability of the GPU.
        version: The version of CUDA, as the driver counts.

    Attributes:
        fails: Name of a function -> status that it returns instead of its work.
        calls: Names of the functions in the order of their calls.
        context: The current context.
        modules: The machine code of each loaded module.
        functions: (number of a module, name) of each function; its handle is its place behind 40.
        attributes: (handle, attribute) -> value.
    """

    def __init__(self, without=(), capability=(9, 0), version=12000):
        self.fails, self.calls, self.context = {}, [], OTHER
        self.modules, self.functions, self.attributes = [], [], {}
        self.capability, self.version = capability, version
        self._callbacks = {
            name: ctypes.CFUNCTYPE(Int, *kinds)(self._function(name))
            for name, kinds in FUNCTIONS.items()
            if name not in without
        }
        self.addresses = {
            name: ctypes.cast(each, Pointer).value for name, each in self._callbacks.items()
        }

    def _function(self, name):
        work = getattr(self, name, lambda *given: 0)

        def call(*given):
            self.calls.append(name)
            return self.fails[name] if name in self.fails else work(*given) or 0

        return call

    def native(self):
        """The functions for native code. This object must be kept alive as long."""
        return _native.Driver(self.addresses)

    def device(self, compile_=lambda source, macros, arch: source.encode(), graphs=False):
        """The GPU for native code; the machine code of a kernel is the name of its source."""
        return _native.Device(self.native(), 0, compile_, driver._start_thread, graphs)

    def cuDriverGetVersion(self, to):
        to[0] = self.version

    def cuGetErrorName(self, status, to):
        if status != 719:
            return 1
        to[0] = b"CUDA_ERROR_LAUNCH_FAILED"
        return 0

    def cuDeviceGetCount(self, to):
        to[0] = 1

    def cuDeviceGetAttribute(self, to, attribute, device):
        to[0] = {16: 132, 75: self.capability[0], 76: self.capability[1]}[attribute]

    def cuDevicePrimaryCtxRetain(self, to, device):
        to[0] = HERE

    def cuCtxGetCurrent(self, to):
        to[0] = self.context

    def cuCtxSetCurrent(self, context):
        self.context = context

    def cuModuleLoadData(self, to, code):
        assert self.context == HERE
        self.modules.append(code)
        to[0] = len(self.modules)

    def cuModuleGetFunction(self, to, module, name):
        found = module, name
        if found not in self.functions:
            self.functions.append(found)
        to[0] = 40 + self.functions.index(found)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes[function, attribute] = value

    def cuOccupancyMaxActiveClusters(self, to, function, config):
        to[0] = 30
