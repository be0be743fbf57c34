// The fused kernel, for weights of up to 8 bits and activations of up to 16. It multiplies a block
// of units and computes its gates while the sums are in the nearest cache. Included inside the
// namespace of an instruction set, which defines the names of operand_blocks.inl and
//   WideFloats, Doubles  lanes of float and double with exact arithmetic and tables, in kVectors
//                        vectors of the type Lane,
//   WidePowers           if QG_POWERS is defined: lanes of float for FusedPlan::powers, in
//                        kVectors vectors of the type Lane.

#include "cpu/isa/operand_blocks.inl"

// Computes `Gates::input_product` of rows of operands for some groups: out[row][group][gate][unit].
template <class V, int P, Mode kMode>
QG_ALONE void project(const Packed &p, const Gates<V> &gates, const OperandByte *a, int64_t stride,
                      int rows, int first_group, int end_group, float *out) {
    using Made = Sums<V, P>;
    Made sums;
    const int most = block_groups<P>(rows < kBlockRows<P> ? rows : kBlockRows<P>);
    for (int first = first_group; first < end_group; first += most) {
        const int groups = end_group - first < most ? end_group - first : most;
        const auto *m = V::multipliers(p, int64_t{first} * 3 * kGroup);
        for (int row = 0; row < rows; row += kBlockRows<P>) {
            const int count = rows - row < kBlockRows<P> ? rows - row : kBlockRows<P>;
            sums.make(count, groups, p, first, a + row * stride, stride);
            for (int r = 0; r < count; ++r) {
                float *to = out + ((static_cast<int64_t>(row) + r) * p.groups + first) * 3 * kGroup;
                const int32_t *from = sums.low + r * groups * 3 * kGroup;
                for (int g = 0; g < groups; ++g)
                    for (int i = 0; i < kGroup; i += V::n) {
                        int j = g * 3 * kGroup + i;
                        gates
                            .template input_product<kMode, 0>(Made::load(from + j),
                                                              V::multiplier(m, j))
                            .store_floats(to + j);
                        j += kGroup;
                        gates
                            .template input_product<kMode, 1>(Made::load(from + j),
                                                              V::multiplier(m, j))
                            .store_floats(to + j);
                        j += kGroup;
                        gates
                            .template input_product<kMode, 2>(Made::load(from + j),
                                                              V::multiplier(m, j))
                            .store_floats(to + j);
                    }
            }
        }
    }
}

template <class Real>
struct State {
    Real *h;  // [row][units], zero-point-free codes
    OperandByte *codes, *next;
    int64_t units, stride;  // per row
};

// Pointers to the inputs and outputs of the gates for a group of units of one row.
template <class Lane>
struct Place {
    using Multipliers = decltype(Lane::multipliers(Packed{}, 0));
    const int32_t *sums;  // sums of R h, [gate][unit]
    Multipliers m;        // their multipliers
    const float *Wx;      // result of `project`
    typename Lane::Real *h;
    OperandByte *codes;
    // instead of Wx: sums of W x and their multipliers
    const int32_t *input_sums = nullptr;
    Multipliers input_m = nullptr;
};

