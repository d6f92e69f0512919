// Splits float32 arrays into their bfloat16 parts (common/bf16_split.cuh), once for all blocks of the kernels that read
// them.
#include "common/bf16_split.cuh"
#include "common/copies.cuh"

static_assert(kElementBytes == 4, "parts are those of float32");

CUFLASH_DEVICE void split_fp32(const Params& params) {
  copy_rows(params, [](u16* place, const float (&x)[8], i64 part_stride) {
    Bytes16 parts[kBf16Parts];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      u32 word[kBf16Parts];
      bf16_split(x[2 * pair], x[2 * pair + 1], word);
#pragma unroll
      for (int part = 0; part < kBf16Parts; ++part) parts[part].word[pair] = word[part];
    }
#pragma unroll
    for (int part = 0; part < kBf16Parts; ++part) *(Bytes16*)(place + part * part_stride) = parts[part];
  });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, split_fp32)
