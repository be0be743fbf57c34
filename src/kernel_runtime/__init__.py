"""Compile, keep, load and launch kernels; knows nothing of what they compute."""
