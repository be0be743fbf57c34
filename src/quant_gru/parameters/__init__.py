"""The parameter file, and what checkpoints carry."""
