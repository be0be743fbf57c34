"""Float GRUs of other frameworks: ONNX, Keras, Haste."""
