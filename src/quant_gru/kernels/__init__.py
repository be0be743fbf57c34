"""Executors of plans. Each one returns the same codes as the reference."""
