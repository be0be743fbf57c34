#include "kernel_runtime/native/whole_files.hpp"

#include <cerrno>
#include <cstdio>
#include <memory>
#include <random>

#if !defined(_WIN32)
#include <fcntl.h>
#include <unistd.h>
#endif

namespace kernel_runtime {
namespace {

// Opens a file that does not exist yet; null on failure.
std::FILE *open_new(const std::string &path, unsigned mode) {
#if defined(_WIN32)
    (void)mode;
    return std::fopen(path.c_str(), "wbx");
#else
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, static_cast<mode_t>(mode));
    return file < 0 ? nullptr : fdopen(file, "wb");
#endif
}

}  // namespace

bool read_whole(const std::string &path, std::string &to) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"),
                                                                &std::fclose);
    char part[1 << 14];
    while (file && !std::feof(file.get()) && !std::ferror(file.get()))
        to.append(part, std::fread(part, 1, sizeof part, file.get()));
    return file && !std::ferror(file.get());
}

bool write_whole(const std::string &path, const std::string &contents, unsigned mode) {
    const std::string draft = path + "." + std::to_string(std::random_device{}()) + ".tmp";
    std::FILE *const file = open_new(draft, mode);
    bool written =
        file && std::fwrite(contents.data(), 1, contents.size(), file) == contents.size();
    if (file) written = std::fclose(file) == 0 && written;
#if defined(_WIN32)
    if (written) std::remove(path.c_str());  // rename does not replace files
#endif
    written = written && std::rename(draft.c_str(), path.c_str()) == 0;
    if (written) return true;
    const int reason = errno;
    std::remove(draft.c_str());
    errno = reason;
    return false;
}

}  // namespace kernel_runtime
