#define QG_NAMESPACE avx_vnni
#define QG_AVXVNNI
#include "avx2.inl"
