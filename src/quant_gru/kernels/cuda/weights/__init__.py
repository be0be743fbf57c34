"""Weights to the numbers of a plan, in place."""
