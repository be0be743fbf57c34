#define QG_NAMESPACE avx512_vnni
#include "cpu/isa/avx512.inl"
