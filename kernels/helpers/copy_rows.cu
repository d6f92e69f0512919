// Copies arrays of 16-bit elements to rows that begin at multiples of 16 bytes, as TMA needs them, once for all blocks
// of the kernels that read them.
#include "common/io/copies.cuh"

static_assert(kElementBytes == 2, "elements are copied as they are");

CUFLASH_DEVICE void copy_to_whole_rows(const Params& params) {
  copy_rows(params, [](u16* to, const u16(&x)[8], i64) {
    Bytes16 words;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) words.word[pair] = x[2 * pair] | (u32)x[2 * pair + 1] << 16;
    *(Bytes16*)to = words;
  });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, copy_to_whole_rows)
