"""The codec on GPUs: one launch encodes a tensor, one decodes it."""
