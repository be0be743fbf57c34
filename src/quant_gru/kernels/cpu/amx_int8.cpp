#define QG_NAMESPACE amx_int8
#define QG_AMX
#include "avx512.inl"
