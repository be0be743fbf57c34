"""ONNX graphs of a GRU, in four profiles."""
