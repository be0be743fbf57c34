"""Execution of a call: shapes, cached plans, layers and directions."""
