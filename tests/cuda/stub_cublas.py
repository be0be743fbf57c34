"""Stands in for cuBLASLt: products on the host, told as the library is told."""

import ctypes

import torch
from host_machine import Prepared

from quant_gru.kernel_runtime.cuda import cublaslt
from quant_gru.kernel_runtime.cuda.driver import Multiplication

Pointer = ctypes.c_void_p
DTYPES = {0: torch.float32, 14: torch.bfloat16}
REFUSED, FAILED = 15, 13


def at(address, dtype, count):
    """So many numbers at an address."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Cublas:
    """A library whose functions keep what they are told under numbers.

    Attributes:
        functions: As `products.loaded` gives them.
        alive: What has been made and not destroyed, by number.
        refuses: A function that does not work.
        workspace: Bytes that the heuristic asks for.
        started: (m, n, k as the library counts them, workspace, stream) of each product.
    """

    def __init__(self):
        self.alive, self.refuses, self.workspace, self.started = {}, None, 512, []
        self._made = 0
        self.functions = {name: self._bound(name) for name in cublaslt._ARGUMENTS}

    def _bound(self, name):
        def call(*arguments):
            if self.refuses == name:
                return REFUSED
            for ending in ("Create", "Destroy", "SetAttribute"):
                if name.endswith(ending):
                    return getattr(self, f"_{ending.lower()}")(*arguments)
            return getattr(self, f"_{name}")(*arguments)

        kinds = cublaslt._ARGUMENTS[name]
        if name == "Matmul":
            kinds = [kind for _, kind in cublaslt.ProductC._fields_]
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

    def _create(self, to, *what):
        self._made += 1
        self.alive[self._made] = [what, {}]
        Pointer.from_address(to).value = self._made
        return 0

    def _destroy(self, number):
        del self.alive[number]
        return 0

    def _setattribute(self, number, attribute, value, size):
        kind = {4: ctypes.c_int32, 8: ctypes.c_uint64}[size]
        self.alive[number][1][attribute] = kind.from_address(value).value
        return 0

    def _MatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, most, to, count):
        assert most == 1
        assert self.alive[preference][1][1] >= self.workspace
        found = cublaslt._FoundC.from_address(to)
        found.algorithm[0], found.workspace_size = operation, self.workspace
        ctypes.c_int.from_address(count).value = 1
        return 0

    def _Matmul(self, *arguments):
        names = [name for name, _ in cublaslt.ProductC._fields_]
        p = dict(zip(names, arguments, strict=True))
        (compute, scale), settings = self.alive[p["operation"]]
        scalars = [ctypes.c_float.from_address(p[name]).value for name in ("alpha", "beta")]
        if (compute, scale, scalars) != (68, 0, [1.0, 0.0]) or p["handle"] not in self.alive:
            return FAILED
        if ctypes.c_uint64.from_address(p["algorithm"]).value != p["operation"]:
            return FAILED
        if p["workspace_size"] != self.workspace or p["c"] != p["d"]:
            return FAILED
        a, b = (self._matrix(p[f"{n}_layout"], p[n]).double() for n in "ab")
        a, b = (
            each.t() if settings.get(attribute) else each for each, attribute in ((a, 3), (b, 4))
        )
        self._matrix(p["d_layout"], p["d"]).copy_(a @ b)
        self.started.append((a.shape[0], b.shape[1], a.shape[1], p["workspace"], p["stream"]))
        return 0

    def _matrix(self, number, address):
        """Of a layout: column after column."""
        (kind, rows, columns, step), _ = self.alive[number]
        assert step == rows
        return at(address, DTYPES[kind], rows * columns).view(columns, rows).t()


def multiplying(host, cublas):
    """What `Device.multiply` is where kernels run on the host, of a stand-in's products."""
    library = cublaslt.Library(cublas.functions)

    def multiply(product):
        made = library.describe(product)
        fields = [name for name, _ in cublaslt.ProductC._fields_]

        def start():
            assert cublas._Matmul(*(getattr(made.record, name) for name in fields)) == 0

        return Multiplication(Prepared(host, [start]), made.record, made.workspace)

    return multiply
