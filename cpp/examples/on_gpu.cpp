// The GPU half of gru_example. It opens the driver itself, so that it needs no CUDA toolkit;
// programs with the toolkit allocate with cudaMalloc instead.
#include <cstdio>
#include <cstdlib>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include "on_gpu.hpp"
#include "quant_gru/cuda.hpp"
#include "quant_gru/gru_interface.hpp"

using namespace quant_gru;

namespace {

using Address = unsigned long long;

struct Driver {
    int (*cuInit)(unsigned flags);
    int (*cuDeviceGet)(int *device, int index);
    int (*cuDeviceGetName)(char *name, int size, int device);
    int (*cuDevicePrimaryCtxRetain)(void **context, int device);
    int (*cuCtxSetCurrent)(void *context);
    int (*cuMemAlloc)(Address *address, size_t bytes);
    int (*cuMemFree)(Address address);
    int (*cuMemcpyHtoD)(Address to, const void *from, size_t bytes);
    int (*cuMemcpyDtoH)(void *to, Address from, size_t bytes);
    int (*cuMemsetD8)(Address to, unsigned char value, size_t bytes);
    int (*cuStreamSynchronize)(void *stream);
    char name[128];
};

void check(int status) {
    if (status)
        throw cuda::DeviceError("Expected the driver to succeed, got status " +
                                std::to_string(status));
}

// The driver, with the context of GPU 0.
Driver opened() {
    Driver d{};
#if !defined(_WIN32)
    const char *chosen = std::getenv("QUANT_GRU_CUDA_DRIVER");
    void *const library = dlopen(chosen ? chosen : "libcuda.so.1", RTLD_NOW);
    if (!library)
        throw cuda::DeviceError(std::string("Expected the driver of an NVIDIA GPU, got ") +
                                dlerror());
    const auto find = [library](auto *&function, const char *name) {
        function =
            reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        if (!function) throw cuda::DeviceError(std::string("Expected the function ") + name);
    };
    find(d.cuInit, "cuInit");
    find(d.cuDeviceGet, "cuDeviceGet");
    find(d.cuDeviceGetName, "cuDeviceGetName");
    find(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(d.cuCtxSetCurrent, "cuCtxSetCurrent");
    find(d.cuMemAlloc, "cuMemAlloc_v2");
    find(d.cuMemFree, "cuMemFree_v2");
    find(d.cuMemcpyHtoD, "cuMemcpyHtoD_v2");
    find(d.cuMemcpyDtoH, "cuMemcpyDtoH_v2");
    find(d.cuMemsetD8, "cuMemsetD8_v2");
    find(d.cuStreamSynchronize, "cuStreamSynchronize");
#else
    throw cuda::DeviceError("Expected a system with dlopen, got Windows");
#endif
    int device = 0;
    void *context = nullptr;
    check(d.cuInit(0));
    check(d.cuDeviceGet(&device, 0));
    check(d.cuDeviceGetName(d.name, sizeof d.name, device));
    check(d.cuDevicePrimaryCtxRetain(&context, device));
    check(d.cuCtxSetCurrent(context));
    return d;
}

const Driver &driver() {
    static const Driver found = opened();
    return found;
}

void wait() { check(driver().cuStreamSynchronize(nullptr)); }

// Floats in memory of the GPU.
class GpuFloats {
 public:
    explicit GpuFloats(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(float)) {
        check(driver().cuMemAlloc(&address_, bytes_));
        check(driver().cuMemsetD8(address_, 0, bytes_));
    }
    explicit GpuFloats(const Floats &values) : GpuFloats(static_cast<int64_t>(values.size())) {
        check(driver().cuMemcpyHtoD(address_, values.data(), bytes_));
    }
    GpuFloats(const GpuFloats &) = delete;
    GpuFloats &operator=(const GpuFloats &) = delete;
    ~GpuFloats() { driver().cuMemFree(address_); }

    float *data() const { return reinterpret_cast<float *>(address_); }
    Floats values() const {
        Floats found(bytes_ / sizeof(float));
        wait();
        check(driver().cuMemcpyDtoH(found.data(), address_, bytes_));
        return found;
    }

 private:
    Address address_ = 0;
    size_t bytes_;
};

void benchmark_shape_on_gpu(const Shaped &s, int repeats) {
    const int64_t N = s.N, T = s.T, C = s.C, H = s.H;
    const GpuFloats x(s.x), W(s.W), R(s.R), b(s.b);
    const GpuFloats h((T + 1) * N * H), Wx(T * N * 3 * H), Rh(N * 3 * H), y(T * N * H);
    const auto model = cuda::Model::load(s.file.data(), s.file.size(), 0);
    const cuda::Call call = model.prepare(T, N);
    ForwardPass<float> pass(false, static_cast<int>(N), static_cast<int>(C), static_cast<int>(H));
    const auto run_floats = [&] {
        pass.Run(static_cast<int>(T), W.data(), R.data(), b.data(), b.data(), x.data(), h.data(),
                 nullptr, Wx.data(), Rh.data(), 0, nullptr);
    };
    const auto times = seconds(repeats, {run_floats, [&] { call.run(x.data(), y.data()); }}, wait);
    const double macs = static_cast<double>(T * N * 3 * H * (C + H));
    std::printf("%s %11.1f %11.1f %8.2f %9.1f\n", text_of(s).c_str(), times[0] * 1e6,
                times[1] * 1e6, times[0] / times[1], macs / times[1] * 1e-9);
}

}  // namespace

Floats run_on_gpu(const std::string &file, const Floats &x, int64_t T, int64_t N) {
    const auto model = cuda::Model::load(file.data(), file.size(), 0);
    driver();
    const GpuFloats given(x), y(T * N * model.shape().directions * model.shape().hidden_size);
    const cuda::Call call = model.prepare(T, N);
    call.run(given.data(), y.data());
    return y.values();
}

void benchmark_on_gpu(const QuantConfig &config, int repeats) {
    std::printf("\n%s\n   N    T    C    H    float us  integer us    ratio    GMAC/s\n",
                driver().name);
    for (const auto &sizes : kShapes) benchmark_shape_on_gpu(Shaped(sizes, config), repeats);
}
