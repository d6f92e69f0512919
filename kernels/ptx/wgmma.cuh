// Products of a warpgroup (128 threads) on the tensor cores of compute capability 9.0: wgmma (PTX ISA 9.7.15).
//
//   d += a b        a is 64 x k, b is k x n, d is 64 x n in float32;  k is 16, or 32 in fp8
//
// A product is issued and runs by itself. Its operands in registers, its accumulator and its tiles in shared memory
// must be left alone until wgmma_wait. The accumulator is float[n / 8][4] in a thread: warp w of the warpgroup holds
// rows 16 w to 16 w + 15, in the layout of ptx::mma_m16n8k16. So does an operand `a` in registers.
//
// An operand in shared memory is a descriptor: see descriptor().
#pragma once
#include "ptx/tma.cuh"

namespace ptx {

// Describes a tile in shared memory, in lines of 128 bytes with their 16-byte vectors swizzled as TMA does it
// (9.7.15.5.1), the first line at a multiple of 1024 bytes. Elements of k along the lines: 8 rows are `stride_bytes`
// (1024 when they are neighbours) after each other, and a step along k moves `address` within the line. Transposed: 8
// elements of k are `stride_bytes` after each other, and the next 64 rows (of 16-bit elements) `leading_bytes`.
CUFLASH_DEVICE constexpr u64 descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 |
         1ull << 62;
}

}  // namespace ptx

#ifndef CUFLASH_EMULATION  // else the functions come with those of ptx/base.cuh

