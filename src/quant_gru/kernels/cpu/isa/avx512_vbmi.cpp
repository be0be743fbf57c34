#define QG_NAMESPACE avx512_vbmi
#include "cpu/isa/avx512.inl"
