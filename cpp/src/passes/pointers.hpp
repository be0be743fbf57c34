// Where arrays of the caller are.
#pragma once

#include <initializer_list>

namespace quant_gru {

struct NamedArray {
    const char *name;
    const void *data;  // null is skipped
};

// The index of the GPU that holds all arrays, or kHost. Throws ArgumentError if one of them is
// elsewhere than the first one. Managed memory counts as memory of a GPU.
int place_of(std::initializer_list<NamedArray> arrays);

}  // namespace quant_gru
