"""Compile, cache, load and launch kernels, independently of what they compute."""
