#include "actnn/codec/native/calls.hpp"

namespace nb = nanobind;

namespace actnn {

using kernel_runtime::call;
using kernel_runtime::number;

Call::Call(void (*run)(const Codec &, int), Real real, int64_t bits, int64_t group, bool stochastic,
           int64_t rows, int64_t m, float lowest, float highest, nb::object threads,
           const nb::handle &type)
    : run_(run), bits_(bits), codec_{}, threads_(std::move(threads)), tensors_(type, -1) {
    codec_.rows = rows;
    codec_.m = m;
    codec_.group = group;
    codec_.real = real;
    codec_.stochastic = stochastic;
    codec_.lowest = lowest;
    codec_.highest = highest;
}

template <class Pointer>
void Call::point(Pointer *&to, const nb::handle &value) const {
    to = reinterpret_cast<Pointer *>(static_cast<uintptr_t>(tensors_.argument(value.ptr())));
}

void Call::start(const nb::handle &x, const nb::handle &data, const nb::handle &params,
                 const nb::handle &state, const nb::handle &bits, const nb::handle &ends,
                 int64_t capacity, int64_t tensor) const {
    Codec codec = codec_;
    const int64_t *noise = nullptr;
    point(codec.x, x);
    point(codec.data, data);
    point(codec.params, params);
    point(noise, state);
    point(codec.bits, bits);
    point(codec.ends, ends);
    codec.capacity = capacity;
    if (bits_) {
        codec.bits = codec.ends = &bits_;
        codec.capacity = bits_;
    }
    if (noise) {
        codec.seed = static_cast<uint64_t>(noise[0]);
        codec.step = static_cast<uint32_t>(noise[1]);
    }
    codec.tensor = static_cast<uint32_t>(tensor);
    const auto threads = static_cast<int>(number(call(threads_)));
    nb::gil_scoped_release release;
    run_(codec, threads);
}

Coder::Coder(int64_t device, nb::object make_codes, nb::object make_tensor, int64_t codes_bytes,
             nb::object encode, nb::object decode, nb::object encode_slowly,
             nb::object decode_slowly, const nb::handle &type)
    : device_(device),
      codes_bytes_(codes_bytes),
      make_codes_(std::move(make_codes)),
      make_tensor_(std::move(make_tensor)),
      encode_(std::move(encode)),
      decode_(std::move(decode)),
      encode_slowly_(std::move(encode_slowly)),
      decode_slowly_(std::move(decode_slowly)),
      tensors_(type, device) {
    const nb::object functions = nb::module_::import_("torch").attr("_C");
    modes_ = functions.attr("_len_torch_dispatch_stack");
    if (0 <= device_) current_ = functions.attr("_cuda_getDevice");
}

bool Coder::is_alone() const {
    return number(call(modes_)) == 0 && (device_ < 0 || number(call(current_)) == device_);
}

int64_t Coder::address_of(const nb::handle &codes) const {
    return static_cast<int64_t>(tensors_.address(codes.ptr()));
}

nb::object Coder::encode(const nb::handle &x, const nb::handle &state, int64_t tensor) const {
    if (!is_alone()) return encode_slowly_(x, state, tensor);
    nb::object codes = make_codes_();
    const int64_t address = address_of(codes);
    encode_(x, address, address + codes_bytes_, state, nb::none(), nb::none(), 0, tensor);
    return codes;
}

nb::object Coder::decode(const nb::handle &codes) const {
    if (PyTuple_Check(codes.ptr()) || !is_alone()) return decode_slowly_(codes);
    nb::object x = make_tensor_();
    const int64_t address = address_of(codes);
    decode_(x, address, address + codes_bytes_, nb::none(), nb::none(), nb::none(), 0, 0);
    return x;
}

}  // namespace actnn
