// Masks of lanes, as bits or as 0 and 1, whichever is faster with an instruction set. Included
// inside the namespace of an instruction set after its lanes.

#if defined(__AVX2__) && !defined(__AVX512F__)
inline Floats same_bits(const Floats &a, const Floats &b) {
    return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)};
}
inline Doubles same_bits(const Doubles &x, const Doubles &y) {
    return {_mm256_cmp_pd(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_pd(x.b, y.b, _CMP_EQ_OQ)};
}
inline Floats both_bits(const Floats &a, const Floats &b) { return {_mm256_and_ps(a.v, b.v)}; }
inline Doubles both_bits(const Doubles &x, const Doubles &y) {
    return {_mm256_and_pd(x.a, y.a), _mm256_and_pd(x.b, y.b)};
}
#else
template <class V>
inline V same_bits(const V &a, const V &b) {
    return V::inside(a, b, b);
}
template <class V>
inline V both_bits(const V &a, const V &b) {
    return V::mul(a, b);
}
#endif

// True where a equals b.
template <class V>
inline V where_same(const V &a, const V &b) {
    return same_bits(a, b);
}

// v where the mask is true, 0 elsewhere.
template <class V>
inline V where(const V &mask, const typename V::Lane &v) {
    return both_bits(mask, v);
}

// True in all lanes.
template <class V>
inline V everywhere() {
    const V zero = V::set(0);
    return where_same(zero, zero);
}
