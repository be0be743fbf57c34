"""The input projection: one GEMM for all steps, from codes or from real values."""
