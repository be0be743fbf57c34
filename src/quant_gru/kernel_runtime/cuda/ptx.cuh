// PTX instructions that CUDA C++ does not provide as functions.
#ifndef KERNEL_RUNTIME_PTX_CUH
#define KERNEL_RUNTIME_PTX_CUH

#include "kernel_runtime/cuda/ptx_arithmetic.cuh"
#include "kernel_runtime/cuda/ptx_matrix.cuh"
#include "kernel_runtime/cuda/ptx_memory.cuh"
#include "kernel_runtime/cuda/ptx_sync.cuh"

#endif
