#include "kernel_runtime/native/cubin_cache.hpp"

#if defined(_WIN32)
#include <direct.h>
#else
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "kernel_runtime/native/sha256.hpp"
#include "kernel_runtime/native/shared_library.hpp"
#include "kernel_runtime/native/whole_files.hpp"

namespace kernel_runtime::cuda {
namespace {

constexpr size_t kDigest = 32;
constexpr const char *kOthers = "others can write it";

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
std::string why_distrusted(const std::string &) { return {}; }
bool is_plain_file(const std::string &) { return true; }
#else
// Why a folder is not trusted; empty if it belongs to this user or root, and others cannot write
// it, or if there is none.
std::string why_distrusted(const std::string &folder) {
    struct stat found;
    if (stat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return {};
    if (found.st_mode & S_IWOTH) return kOthers;
    if (found.st_uid == 0 || found.st_uid == geteuid()) return {};
    return "it belongs to another user";
}

// Whether a path is a file that others cannot write and that opening does not wait for, as a pipe
// would.
bool is_plain_file(const std::string &path) {
    constexpr off_t kMostBytes = off_t{1} << 28;
    struct stat found;
    return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode) &&
           !(found.st_mode & S_IWOTH) && found.st_size <= kMostBytes;
}

// Empty if the user has none.
std::string home() {
    const std::string chosen = environment("HOME");
    if (!chosen.empty()) return chosen;
    char space[1 << 14];
    struct passwd entry, *found = nullptr;
    const bool failed = getpwuid_r(getuid(), &entry, space, sizeof space, &found) != 0;
    return failed || !found ? std::string() : found->pw_dir;
}
#endif

std::string user_folder(const std::string &name) {
#if defined(_WIN32)
    const std::string local = environment("LOCALAPPDATA");
    return local.empty() ? local : local + "/" + name + "/Cache";
#else
    // a relative path is to be ignored, as the specification of these folders says
    if (const std::string base = environment("XDG_CACHE_HOME"); !base.empty() && base[0] == '/')
        return base + "/" + name;
#if defined(__APPLE__)
    constexpr const char *kCaches = "/Library/Caches/";
#else
    constexpr const char *kCaches = "/.cache/";
#endif
    const std::string around = home();
    return around.empty() ? around : around + kCaches + name;
#endif
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

CubinCache::CubinCache(const std::string &variable, const std::string &name,
                       std::function<void(const std::string &)> warn)
    : variable_(variable), folder_(environment(variable.c_str())), warn_(std::move(warn)) {
    if (folder_.empty()) folder_ = user_folder(name);
}

std::string CubinCache::load(const std::string &key) const {
    std::string data;
    if (folder_.empty() || !distrust().empty() || !is_plain_file(path_of(key)) ||
        !read_whole(path_of(key), data) || data.size() <= kDigest)
        return {};
    const std::string code = data.substr(kDigest);
    return digest_of(key, code) == data.substr(0, kDigest) ? code : std::string();
}

std::string CubinCache::store(const std::string &key, const std::string &code) const {
    if (folder_.empty()) return variable_ + " is not set";
    make_folders(folder_);
    if (const std::string why = distrust(); !why.empty()) return why;
    // the umask decides who can read and write it, except for what would not be trusted
    if (write_whole(path_of(key), digest_of(key, code) + code, 0664)) return {};
    return "'" + folder_ + "': " + std::strerror(errno);
}

std::string CubinCache::distrust() const {
    const std::string why = why_distrusted(folder_);
    static std::mutex mutex;
    static std::set<std::string> *const said = new std::set<std::string>;  // outlives all threads
    std::unique_lock<std::mutex> lock(mutex);
    if (why.empty() || !said->insert(folder_).second) return why;
    lock.unlock();
    const std::string cure = why == kOthers ? ", or run chmod o-w" : " in place of";
    warn_("the cache of compiled kernels is not used, because " + why +
          ": kernels are compiled again in each process. Use a folder of your own (" + variable_ +
          "=..)" + cure + " '" + folder_ + "'");
    return why;
}

}  // namespace kernel_runtime::cuda
