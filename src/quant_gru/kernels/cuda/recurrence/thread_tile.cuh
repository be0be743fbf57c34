// A tile of the recurrence: the memory layout of a block, and the elements of a thread. Macros as
// in persistent.cu.
#ifndef QUANT_GRU_TILE_CUH
#define QUANT_GRU_TILE_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

#ifndef HELD
#define HELD 0
#endif
#ifndef STRETCH
#define STRETCH 0
#endif
#ifndef REALS
#define REALS 0
#define VALUES 0
#define CODES 1
#endif

constexpr int kHalves = KS * SPREAD;  // warps per group of 16 units
constexpr int kGroups = UP / CL / 16;
constexpr int kThreads = kGroups * kHalves * 32;
constexpr int kBlocks = KP / 64 / KS;  // blocks of 64 features per warp
constexpr bool kBulk = BULK;
constexpr int kStride =
    kBulk ? UP : ((KP > UP ? KP : UP) + 127) / 128 * 128 + 64;  // avoids bank conflicts
constexpr int kTileRows = NT * NB;
constexpr int kPlane = kTileRows * kStride;
constexpr int kState = HP * kPlane;
constexpr int kSlice = HP * NB * 64;  // bytes of a strip that a block sends in a bulk copy
constexpr int kNextPlane = kBulk ? NB * 64 : kPlane;
constexpr int kNextBlock = kBulk ? kSlice : 64;  // stride of blocks of 64 features
constexpr int kSets = HP + WP - 1;               // accumulators per weight: powers of 256
constexpr bool kShared = kHalves == 2;           // two warps divide the rows of a strip
constexpr int kElements = kShared ? (NB == 8 ? 2 : 1) : (NB == 8 ? 4 : NB == 4 ? 2 : 1);
constexpr int kRows = NB == 8 ? 2 : 1;  // units per thread
constexpr int kSame = kRows;            // consecutive elements of a thread in the same row
constexpr int kColumns = kElements / kSame;
constexpr int kOwned = NB == 1 ? 1 : kShared ? NB / 2 : NB;  // rows of a strip that a warp finishes
constexpr int kStage = HP * kOwned * 16;                     // bytes of 16 units that a warp sends
constexpr int kStages = CL == 1 || kBulk ? 0 : 2 * kGroups * kHalves * kStage;
constexpr int kExchange = KS == 2 ? 2 * kGroups * 2 * kSets * 3 * kElements * 32 : 0;
constexpr int kUnits = UP / CL;
constexpr uint32_t kReceived = HP * NB * (kBulk ? UP - kUnits : UP);
constexpr int kCopied = COPY ? COPY / HP : 16;  // units per copy
constexpr int kFlags = REALS ? 32 : 0;          // bytes of NaN flags: per tile row, and for all
constexpr int kAhead = RING - 1;                // steps between the start of a load and its use
// Whether weights leave registers for values that the compiler would recompute in every step.
constexpr bool kRoom = 12 * kBlocks * 2 * WP <= (kThreads > 256 ? 48 : 96);
constexpr bool kTight = TIGHT;
constexpr int kFactors = kTight ? 3 * 16 * 8 * (kThreads / 32) : 0;  // bytes
constexpr bool kLate = LATE;
// Whether a barrier wait keeps the contents of the L1 cache. With two strips that is faster. With
// one strip it is slower: steps take a fifth longer once `W x` of some hundred steps has filled it.
constexpr bool kLeaves = NT == 2;
// Whether both bytes of a state are columns of one MMA. Both are then signed: low bytes are stored
// less 128, and biases compensate for that.
constexpr bool kPacked = HP == 2 && WP == 1 && NB <= 4;
constexpr int kTop = kPacked ? 0x80 : 0;
constexpr int kReads = kPacked ? 1 : HP;       // loads per block of 64 features
constexpr int kTerms = kPacked ? 1 : kSets;    // accumulators in the GEMM, by powers of 256
constexpr bool kPairs = kLate && kTerms == 1;  // two accumulators for gates that are not late
constexpr int kKept = kLate && kBlocks * kReads <= 4 ? kBlocks : 1;  // state blocks in registers
constexpr int kAccumulators = kPairs ? 2 : kTerms * SETS;
// Whether sums may be requantized in int32. Whether int32 holds every accumulator is checked on the
// device, where the weights are known.
constexpr bool kWhole = sizeof(REAL) == 4 && kSets == 2;
constexpr bool kSaturated = SATURATED;
constexpr bool kBits = sizeof(REAL) == 4 && TZ == 0 && TR == 0 && TG == 0;

