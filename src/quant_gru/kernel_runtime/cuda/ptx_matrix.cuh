// Matrix products (mma, wgmma) and the loads of their operands.
#ifndef KERNEL_RUNTIME_PTX_MATRIX_CUH
#define KERNEL_RUNTIME_PTX_MATRIX_CUH

#include <stdint.h>

#ifndef PTX_ON_HOST  // tests that run kernels on the host define these functions

// d += a * b with a (16, 32) and b (32, 8), bytes. The flags say which operand is unsigned.
template <bool kUnsignedA, bool kUnsignedB>
inline void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define PTX_MMA(A, B)                                                         \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B             \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (kUnsignedA && kUnsignedB)
        PTX_MMA("u8", "u8");
    else if (kUnsignedA)
        PTX_MMA("u8", "s8");
    else if (kUnsignedB)
        PTX_MMA("s8", "u8");
    else
        PTX_MMA("s8", "s8");
#undef PTX_MMA
}

// d = a * b + c with the same shapes, signed bytes.
inline void mma_from(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
}

// Loads four matrices of 8 rows of 16 bytes. Lane i passes the address of row i % 8 of matrix i
// / 8. It receives word i % 4 of row i / 4 of each matrix.
inline void load_matrices(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

// Asynchronous products of matrices in shared memory by the four warps of a warpgroup: d += a * b.
// Operands are signed bytes with k = 32: 64 rows of a, 8 rows of b for each column of d.
//
// A matrix consists of lines of 128 bytes in the 128-byte swizzled layout. Groups of 8 lines are
// contiguous and start at multiples of 1024 bytes. The 16-byte chunk i of line j is stored at
// position i ^ (j % 8).
inline uint64_t matrix_in_lines(uint32_t address) {
    const uint64_t apart = 1024 >> 4, turned = 1;
    return (address & 0x3FFFFu) >> 4 | uint64_t(1) << 16 | apart << 32 | turned << 62;
}
// The matrix that starts so many bytes later: at another feature, or at another line.
inline uint64_t matrix_from(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }
inline void settled(int &v) { asm volatile("" : "+r"(v)::"memory"); }
inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int kColumns>
struct GroupProduct;
#define PTX_FOUR(v) "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
// Register names, and the sums in them, for 8, 10, 12 and 14 columns.
#define PTX_NAMES_8                                                              \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20," \
    "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_NAMES_10 PTX_NAMES_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PTX_NAMES_12 PTX_NAMES_10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_NAMES_14 PTX_NAMES_12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PTX_SUMS_8                                                                  \
    PTX_FOUR(d[0]), PTX_FOUR(d[1]), PTX_FOUR(d[2]), PTX_FOUR(d[3]), PTX_FOUR(d[4]), \
        PTX_FOUR(d[5]), PTX_FOUR(d[6]), PTX_FOUR(d[7])
#define PTX_SUMS_10 PTX_SUMS_8, PTX_FOUR(d[8]), PTX_FOUR(d[9])
#define PTX_SUMS_12 PTX_SUMS_10, PTX_FOUR(d[10]), PTX_FOUR(d[11])
#define PTX_SUMS_14 PTX_SUMS_12, PTX_FOUR(d[12]), PTX_FOUR(d[13])
#define PTX_PRODUCT(columns, rows, a_name, b_name, added_name)                             \
    template <>                                                                            \
    struct GroupProduct<columns> {                                                         \
        static inline void add(int (&d)[columns][4], uint64_t a, uint64_t b, bool added) { \
            asm volatile("{ .reg .pred added; setp.ne.b32 added, " added_name              \
                         ", 0; "                                                           \
                         "wgmma.mma_async.sync.aligned.m64" rows                           \
                         "k32.s32.s8.s8 {" PTX_NAMES_##columns "}, " a_name ", " b_name    \
                                                               ", added; }"                \
                         : PTX_SUMS_##columns                                              \
                         : "l"(a), "l"(b), "r"((int)added));                               \
        }                                                                                  \
    };
PTX_PRODUCT(8, "n64", "%32", "%33", "%34")
PTX_PRODUCT(10, "n80", "%40", "%41", "%42")
PTX_PRODUCT(12, "n96", "%48", "%49", "%50")
PTX_PRODUCT(14, "n112", "%56", "%57", "%58")
#undef PTX_PRODUCT
#undef PTX_SUMS_14
#undef PTX_SUMS_12
#undef PTX_SUMS_10
#undef PTX_SUMS_8
#undef PTX_NAMES_14
#undef PTX_NAMES_12
#undef PTX_NAMES_10
#undef PTX_NAMES_8
#undef PTX_FOUR

// d += a * b with a (16, 16) and b (16, 8), bfloat16.
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// The row, of the 8 rows of a matrix, whose address lane i passes to `load_matrices`: row i, or
// with `apart` a permutation. Thread t of four then holds rows t and t + 4 of a product, not 2t and
// 2t + 1.
inline int row_of_eight(int i, bool apart) { return apart ? i / 2 + i % 2 * 4 : i; }

#endif
