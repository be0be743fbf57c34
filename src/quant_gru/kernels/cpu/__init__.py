"""The CPU executor: native integer kernels, equal to the reference code for code."""
