"""The backward of the quantized GRU on a GPU."""
