#define QG_NAMESPACE avx512_vnni
#include "avx512.inl"
