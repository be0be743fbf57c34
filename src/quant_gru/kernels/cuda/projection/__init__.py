"""The input projection: a GEMM of all steps, from codes or from real values."""
