// Split-KV decode: which keys of which heads a block, or a cluster of blocks, works on, and which queries its rows
// stand for.
//
// All queries of the query heads that share a key/value head are rows of one product: row head_in_group * seqlen_q +
// query. So keys are read only once.
#pragma once
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/float8.cuh"
#include "common/schedule/key_splits.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"

constexpr bool kSplitsKeys = CUFLASH_SPLITS_KEYS;  // blocks share the keys of a head
// Tiles of keys of each block, where a head has as many blocks as its longest keys need, so that splits depend on
// nothing but the keys of the head; 0: keys are split evenly.
constexpr int kSplitTiles = CUFLASH_SPLIT_TILES;

// Iterates over the heads of which a block has keys. The blocks of a cluster have the same heads, and count as one
// block.
struct HeadScheduler {
  KeySplits splits;
  u32 at, stop;  // positions among the keys of all heads
  u32 head;      // key/value head, among those of the whole batch

  CUFLASH_DEVICE explicit HeadScheduler(const Params& params, u32 block = ptx::block_index()) : splits(params) {
    at = splits.start_of_block(block);
    stop = at + splits.heads;
    head = splits.head_at(at);
  }

  CUFLASH_DEVICE bool more() const { return at < stop; }
  CUFLASH_DEVICE void advance() { at = splits.start_of_head(++head); }
};

// The split of one head that a block works on.
struct HeadWork {
  int head_kv, batch;
  int group;  // query heads of the key/value head
  int rows;   // rows of the product that stand for a query
  int key_stop;
  int first_tile, num_tiles;  // tiles of keys of the head, over all of its blocks
  u32 blocks, from, to;       // this block has steps [from, to) of `blocks` steps
  u32 heads;                  // steps of a block: as many as there are key/value heads in the batch
  TileRange keys;             // this block's tiles; but `full_start` and `full_stop` are those of the whole head

  CUFLASH_DEVICE HeadWork(const Params& params, const HeadScheduler& scheduler) {
    head_kv = scheduler.head % params.num_heads_kv;
    batch = scheduler.head / params.num_heads_kv;
    group = params.num_heads / params.num_heads_kv;
    rows = group * params.seqlen_q;
    key_stop = key_stop_of(params, batch);
    keys = key_tiles(params, batch, 0, params.seqlen_q - 1, key_stop);
    first_tile = keys.start, num_tiles = keys.stop - keys.start;
    blocks = scheduler.splits.blocks;
    heads = scheduler.splits.heads;
    from = scheduler.at - scheduler.splits.start_of_head(scheduler.head);
    to = from + min_of(scheduler.stop - scheduler.at, blocks - from);
    keys.start = first_tile + tiles_before(num_tiles, from);
    keys.stop = first_tile + tiles_before(num_tiles, to);
  }

  // How many of `count` tiles come before a step: count * step / blocks, without a product that may overflow.
  CUFLASH_DEVICE int tiles_before(u32 count, u32 step) const {
    if constexpr (kSplitTiles > 0) return min_of((int)(step / heads) * kSplitTiles, (int)count);
    return (int)(count / blocks * step + count % blocks * step / blocks);
  }
  CUFLASH_DEVICE bool has_keys() const { return keys.start < keys.stop; }
  CUFLASH_DEVICE int first_head() const { return head_kv * group; }
};

// A lane holds slices of two rows of the product; here they are row 0 and row 1. Each stands for a query of some head,
// or for no query: then nothing is looked up for it.
struct LaneRows {
  Score score[2];
  Mask mask[2];
  int query[2];

  CUFLASH_DEVICE LaneRows(const Params& params, const HeadWork& work, const int (&row)[2])
      : score{Score(params, work.batch, head_of(params, work, row[0]), work.key_stop),
              Score(params, work.batch, head_of(params, work, row[1]), work.key_stop)},
        mask{Mask(params, work.batch, head_of(params, work, row[0]), work.key_stop),
             Mask(params, work.batch, head_of(params, work, row[1]), work.key_stop)},
        query{row[0] < work.rows ? row[0] % params.seqlen_q : params.seqlen_q,
              row[1] < work.rows ? row[1] % params.seqlen_q : params.seqlen_q} {}

  CUFLASH_DEVICE static int head_of(const Params& params, const HeadWork& work, int row) {
    return work.first_head() + (row < work.rows ? row / params.seqlen_q : 0);
  }

  // Loads the scales of q.
  CUFLASH_DEVICE void load_scales(const Params& params, const HeadWork& work, const int (&row)[2],
                                  float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = QueryScales(params, work.batch, head_of(params, work, row[i])).of(query[i]);
  }

  // The members of a Score and of a Mask that to_scores calls.
  CUFLASH_DEVICE Real of(Real product, int row, int key, Unused& derivative) const {
    return score[row].of(product, query[row], key, derivative);
  }
  CUFLASH_DEVICE Real with_bias(Real x, int row, int key) const { return score[row].with_bias(x, query[row], key); }
  CUFLASH_DEVICE bool visible(int row, int key) const { return mask[row].visible(query[row], key); }
};

// Which weights of these rows dropout drops.
struct LaneDropout {
  Dropout of_row[2];

  CUFLASH_DEVICE LaneDropout(const Params& params, const HeadWork& work, const int (&row)[2])
      : of_row{Dropout(params, work.batch, LaneRows::head_of(params, work, row[0])),
               Dropout(params, work.batch, LaneRows::head_of(params, work, row[1]))} {}

  // Replaces the dropped weights of a tile by zeros; `key` is this lane's first key.
  template <class T, int n_tiles>
  CUFLASH_DEVICE void drop(T (&weight)[n_tiles][4], const LaneRows& rows, int key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int first = 0; first < n_tiles; first += 2) {
        // A call of the generator serves a query and the query 8 rows later.
        const int query = rows.query[half], lower = query / 8 % 2;
        const KeptWeights<false> kept = of_row[half].of(query, key, first);
#pragma unroll
        for (int n = first; n < first + 2; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!kept.keeps(n, i + 2 * lower)) weight[n][2 * half + i] = 0;
      }
  }
};

// Where the queries of the rows are loaded from.
template <class T>
struct GroupRows {
  using Stored = T;

  const T* first;
  i64 head_stride, row_stride;
  int seqlen_q;

  CUFLASH_DEVICE GroupRows(const Params& params, const Tensor& q, const HeadWork& work)
      : first((const T*)q.data + work.batch * q.batch_stride + work.first_head() * q.head_stride),
        head_stride(q.head_stride),
        row_stride(q.row_stride),
        seqlen_q(params.seqlen_q) {}

  CUFLASH_DEVICE const T* row(int i) const { return first + i / seqlen_q * head_stride + i % seqlen_q * row_stride; }
  CUFLASH_DEVICE const T* anywhere() const { return first; }
};
