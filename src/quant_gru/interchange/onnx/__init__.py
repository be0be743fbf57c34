"""ONNX graphs of a GRU, in five profiles."""
