"""How many bits each tensor gets while a model is trained, and what its noise does."""
