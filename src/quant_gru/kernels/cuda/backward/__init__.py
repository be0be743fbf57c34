"""The backward of the integer GRU on a GPU."""
