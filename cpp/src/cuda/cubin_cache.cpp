#include "cuda/cubin_cache.hpp"

#if defined(_WIN32)
#include <direct.h>
#else
#include <sys/stat.h>
#endif

#include "cuda/sha256.hpp"
#include "cuda/shared_library.hpp"
#include "files.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru::cuda {
namespace {

constexpr size_t kDigest = 32;

// Makes a folder and those around it; failures show when a file is written.
void make_folders(const std::string &path) {
    for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
        const std::string folder = path.substr(0, end);
#if defined(_WIN32)
        _mkdir(folder.c_str());
#else
        mkdir(folder.c_str(), 0777);
#endif
        if (end == path.npos) return;
    }
}

std::string digest_of(const std::string &key, const std::string &code) {
    const auto digest = Sha256().add(key.data(), key.size()).add(code.data(), code.size()).finish();
    return {digest.begin(), digest.end()};
}

}  // namespace

std::string cache_key(const std::vector<std::string> &parts) {
    Sha256 hash;
    for (const std::string &part : parts) {
        unsigned char length[8];
        for (size_t i = 0; i < 8; ++i)
            length[i] = static_cast<unsigned char>(uint64_t{part.size()} >> (8 * i));
        hash.add(length, sizeof length).add(part.data(), part.size());
    }
    return hexadecimal(hash.finish());
}

std::string cache_folder() {
    if (const std::string chosen = environment("QUANT_GRU_CACHE"); !chosen.empty()) return chosen;
    if (const std::string base = environment("XDG_CACHE_HOME"); !base.empty())
        return base + "/quant-gru";
    const std::string home = environment("HOME");
    return home.empty() ? home : home + "/.cache/quant-gru";
}

std::string load_cubin(const std::string &key) {
    const std::string folder = cache_folder();
    if (folder.empty()) return {};
    try {
        const std::string data = read_file(folder + "/" + key + ".cubin");
        if (data.size() <= kDigest) return {};
        const std::string code = data.substr(kDigest);
        return digest_of(key, code) == data.substr(0, kDigest) ? code : std::string();
    } catch (const FileError &) {
        return {};
    }
}

void store_cubin(const std::string &key, const std::string &code) {
    const std::string folder = cache_folder();
    if (folder.empty()) return;
    make_folders(folder);
    try {
        write_file(folder + "/" + key + ".cubin", digest_of(key, code) + code);
    } catch (const FileError &) {  // the next process compiles again
    }
}

}  // namespace quant_gru::cuda
