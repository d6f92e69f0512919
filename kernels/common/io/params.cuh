// The one argument of every kernel. Python fills it (cuflash/gpu/params.py) from its own table of the same fields
// (cuflash/plan/argument.py); the sizes of both must agree.
#pragma once
#include "common/config.cuh"
#if CUFLASH_HAS_FUNCTIONS
#include "common/score/dual.cuh"
#if CUFLASH_TANGENTS
#include "common/score/hyper.cuh"
#endif
#include "common/score/score_functions.cuh"
#include "common/score/tile_bounds.cuh"
#include CUFLASH_FUNCTIONS  // written by cuflash/score_mod/program.py
#endif

// An operand whose last axis is contiguous. Strides are in elements.
struct Tensor {
  void* data;
  i64 batch_stride;
  i64 head_stride;
  i64 row_stride;
};

// An array over (batch, head, query, key). Strides are in elements, and 0 on axes along which it broadcasts.
struct ScoreTensor {
  const void* data;
  i64 batch_stride;
  i64 head_stride;
  i64 row_stride;
  i64 key_stride;
};

// With pages, k and v are pools of pages. The table holds the index of each page of each batch entry; strides are in
// elements.
struct BlockTable {
  const i32* data;
  i64 batch_stride;
  i64 page_stride;
};

