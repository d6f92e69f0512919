// How the blocks of sm90/decode.cu share the keys, and what those that share a head leave to around/combine.cu.
#pragma once
#include "common/exponential.cuh"
#include "common/fragments.cuh"
#include "common/params.cuh"

struct alignas(8) Float2 {
  float value[2];
};
struct alignas(16) Float4 {
  float value[4];
};

// The keys of all key/value heads of the batch, one head after the other, are cut into as many equal
// shares as there are blocks. So a block has keys of one head or of neighbouring ones, and a head belongs to one block
// or to neighbouring ones. A place among these keys is a number of steps; a head is as many of them long as there are
// blocks.
struct Shares {
  u32 blocks, heads;  // whose product is less than 2^31

  CUFLASH_DEVICE explicit Shares(const Params& params)
      : blocks(params.resident_blocks), heads(params.batch * params.num_heads_kv) {}

  CUFLASH_DEVICE u32 start_of_head(u32 head) const { return head * blocks; }
  CUFLASH_DEVICE u32 start_of_block(u32 block) const { return block * heads; }
  CUFLASH_DEVICE u32 head_at(u32 place) const { return place / blocks; }
  CUFLASH_DEVICE u32 block_at(u32 place) const { return place / heads; }
};

// Results of one head from the keys of each of its blocks alone. A row stands for a query of one of the query heads
// that share the key/value head: row head_in_group * seqlen_q + query.
struct Partials {
  u32 first_block;
  int count;  // of blocks
  int rows;   // of one block
  float* g_out;
  float* g_lse;

  CUFLASH_DEVICE Partials(const Params& params, const Shares& shares, u32 head)
      : first_block(shares.block_at(shares.start_of_head(head))),
        count(shares.block_at(shares.start_of_head(head + 1) - 1) - first_block + 1),
        rows(params.num_heads / params.num_heads_kv * params.seqlen_q) {
    const i64 first_row = (i64)slot(first_block, head) * rows;
    g_out = (float*)params.partial_out + first_row * kDimV;
    g_lse = (float*)params.partial_lse + first_row;
  }

  // The slots of a block's heads and of a head's blocks are neighbours: from one to the next, one of the two grows, or
  // both.
  CUFLASH_DEVICE static u32 slot(u32 block, u32 head) { return block + head; }

  // Row `row` of O, of kDimV columns, and its lse, by the head's `i`-th block.
  CUFLASH_DEVICE float* out(int i, int row) const { return g_out + ((i64)i * rows + row) * kDimV; }
  CUFLASH_DEVICE float* lse(int i, int row) const { return g_lse + (i64)i * rows + row; }

  // log sum exp over the blocks and the sink; -inf where none saw a key. By a warp: every lane gets the same.
  CUFLASH_DEVICE float combined_lse(int row, float sink) const {
    float max = sink, sum = 0.0f;
    for (int i = lane_index(); i < count; i += 32) max = fmaxf(max, *lse(i, row));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) max = fmaxf(max, ptx::shuffle_xor(max, mask));
    if (max == -ptx::infinity()) max = 0.0f;
    for (int i = lane_index(); i < count; i += 32) sum += exponential((*lse(i, row) - max) * kLog2e);
    if (kHasSinks && lane_index() == 0) sum += exponential((sink - max) * kLog2e);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
    return sum == 0.0f ? -ptx::infinity() : max + ptx::log2_approx(sum) * kLn2;
  }

  // What the `i`-th block's O counts for.
  CUFLASH_DEVICE float weight(int i, int row, float combined_lse) const {
    return exponential((*lse(i, row) - combined_lse) * kLog2e);
  }
};

CUFLASH_DEVICE float* lse_of(const Params& params, int batch, int head, int query) {
  return (float*)params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride +
         query * params.lse.row_stride;
}

CUFLASH_DEVICE Storage* out_of(const Params& params, int batch, int head, int query) {
  return (Storage*)params.out.data + batch * params.out.batch_stride + head * params.out.head_stride +
         query * params.out.row_stride;
}

// Rounds two neighbouring columns of a row of the output. Rows of whole 16 bytes have both of them, or neither.
CUFLASH_DEVICE void store_pair(Storage* g_row, int column, float left, float right) {
  if (column < kHeadDimV) *(u32*)(g_row + column) = ptx::pack(Element{}, left, right);
}
