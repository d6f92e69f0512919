// What blocks of decode_sm90.cu that share the keys of a head leave for combine.cu.
#pragma once
#include "config.cuh"
#include "params.cuh"

struct alignas(8) Float2 {
  float value[2];
};
struct alignas(16) Float4 {
  float value[4];
};

// Results from the keys of one split alone. A row stands for a query of one of the heads that share a key/value head:
// row head_in_group * seqlen_q + query.
struct Partials {
  i64 first;  // of the rows of split 0
  int rows;   // of one split
  float* g_out;
  float* g_lse;

  CUFLASH_DEVICE Partials(const Params& params, int batch, int head_kv)
      : rows(params.num_heads / params.num_heads_kv * params.seqlen_q),
        g_out((float*)params.partial_out),
        g_lse((float*)params.partial_lse) {
    first = ((i64)batch * params.num_heads_kv + head_kv) * params.key_splits * rows;
  }

  // Row `row` of O, of kDimV columns, and its lse.
  CUFLASH_DEVICE float* out(int split, int row) const { return g_out + (first + split * rows + row) * kDimV; }
  CUFLASH_DEVICE float* lse(int split, int row) const { return g_lse + first + split * rows + row; }
};

CUFLASH_DEVICE float* lse_of(const Params& params, int batch, int head, int query) {
  return (float*)params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride +
         query * params.lse.row_stride;
}
