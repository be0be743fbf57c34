#define QG_NAMESPACE avx_vnni
#define QG_AVXVNNI
#include "cpu/isa/avx2.inl"
