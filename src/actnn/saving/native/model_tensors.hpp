// Parameters and buffers of a model: they are alive anyway, so that saving them holds nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "actnn/saving/native/module_paths.hpp"
#include "actnn/saving/native/torch_api.hpp"

namespace actnn {

// Why a tensor is alive anyway, and the path of the module that has it.
struct Owned {
    nanobind::object reason, owner;
};

// The reasons.
const nanobind::object &parameter_reason();
const nanobind::object &buffer_reason();

class ModelTensors {
 public:
    ModelTensors() = default;
    ModelTensors(const ModelTensors &) = delete;
    ModelTensors &operator=(const ModelTensors &) = delete;

    // Reads which tensors a model has now. This is quick if they are those of the step before.
    void read(const nanobind::handle &model, const ModulePaths &paths);
    // What is known of a tensor itself; null if nothing is.
    const Owned *of(PyObject *tensor) const { return in(by_tensor_, tensor); }
    // What is known of the tensors of a storage.
    const Owned *of_storage(uintptr_t address) const { return in(by_storage_, address); }

 private:
    struct Tensor {
        PyObject *tensor, *module;  // to compare; they may be gone
        bool is_parameter;
        uintptr_t address;  // of the elements
        bool operator==(const Tensor &other) const {
            return tensor == other.tensor && module == other.module &&
                   is_parameter == other.is_parameter && address == other.address;
        }
    };
    struct Storage : Owned {
        WeakStorage reference;  // as long as it exists, no other storage has the address
    };

    template <class Table, class Key>
    static const Owned *in(const Table &table, Key key) {
        const auto found = table.find(key);
        return found == table.end() ? nullptr : &found->second;
    }

    std::vector<Tensor> tensors_;  // in the order in which they were read
    std::unordered_map<PyObject *, Owned> by_tensor_;
    std::unordered_map<uintptr_t, Storage> by_storage_;
};

}  // namespace actnn
