"""Training: straight-through gradients, learned scales, what is kept for backward."""