static_assert(!kBulk || (CL > 1 && UP == 64 * CL && KP == UP), "a block's units are 64 features");
static_assert(KP % (64 * KS) == 0 && UP % (16 * CL) == 0, "padding");
static_assert(kHalves <= 2 && (NB == 1 || NB == 2 || NB == 4 || NB == 8), "shape");
static_assert(NT == 1 || (NT == 2 && CL > 1), "strips");
static_assert(KS == 1 || kGroups < 16, "a named barrier for each group");
static_assert(SPREAD == 1 || NB > 1, "rows are what is spread");
static_assert(!LATE || WP == 1, "one plane of late weights");
static_assert(!kSaturated || (kBits && kSets == 1), "codes of 8 bits");
static_assert(!TIGHT || (sizeof(REAL) == 4 && kSets <= 2 && NB >= 4), "a multiplier is a word");
static_assert(!STRETCH || STRETCH > kAhead, "steps that are ahead are of the next stretch");
static_assert(SETS == 1 || kTerms == 1, "sets of the same weight");

#if WX == 1
typedef uint32_t Stored;  // bytes: update, reset, candidate
#else
typedef uint2 Stored;  // 16 bits each
#endif
#if OUT == 1
typedef uint8_t Code;
#elif OUT == 2
typedef uint16_t Code;
#else
typedef int32_t Code;
#endif
typedef REAL Real;

// An element of a thread: unit 8 * row8 + lane / 4 of its group, row n of a strip, in register
// `slot` of its warp's accumulators. If two warps share a strip, one has the even rows and the
// other the odd rows. If a strip has fewer than 8 rows, the columns of the MMA repeat them.
struct Place {
    int row8, n, slot;
};

inline Place place_of(int e, int quad, int half) {
    Place p;
    int column;  // one of the two MMA columns of a thread
    if (!kShared) {
        p.row8 = NB == 8 ? e & 1 : NB == 4 ? quad >> 1 : quad & 1;
        column = NB == 8 ? e >> 1 : NB == 4 ? e : NB == 2 ? quad >> 1 : 0;
    } else {
        p.row8 = NB == 8 ? e : NB == 4 ? quad >> 1 : quad & 1;
        column = NB == 1 ? 0 : half;
    }
    p.n = (NB == 8 ? 2 * quad : NB == 4 ? 2 * (quad & 1) : 0) + column;
    p.slot = 2 * p.row8 + column;
    return p;
}

// Index of a byte of a state. The layout has consecutive tile rows or, for bulk copies,
// [strip][block of the cluster][plane][row][64].
inline int stands_at(int row, int unit) {
    if (!kBulk) return row * kStride + unit;
    return (row / NB * CL + unit / 64) * kSlice + row % NB * 64 + unit % 64;
}

inline bool works(int quad, int half) {
    if (NB == 1) return quad < 2 && half == 0;
    if (NB == 2 && kShared) return quad < 2;
    return true;
}

inline int pick(const int (&a)[4], int slot) {
    const int low = slot & 1 ? a[1] : a[0], high = slot & 1 ? a[3] : a[2];
    return slot & 2 ? high : low;
}

// Separates the sums of low and high bytes of a packed MMA, for the unit and the two columns of
// this thread. The columns repeat the rows of the tile, with alternating low and high bytes.
inline void apart(int (&low)[2], int (&high)[2], const int (&a)[4], int quad) {
    if (NB == 1) {  // the two columns are the two bytes of the row
        low[0] = low[1] = quad & 1 ? a[2] : a[0];
        high[0] = high[1] = quad & 1 ? a[3] : a[1];
        return;
    }
    const bool second = NB == 4 ? quad >> 1 : quad & 1;  // has high bytes, and the second unit
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32_t mine = (uint32_t)(second ? a[2 + j] : a[j]);
        const uint32_t given = (uint32_t)(second ? a[j] : a[2 + j]);
        const uint32_t taken = shuffled(given, NB / 2);
        low[j] = (int)(second ? taken : mine);
        high[j] = (int)(second ? mine : taken);
    }
}

// The input projection of a thread's elements in one step.
struct alignas(sizeof(Stored) * kElements < 16 ? sizeof(Stored) * kElements : 16) Words {
    Stored w[kElements];
};

// Starts loading the input projection into shared memory, some steps before its use, to hide the
// latency. Loads into registers would stall the instructions that follow.
inline void start_words(Words *to, const Stored *from) {
    constexpr int kPart = sizeof(Words) < 16 ? sizeof(Words) : 16;
#pragma unroll
    for (int i = 0; i < (int)sizeof(Words); i += kPart)
        copy_async<kPart>((unsigned char *)to + i, (const unsigned char *)from + i);
}

#endif
