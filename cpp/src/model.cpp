#include "quant_gru/model.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "network.hpp"

namespace quant_gru {

std::vector<char> read_model_file(const std::string &path) {
    struct stat status;
    if (stat(path.c_str(), &status) != 0)
        throw FileError(std::string("Expected a readable file, got: ") + std::strerror(errno));
    if (!S_ISREG(status.st_mode)) throw FileError("Expected a regular file, got something else");
    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"),
                                                                &std::fclose);
    if (!file)
        throw FileError(std::string("Expected a readable file, got: ") + std::strerror(errno));
    std::vector<char> bytes(static_cast<size_t>(status.st_size));
    if (std::fread(bytes.data(), 1, bytes.size(), file.get()) != bytes.size())
        throw FileError("Expected " + std::to_string(bytes.size()) + " bytes, got fewer");
    return bytes;
}

Model Model::load(const std::string &path) {
    return from_file(path, [](const void *bytes, size_t size) { return load(bytes, size); });
}

Model Model::load(const void *bytes, size_t size) {
    const std::string instruction_set = chosen_instruction_set();
    return Model(std::make_shared<const Network>(read_frozen(bytes, size), instruction_set));
}

Model::Model(std::shared_ptr<const Network> network) : network_(std::move(network)) {}

const Shape &Model::shape() const { return network_->shape(); }

const char *Model::instruction_set() const { return network_->instruction_set(); }

void Model::run(const float *x, int64_t T, int64_t N, float *y, const RunOptions &options) const {
    network_->run(x, T, N, y, options);
}

Stream Model::stream(int64_t N) const { return Stream(network_, N); }

}  // namespace quant_gru