// Computes the gates of V::kVectors groups; place(k) is the Place of each.
//   keeps      states keep a share of their previous value (zoneout)
//   kProjects  places have sums of W x instead of Wx
//   Made       the type of Sums that loads the sums
template <class V, int P, Mode kMode, bool kProjects, class Made, class Places>
QG_INLINE void advance(const Gates<V> &gates, const Places place, int32_t shift, int64_t plane,
                       bool keeps) {
    using Lane = typename V::Lane;
    for (int i = 0; i < kGroup; i += Lane::n) {
        // The barrier makes the compiler read constants where they are used: the registers cannot
        // hold all of them.
        __asm__ volatile("" ::: "memory");
        auto Wx = [&](auto gate) {
            constexpr int kGate = decltype(gate)::value, kAt = kGate * kGroup;
            if constexpr (kProjects) {
                const V sums =
                    V::each([&](int k) { return Made::load(place(k).input_sums + kAt + i); });
                const auto m =
                    V::each([&](int k) { return Lane::multiplier(place(k).input_m, kAt + i); });
                return gates.template input_product<kMode, kGate>(sums, m);
            } else {
                return V(V::each([&](int k) { return Lane::load_floats(place(k).Wx + kAt + i); }));
            }
        };
        auto Rh = [&](auto gate) {
            constexpr int kGate = decltype(gate)::value, kAt = kGate * kGroup;
            const V sums = V::each([&](int k) { return Made::load(place(k).sums + kAt + i); });
            const auto m = V::each([&](int k) { return Lane::multiplier(place(k).m, kAt + i); });
            return gates.template state_product<kMode, kGate>(sums, m);
        };
        auto before = [&] { return V::each([&](int k) { return Lane::load(place(k).h + i); }); };
        V now = gates.template next<kMode>(Wx, Rh, before);
        if (__builtin_expect(keeps, 0))
            now = gates.zoneout.whole(gates.zoneout.unrounded(before(), now));
        for (int k = 0; k < V::kVectors; ++k) {
            const Lane lane = now.lane(k);
            lane.store(place(k).h + i);
            lane.template store_operand<P>(shift, place(k).codes + i, plane);
        }
    }
}

// Runs one step of a single row: all units, block by block.
template <class V, int P, Mode kMode>
QG_ALONE void step_row(const FusedPlan &p, const Gates<typename V::Lane> &gates,
                       const Gates<V> &wide_gates, const State<typename V::Real> &state,
                       const float *Wx, bool keeps) {
    using Lane = typename V::Lane;
    constexpr int kDot = max_groups(1, P), kMost = kDot > V::kVectors ? kDot : V::kVectors;
    constexpr int kMultipliers = (V::kPowers ? 3 : 1) * 3 * kGroup;  // of a group
    const Packed &R = p.R;
    const int32_t shift = p.h.zero - R.offset;
    using Made = Sums<Lane, 1>;  // `dot` adds the planes
    alignas(64) int32_t sums[kMost * 3 * kGroup];
    for (int first = 0; first < R.groups; first += kMost) {
        const int groups = R.groups - first < kMost ? R.groups - first : kMost;
        for (int g = 0; g < groups; g += kDot)
            dot_groups<P, 1, kDot>(groups - g < kDot ? groups - g : kDot, R, first + g, state.codes,
                                   state.stride, sums + g * 3 * kGroup);
        // Groups are contiguous, so addresses are those of the first group plus constant offsets.
        const auto places = [&](int from) {
            const int64_t channel = static_cast<int64_t>(first + from) * 3 * kGroup;
            const int64_t unit = static_cast<int64_t>(first + from) * kGroup;
            const Place<Lane> start{sums + from * 3 * kGroup, V::multipliers(R, channel),
                                    Wx + channel, state.h + unit, state.next + unit};
            return [start](int k) QG_LAMBDA {
                return Place<Lane>{start.sums + k * 3 * kGroup, start.m + k * kMultipliers,
                                   start.Wx + k * 3 * kGroup, start.h + k * kGroup,
                                   start.codes + k * kGroup};
            };
        };
        int done = 0;
        if constexpr (V::kVectors > 1)
            for (; done + V::kVectors <= groups; done += V::kVectors)
                advance<V, P, kMode, false, Made>(wide_gates, places(done), shift, state.stride / 2,
                                                  keeps);
        for (; done < groups; ++done)
            advance<Lane, P, kMode, false, Made>(gates, places(done), shift, state.stride / 2,
                                                 keeps);
    }
}

