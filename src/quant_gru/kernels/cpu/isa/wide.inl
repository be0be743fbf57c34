// Sums of products of codes of up to 32 bits. Included inside the namespace of an instruction set,
// whose vectors those of the compiler become.

inline void run_wide_sums(const WideSums &job) {
    for (int c = 0; c < job.channels; ++c) {
        const int32_t *const w = job.w + static_cast<int64_t>(c) * job.inputs;
        int64_t sum = 0;
        for (int i = 0; i < job.inputs; ++i) sum += static_cast<int64_t>(w[i]) * job.v[i];
        job.sums[c] = sum;
    }
}
