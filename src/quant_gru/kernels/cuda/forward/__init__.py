"""Launches of a forward: whole calls on real values, and single layers on codes."""
