// What the processor that runs this has, in addition to the baseline that every processor of the architecture has.
#pragma once

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

#if defined(MODEL_OF_TILES)
constexpr bool HAS_MODEL = true;  // which AVX2 computes
#else
constexpr bool HAS_MODEL = false;
#endif

struct Processor {
    const char *baseline;  // the name of its instruction set
    bool has_avx2 = false, has_avx512 = false, has_bfloat16 = false, has_tiles = false;
};

#if defined(__x86_64__)

// Whether the system lets this process use tile registers. It is queried once.
inline bool may_use_tiles() {
    if (HAS_MODEL) return true;
#if defined(__linux__)
    constexpr int64_t ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static std::atomic<int> answer{0};               // 1 is yes, 2 is no
    if (answer == 0) answer = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0 ? 1 : 2;
    return answer == 1;
#else
    return false;  // not tried
#endif
}

// By CPUID, and by what the system saves the registers of: compilers that do not know instructions do not know their
// names either, and `__builtin_cpu_supports` needs a library that not every compiler has on every system.
inline Processor find_processor() {
    Processor found{"SSE2"};
    unsigned a, b, c, d, saved, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return found;  // OSXSAVE
    const bool has_fma = (c >> 12 & 1) && (c >> 29 & 1);                  // and conversions of float16
    asm volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    constexpr unsigned AVX = 0x6, AVX512 = 0xe6, F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
#if defined(__APPLE__)
    const bool saves_avx512 = true;  // from their first use on, which XCR0 does not show before
#else
    const bool saves_avx512 = (saved & AVX512) == AVX512;
#endif
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.has_avx2 = (saved & AVX) == AVX && has_fma && (b >> 5 & 1);
    found.has_avx512 = found.has_avx2 && saves_avx512 && (b & F_DQ_BW_VL) == F_DQ_BW_VL;
    const bool has_tiles = (d >> 22 & 1) && (d >> 24 & 1);
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.has_bfloat16 = found.has_avx512 && (a >> 5 & 1);
    found.has_tiles = HAS_MODEL ? found.has_avx2 : found.has_bfloat16 && has_tiles;
    return found;
}

#else

inline bool may_use_tiles() { return false; }
#if defined(__aarch64__)
inline Processor find_processor() { return Processor{"NEON"}; }
#else
inline Processor find_processor() { return Processor{"generic"}; }
#endif

#endif

// Lets the other thread of the core work.
inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace
