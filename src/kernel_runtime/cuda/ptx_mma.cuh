// Matrix instructions: mma of a warp, wgmma of a warpgroup, and loads of their operands.
#ifndef QUANT_GRU_PTX_MMA_CUH
#define QUANT_GRU_PTX_MMA_CUH

#include <stdint.h>

#ifndef QG_HOST  // a host that runs kernels brings its own

// d += a * b over k = 32, bytes; rows of a: 16, columns of b: 8. The first two flags say which
// operand has unsigned bytes.
template <bool kUnsignedA, bool kUnsignedB>
inline void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define QG_MMA(A, B)                                                          \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B             \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (kUnsignedA && kUnsignedB)
        QG_MMA("u8", "u8");
    else if (kUnsignedA)
        QG_MMA("u8", "s8");
    else if (kUnsignedB)
        QG_MMA("s8", "u8");
    else
        QG_MMA("s8", "s8");
#undef QG_MMA
}

// The same of signed bytes, d = a * b + c.
inline void mma_from(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
}

// d += a * b over k = 16, bfloat16; rows of a: 16, columns of b: 8.
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8, and
// gets word lane % 4 of row lane / 4 of each.
inline void load_matrices(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

// Products of matrices in shared memory by the four warps of a group, d += a * b of signed bytes
// over k = 32: 64 rows of a, 8 rows of b for each column of d. They go on while the threads do.
//
// A matrix has lines of 128 bytes, 8 of them from a multiple of 1024 on, the next 8 behind; the 16
// bytes of number i of line j stand in place of those of number i ^ j % 8.
inline uint64_t matrix_in_lines(uint32_t address) {
    const uint64_t apart = 1024 >> 4, turned = 1;
    return (address & 0x3FFFFu) >> 4 | uint64_t(1) << 16 | apart << 32 | turned << 62;
}
// From so many bytes on: features of the first lines, or other lines.
inline uint64_t matrix_from(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }
inline void settled(int &v) { asm volatile("" : "+r"(v)::"memory"); }
inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int kColumns>
struct GroupProduct;
#define QG_FOUR(v) "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
// registers, and sums that are in them, of 8 columns, of two more each
#define QG_NAMES_8                                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20," \
    "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QG_NAMES_10 QG_NAMES_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define QG_NAMES_12 QG_NAMES_10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define QG_NAMES_14 QG_NAMES_12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define QG_SUMS_8                                                                             \
    QG_FOUR(d[0]), QG_FOUR(d[1]), QG_FOUR(d[2]), QG_FOUR(d[3]), QG_FOUR(d[4]), QG_FOUR(d[5]), \
        QG_FOUR(d[6]), QG_FOUR(d[7])
#define QG_SUMS_10 QG_SUMS_8, QG_FOUR(d[8]), QG_FOUR(d[9])
#define QG_SUMS_12 QG_SUMS_10, QG_FOUR(d[10]), QG_FOUR(d[11])
#define QG_SUMS_14 QG_SUMS_12, QG_FOUR(d[12]), QG_FOUR(d[13])
#define QG_PRODUCT(columns, rows, a_name, b_name, added_name)                              \
    template <>                                                                            \
    struct GroupProduct<columns> {                                                         \
        static inline void add(int (&d)[columns][4], uint64_t a, uint64_t b, bool added) { \
            asm volatile("{ .reg .pred added; setp.ne.b32 added, " added_name              \
                         ", 0; "                                                           \
                         "wgmma.mma_async.sync.aligned.m64" rows                           \
                         "k32.s32.s8.s8 {" QG_NAMES_##columns "}, " a_name ", " b_name     \
                                                              ", added; }"                 \
                         : QG_SUMS_##columns                                               \
                         : "l"(a), "l"(b), "r"((int)added));                               \
        }                                                                                  \
    };
QG_PRODUCT(8, "n64", "%32", "%33", "%34")
QG_PRODUCT(10, "n80", "%40", "%41", "%42")
QG_PRODUCT(12, "n96", "%48", "%49", "%50")
QG_PRODUCT(14, "n112", "%56", "%57", "%58")
#undef QG_PRODUCT
#undef QG_SUMS_14
#undef QG_SUMS_12
#undef QG_SUMS_10
#undef QG_SUMS_8
#undef QG_NAMES_14
#undef QG_NAMES_12
#undef QG_NAMES_10
#undef QG_NAMES_8
#undef QG_FOUR

#endif

// Of 8 rows that `load_matrices` reads, the one for lane i: as they come, or, `apart`, those that a
// thread has of a product are four apart, rows i and i + 4 in the i-th of four.
inline int row_of_eight(int i, bool apart) { return apart ? i / 2 + i % 2 * 4 : i; }

#endif
