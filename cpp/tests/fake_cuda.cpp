// Stands in for libcuda and libnvrtc on machines without a GPU: one library with the functions of
// both. Device memory is host memory, filled with a pattern that no result has.
//
// FAKE_CUDA_HOST  a folder: kernels are compiled there by g++ and run on the host, every thread a
//                 fiber (tests/cuda/host.hpp). Not set: launches are only checked.
// FAKE_CUDA_ARCH  compute capability, 90 if not set
// FAKE_CUDA_ALL_MEMORY  set: all memory counts as memory of the GPU
#include <dlfcn.h>
#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_runtime/native/driver.hpp"

using namespace kernel_runtime::cuda;

namespace {

enum : int { kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kCompilation = 6 };

std::mutex mutex;
thread_local void *current = nullptr;
char primary;  // its address is the context

std::string variable(const char *name, const char *otherwise = "") {
    const char *value = std::getenv(name);
    return value ? value : otherwise;
}

struct Program {
    std::string source, name, log, code;
};

struct Module {
    std::string source;  // of the kernels, or the path of their library
    void *library = nullptr;
};

struct Function {
    Module *module;
    std::string name;
    int shared = 48 << 10, any_cluster = 0;
    using Run = void (*)(const void *, int, int, int, int, long);
    Run run = nullptr;
};

std::map<Address, size_t> allocations;
int launches = 0;

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

bool exists(const std::string &path) { return access(path.c_str(), F_OK) == 0; }

// Text that includes a source of kernels and exports a function to run each of them.
std::string on_host(const Program &program, const std::vector<std::string> &macros) {
    std::string text = "#include \"host.hpp\"\n";
    for (const std::string &each : macros) text += "#define " + each + "\n";
    text += program.source;
    const std::string parameter = "(const __grid_constant__ ", &source = program.source;
    for (size_t at = 0; (at = source.find(parameter, at)) != source.npos; at += parameter.size()) {
        size_t first = at, last = at + parameter.size();
        while (first && is_of_name(source[first - 1])) --first;
        while (is_of_name(source[last])) ++last;
        const std::string function = source.substr(first, at - first);
        const std::string kind = source.substr(at + parameter.size(), last - at - parameter.size());
        text += "\nextern \"C\" void run_" + function +
                "(const void *p, int x, int y, int threads, int cluster, long shared) {\n"
                "    host::run([](const void *p) { " +
                function + "(*(const " + kind +
                " *)p); }, p, x, y, threads, cluster, size_t(shared), false);\n}\n";
    }
    return text;
}

int command(const std::string &text) { return std::system(text.c_str()); }

// Compiles a program for the host. Returns the path of the library, or nothing.
std::string host_library(const std::string &folder, const std::string &text) {
    const std::string root = QUANT_GRU_ROOT, kernels = root + "/src/quant_gru/kernels";
    const std::string compiler =
        "cd " + folder +
        " && g++ -std=c++17 -O1 -ffp-contract=off -fPIC -w -U_FORTIFY_SOURCE "
        "-fno-gnu-unique -I. -I" +
        root + "/tests/cuda -I" + kernels + "/cuda -I" + kernels + " -I" + root +
        "/src/quant_gru -I" + root + "/src ";
    const std::string host = root + "/tests/cuda/host.";
    if (!exists(folder + "/host.o") &&
        (command(compiler + "-c " + host + "cpp -o host.o") ||
         command(compiler + "-x c++-header " + host + "hpp -o host.hpp.gch")))
        return {};
    char name[32];
    std::snprintf(name, sizeof name, "%016zx", std::hash<std::string>()(text));
    const std::string path = folder + "/" + name;
    if (exists(path + ".so")) return path + ".so";
    std::FILE *const file = std::fopen((path + ".cpp").c_str(), "w");
    if (!file) return {};
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
    if (command(compiler + "-shared -Wl,-Bsymbolic " + path + ".cpp host.o -o " + path + ".so"))
        return {};
    return path + ".so";
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int

FAKE cuInit(unsigned) { return 0; }
FAKE cuDriverGetVersion(int *version) { return *version = 13000, 0; }
FAKE cuDeviceGetCount(int *count) { return *count = 1, 0; }
FAKE cuDeviceGet(int *device, int index) { return *device = index, index ? kInvalidDevice : 0; }

FAKE cuDeviceGetAttribute(int *value, int attribute, int) {
    const int arch = std::stoi(variable("FAKE_CUDA_ARCH", "90"));
    switch (attribute) {
        case kCapabilityMajor:
            return *value = arch / 10, 0;
        case kCapabilityMinor:
            return *value = arch % 10, 0;
        case kMultiprocessorCount:
            return *value = 132, 0;
        default:
            return kInvalidValue;
    }
}

FAKE cuDeviceGetName(char *name, int size, int) {
    return std::snprintf(name, static_cast<size_t>(size), "a stand-in"), 0;
}

FAKE cuDevicePrimaryCtxRetain(void **context, int) { return *context = &primary, 0; }
FAKE cuCtxGetCurrent(void **context) { return *context = current, 0; }
FAKE cuCtxSetCurrent(void *context) { return current = context, 0; }

FAKE cuModuleLoadData(void **module, const void *image) {
    auto *found = new Module{static_cast<const char *>(image)};
    if (!variable("FAKE_CUDA_HOST").empty()) {
        found->library = dlopen(found->source.c_str(), RTLD_NOW);
        if (!found->library) return std::printf("%s\n", dlerror()), kInvalidValue;
    }
    return *module = found, 0;
}

FAKE cuModuleGetFunction(void **function, void *module, const char *name) {
    auto *of = static_cast<Module *>(module);
    const std::lock_guard<std::mutex> lock(mutex);
    static std::map<std::pair<void *, std::string>, Function> functions;
    const auto [found, is_new] = functions.try_emplace({module, name}, Function{of, name});
    if (of->library) {
        const std::string symbol = std::string("run_") + name;
        found->second.run = reinterpret_cast<Function::Run>(dlsym(of->library, symbol.c_str()));
    } else if (of->source.find(std::string(name) + "(") == std::string::npos) {
        return kInvalidValue;
    }
    return *function = &found->second, 0;
}

FAKE cuFuncSetAttribute(void *function, int attribute, int value) {
    auto *f = static_cast<Function *>(function);
    if (attribute == kMaxDynamicShared) return f->shared = value, value > 227 << 10;
    if (attribute == kNonPortableCluster) return f->any_cluster = value, 0;
    return kInvalidValue;
}

FAKE cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **) {
    const auto &f = *static_cast<Function *>(function);
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->count; ++i)
        if (config->attributes[i].id == kClusterDimension) cluster = config->attributes[i].value[0];
    if (current != &primary || !config->grid[0] || !config->grid[1] || config->grid[1] > 65535 ||
        config->grid[0] % cluster || config->block[0] > 1024 || (cluster > 8 && !f.any_cluster) ||
        config->shared_bytes > static_cast<unsigned>(f.shared) || !parameters[0])
        return kInvalidValue;
    const std::lock_guard<std::mutex> lock(mutex);
    ++launches;
    if (!f.run) return f.module->library ? kInvalidValue : 0;
    f.run(parameters[0], static_cast<int>(config->grid[0]), static_cast<int>(config->grid[1]),
          static_cast<int>(config->block[0]), static_cast<int>(cluster), config->shared_bytes);
    return 0;
}

