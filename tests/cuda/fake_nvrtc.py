"""Stands in for NVRTC: the machine code of 'folder/name.cu' is the text 'folder/name'."""

import ctypes

from quant_gru.kernel_runtime import _native

Int, Text, Pointer, Size = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
Out, Texts = ctypes.POINTER(Pointer), ctypes.POINTER(Text)
Number, Bytes = ctypes.POINTER(Int), ctypes.POINTER(Size)


class FakeNvrtc:
    """Records what it is asked for.

    Args:
        version: The version that it tells.
        broken: Whether it compiles nothing.

    Attributes:
        addresses: Those of its functions.
        asked: The name of each source, and the options for it.
    """

    def __init__(self, version=(13, 0), broken=False):
        self.asked, self._programs = [], {}
        self._version, self._broken = version, broken
        functions = {
            "nvrtcVersion": (self._tell_version, Number, Number),
            "nvrtcCreateProgram": (self._create, Out, Text, Text, Int, Texts, Texts),
            "nvrtcCompileProgram": (self._compile, Pointer, Int, Texts),
            "nvrtcGetCUBINSize": (self._size, Pointer, Bytes),
            "nvrtcGetCUBIN": (self._text, Pointer, Pointer),
            "nvrtcGetProgramLogSize": (self._size, Pointer, Bytes),
            "nvrtcGetProgramLog": (self._text, Pointer, Pointer),
            "nvrtcDestroyProgram": (self._destroy, Out),
            "nvrtcGetErrorString": (lambda status: 0, Int),
        }
        self._functions = [
            ctypes.CFUNCTYPE(Int, *kinds)(function)
            for function, *kinds in (functions[name] for name in _native.NVRTC_FUNCTIONS)
        ]
        self.addresses = [ctypes.cast(each, Pointer).value for each in self._functions]

    def _tell_version(self, major, minor):
        major[0], minor[0] = self._version
        return 0

    def _create(self, to, source, name, headers, texts, names):
        to[0] = number = 1 + len(self._programs)
        self._programs[number] = name.removesuffix(b".cu")
        return 0

    def _compile(self, program, count, options):
        name = self._programs[program].decode()
        self.asked.append((name, [options[i].decode() for i in range(count)]))
        if self._broken:
            self._programs[program] = b"undefined \xff\n\0"
        return 6 if self._broken else 0

    def _size(self, program, to):
        to[0] = len(self._programs[program])
        return 0

    def _text(self, program, to):
        text = self._programs[program]
        ctypes.memmove(to, text, len(text))
        return 0

    def _destroy(self, program):
        assert self._programs[program[0]] is not None
        return 0
