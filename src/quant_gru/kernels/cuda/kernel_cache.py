"""The disk cache of compiled kernels. It needs no torch: the command line shows it at once."""

from quant_gru.errors import QuantGRUWarning
from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache

CACHE = DiskCache("QUANT_GRU_CACHE", "quant-gru", QuantGRUWarning)
