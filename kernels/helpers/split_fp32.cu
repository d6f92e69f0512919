// Splits float32 arrays into their bfloat16 terms (common/io/bf16_split.cuh), once for all blocks of the kernels that
// read them.
#include "common/io/copies.cuh"
#include "common/io/bf16_split.cuh"

CUFLASH_DEVICE void split_fp32(const Params& params) {
  copy_rows(params, [](u16* to, const float (&x)[8], i64 term_stride) {
    Bytes16 terms[kBf16Terms];
    split_columns(x, terms);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term) *(Bytes16*)(to + term * term_stride) = terms[term];
  });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, split_fp32)
