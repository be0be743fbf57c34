"""Launches of a forward: of whole calls, and of a layer of codes."""
