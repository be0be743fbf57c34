// Stands in for libcublas on machines without a GPU: products of host memory.
#include <cstdint>

#define FAKE extern "C" __attribute__((visibility("default"))) int

namespace {

struct Handle {
    void *stream = nullptr;
    int mode = 0;
};

// op(A) (m, k) and op(B) (k, n); all matrices have contiguous columns.
template <class T>
int gemm(int transA, int transB, int m, int n, int k, const T *alpha, const T *A, int lda,
         const T *B, int ldb, const T *beta, T *C, int ldc) {
    if (m < 0 || n < 0 || k < 0 || lda < (transA ? k : m) || ldb < (transB ? n : k) || ldc < m)
        return 7;  // CUBLAS_STATUS_INVALID_VALUE
    for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < m; ++i) {
            T sum = 0;
            for (int64_t l = 0; l < k; ++l)
                sum +=
                    A[transA ? l + i * lda : i + l * lda] * B[transB ? j + l * ldb : l + j * ldb];
            T &to = C[i + j * ldc];
            to = *alpha * sum + (*beta == 0 ? 0 : *beta * to);
        }
    return 0;
}

}  // namespace

FAKE cublasCreate_v2(Handle **handle) { return *handle = new Handle, 0; }
FAKE cublasDestroy_v2(Handle *handle) { return delete handle, 0; }
FAKE cublasGetStream_v2(Handle *handle, void **stream) { return *stream = handle->stream, 0; }
FAKE cublasSetStream_v2(Handle *handle, void *stream) { return handle->stream = stream, 0; }
FAKE cublasGetPointerMode_v2(Handle *handle, int *mode) { return *mode = handle->mode, 0; }
FAKE cublasSetPointerMode_v2(Handle *handle, int mode) { return handle->mode = mode, 0; }

FAKE cublasSgemm_v2(Handle *handle, int transA, int transB, int m, int n, int k, const float *alpha,
                    const float *A, int lda, const float *B, int ldb, const float *beta, float *C,
                    int ldc) {
    if (handle->mode) return 13;  // the factors would be read on the device
    return gemm(transA, transB, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
}

FAKE cublasDgemm_v2(Handle *handle, int transA, int transB, int m, int n, int k,
                    const double *alpha, const double *A, int lda, const double *B, int ldb,
                    const double *beta, double *C, int ldc) {
    if (handle->mode) return 13;
    return gemm(transA, transB, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
}
