#define QG_NAMESPACE avx512_vbmi
#include "avx512.inl"
