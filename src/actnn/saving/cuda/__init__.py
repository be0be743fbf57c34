"""Pointwise operations on GPUs that keep one bit, or a seed, instead of a tensor."""
