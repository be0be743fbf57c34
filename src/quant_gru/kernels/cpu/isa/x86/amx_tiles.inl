// The products of the fused kernel with tiles: operands of 16 rows by 64 bytes, weights of 64 bytes
// by 16 units. Included by avx512.inl, inside its namespace.

template <int P>
constexpr int kTileRows = P == 1 ? 32 : 16;
constexpr int kTileGroups = 2;

// Configures all tiles of the thread at their full size, for the duration of a run.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {
            config[16 + 2 * tile] = 64;  // bytes of a row
            config[48 + tile] = 16;      // rows
        }
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

constexpr int kStep = 192;  // bytes from one step of weights to the next

// Computes the sums of 16 rows for the three gates of a group.
inline void tiles_of_group(const int8_t *w, const uint8_t *a, int64_t stride, int blocks,
                           const int32_t *bias, int32_t *out, int64_t out_stride) {
    // A stride of 0 loads the same bias into every row.
    _tile_loadd(0, bias, 0);
    _tile_loadd(1, bias + 16, 0);
    _tile_loadd(2, bias + 32, 0);
    for (int block = 0; block < blocks; ++block, w += 16 * kStep, a += 64) {
        _tile_loadd(6, a, stride);
        _tile_loadd(3, w, kStep);
        _tile_dpbusd(0, 6, 3);
        _tile_loadd(4, w + 64, kStep);
        _tile_dpbusd(1, 6, 4);
        _tile_loadd(5, w + 128, kStep);
        _tile_dpbusd(2, 6, 5);
    }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
    _tile_stored(2, out + 32, out_stride);
}

// The same for two blocks of operands. `second_bias`: whether the sums of the second have a bias.
inline void tiles_of_two(const int8_t *w, const uint8_t *a0, const uint8_t *a1, int64_t stride,
                         int blocks, const int32_t *bias, bool second_bias, int32_t *out0,
                         int32_t *out1, int64_t out_stride) {
    _tile_loadd(0, bias, 0);
    _tile_loadd(1, bias + 16, 0);
    _tile_loadd(2, bias + 32, 0);
    if (second_bias) {
        _tile_loadd(3, bias, 0);
        _tile_loadd(4, bias + 16, 0);
        _tile_loadd(5, bias + 32, 0);
    } else {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
    }
    for (int block = 0; block < blocks; ++block, w += 16 * kStep, a0 += 64, a1 += 64) {
        _tile_loadd(7, w, kStep);
        _tile_loadd(6, a0, stride);
        _tile_dpbusd(0, 6, 7);
        _tile_loadd(6, a1, stride);
        _tile_dpbusd(3, 6, 7);
        _tile_loadd(7, w + 64, kStep);
        _tile_dpbusd(4, 6, 7);
        _tile_loadd(6, a0, stride);
        _tile_dpbusd(1, 6, 7);
        _tile_loadd(7, w + 128, kStep);
        _tile_dpbusd(2, 6, 7);
        _tile_loadd(6, a1, stride);
        _tile_dpbusd(5, 6, 7);
    }
    _tile_stored(0, out0, out_stride);
    _tile_stored(1, out0 + 16, out_stride);
    _tile_stored(2, out0 + 32, out_stride);
    _tile_stored(3, out1, out_stride);
    _tile_stored(4, out1 + 16, out_stride);
    _tile_stored(5, out1 + 32, out_stride);
}

#define QG_PLANES_APART
// Up to 32 rows of one plane, or 16 of two. It reads and writes whole blocks of 16 rows. `high`
// receives the sums of the plane of high bytes.
template <int P>
inline void dot_planes(int rows, int groups, const Packed &p, int first, const uint8_t *a,
                       int64_t stride, int32_t *low, int32_t *high) {
    // The intrinsics do not tell the compiler that tiles are loaded from memory.
    __asm__ volatile("" ::: "memory");
    const int blocks = (p.steps + 15) / 16;
    const int64_t out_row = 48 * groups, out_stride = 4 * out_row;
    for (int g = 0; g < groups; ++g) {
        const int8_t *w = p.w + (first + g) * p.group_stride;
        const int32_t *bias = p.bias + (first + g) * 48;
        int32_t *to = low + 48 * g;
        if (P == 1 && rows <= 16)
            tiles_of_group(w, a, stride, blocks, bias, to, out_stride);
        else if (P == 1)
            tiles_of_two(w, a, a + 16 * stride, stride, blocks, bias, true, to, to + 16 * out_row,
                         out_stride);
        else  // the second block is the plane of high bytes
            tiles_of_two(w, a, a + stride / 2, stride, blocks, bias, false, to, high + 48 * g,
                         out_stride);
    }
}

// The same with the sums of both planes added.
template <int P>
inline void dot_tiles(int rows, int groups, const Packed &p, int first, const uint8_t *a,
                      int64_t stride, int32_t *out) {
    alignas(64) int32_t high[P == 2 ? 16 * kTileGroups * 48 : 16];
    dot_planes<P>(rows, groups, p, first, a, stride, out, high);
    if (P == 2)
        for (int64_t i = 0; i < rows * 48 * groups; i += 16) {
            const __m512i low = _mm512_load_si512(out + i);
            const __m512i above = _mm512_slli_epi32(_mm512_load_si512(high + i), 8);
            _mm512_store_si512(out + i, _mm512_add_epi32(low, above));
        }
}
