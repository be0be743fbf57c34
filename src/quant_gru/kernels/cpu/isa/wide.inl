// Sums of products of codes of up to 32 bits. Included inside the namespace of an instruction set;
// the compiler vectorizes the loop for it.

inline void run_wide_sums(const WideSums &job) {
    const int64_t inputs = job.inputs;
    for (int c = 0; c < job.channels; ++c) {
        // A row of weights stays in the level-1 cache for all rows of the operand.
        const int32_t *const w = job.w + c * inputs;
        for (int row = 0; row < job.rows; ++row) {
            const int32_t *const v = job.v + row * inputs;
            int64_t sum = 0;
            for (int64_t i = 0; i < inputs; ++i) sum += static_cast<int64_t>(w[i]) * v[i];
            job.sums[static_cast<int64_t>(row) * job.channels + c] = sum;
        }
    }
}
