// Splits float32 arrays into their bfloat16 parts (common/bf16_split.cuh), once for all blocks of the kernels that read
// them:
//
//   q, k, v and, in the backward pass, dout  ->  (parts, batch, heads, seqlen, head dimension rounded up to 8)
//
// A block serves kBlockM rows of one head of one array. Rows of k and v that kv_lengths hides are zeros and are not
// read.
#include "common/operands.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"
#include "common/split_columns.cuh"

// Rows [first_row, first_row + kBlockM) of a head; those from `row_stop` to seqlen are zeros. `g_split` is the place of
// the head's first part, the others follow at multiples of `part_stride`.
template <int columns>
CUFLASH_DEVICE void split_rows(const float* head, i64 row_stride, u16* g_split, i64 part_stride, int first_row,
                               int seqlen, int row_stop) {
  constexpr int kWidth = round_up(columns, 8), kVectors = kWidth / 8;
#pragma unroll 4
  for (int i = ptx::thread_index(); i < kBlockM * kVectors; i += kNumThreads) {
    const int row = first_row + i / kVectors, column = i % kVectors * 8;
    if (row >= seqlen) break;
    float x[8] = {};
    if (row < row_stop) load_columns<columns>(head + row * row_stride, column, x);
    Bytes16 parts[kBf16Parts];
    split_columns(x, parts);
#pragma unroll
    for (int part = 0; part < kBf16Parts; ++part)
      *(Bytes16*)(g_split + part * part_stride + (i64)row * kWidth + column) = parts[part];
  }
}

// The `index`-th block of an array.
template <int columns>
CUFLASH_DEVICE void split_block(const Params& params, const Tensor& source, void* parts, int num_heads, int seqlen,
                                bool of_keys, u32 index) {
  constexpr int kWidth = round_up(columns, 8);
  const int blocks_of_head = ceil_div(seqlen, kBlockM);
  const int block = index % blocks_of_head, head = index / blocks_of_head % num_heads;
  const int batch = index / blocks_of_head / num_heads;
  const i64 head_elements = (i64)seqlen * kWidth;
  u16* g_split = (u16*)parts + ((i64)batch * num_heads + head) * head_elements;
  split_rows<columns>(head_of(source, batch, head), source.row_stride, g_split,
                      head_elements * num_heads * params.batch, block * kBlockM, seqlen,
                      of_keys ? key_stop_of(params, batch) : seqlen);
}

CUFLASH_DEVICE void split_fp32(const Params& params) {
  const u32 blocks_q = ceil_div(params.seqlen_q, kBlockM) * params.num_heads * params.batch;
  const u32 blocks_k = ceil_div(params.seqlen_k, kBlockM) * params.num_heads_kv * params.batch;
  u32 index = ptx::block_index();
  if (index < blocks_q)
    return split_block<kHeadDim>(params, params.q, params.q_split, params.num_heads, params.seqlen_q, false, index);
  index -= blocks_q;
  if (index < blocks_k)
    return split_block<kHeadDim>(params, params.k, params.k_split, params.num_heads_kv, params.seqlen_k, true, index);
  index -= blocks_k;
  if (index < blocks_k)
    return split_block<kHeadDimV>(params, params.v, params.v_split, params.num_heads_kv, params.seqlen_k, true, index);
  index -= blocks_k;
  split_block<kHeadDimV>(params, params.dout, params.dout_split, params.num_heads, params.seqlen_q, false, index);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, split_fp32)
