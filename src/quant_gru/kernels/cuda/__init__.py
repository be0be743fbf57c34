"""The CUDA executor: kernels compiled at first use, one launch for a whole sequence."""
