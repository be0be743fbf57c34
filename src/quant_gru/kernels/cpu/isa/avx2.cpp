#define QG_NAMESPACE avx2
#include "cpu/isa/x86/avx2.inl"
