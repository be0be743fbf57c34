"""Training: straight-through gradients, learned scales, and compression of saved states."""
