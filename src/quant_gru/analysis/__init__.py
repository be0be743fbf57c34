"""Tools to find where precision is lost, and how to recover it."""
