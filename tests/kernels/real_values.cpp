// Copies of real values for `test_real_values.py`, with the code of the kernels.
#include "cpu/core/real_values.cpp"

extern "C" void convert(int kind, void *values, int64_t count, float *to, int writes) {
    const auto all =
        quant_gru::RealValues::contiguous(values, static_cast<quant_gru::Real>(kind), 1, count);
    if (writes)
        quant_gru::write(to, 1, 1, count, all);
    else
        quant_gru::read(all, 1, 1, count, to);
}
