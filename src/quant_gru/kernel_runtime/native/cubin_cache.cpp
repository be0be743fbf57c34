#include "kernel_runtime/native/cubin_cache.hpp"

#if defined(_WIN32)
#include <direct.h>
#else
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <mutex>
#include <set>

#include "kernel_runtime/native/embedder.hpp"
#include "kernel_runtime/native/sha256.hpp"
#include "kernel_runtime/native/shared_library.hpp"
#include "kernel_runtime/native/whole_files.hpp"

namespace kernel_runtime::cuda {
namespace {

constexpr size_t kDigest = 32;

// Makes a folder and those around it; failures show when a file is written.
void make_folders(const std::string &path) {
    for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
        const std::string folder = path.substr(0, end);
#if defined(_WIN32)
        _mkdir(folder.c_str());
#else
        mkdir(folder.c_str(), 0775);  // the umask takes more; others can never write
#endif
        if (end == path.npos) return;
    }
}

std::string digest_of(const std::string &key, const std::string &code) {
    const auto digest = Sha256().add(key.data(), key.size()).add(code.data(), code.size()).finish();
    return {digest.begin(), digest.end()};
}

#if defined(_WIN32)
bool is_trusted(const std::string &) { return true; }
bool is_plain_file(const std::string &) { return true; }
#else
// Whether a folder belongs to this user or root, and others cannot write it. The digest has no
// secret: whoever writes an entry decides what runs on the GPU. `disk_cache.py` has the same rules.
bool is_trusted(const std::string &folder) {
    struct stat found;
    if (stat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return true;  // empty
    const bool others = found.st_mode & S_IWOTH;
    if (!others && (found.st_uid == 0 || found.st_uid == geteuid())) return true;
    static std::mutex mutex;
    static std::set<std::string> said;
    const std::lock_guard<std::mutex> lock(mutex);
    if (said.insert(folder).second)
        std::fprintf(stderr,
                     "%s: the cache of compiled kernels is not used, because %s: kernels are "
                     "compiled again in each process. Use a folder of your own (%s=..)%s '%s'\n",
                     kEmbedder.name, others ? "others can write it" : "it belongs to another user",
                     kEmbedder.cache_variable, others ? ", or run chmod o-w" : " in place of",
                     folder.c_str());
    return false;
}

// Whether a path is a file that others cannot write and that opening does not wait for, as a pipe
// would.
bool is_plain_file(const std::string &path) {
    constexpr off_t kMostBytes = off_t{1} << 28;
    struct stat found;
    return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode) &&
           !(found.st_mode & S_IWOTH) && found.st_size <= kMostBytes;
}
#endif

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
    if (const std::string chosen = environment(kEmbedder.cache_variable); !chosen.empty())
        return chosen;
#if defined(_WIN32)
    const std::string local = environment("LOCALAPPDATA");
    return local.empty() ? local : local + "/" + kEmbedder.name + "/Cache";
#else
    // a relative path is to be ignored, as the specification of these folders says
    if (const std::string base = environment("XDG_CACHE_HOME"); !base.empty() && base[0] == '/')
        return base + "/" + kEmbedder.name;
#if defined(__APPLE__)
    constexpr const char *kCaches = "/Library/Caches/";
#else
    constexpr const char *kCaches = "/.cache/";
#endif
    const std::string home = environment("HOME");
    return home.empty() ? home : home + kCaches + kEmbedder.name;
#endif
}

std::string load_cubin(const std::string &key) {
    const std::string folder = cache_folder();
    const std::string path = folder + "/" + key + ".cubin";
    if (folder.empty() || !is_trusted(folder) || !is_plain_file(path)) return {};
    std::string data;
    if (!read_whole(path, data) || data.size() <= kDigest) return {};
    const std::string code = data.substr(kDigest);
    return digest_of(key, code) == data.substr(0, kDigest) ? code : std::string();
}

void store_cubin(const std::string &key, const std::string &code) {
    const std::string folder = cache_folder();
    if (folder.empty()) return;
    make_folders(folder);
    if (!is_trusted(folder)) return;
    // without it, the next process compiles again
    write_whole(folder + "/" + key + ".cubin", digest_of(key, code) + code, 0664);
}

}  // namespace kernel_runtime::cuda
