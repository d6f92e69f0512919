// What the processor that runs this has, in addition to the baseline that every processor of the architecture has.
#pragma once

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static std::atomic<int> answer{0};            // 1 is yes, 2 is no
    if (answer == 0) answer = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0 ? 1 : 2;
    return answer == 1;
}

// Compilers that do not know instructions do not know their names either: those are found by leaf 7 of CPUID.
inline Processor find_processor() {
    Processor found{"SSE2"};
    __builtin_cpu_init();
    found.has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    found.has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.has_bfloat16 = found.has_avx512 && (a >> 5 & 1);
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) found.has_tiles = found.has_bfloat16 && (d >> 22 & 1) && (d >> 24 & 1);
    if (HAS_MODEL) found.has_tiles = found.has_avx2;
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

inline const Processor &processor() {
    static const Processor found = find_processor();
    return found;
}

// Lets the other thread of the core work.
inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace
