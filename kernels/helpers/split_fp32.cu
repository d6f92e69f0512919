// Splits float32 arrays into their bfloat16 parts (common/io/bf16_split.cuh), once for all blocks of the kernels that
// read them.
#include "common/io/copies.cuh"
#include "common/io/bf16_split.cuh"

CUFLASH_DEVICE void split_fp32(const Params& params) {
  copy_rows(params, [](u16* place, const float (&x)[8], i64 part_stride) {
    Bytes16 parts[kBf16Parts];
    split_columns(x, parts);
#pragma unroll
    for (int part = 0; part < kBf16Parts; ++part) *(Bytes16*)(place + part * part_stride) = parts[part];
  });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, split_fp32)
