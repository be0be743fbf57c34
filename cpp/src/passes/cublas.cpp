#include "passes/cublas.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_runtime/native/shared_library.hpp"
#include "quant_gru/cuda.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

enum : int { kPlain = 0, kTransposed = 1 };  // CUBLAS_OP_N, CUBLAS_OP_T
enum : int { kHostPointers = 0 };            // CUBLAS_POINTER_MODE_HOST

template <class T>
using Gemm = int (*)(cublasHandle_t handle, int transA, int transB, int m, int n, int k,
                     const T *alpha, const T *A, int lda, const T *B, int ldb, const T *beta, T *C,
                     int ldc);

// The functions of libcublas that passes call. Each returns 0 or an error.
struct Cublas {
    int (*cublasCreate)(cublasHandle_t *handle);
    int (*cublasDestroy)(cublasHandle_t handle);
    int (*cublasGetStream)(cublasHandle_t handle, cuda::Stream *stream);
    int (*cublasSetStream)(cublasHandle_t handle, cuda::Stream stream);
    int (*cublasGetPointerMode)(cublasHandle_t handle, int *mode);
    int (*cublasSetPointerMode)(cublasHandle_t handle, int mode);
    Gemm<float> cublasSgemm;
    Gemm<double> cublasDgemm;

    Gemm<float> gemm(float) const { return cublasSgemm; }
    Gemm<double> gemm(double) const { return cublasDgemm; }
};

std::vector<std::string> names() {
    std::vector<std::string> found = cuda::library_names(
        "QUANT_GRU_CUBLAS",
        {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"},
        {"cublas64_13.dll", "cublas64_12.dll"});
    // libcublas finds libcublasLt in a folder of its own only if it is open already
    const std::string &path = found.front();
    const size_t at = path.rfind("/libcublas.");
    if (at != std::string::npos)
        cuda::open_if_found(path.substr(0, at) + "/libcublasLt." + path.substr(at + 11));
    // a handle of the caller belongs to the library that the process has opened
    std::stable_partition(found.begin(), found.end(), cuda::is_open);
    return found;
}

Cublas opened() {
    const cuda::SharedLibrary library("cuBLAS", names(),
                                      "set QUANT_GRU_CUBLAS to the path of libcublas.so.13, which "
                                      "the CUDA toolkit and the package nvidia-cublas have");
    Cublas c;
    library.find(c.cublasCreate, "cublasCreate_v2");
    library.find(c.cublasDestroy, "cublasDestroy_v2");
    library.find(c.cublasGetStream, "cublasGetStream_v2");
    library.find(c.cublasSetStream, "cublasSetStream_v2");
    library.find(c.cublasGetPointerMode, "cublasGetPointerMode_v2");
    library.find(c.cublasSetPointerMode, "cublasSetPointerMode_v2");
    library.find(c.cublasSgemm, "cublasSgemm_v2");
    library.find(c.cublasDgemm, "cublasDgemm_v2");
    return c;
}

const Cublas &cublas() {
    static const Cublas found = opened();
    return found;
}

void check(int status) {
    if (status)
        throw cuda::DeviceError("Expected cuBLAS to succeed, got status " + std::to_string(status));
}

int size(int64_t value) {
    if (value > std::numeric_limits<int>::max())
        throw ArgumentError("Expected sizes of matrices on a GPU to be below 2^31, got " +
                            std::to_string(value));
    return static_cast<int>(value);
}

}  // namespace

Products::Products(cublasHandle_t given) : handle_(given), own_(!given) {
    if (own_) check(cublas().cublasCreate(&handle_));
}

Products::~Products() {
    if (own_) cublas().cublasDestroy(handle_);
}

template <class T>
void Products::multiply(const Strided<T> &A, int64_t M, const T *B, int64_t K, int64_t N, T *C,
                        bool add) const {
    if (!M || !N || (!K && add)) return;
    // matrices of cuBLAS have contiguous columns: the transposed product
    const bool rows = A.column == 1 && (M == 1 || A.row >= K);
    const int64_t stride = rows ? std::max(A.row, K) : std::max(A.column, M);
    const T one = 1, beta = add ? T(1) : T(0);
    check(cublas().gemm(T())(handle_, kPlain, rows ? kPlain : kTransposed, size(N), size(M),
                             size(K), &one, B, size(N), A.data, size(stride), &beta, C, size(N)));
}

template void Products::multiply(const Strided<float> &, int64_t, const float *, int64_t, int64_t,
                                 float *, bool) const;
template void Products::multiply(const Strided<double> &, int64_t, const double *, int64_t, int64_t,
                                 double *, bool) const;

Products::Settings::Settings(const Products &products, cuda::Stream stream)
    : handle_(products.handle_), stream_(stream) {
    const Cublas &c = cublas();
    check(c.cublasGetStream(handle_, &before_));
    check(c.cublasGetPointerMode(handle_, &mode_));
    // to set a stream takes away a workspace that the caller has set
    if (stream_ != before_) check(c.cublasSetStream(handle_, stream_));
    if (mode_ != kHostPointers) check(c.cublasSetPointerMode(handle_, kHostPointers));
}

Products::Settings::~Settings() {
    const Cublas &c = cublas();
    if (stream_ != before_) c.cublasSetStream(handle_, before_);
    if (mode_ != kHostPointers) c.cublasSetPointerMode(handle_, mode_);
}

}  // namespace quant_gru
