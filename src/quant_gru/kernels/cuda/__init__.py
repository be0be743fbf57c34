"""The CUDA executor. Kernels are compiled at first use; one launch runs a whole sequence."""
