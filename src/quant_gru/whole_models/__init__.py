"""Whole models: replace their GRUs, calibrate them."""