// Runs one step of `rows` rows: all units, block by block. With kProjects, the step also computes
// the input projection, from operands of two planes at `x`, so that Wx is never stored.
template <class V, int P, Mode kMode, bool kProjects>
QG_ALONE void step(const FusedPlan &p, const Gates<typename V::Lane> &gates,
                   const Gates<V> &wide_gates, const State<typename V::Real> &state,
                   const float *Wx, const OperandByte *x, int64_t x_stride, int rows,
                   const int64_t *lengths, int64_t at, bool keeps) {
    using Lane = typename V::Lane;
    const Packed &R = p.R;
    using Made = Sums<Lane, P>;
    Made sums;
    [[maybe_unused]] Made input;
    Place<Lane> places[most_sums<P>()];
    const int32_t shift = p.h.zero - R.offset;
    const int64_t plane = state.stride / 2;
    const int most = block_groups<P>(rows < kBlockRows<P> ? rows : kBlockRows<P>);
    for (int first = 0; first < R.groups; first += most) {
        const int groups = R.groups - first < most ? R.groups - first : most;
        for (int row = 0; row < rows; row += kBlockRows<P>) {
            const int count = rows - row < kBlockRows<P> ? rows - row : kBlockRows<P>;
            if constexpr (kProjects)
                input.make(count, groups, p.W, first, x + row * x_stride, x_stride);
            sums.make(count, groups, R, first, state.codes + row * state.stride, state.stride);
            int found = 0;
            for (int r = 0; r < count; ++r) {
                if (lengths && lengths[row + r] <= at) continue;
                for (int g = 0; g < groups; ++g) {
                    const int64_t channel = static_cast<int64_t>(first + g) * 3 * kGroup;
                    const int64_t unit = static_cast<int64_t>(first + g) * kGroup;
                    Place<Lane> &place = places[found++];
                    const int64_t sum = (r * groups + g) * 3 * kGroup;
                    place.sums = sums.low + sum;
                    place.m = V::multipliers(R, channel);
                    if constexpr (kProjects) {
                        place.input_sums = input.low + sum;
                        place.input_m = V::multipliers(p.W, channel);
                    } else {
                        place.Wx = Wx + (row + r) * R.groups * 3 * kGroup + channel;
                    }
                    place.h = state.h + (row + r) * state.units + unit;
                    place.codes = state.next + (row + r) * state.stride + unit;
                }
            }
            const auto from = [&places](int start) {
                const Place<Lane> *const at = places + start;
                return [at](int k) QG_LAMBDA -> const Place<Lane> & { return at[k]; };
            };
            int done = 0;
            if constexpr (V::kVectors > 1)
                for (; done + V::kVectors <= found; done += V::kVectors)
                    advance<V, P, kMode, kProjects, Made>(wide_gates, from(done), shift, plane,
                                                          keeps);
            for (; done < found; ++done)
                advance<Lane, P, kMode, kProjects, Made>(gates, from(done), shift, plane, keeps);
        }
    }
}

// Restores the states of units that are held in a step, from the operands of the step.
template <class Real>
QG_ALONE void restore(const FusedPlan &p, const State<Real> &state, int64_t row,
                      const uint8_t *held) {
    const int32_t shift = p.h.zero - p.R.offset;
    const OperandByte *before = state.codes + row * state.stride;
    OperandByte *after = state.next + row * state.stride;
    for (int unit = 0; unit < p.H; ++unit) {
        if (!held[unit]) continue;
        int32_t code = before[unit];
        after[unit] = before[unit];
        if (p.R.planes == 2) {
            const int64_t high = unit + state.stride / 2;
            code += 256 * before[high];
            after[high] = before[high];
        }
        state.h[row * state.units + unit] = static_cast<Real>(code - shift);
    }
}

// Prefetches values that are about to be read or written.
inline void fetch(const float *p, int n) {
    constexpr int kLine = 16;
    for (int i = 0; i < n; i += kLine) __builtin_prefetch(p + i);
    __builtin_prefetch(p + n - 1);
}

inline int64_t operand_stride(const Packed &p) {
    // Whole groups, so that blocks can be stored without a special case at the end.
    const int64_t least = static_cast<int64_t>(p.steps) * kDepth;
    return p.planes * round_up(least, 64);
}

// A single row with up to kFewFeatures features and kNearWeights bytes of weights computes its
// input projection between its steps, for kShortAhead steps at once. A wide processor is partly
// idle between the sums of a step and its state; a small projection for later steps fills this
// time.
constexpr int kShortAhead = 4;
#if defined(QG_ROWS_AVX512)
constexpr int kFewFeatures = 32;
constexpr int64_t kNearWeights = 40000;
#else
constexpr int kFewFeatures = 0;
constexpr int64_t kNearWeights = 0;
#endif

