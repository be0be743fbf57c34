#include <algorithm>
#include <cmath>
#include <cstring>

#include "actnn/codec/c99/group.h"
#include "actnn/codec/native/codec.hpp"

namespace actnn {
namespace {
#include "actnn/codec/native/groups.inl"
}  // namespace

const Variant avx2{encode_part, decode_part};

}  // namespace actnn
