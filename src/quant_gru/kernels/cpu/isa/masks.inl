// Masks of lanes, as bits or as 0 and 1, whichever is faster with an instruction set. Included
// inside the namespace of an instruction set after its lanes.

// True where a equals b.
template <class V>
inline V where_same(const V &a, const V &b) {
    return V::inside(a, b, b);
}

// v where the mask is true, 0 elsewhere.
template <class V>
inline V where(const V &mask, const V &v) {
    return V::mul(mask, v);
}

// True in all lanes.
template <class V>
inline V everywhere() {
    return where_same(V::set(0), V::set(0));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline Floats where_same(const Floats &a, const Floats &b) {
    return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)};
}
inline Floats where(const Floats &mask, const Floats &v) { return {_mm256_and_ps(mask.v, v.v)}; }
inline Doubles where_same(const Doubles &x, const Doubles &y) {
    return {_mm256_cmp_pd(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_pd(x.b, y.b, _CMP_EQ_OQ)};
}
inline Doubles where(const Doubles &mask, const Doubles &v) {
    return {_mm256_and_pd(mask.a, v.a), _mm256_and_pd(mask.b, v.b)};
}
#endif
