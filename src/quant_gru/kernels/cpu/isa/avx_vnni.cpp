#define QG_NAMESPACE avx_vnni
#define QG_AVXVNNI
#include "cpu/isa/x86/avx2.inl"
