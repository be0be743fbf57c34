#include "cuda/cubin_cache.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "cuda/sha256.hpp"

namespace quant_gru::cuda {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDigest = 32;

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
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
    if (const std::string chosen = variable("QUANT_GRU_CACHE"); !chosen.empty()) return chosen;
    if (const std::string base = variable("XDG_CACHE_HOME"); !base.empty())
        return base + "/quant-gru";
    const std::string home = variable("HOME");
    return home.empty() ? home : home + "/.cache/quant-gru";
}

std::string load_cubin(const std::string &key) {
    const std::string folder = cache_folder();
    if (folder.empty()) return {};
    std::ifstream stream(folder + "/" + key + ".cubin", std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(stream), {}};
    if (data.size() <= kDigest) return {};
    const std::string code = data.substr(kDigest);
    return digest_of(key, code) == data.substr(0, kDigest) ? code : std::string();
}

void store_cubin(const std::string &key, const std::string &code) {
    const std::string folder = cache_folder();
    if (folder.empty()) return;
    std::error_code failed;
    fs::create_directories(folder, failed);
    const std::string path = folder + "/" + key;
    const std::string draft = path + std::to_string(std::random_device{}()) + ".tmp";
    std::ofstream stream(draft, std::ios::binary | std::ios::trunc);
    stream << digest_of(key, code) << code;
    stream.close();
    if (!stream.fail()) fs::rename(draft, path + ".cubin", failed);
    if (stream.fail() || failed) fs::remove(draft, failed);
}

}  // namespace quant_gru::cuda