FAKE cuOccupancyMaxActiveClusters(int *count, void *, const LaunchConfig *config) {
    const unsigned blocks = config->attributes[0].value[0];
    return *count = blocks == 16 ? 7 : static_cast<int>(blocks == 2 ? 66 : 120 / blocks), 0;
}

FAKE cuMemAlloc_v2(Address *address, size_t bytes) {
    void *found = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!bytes || !found) return kOutOfMemory;
    std::memset(found, 0xFB, bytes);
    *address = reinterpret_cast<uintptr_t>(found);
    const std::lock_guard<std::mutex> lock(mutex);
    return allocations[*address] = bytes, 0;
}

FAKE cuMemFree_v2(Address address) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!allocations.erase(address)) return kInvalidValue;
    return std::free(reinterpret_cast<void *>(address)), 0;
}

FAKE cuMemcpyHtoD_v2(Address to, const void *from, size_t bytes) {
    return std::memcpy(reinterpret_cast<void *>(to), from, bytes), 0;
}
FAKE cuMemcpyDtoH_v2(void *to, Address from, size_t bytes) {
    return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), 0;
}
FAKE cuMemsetD8_v2(Address to, unsigned char value, size_t bytes) {
    return std::memset(reinterpret_cast<void *>(to), value, bytes), 0;
}
FAKE cuStreamSynchronize(Stream) { return 0; }
FAKE cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR_FAKE", 0; }

FAKE cuPointerGetAttribute(void *value, int attribute, Address address) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (variable("FAKE_CUDA_ALL_MEMORY").empty()) {
        const auto next = allocations.upper_bound(address);
        if (next == allocations.begin()) return kInvalidValue;
        const auto &[start, bytes] = *std::prev(next);
        if (address >= start + bytes) return kInvalidValue;
    }
    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CU_MEMORYTYPE_DEVICE; otherwise the index of the GPU
    return *static_cast<int *>(value) = attribute == 2 ? 2 : 0, 0;
}

// Launches so far.
FAKE fake_launches() { return launches; }

// Memory that is allocated now.
FAKE fake_allocations() { return static_cast<int>(allocations.size()); }

FAKE nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
FAKE nvrtcCreateProgram(void **program, const char *source, const char *name, int,
                        const char *const *, const char *const *) {
    return *program = new Program{source, name, "", ""}, 0;
}

FAKE nvrtcCompileProgram(void *program, int count, const char *const *options) {
    auto &p = *static_cast<Program *>(program);
    std::vector<std::string> macros;
    for (int i = 0; i < count; ++i) {
        std::string option = options[i];
        if (option.compare(0, 2, "-D") != 0) continue;
        option.replace(option.find('='), 1, " ");
        macros.push_back(option.substr(2));
    }
    const std::string folder = variable("FAKE_CUDA_HOST");
    {
        const std::lock_guard<std::mutex> lock(mutex);
        p.code = folder.empty() ? p.source : host_library(folder, on_host(p, macros));
    }
    if (p.code.empty()) p.log = "g++ failed for " + p.name;
    return p.code.empty() ? kCompilation : 0;
}

FAKE nvrtcGetCUBINSize(void *program, size_t *size) {
    return *size = static_cast<Program *>(program)->code.size() + 1, 0;
}
FAKE nvrtcGetCUBIN(void *program, char *code) {
    return std::strcpy(code, static_cast<Program *>(program)->code.c_str()), 0;
}
FAKE nvrtcGetProgramLogSize(void *program, size_t *size) {
    return *size = static_cast<Program *>(program)->log.size() + 1, 0;
}
FAKE nvrtcGetProgramLog(void *program, char *log) {
    return std::strcpy(log, static_cast<Program *>(program)->log.c_str()), 0;
}
FAKE nvrtcDestroyProgram(void **program) {
    return delete static_cast<Program *>(*program), *program = nullptr, 0;
}
extern "C" __attribute__((visibility("default"))) const char *nvrtcGetErrorString(int) {
    return "NVRTC_ERROR_FAKE";
}
