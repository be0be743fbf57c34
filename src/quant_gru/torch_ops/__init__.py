"""PyTorch operators for torch.compile, torch.export and torch.func."""