// The gates of lanes, and of one of them.
template <class V>
struct PlanGates {
    Gates<typename V::Lane> lane;
    Gates<V> wide;
    explicit PlanGates(const FusedPlan &p) : lane(p), wide(p) {}
};

template <class V, int P, Mode kMode>
bool run_rows(const FusedPlan &p, const Job &job, int64_t first_row, int rows) {
    using Real = typename V::Real;
    const int rule = V::kTies == Ties::stretched ? QG_HALF_EVEN : p.rule;
    const int of_rows = kRowsDirect ? rule : QG_HALF_EVEN,
              of_step = kRowsDirect ? QG_HALF_EVEN : rule;
    // A short call would take as long for these numbers as for its products.
    const auto &plan_gates = *reinterpret_cast<const PlanGates<V> *>(p.gates);
    const Gates<typename V::Lane> &gates = plan_gates.lane;
    const Gates<V> &wide_gates = plan_gates.wide;
    const Direction whole_call(of_rows);
    const int H = p.H, C = p.W.inputs;
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t x_stride = operand_stride(p.W), h_stride = operand_stride(p.R);
    const bool between =
        rows == 1 && job.T > kShortAhead && P == 1 && p.W.planes == 1 && C <= kFewFeatures &&
        p.W.groups * p.W.group_stride + p.R.groups * p.R.group_stride <= kNearWeights;
    const int64_t at_once = steps_ahead(job.T, rows, layout.ahead);
    const int64_t ahead = between && at_once > kShortAhead ? kShortAhead : at_once;
    const int64_t padded = round_up(rows, layout.row_block);
    MemoryPieces pieces{static_cast<char *>(job.workspace)};
    float *Wx = static_cast<float *>(pieces.take(at_once * rows * units * 3 * sizeof(float)));
    auto *x = static_cast<OperandByte *>(
        pieces.take(round_up(at_once * rows, layout.row_block) * x_stride * sizeof(OperandByte)));
    auto *row_codes =
        static_cast<int32_t *>(pieces.take(round_up(H > C ? H : C, 16) * sizeof(int32_t)));
    State<Real> state;
    state.h = static_cast<Real *>(pieces.take(rows * units * sizeof(Real)));
    state.codes = static_cast<OperandByte *>(pieces.take(padded * h_stride * sizeof(OperandByte)));
    state.next = static_cast<OperandByte *>(pieces.take(padded * h_stride * sizeof(OperandByte)));
    state.units = units;
    state.stride = h_stride;

    bool nan = false;
    for (int64_t i = 0; i < round_up(H > C ? H : C, 16); ++i) row_codes[i] = 0;
    for (int64_t i = 0; i < rows * units; ++i) state.h[i] = 0;
    for (int row = 0; row < rows; ++row) {
        nan |= read_row(job.h0, p.h, (first_row + row) * job.h0.row, H, row_codes);
        to_operand(p.R, p.h.zero, row_codes, H, state.codes + row * h_stride, h_stride);
        for (int i = 0; i < H; ++i) state.h[row * units + i] = static_cast<Real>(row_codes[i]);
    }
    const int64_t *lengths = job.lengths ? job.lengths + first_row : nullptr;
    const bool keeps = p.zoneout.present && !job.held;
    // Reads the operands of the steps of a block.
    auto read_steps = [&](int64_t block, int steps) {
        const int64_t next = (job.reverse ? -ahead : ahead) * job.x.step;
        for (int s = 0; s < steps; ++s) {
            const int64_t at = job.reverse ? job.T - 1 - (block + s) : block + s;
            for (int row = 0; row < rows; ++row) {
                const int64_t start = at * job.x.step + (first_row + row) * job.x.row;
                nan |= read_operand(p.W, p.x, job.x, start, C, row_codes,
                                    x + (s * rows + row) * x_stride, x_stride);
                if (rows == 1) continue;
                // Rows of a batch are too short for the hardware prefetcher to detect the stride.
                if (job.x.real && block + ahead + s < job.T)
                    fetch(static_cast<const float *>(job.x.data) + start + next, C);
                if (job.out.real)
                    fetch(job.out.real + at * job.out.real_step +
                              (first_row + row) * job.out.real_row,
                          H);
            }
        }
    };
    // A step projects its own input if steps are processed one at a time with separate plane sums.
    const bool projects =
        Sums<typename V::Lane, P>::kApart && p.W.planes == P && ahead == 1 && rows > 1;
    auto project_steps = [&](int steps, int first, int end, float *to) {
        const Direction direction(of_step);
        if (p.W.planes == 1 || kMaxPlanes == 1)
            project<typename V::Lane, 1, kMode>(p.W, gates, x, x_stride, steps * rows, first, end,
                                                to);
        else
            project<typename V::Lane, kMaxPlanes, kMode>(p.W, gates, x, x_stride, steps * rows,
                                                         first, end, to);
    };
    auto advance_rows = [&](const float *from_input, int64_t at) {
        const Direction direction(of_step);
        if (projects)
            step<V, P, kMode, Sums<typename V::Lane, P>::kApart>(
                p, gates, wide_gates, state, nullptr, x, x_stride, rows, lengths, at, keeps);
        else if (rows > 1)
            step<V, P, kMode, false>(p, gates, wide_gates, state, from_input, nullptr, 0, rows,
                                     lengths, at, keeps);
        else if (!lengths || lengths[0] > at)
            step_row<V, P, kMode>(p, gates, wide_gates, state, from_input, keeps);
    };
    float *next_Wx = Wx + ahead * units * 3;
    const int share = (p.W.groups + kShortAhead - 1) / kShortAhead;
    for (int64_t block = 0; block < job.T; block += ahead) {
        const int steps = static_cast<int>(job.T - block < ahead ? job.T - block : ahead);
        const int64_t left = job.T - block - steps;
        const int next_steps = between ? static_cast<int>(left < ahead ? left : ahead) : 0;
        if (!between || block == 0) {
            read_steps(block, steps);
            if (!projects) project_steps(steps, 0, p.W.groups, Wx);
        }
        for (int s = 0; s < steps; ++s) {
            const int64_t at = job.reverse ? job.T - 1 - (block + s) : block + s;
            if (lengths)
                for (int row = 0; row < rows; ++row)
                    if (lengths[row] <= at)
                        __builtin_memcpy(state.next + row * h_stride, state.codes + row * h_stride,
                                         h_stride * sizeof(OperandByte));
            advance_rows(Wx + s * rows * units * 3, at);
            if (next_steps) {
                if (s == 0) read_steps(block + ahead, next_steps);
                const int first = s * share, end = first + share;
                project_steps(next_steps, first, end < p.W.groups ? end : p.W.groups, next_Wx);
            }
            if (job.held)
                for (int row = 0; row < rows; ++row)
                    restore(p, state, row, job.held + (at * job.N + first_row + row) * H);
            OperandByte *codes = state.codes;
            state.codes = state.next;
            state.next = codes;
            for (int row = 0; row < rows; ++row)
                write_row(job.out, p.h, at, first_row + row, state.h + row * units, H);
        }
        if (next_steps) {
            float *done = Wx;
            Wx = next_Wx;
            next_Wx = done;
        }
    }
    for (int row = 0; row < rows; ++row)
        write_row(job.last, p.h, 0, first_row + row, state.h + row * units, H);
    return nan;
}

