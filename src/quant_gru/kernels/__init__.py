"""Executors of the plan; each equals the reference, code for code."""
