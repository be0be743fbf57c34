#define QG_NAMESPACE avx512_vbmi
#include "cpu/isa/x86/avx512.inl"