template <class V, int P>
bool run_lanes(const FusedPlan &p, const Job &job) {
    [[maybe_unused]] const bool scaled =
        p.rRh.present && p.old_contrib.present && p.new_contrib.present && p.scalable;
    bool nan = false;
    for (int64_t row = job.first_row; row < job.end_row; row += layout.rows) {
        const int64_t left = job.end_row - row;
        const int rows = static_cast<int>(left < layout.rows ? left : layout.rows);
        if constexpr (V::kScales) {
            if (scaled) {
                nan |= run_rows<V, P, Mode::scaled>(p, job, row, rows);
                continue;
            }
        }
        nan |= run_rows<V, P, Mode::any>(p, job, row, rows);
    }
    return nan;
}

// Lanes that run a plan, and the planes of its state.
template <class V, int kPlanes>
struct ChosenLanes {
    using type = V;
    static constexpr int P = kPlanes;
};

// Calls `run` with the lanes of a plan.
template <class V, class Run>
bool with_planes(const FusedPlan &p, Run run) {
    return p.R.planes == 1 ? run(ChosenLanes<V, 1>()) : run(ChosenLanes<V, kMaxPlanes>());
}

template <Ties kHow, class Run>
bool with_ruled(const FusedPlan &p, Run run) {
    if (p.in_float) return run(ChosenLanes<typename RuledOf<WideFloats, kHow>::type, 1>());
#if defined(QG_POWERS)
    if constexpr (kHow == Ties::up || kHow == Ties::any) {
        if (p.powers) return with_planes<typename RuledOf<WidePowers, kHow>::type>(p, run);
    }
#endif
    return with_planes<Ruled<Doubles, kHow>>(p, run);
}

