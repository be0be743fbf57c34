#define QG_NAMESPACE amx_int8
#define QG_AMX
#include "cpu/isa/x86/avx512.inl"
