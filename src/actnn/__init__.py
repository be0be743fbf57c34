"""Training of any PyTorch model in less memory: what autograd keeps is compressed."""
