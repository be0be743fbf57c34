"""Conversions between real values and codes."""
