// Compiles CUDA sources with NVRTC, which is called through function addresses.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernel_runtime/native/launch.hpp"

namespace kernel_runtime::cuda {

// Several threads may use it at once.
class Compiler {
 public:
    using Texts = std::map<std::string, std::string>;

    // The functions of NVRTC that are called.
    static constexpr const char *kFunctions[] = {
        "nvrtcVersion",       "nvrtcCreateProgram",  "nvrtcCompileProgram",
        "nvrtcGetCUBINSize",  "nvrtcGetCUBIN",       "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog", "nvrtcDestroyProgram", "nvrtcGetErrorString"};

    // addresses: of these functions. texts: of kernels, such as "folder/file.cu", and of headers,
    // by the name in their #include. Each program receives all headers.
    Compiler(const std::vector<uintptr_t> &addresses, const Texts &texts);

    // The version of NVRTC, such as "13.0".
    std::string version() const;

    // The machine code of a kernel for an architecture such as "sm_90a". Fails: NVRTC rejects the
    // source; the message has its log.
    std::string compile(const Kernel &kernel, const std::string &arch) const;

    // The name of that code in a cache: a digest of everything that determines it.
    std::string key_of(const Kernel &kernel, const std::string &arch) const;

 private:
    struct Functions {
        int (*version)(int *major, int *minor);
        int (*create)(void **program, const char *source, const char *name, int headers,
                      const char *const *texts, const char *const *names);
        int (*compile)(void *program, int count, const char *const *options);
        int (*code_size)(void *program, size_t *size);
        int (*code)(void *program, char *code);
        int (*log_size)(void *program, size_t *size);
        int (*log)(void *program, char *log);
        int (*destroy)(void **program);
        const char *(*error_name)(int status);
    };
    void check(int status) const;
    std::string log_of(void *program) const;
    const std::string &source_of(const Kernel &kernel) const;
    std::vector<std::string> options_of(const Kernel &kernel, const std::string &arch) const;

    Functions call_;
    int major_ = 0, minor_ = 0;
    Texts sources_, headers_;
};

}  // namespace kernel_runtime::cuda
