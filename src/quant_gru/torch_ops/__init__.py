"""Operators of torch: what torch.compile, torch.export and torch.func see."""
