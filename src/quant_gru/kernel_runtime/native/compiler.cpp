#include "kernel_runtime/native/compiler.hpp"

#include <cstring>
#include <memory>
#include <utility>

#include "kernel_runtime/native/cubin_cache.hpp"
#include "kernel_runtime/native/embedder.hpp"

namespace kernel_runtime::cuda {

Compiler::Compiler(const std::vector<uintptr_t> &addresses, const Texts &texts) {
    static_assert(sizeof kFunctions / sizeof *kFunctions == sizeof call_ / sizeof(uintptr_t));
    if (addresses.size() * sizeof(uintptr_t) != sizeof call_)
        fail("Expected an address of each function of NVRTC");
    std::memcpy(&call_, addresses.data(), sizeof call_);
    check(call_.version(&major_, &minor_));
    for (const auto &each : texts) {
        const std::string &name = each.first;
        const bool is_source = name.size() > 3 && name.compare(name.size() - 3, 3, ".cu") == 0;
        (is_source ? sources_ : headers_).insert(each);
    }
}

std::string Compiler::version() const {
    return std::to_string(major_) + "." + std::to_string(minor_);
}

std::string Compiler::compile(const Kernel &kernel, const std::string &arch) const {
    const std::string name = kernel.source + ".cu";
    std::vector<const char *> names, texts, given;
    for (const auto &[header, text] : headers_) {
        names.push_back(header.c_str());
        texts.push_back(text.c_str());
    }
    void *program = nullptr;
    check(call_.create(&program, source_of(kernel).c_str(), name.c_str(),
                       static_cast<int>(names.size()), texts.data(), names.data()));
    const auto destroy = [this](void *each) { call_.destroy(&each); };
    const std::unique_ptr<void, decltype(destroy)> owner(program, destroy);
    const std::vector<std::string> options = options_of(kernel, arch);
    std::string told;
    for (const std::string &option : options) {
        given.push_back(option.c_str());
        told += " " + option;
    }
    if (call_.compile(program, static_cast<int>(given.size()), given.data()))
        fail("Expected NVRTC " + version() + " to compile " + name + " with" + told + ", got\n" +
             log_of(program));
    size_t size = 0;
    check(call_.code_size(program, &size));
    std::string code(size, '\0');
    check(call_.code(program, code.data()));
    return code;
}

std::string Compiler::key_of(const Kernel &kernel, const std::string &arch) const {
    std::vector<std::string> parts{source_of(kernel)};
    for (const auto &each : headers_) parts.push_back(each.first);
    for (const auto &each : headers_) parts.push_back(each.second);
    for (std::string &option : options_of(kernel, arch)) parts.push_back(std::move(option));
    parts.push_back(version());
    return cache_key(parts);
}

void Compiler::check(int status) const {
    if (status) fail("Expected NVRTC to succeed, got " + std::string(call_.error_name(status)));
}

std::string Compiler::log_of(void *program) const {
    size_t size = 0;
    if (call_.log_size(program, &size) || !size) return {};
    std::string log(size, '\0');
    call_.log(program, log.data());
    return log.substr(0, log.find_last_not_of(std::string("\0 \n", 3)) + 1);
}

const std::string &Compiler::source_of(const Kernel &kernel) const {
    const auto found = sources_.find(kernel.source + ".cu");
    if (found == sources_.end())
        fail("Expected the name of a source, got '" + kernel.source + ".cu'");
    return found->second;
}

std::vector<std::string> Compiler::options_of(const Kernel &kernel, const std::string &arch) const {
    // --fmad=false: products and sums are rounded separately, as written.
    std::vector<std::string> options{"--device-as-default-execution-space", "--std=c++17",
                                     "--fmad=false"};
    // Omits declarations of textures and of the runtime library, which precede every source.
    if (std::make_pair(major_, minor_) >= std::make_pair(12, 4)) options.push_back("--minimal");
    options.push_back("--gpu-architecture=" + arch);
    for (const auto &[name, value] : kernel.macros) options.push_back("-D" + name + "=" + value);
    return options;
}

}  // namespace kernel_runtime::cuda
