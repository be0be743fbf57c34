#define QG_NAMESPACE avx2
#include "avx2.inl"
