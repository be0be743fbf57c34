#define QG_NAMESPACE avx2
#include "cpu/isa/avx2.inl"