namespace ptx {

// Warpgroup. wgmma.fence (9.7.15.7.1): registers written so far are visible to the products that follow.
CUFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Warpgroup. wgmma.commit_group (9.7.15.7.2): closes the group of the products issued since the last one.
CUFLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Warpgroup. wgmma.wait_group (9.7.15.7.3): until at most `pending` of the newest groups are in flight.
template <int pending>
CUFLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Thread. Nothing the compiler knows about these registers from before holds after.
template <int n_tiles>
CUFLASH_DEVICE void fence_operand(float (&d)[n_tiles][4]) {
#pragma unroll
  for (int i = 0; i < n_tiles; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// Warpgroup. wgmma.mma_async (9.7.15.5.2), for n = 16, 32, …, 256. `accumulate` false: d = a b.
// `a` in shared memory: wgmma<a_transposed, b_transposed>(type, d, a, b, accumulate). An operand
// lies with its k elements next to each other, or transposed, with its m (or n) elements next to each other.
// `a` in registers: wgmma<b_transposed>(type, d, a, b, accumulate), a[4] of two elements each.

// The accumulator's registers in the source of an instruction, and as its operands: 8 for every 16 columns.
#define CUFLASH_TEXT_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUFLASH_TEXT_2 CUFLASH_TEXT_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUFLASH_TEXT_3 CUFLASH_TEXT_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUFLASH_TEXT_4 CUFLASH_TEXT_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFLASH_TEXT_5 CUFLASH_TEXT_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUFLASH_TEXT_6 CUFLASH_TEXT_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFLASH_TEXT_7 CUFLASH_TEXT_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUFLASH_TEXT_8 CUFLASH_TEXT_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFLASH_TEXT_9 CUFLASH_TEXT_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUFLASH_TEXT_10 CUFLASH_TEXT_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUFLASH_TEXT_11 CUFLASH_TEXT_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUFLASH_TEXT_12 CUFLASH_TEXT_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFLASH_TEXT_13 CUFLASH_TEXT_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUFLASH_TEXT_14 CUFLASH_TEXT_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUFLASH_TEXT_15 CUFLASH_TEXT_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUFLASH_TEXT_16 CUFLASH_TEXT_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUFLASH_N_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUFLASH_OPERANDS_1 CUFLASH_N_TILE(0), CUFLASH_N_TILE(1)
#define CUFLASH_OPERANDS_2 CUFLASH_OPERANDS_1, CUFLASH_N_TILE(2), CUFLASH_N_TILE(3)
#define CUFLASH_OPERANDS_3 CUFLASH_OPERANDS_2, CUFLASH_N_TILE(4), CUFLASH_N_TILE(5)
#define CUFLASH_OPERANDS_4 CUFLASH_OPERANDS_3, CUFLASH_N_TILE(6), CUFLASH_N_TILE(7)
#define CUFLASH_OPERANDS_5 CUFLASH_OPERANDS_4, CUFLASH_N_TILE(8), CUFLASH_N_TILE(9)
#define CUFLASH_OPERANDS_6 CUFLASH_OPERANDS_5, CUFLASH_N_TILE(10), CUFLASH_N_TILE(11)
#define CUFLASH_OPERANDS_7 CUFLASH_OPERANDS_6, CUFLASH_N_TILE(12), CUFLASH_N_TILE(13)
#define CUFLASH_OPERANDS_8 CUFLASH_OPERANDS_7, CUFLASH_N_TILE(14), CUFLASH_N_TILE(15)
#define CUFLASH_OPERANDS_9 CUFLASH_OPERANDS_8, CUFLASH_N_TILE(16), CUFLASH_N_TILE(17)
#define CUFLASH_OPERANDS_10 CUFLASH_OPERANDS_9, CUFLASH_N_TILE(18), CUFLASH_N_TILE(19)
#define CUFLASH_OPERANDS_11 CUFLASH_OPERANDS_10, CUFLASH_N_TILE(20), CUFLASH_N_TILE(21)
#define CUFLASH_OPERANDS_12 CUFLASH_OPERANDS_11, CUFLASH_N_TILE(22), CUFLASH_N_TILE(23)
#define CUFLASH_OPERANDS_13 CUFLASH_OPERANDS_12, CUFLASH_N_TILE(24), CUFLASH_N_TILE(25)
#define CUFLASH_OPERANDS_14 CUFLASH_OPERANDS_13, CUFLASH_N_TILE(26), CUFLASH_N_TILE(27)
#define CUFLASH_OPERANDS_15 CUFLASH_OPERANDS_14, CUFLASH_N_TILE(28), CUFLASH_N_TILE(29)
#define CUFLASH_OPERANDS_16 CUFLASH_OPERANDS_15, CUFLASH_N_TILE(30), CUFLASH_N_TILE(31)

// The instruction for n = 16 `count`; r0 to r7 number the operands after the accumulator's.
#define CUFLASH_WGMMA_16BIT(Type, name, count, n, r0, r1, r2, r3, r4, r5, r6)                                          \
  template <bool a_transposed, bool b_transposed>                                                                      \
  CUFLASH_DEVICE void wgmma(Type, float (&d)[2 * count][4], u64 a, u64 b, bool accumulate) {                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "."\
                 name " {" CUFLASH_TEXT_##count "}, " r0 ", " r1 ", p, 1, 1, " r3 ", " r4 ";\n}"                       \
                 : CUFLASH_OPERANDS_##count                                                                            \
                 : "l"(a), "l"(b), "r"((u32)accumulate), "n"(a_transposed), "n"(b_transposed));                        \
  }                                                                                                                    \
  template <bool b_transposed>                                                                                         \
  CUFLASH_DEVICE void wgmma(Type, float (&d)[2 * count][4], const u32(&a)[4], u64 b, bool accumulate) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "."\
                 name " {" CUFLASH_TEXT_##count "}, {" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, " r6 ";\n}"     \
                 : CUFLASH_OPERANDS_##count                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulate), "n"(b_transposed));       \
  }
#define CUFLASH_WGMMA(count, n, r0, r1, r2, r3, r4, r5, r6)                                                            \
  CUFLASH_WGMMA_16BIT(Float16, "f16", count, n, r0, r1, r2, r3, r4, r5, r6)                                            \
  CUFLASH_WGMMA_16BIT(BFloat16, "bf16", count, n, r0, r1, r2, r3, r4, r5, r6)

CUFLASH_WGMMA(1, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CUFLASH_WGMMA(2, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CUFLASH_WGMMA(3, "48", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CUFLASH_WGMMA(4, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CUFLASH_WGMMA(5, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CUFLASH_WGMMA(6, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CUFLASH_WGMMA(7, "112", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CUFLASH_WGMMA(8, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CUFLASH_WGMMA(9, "144", "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CUFLASH_WGMMA(10, "160", "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CUFLASH_WGMMA(11, "176", "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CUFLASH_WGMMA(12, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CUFLASH_WGMMA(13, "208", "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CUFLASH_WGMMA(14, "224", "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CUFLASH_WGMMA(15, "240", "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CUFLASH_WGMMA(16, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// The same of fp8 elements: wgmma_k32(type of a, type of b, d, a, b, accumulate). Operands in shared memory lie
// with their k elements next to each other; a[4] in registers has four elements each, those of k = 4t to 4t + 3 where
// 16-bit elements have k = 2t and 2t + 1, and 16 further along where these have 8. Sums keep about 14 bits: they are
// cut off there, tile after tile.
#define CUFLASH_N_TILES_1 "%0, %1, %2, %3"
#define CUFLASH_N_TILES_8 CUFLASH_TEXT_4
#define CUFLASH_N_TILES_5 CUFLASH_TEXT_2 ", %16, %17, %18, %19"
#define CUFLASH_N_TILES_9 CUFLASH_TEXT_4 ", %32, %33, %34, %35"
#define CUFLASH_N_TILES_12 CUFLASH_TEXT_6
#define CUFLASH_N_TILES_13 CUFLASH_TEXT_6 ", %48, %49, %50, %51"
#define CUFLASH_N_TILES_16 CUFLASH_TEXT_8
#define CUFLASH_N_TILES_17 CUFLASH_TEXT_8 ", %64, %65, %66, %67"
#define CUFLASH_SUMS_1 CUFLASH_N_TILE(0)
#define CUFLASH_SUMS_8 CUFLASH_OPERANDS_4
#define CUFLASH_SUMS_5 CUFLASH_OPERANDS_2, CUFLASH_N_TILE(4)
#define CUFLASH_SUMS_9 CUFLASH_OPERANDS_4, CUFLASH_N_TILE(8)
#define CUFLASH_SUMS_12 CUFLASH_OPERANDS_6
#define CUFLASH_SUMS_13 CUFLASH_OPERANDS_6, CUFLASH_N_TILE(12)
#define CUFLASH_SUMS_16 CUFLASH_OPERANDS_8
#define CUFLASH_SUMS_17 CUFLASH_OPERANDS_8, CUFLASH_N_TILE(16)

#define CUFLASH_WGMMA_8BIT(A, a_name, B, b_name, tiles, n, r0, r1, r2, r3, r4, r5)                                     \
  CUFLASH_DEVICE void wgmma_k32(A, B, float (&d)[tiles][4], u64 a, u64 b, bool accumulate) {                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32." a_name  \
                 "." b_name " {" CUFLASH_N_TILES_##tiles "}, " r0 ", " r1 ", p, 1, 1;\n}"                              \
                 : CUFLASH_SUMS_##tiles                                                                                \
                 : "l"(a), "l"(b), "r"((u32)accumulate));                                                              \
  }                                                                                                                    \
  CUFLASH_DEVICE void wgmma_k32(A, B, float (&d)[tiles][4], const u32(&a)[4], u64 b, bool accumulate) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32." a_name  \
                 "." b_name " {" CUFLASH_N_TILES_##tiles "}, {" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1;\n}"    \
                 : CUFLASH_SUMS_##tiles                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulate));                          \
  }
#define CUFLASH_WGMMA_K32(tiles, n, r0, r1, r2, r3, r4, r5)                                                            \
  CUFLASH_WGMMA_8BIT(Float8E4M3, "e4m3", Float8E4M3, "e4m3", tiles, n, r0, r1, r2, r3, r4, r5)                         \
  CUFLASH_WGMMA_8BIT(Float8E4M3, "e4m3", Float8E5M2, "e5m2", tiles, n, r0, r1, r2, r3, r4, r5)                         \
  CUFLASH_WGMMA_8BIT(Float8E5M2, "e5m2", Float8E5M2, "e5m2", tiles, n, r0, r1, r2, r3, r4, r5)

CUFLASH_WGMMA_K32(1, "8", "%4", "%5", "%6", "%7", "%8", "%9")
CUFLASH_WGMMA_K32(5, "40", "%20", "%21", "%22", "%23", "%24", "%25")
CUFLASH_WGMMA_K32(8, "64", "%32", "%33", "%34", "%35", "%36", "%37")
CUFLASH_WGMMA_K32(9, "72", "%36", "%37", "%38", "%39", "%40", "%41")
CUFLASH_WGMMA_K32(12, "96", "%48", "%49", "%50", "%51", "%52", "%53")
CUFLASH_WGMMA_K32(13, "104", "%52", "%53", "%54", "%55", "%56", "%57")
CUFLASH_WGMMA_K32(16, "128", "%64", "%65", "%66", "%67", "%68", "%69")
CUFLASH_WGMMA_K32(17, "136", "%68", "%69", "%70", "%71", "%72", "%73")

}  // namespace ptx

#endif  // CUFLASH_EMULATION