struct Params {
  Tensor q, k, v, out, dout, dq, dk, dv;
  Tensor lse, dlse;  // row_stride is the stride between queries; dlse may be absent: null
  // The optional inputs of cuflash/spec/inputs.py, in its order.
  ScoreTensor bias;        // added to the score
  ScoreTensor mask;        // bytes: 0 hides the key
  ScoreTensor block_mask;  // bytes, over (batch, head, block of queries, block of keys): 0 hides the block
  Tensor alibi_slopes;     // (batch, head)
  const void* kv_lengths;
  i64 kv_lengths_stride;
  const void* sinks;  // of Real: one number for each query head
  i64 sinks_stride;
  const void* cu_seqlens_q;  // i32: where packed sequences start, and where the last one ends
  i64 cu_seqlens_q_stride;
  const void* cu_seqlens_k;
  i64 cu_seqlens_k_stride;
  BlockTable block_table;
  Tensor q_scale;           // floats over (batch, head, block of queries)
  Tensor k_scale, v_scale;  // floats over (batch or page, head of k and v, block of keys)
  ScoreTensor dbias;        // written; stride 0 on axes that it is summed over
  Tensor dalibi_slopes;     // (batch, head)
  void* dsinks;
  i64 dsinks_stride;
  void* dscale;  // one Real each, as is dsoftcap
  void* dsoftcap;
  // Scratch memory, of Real.
  // Packed sequences: these arrays have one batch entry, and slots of tiles (common/schedule/schedule.cuh) instead of
  // tiles.
  void* row_stats;       // (batch, num_heads, stats_rows, 2): lse as an exponent, and delta - dlse
  void* dq_accumulator;  // (batch, num_heads, m blocks, block_m * padded head_dim), in fragment order
  void* dkv_partials;    // (batch, num_heads_kv, n blocks, group_splits, dk and dv of a tile), in fragment
                         // order; or (n blocks after whole_tiles, tail_splits, the same)
  void* partial_out;     // (batch * num_heads_kv + resident_blocks, rows of a group, padded head_dim_v)
  void* partial_sums;    // the same with two columns, see common/schedule/key_splits.cuh
  void* arrivals;        // of u64: (batch * num_heads_kv), see common/schedule/key_splits.cuh
  void* q_copy;          // of 16 bits, see common/io/copies.cuh
  void* k_copy;
  void* v_copy;
  void* dout_copy;
  void* key_index;       // of i32: (index_batches, index_heads, m blocks, a row of tiles of keys)
  void* query_index;     // of i32: (index_batches, index_heads, n blocks, a row of tiles of queries)
  void* mask_words;      // of u32: (mask_batches, mask_heads, queries / 64, keys / 64, words of a block)
  void* mask_blocks;     // bytes, the same without words: TileClass of each block, or what masks leave of each tile
  void* score_partials;  // (tiles of dbias, score_splits, elements of a tile)
  void* sums_partials;   // (3, num_heads, batch, m blocks, sums_splits): of dalibi_slopes, dscale, dsoftcap
  // Where blocks that own keys write these two, common/score/key_sums.cuh says how they are laid out.
  u64 call;  // a number less than 2^48 that no other call of this process has
  i32 batch, num_heads, num_heads_kv, seqlen_q, seqlen_k;  // packed: the number of sequences, and the rows of all
  i32 diagonal;      // query i stands at key position i + diagonal; entries may add their own (schedule/sequences.cuh)
  i32 right_offset;  // query i attends to keys up to i + right_offset
  i32 left_offset;   // query i attends to keys from i + left_offset on
  // The fields of RunTime (cuflash/plan/launch_plan.py).
  i32 head_section;     // heads whose blocks are interleaved in the launch order
  i32 stats_rows;       // seqlen_q, rounded up to whole tiles; packed: the rows of all slots of tiles
  i32 group_splits;     // blocks that share the query heads of a key/value head
  i32 whole_tiles;      // tiles of keys that come before those that blocks share
  i32 tail_splits;      // blocks that share the queries of each tile after whole_tiles
  i32 resident_blocks;  // blocks of a persistent kernel
  i32 index_batches;    // batch entries that have block-sparse indices of their own: all or 1
  i32 index_heads;      // query heads that have them: all or 1
  i32 score_splits;     // blocks that share the pairs summed into a tile of dbias
  i32 sums_splits;      // blocks that share the keys of a tile of queries in sums of gradients of scores
  i32 clear_ahead;      // blocks of a head clear the dq accumulators of the head that comes so many later
  float scale;
  float softcap;
  u32 seed_low;  // dropout: the key of the random number generator
  u32 seed_high;
  u32 offset;
  u32 dropout_threshold;  // weights whose 16 bits are less are dropped
  u32 dropout_rows;       // where the counters of the first query and of the first key begin
  u32 dropout_columns;
  u32 dropout_head;   // the counter of the first head
  u32 dropout_heads;  // added to it from one batch entry to the next
  float kept_scale;   // the factor of weights that are kept
  i32 num_pages;      // pages of each pool
  i32 q_scale_shift;  // base-2 logarithms of how many queries, or keys, share a scale
  i32 k_scale_shift;
  i32 v_scale_shift;
  double scale_float64;  // these three are for float64 problems
  double softcap_float64;
  double kept_scale_float64;
  // These are at the end: elsewhere kernels would read fields in groups of 16 bytes, which takes more registers.
  void* bias_blocks;  // BiasBlocks of common/score/mask.cuh, with as many matrices as the bias has
  i32 mask_batches;   // batch entries with bits, or tile classes under masks, of their own; of RunTime
  i32 mask_heads;     // query heads with bits or tile classes of their own
  void* row_sums;     // (batch, num_heads, stats_rows, 2): RowSum of common/score/scores.cuh
#if CUFLASH_ROW_REDUCTIONS
  Tensor max, dmax, entropy, dentropy;  // over rows, as lse is; null where there are none
  // Scratch memory of rows, which lie as row_stats do: common/softmax/row_reduction_gradients.cuh.
  void* row_dentropy;
  void* row_dmax;
  void* row_first_max;
#endif
#if CUFLASH_TANGENTS
  // Tangents, null where there are none: those of inputs and of results, like what they are tangents of.
  Tensor tq, tk, tv, tout, tdout;
  Tensor tlse, tdlse;
  ScoreTensor tbias;
  Tensor talibi_slopes;
  const void* tsinks;
  i64 tsinks_stride;
  const void* tscale;  // one Real each, like tsoftcap
  const void* tsoftcap;
  void* row_tangents;  // scratch memory of Real, like row_stats: tlse, and the tangent of delta - dlse
#endif
#if CUFLASH_HAS_FUNCTIONS
  // Scratch memory of i64, see common/score/score_args_gradients.cuh: (words of a term, elements of all arrays whose
  // gradients are wanted). It comes first to set the alignment of the arrays after it: if they were read in groups of
  // 16 bytes, they would take more registers.
  void* score_arg_sums;
  ScoreArg score_args[max_of(kNumScoreArgs, 1)];  // arrays that score_mod and mask_mod read; missing axes have size 1
  ScoreArg gradients[max_of(kNumScoreArgs, 1)];   // their gradients; null where not wanted
  void* score_arg_largest;  // scratch memory of u64: for each array the bits of a double, then the
                            // largest number of reads of a pair
#endif
};

CUFLASH_DEVICE Real scale_of(const Params& params) {
  if constexpr (kElementBytes == 8) return params.scale_float64;
  return params.scale;
}
CUFLASH_DEVICE Real softcap_of(const Params& params) {
  if constexpr (kElementBytes == 8) return params.softcap_float64;
  return params.softcap;
}
CUFLASH_DEVICE Real kept_scale_of(const Params& params) {
  if constexpr (!kHasDropout) return 1;
  if constexpr (kElementBytes == 8) return params.kept_scale_float64;
  return params.kept_scale;
}

// The sink of a query head: the natural logarithm of what is added to the sum of exponentials of each of its rows.
CUFLASH_DEVICE Real sink_of(const Params& params, int head) {
  return ((const Real*)params.sinks)[head * params.sinks_stride];
}

static_assert(sizeof(Params) == CUFLASH_PARAMS_BYTES, "Params differs from its description in Python");
