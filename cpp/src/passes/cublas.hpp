// Matrix products by cuBLAS, which is opened at run time.
#pragma once

#include <cstdint>

#include "cuda/host/runtime.hpp"
#include "passes/gemm.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {

// Opens libcublas, or the library that QUANT_GRU_CUBLAS names; a libcublas that the process has
// opened before comes first. Throws DeviceError.
class Products {
 public:
    // given: a handle of the caller, or null to create one for the GPU of the current context.
    explicit Products(cublasHandle_t given);
    ~Products();
    Products(const Products &) = delete;
    Products &operator=(const Products &) = delete;

    // C (M, N) = A B, or C += A B with `add`, for B (K, N) and C of contiguous rows. A has
    // contiguous rows or columns. Throws DeviceError.
    template <class T>
    void multiply(const Strided<T> &A, int64_t M, const T *B, int64_t K, int64_t N, T *C,
                  bool add) const;

    // Uses a stream and, until the object is destroyed, changes no other setting of the handle.
    class Settings {
     public:
        Settings(const Products &products, cuda::Stream stream);
        ~Settings();
        Settings(const Settings &) = delete;
        Settings &operator=(const Settings &) = delete;

     private:
        cublasHandle_t handle_;
        cuda::Stream stream_ = nullptr, before_ = nullptr;
        int mode_ = 0;
    };

 private:
    cublasHandle_t handle_;
    bool own_;
};

}  // namespace quant_gru
