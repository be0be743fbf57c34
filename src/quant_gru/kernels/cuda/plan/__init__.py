"""Convert a plan to the structures and tensors that kernels read."""
