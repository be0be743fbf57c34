#define QG_NAMESPACE amx_int8
#define QG_AMX
#include "cpu/isa/avx512.inl"
