"""Layers that keep less than the generic codes, and the functions that compress a whole model."""
