"""Encodings of AIMET: scales and offsets of the tensors around a GRU."""
