"""NVRTC, a cache on disk, the CUDA driver, streams, graphs and cuBLASLt."""
