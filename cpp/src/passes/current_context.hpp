// The context of a GPU, for functions that take it from the calling thread.
#pragma once

#include "cuda/host/runtime.hpp"

namespace quant_gru {

// Makes the primary context of a GPU current, then the previous one again.
class CurrentContext {
 public:
    // context: of `primary_context`. Throws DeviceError.
    explicit CurrentContext(void *context) {
        cuda::check(cuda::driver().cuCtxGetCurrent(&before_));
        cuda::check(cuda::driver().cuCtxSetCurrent(context));
    }
    ~CurrentContext() { cuda::driver().cuCtxSetCurrent(before_); }
    CurrentContext(const CurrentContext &) = delete;
    CurrentContext &operator=(const CurrentContext &) = delete;

 private:
    void *before_ = nullptr;
};

// The primary context of a GPU, which is never released. Throws DeviceError.
inline void *primary_context(int index) {
    int device = 0;
    void *context = nullptr;
    cuda::check(cuda::driver().cuDeviceGet(&device, index));
    cuda::check(cuda::driver().cuDevicePrimaryCtxRetain(&context, device));
    return context;
}

}  // namespace quant_gru
