"""A plan in the structures and tensors that kernels read."""