template <class Run>
bool with_lanes(const FusedPlan &p, Run run) {
    if (p.rule == QG_HALF_UP && p.halves) return with_ruled<Ties::up>(p, run);
    if (p.rule == QG_HALF_AWAY && p.stretches) return with_ruled<Ties::stretched>(p, run);
    if (p.rule == QG_HALF_AWAY && p.in_float)
        return run(ChosenLanes<typename RuledOf<WideFloats, Ties::away>::type, 1>());
    if (p.rule != QG_HALF_EVEN && p.rule != QG_FLOOR) return with_ruled<Ties::any>(p, run);
    if (p.in_float) return run(ChosenLanes<WideFloats, 1>());
#if defined(QG_POWERS)
    if (p.powers) return with_planes<WidePowers>(p, run);
#endif
    return with_planes<Doubles>(p, run);
}

bool run_packed(const FusedPlan &p, const Job &job) {
    return with_lanes(p, [&](auto lanes) {
        using L = decltype(lanes);
        return run_lanes<typename L::type, L::P>(p, job);
    });
}

// Writes FusedPlan::gates.
void prepare_gates(const FusedPlan &p, void *to) {
    with_lanes(p, [&](auto lanes) QG_ONCE {
        using Made = PlanGates<typename decltype(lanes)::type>;
        static_assert(sizeof(Made) <= kGatesBytes && __is_trivially_copyable(Made));
        const Made made(p);
        __builtin_memcpy(to, &made, sizeof made);
        return true;
    });
}

// Extends weights that share words.
inline void unpack_words(const Packed &p, int16_t *words) {
    constexpr int kStep = 3 * kGroup * kDepth;
    for (int group = 0; group < p.groups; ++group, words += p.word_stride) {
        const int8_t *from = p.w + group * p.group_stride;
        for (int step = 0, used = 0; step < p.steps; ++step) {
            for (int i = 0; i < kStep; ++i) {
                uint16_t shared;
                __builtin_memcpy(&shared, from + 2 * i, sizeof shared);
                const auto high = static_cast<int16_t>(static_cast<uint16_t>(shared << used));
                words[step * kStep + i] = static_cast<int16_t>(high >> (16 - p.bits));
            }
            used += p.bits;
            if (used < 16) continue;
            used = 0;
            from += 2 * kStep;
        }
    }
}

inline const int16_t *extended(const Packed &p, MemoryPieces &pieces) {
    const int64_t n = p.groups * p.word_stride;
    auto *words = static_cast<int16_t *>(pieces.take(n * sizeof(int16_t)));
    if (p.bits == 8)
        for (int64_t i = 0; i < n; ++i) words[i] = p.w[i];
    else
        unpack_words(p, words);
    return words;
}

bool run_fused(const FusedPlan &p, const Job &job) {
    if (!extends(layout, p, job.end_row - job.first_row, job.T)) return run_packed(p, job);
    MemoryPieces pieces{static_cast<char *>(job.workspace)};
    FusedPlan extended_plan = p;
    extended_plan.W.words = extended(p.W, pieces);
    extended_plan.R.words = extended(p.R, pieces);
    Job rest = job;
    rest.workspace = pieces.next;
    return run_packed(extended_plan, rest);
}
