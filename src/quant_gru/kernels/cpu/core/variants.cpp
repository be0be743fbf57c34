#include "cpu/core/variants.hpp"

#include <sstream>
#include <stdexcept>

#if defined(QG_X86)
#include "kernel_runtime/native/processor.hpp"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(QG_NEON_DOT) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Instruction sets that the build left out, separated by commas.
#if !defined(QG_LEFT_OUT)
#define QG_LEFT_OUT ""
#endif

namespace quant_gru {
namespace {

[[maybe_unused]] bool always() { return true; }

#if defined(QG_X86)
using kernel_runtime::bit;
using kernel_runtime::has_avx2;
using kernel_runtime::has_avx512_vnni;
using kernel_runtime::Leaf;

[[maybe_unused]] bool has_avx512_vbmi() { return has_avx512_vnni() && bit(Leaf(7).c, 1); }

[[maybe_unused]] bool has_amx_int8() {
#if defined(QG_EMULATED_TILES)
    return has_avx512_vbmi();
#elif defined(__linux__)
    const Leaf leaf(7);
    if (!has_avx512_vbmi() || !bit(leaf.d, 24) || !bit(leaf.d, 25)) return false;
    // The operating system enables the tile registers of a process on request.
    constexpr long kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}

[[maybe_unused]] bool has_avx_vnni() {
    return has_avx2() && Leaf(7).a >= 1 && bit(Leaf(7, 1).a, 4);
}
#endif

#if defined(QG_NEON_DOT)
[[maybe_unused]] bool has_neon_dot() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#else
    return true;  // every Apple processor of this architecture
#endif
}
#endif

#if defined(QG_TRAINING)
#define QG_TRAINING_FUNCTIONS(space)                                                             \
    , space::scales, space::codes, &space::product_layout, space::fused_derivatives,             \
        space::general_derivatives, space::wide_derivatives, space::fused_derivatives_workspace, \
        space::general_derivatives_workspace, space::wide_derivatives_workspace,                 \
        space::recurrence, space::weight_products
#else
#define QG_TRAINING_FUNCTIONS(space)
#endif
#define QG_VARIANT(text, space, runs)                               \
    {text,         runs,           &space::layout,  space::prepare, \
     space::fused, space::general, space::multiply, space::wide_sums QG_TRAINING_FUNCTIONS(space)}

const Variant kVariants[] = {
#if defined(QG_X86)
#if !defined(QG_WITHOUT_amx_int8)
    QG_VARIANT("amx-int8", amx_int8, has_amx_int8),
#endif
#if !defined(QG_WITHOUT_avx512_vbmi)
    QG_VARIANT("avx512-vbmi", avx512_vbmi, has_avx512_vbmi),
#endif
#if !defined(QG_WITHOUT_avx512_vnni)
    QG_VARIANT("avx512-vnni", avx512_vnni, has_avx512_vnni),
#endif
#if !defined(QG_WITHOUT_avx_vnni)
    QG_VARIANT("avx-vnni", avx_vnni, has_avx_vnni),
#endif
#if !defined(QG_WITHOUT_avx2)
    QG_VARIANT("avx2", avx2, has_avx2),
#endif
#endif
#if defined(QG_NEON_DOT)
#if !defined(QG_WITHOUT_neon_dot)
    QG_VARIANT("neon-dot", neon_dot, has_neon_dot),
#endif
#endif
#if !defined(QG_WITHOUT_portable)
    QG_VARIANT("portable", portable, always),
#endif
};

}  // namespace

std::vector<std::string> variants(bool only_runnable) {
    std::vector<std::string> names;
    for (const Variant &v : kVariants)
        if (!only_runnable || v.runs_here()) names.emplace_back(v.name);
    return names;
}

std::vector<std::string> left_out() {
    std::vector<std::string> names;
    std::istringstream all(QG_LEFT_OUT);
    for (std::string name; std::getline(all, name, ',');) names.push_back(name);
    return names;
}

const Variant &variant_of(const std::string &name) {
    for (const Variant &v : kVariants)
        if (name == v.name && v.runs_here()) return v;
    throw std::invalid_argument("Expected an instruction set that runs here, got " + name);
}

}  // namespace quant_gru
