// The part of ONNX Runtime's C interface that an operator needs. The functions are those of its
// first version, whose order never changes; an operator has the fields of version 16, which ONNX
// Runtime 1.16 and newer read.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _WIN32
#define QGRU_ORT_CALL __stdcall
#else
#define QGRU_ORT_CALL
#endif

namespace quant_gru {
namespace ort {

constexpr uint32_t kVersion = 16;
constexpr int kInvalidArgument = 2, kFloat = 1, kInt64 = 7, kRequired = 0, kOptional = 1;

struct Status;
struct Options;
struct Domain;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct Operator;

template <class... Arguments>
using Function = Status *(QGRU_ORT_CALL *)(Arguments...);
using Unused = const void *;

struct Api {
    Function<int, const char *> create_status_of_code;
    Unused functions_1[25];
    Function<const char *, Domain **> create_domain;
    Function<Domain *, const Operator *> add_operator;
    Function<Options *, Domain *> add_domain;
    Unused functions_29[22];
    Function<Value *, void **> data;
    Unused functions_52[8];
    Function<const TensorInfo *, int *> element_type;
    Function<const TensorInfo *, size_t *> dimension_count;
    Function<const TensorInfo *, int64_t *, size_t> dimensions;
    Unused functions_63[2];
    Function<const Value *, TensorInfo **> tensor_info;
    Unused functions_66[21];
    Function<const KernelInfo *, const char *, char *, size_t *> string_attribute;
    Function<const KernelContext *, size_t *> input_count;
    Unused functions_89[1];
    Function<const KernelContext *, size_t, const Value **> input;
    Function<KernelContext *, size_t, const int64_t *, size_t, Value **> output;
    Unused functions_92[7];
    void(QGRU_ORT_CALL *release_tensor_info)(TensorInfo *);
    Unused functions_100[1];
    void(QGRU_ORT_CALL *release_domain)(Domain *);

    Status *create_status(const char *message) const {
        return create_status_of_code(kInvalidArgument, message);
    }
};
static_assert(offsetof(Api, release_domain) == 101 * sizeof(void *),
              "one pointer for each function");

struct ApiBase {
    const Api *(QGRU_ORT_CALL *api)(uint32_t version);
    const char *(QGRU_ORT_CALL *version)();
};

// An operator, as ONNX Runtime reads it.
struct Operator {
    uint32_t version;
    void *(QGRU_ORT_CALL *create)(const Operator *, const Api *, const KernelInfo *);
    const char *(QGRU_ORT_CALL *name)(const Operator *);
    const char *(QGRU_ORT_CALL *provider)(const Operator *);
    int(QGRU_ORT_CALL *input_type)(const Operator *, size_t);
    size_t(QGRU_ORT_CALL *inputs)(const Operator *);
    int(QGRU_ORT_CALL *output_type)(const Operator *, size_t);
    size_t(QGRU_ORT_CALL *outputs)(const Operator *);
    void(QGRU_ORT_CALL *compute_without_status)(void *, KernelContext *);
    void(QGRU_ORT_CALL *destroy)(void *);
    int(QGRU_ORT_CALL *input_presence)(const Operator *, size_t);
    int(QGRU_ORT_CALL *output_presence)(const Operator *, size_t);
    int(QGRU_ORT_CALL *input_memory)(const Operator *, size_t);
    int(QGRU_ORT_CALL *variadic[4])(const Operator *);
    Status *(QGRU_ORT_CALL *create_with_status)(const Operator *, const Api *, const KernelInfo *,
                                                void **);
    Status *(QGRU_ORT_CALL *compute)(void *, KernelContext *);
};

}  // namespace ort
}  // namespace quant_gru
