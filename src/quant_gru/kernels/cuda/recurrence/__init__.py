"""Kernels of the recurrence: persistent, one launch per step, and wide integers."""
