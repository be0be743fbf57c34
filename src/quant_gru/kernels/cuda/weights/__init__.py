"""Requantize weights: rewrite the numbers of a plan in place."""
