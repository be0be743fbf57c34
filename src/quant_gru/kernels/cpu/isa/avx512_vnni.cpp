#define QG_NAMESPACE avx512_vnni
#include "cpu/isa/x86/avx512.inl"
