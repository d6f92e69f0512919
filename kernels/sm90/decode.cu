// Forward pass for few queries on compute capability 9.0, in 16-bit types: reads K and V once, as fast as memory
// allows.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// All queries of the query heads that share a key/value head fit into the 64 rows of one product: row
// head_in_group * seqlen_q + query. The kernel is persistent: as many blocks as the device holds take equal shares of
// all keys (common/key_splits.cuh). A block that has a head to itself stores its results; the others leave O and lse of
// their keys in scratch memory, and the one of a head that is done last combines them, unless around/combine.cu does.
//
// One thread, the producer, loads tiles by TMA as far ahead as the rings allow: that many bytes have to be on their way
// to keep memory busy. The other warps are the consumer warpgroup, which takes one tile after another. The rings run on
// from one head to the next. Where two blocks share a multiprocessor, the products of one run during the softmax of the
// other.
//
// Keys and values of one byte are converted to float16 by the consumer, a tile at a time, to where products read them.
// Their place in the ring is free from then on. Queries are converted where they lie. Warps without queries convert
// values while the others weigh keys.
//
//   barrier      one phase is over when           who waits
//   q_full       Q of a head has arrived          consumer, before its first S
//   q_empty      every warp has its last S        producer, before Q of the next head
//   k_full[i]    K has arrived in stage i         consumer, before S
//   k_empty[i]   every warp has its S, or its     producer, before the next K in stage i
//                part of K converted
//   v_full[i]    V has arrived in stage i         consumer, before O
//   v_empty[i]   every warp has its O, likewise   producer, before the next V in stage i
//   named: one for the consumer
#include "common/config.cuh"
#include "common/float8.cuh"
#include "common/fragments.cuh"
#include "common/key_splits.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr bool kSplitsKeys = CUFLASH_SPLITS_KEYS;  // blocks share the keys of a head
constexpr bool kCombines = CUFLASH_COMBINES;       // and the last one of a head combines their results
constexpr int kConsumerWarps = 4;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kNTiles = kBlockN / 8;
static_assert(kNumWarps == kConsumerWarps + 1, "the consumer and the producer");
static_assert(kBlockM == 64, "rows of one product");

// What products are made of. Numbers of one byte are numbers of float16, and one instruction makes two of them.
using Operand = Either<kHasFloat8, Float16, Element>::Type;
constexpr bool kNarrowsQueries = kHasFloat8 && !kFloat8Queries && !kIsFloat16<Element>;

// Shared memory: Q; K and V that were converted; the rings of K and V; barriers. A line has 64 columns, or 128 of one
// byte.
constexpr int kKeyChunk = kLineBytes / sizeof(KeyStorage);
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kConvertedK = kHasFloat8 ? chunked_bytes(kBlockN, kDim) : 0;
constexpr u32 kConvertedV = kHasFloat8 ? chunked_bytes(kBlockN, kDimV) : 0;
constexpr u32 kBytesConverted = kConvertedK + kConvertedV;
constexpr u32 kBytesK = ceil_div(kDim, kKeyChunk) * kBlockN * kLineBytes;
constexpr u32 kBytesV = ceil_div(kDimV, kKeyChunk) * kBlockN * kLineBytes;
static_assert(kBytesQ + kBytesConverted + kNumStages * (kBytesK + kBytesV) + QkvBarriers<kNumStages>::kBytes ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct DecodeParams {
  Params common;
  TensorMap q, k, v;  // a box of q holds all rows of a group
};
static_assert(sizeof(DecodeParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared : QkvShared<kNumStages> {
  CUFLASH_DEVICE Shared() : QkvShared(kBytesQ + kBytesConverted, kNumStages * kBytesK, kNumStages * kBytesV) {}
};

// Stores 16 neighbours of one byte a number as operands: a vector of a line, and the next one.
template <class Float8>
CUFLASH_DEVICE void store_operands(u32 address, Float8 type, const Bytes16& bytes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Bytes16 half;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
      half.word[pair] = to_elements(Operand{}, type, (u16)(bytes.word[2 * i + pair / 2] >> pair % 2 * 16));
    ptx::store_shared_b128(address ^ i * 16, half);
  }
}

// What a thread has of a tile of so many rows of numbers of one byte: 16 neighbours at a time, of all threads those of
// the same columns first. Eight neighbouring threads have eight rows, so that they meet in no bank. Vectors of a thread
// differ in constants, by which addresses differ in some bits: lines lie at multiples of their size.
template <int rows, int columns, int threads>
struct BytesOfThread {
  static_assert(threads % rows == 0 || rows % threads == 0, "a thread walks along a row, or from row to row");
  static constexpr int kVectors = columns / 16, kCount = ceil_div(rows * kVectors, threads);
  u32 row, first;

  CUFLASH_DEVICE explicit BytesOfThread(u32 thread) : row(thread % rows), first(thread / rows) {}

  CUFLASH_DEVICE bool exists(int i) const {
    return rows * kVectors % threads == 0 || (int)first + i * threads / rows < kVectors;
  }
  CUFLASH_DEVICE u32 row_of(int i) const { return row + i * threads % rows; }
  CUFLASH_DEVICE Bytes16 load(u32 tile, int i) const {
    const int vector = i * threads / rows;
    const u32 line = tile + row * kLineBytes + (first * 16 ^ row % 8 * 16);
    return ptx::load_shared_b128((line ^ vector % 8 * 16) + (vector / 8 * rows + i * threads % rows) * kLineBytes);
  }
  template <class Float8 = KeyElement>
  CUFLASH_DEVICE void store(u32 tile, int i, const Bytes16& bytes) const {
    const int vector = i * threads / rows;
    const u32 line = tile + row * kLineBytes + (first * 32 ^ row % 8 * 16);
    store_operands((line ^ vector % 4 * 32) + (vector / 4 * rows + i * threads % rows) * kLineBytes, Float8{}, bytes);
  }
};

// Converts the first `valid` rows of a tile of numbers of one byte, and clears the others, if there are any; by so many
// threads.
template <int columns, int threads, bool whole>
CUFLASH_DEVICE void convert_tile(u32 target, u32 source, int valid, u32 thread) {
  const BytesOfThread<kBlockN, columns, threads> own(thread);
#pragma unroll 4
  for (int i = 0; i < own.kCount; ++i) {
    if (!own.exists(i)) break;
    Bytes16 bytes = {};
    if (whole || (int)own.row_of(i) < valid) bytes = own.load(source, i);
    own.store(target, i, bytes);
  }
}

// The same of queries, where they lie: all are read before one is written. `sync` waits for the consumer. Products wait
// for what was written as they do for the first tile of keys, which is converted next.
template <class Sync>
CUFLASH_DEVICE void convert_queries(u32 tile, int valid, u32 thread, Sync sync) {
  const BytesOfThread<kBlockM, kDim, kConsumerThreads> own(thread);
  Bytes16 bytes[own.kCount] = {};
#pragma unroll
  for (int i = 0; i < own.kCount; ++i)
    if (own.exists(i) && (int)own.row_of(i) < valid) bytes[i] = own.load(tile, i);
  sync();
#pragma unroll
  for (int i = 0; i < own.kCount; ++i)
    if (own.exists(i)) own.store(tile, i, bytes[i]);
}

// Makes numbers of float16 of queries of bfloat16, where they lie: a row times the power of two that takes its largest
// number to the end of the range, so that what becomes less than a number is 2^39 times smaller than the largest. Two
// neighbouring threads have a row, and a warp its own. `inverse` takes the powers back, in the two rows of a lane.
CUFLASH_DEVICE void narrow_queries(u32 tile, u32 thread, float (&inverse)[2]) {
  const u32 row = thread / 2, lane = thread % 32;
  const auto each = [&](auto visit) {
#pragma unroll 2
    for (u32 vector = thread % 2; vector < kDim / 8; vector += 2) {
      const u32 address = tile + (vector / 8 * kBlockM + row) * kLineBytes + (vector % 8 * 16 ^ row % 8 * 16);
      Bytes16 x = ptx::load_shared_b128(address);
      visit(address, x);
    }
  };
  u32 largest = 0;
  each([&](u32, const Bytes16& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 high = x.word[i] & 0x7fff0000, low = x.word[i] << 16 & 0x7fff0000;
      largest = largest > high ? largest : high;
      largest = largest > low ? largest : low;
    }
  });
  const u32 other = ptx::shuffle(largest, lane ^ 1);
  const int exponent = (int)((largest > other ? largest : other) >> 23) - 127;
  const int shift = exponent > 127 ? 0 : min_of(14 - exponent, 126);
  const float factor = power_of_two(shift);
  each([&](u32 address, Bytes16& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x.word[i] =
          ptx::pack(Float16{}, ptx::float_of(x.word[i] << 16) * factor, ptx::float_of(x.word[i] & 0xffff0000) * factor);
    ptx::store_shared_b128(address, x);
  });
#pragma unroll
  for (int half = 0; half < 2; ++half)
    inverse[half] = ptx::float_of(ptx::shuffle(ptx::bits_of(power_of_two(-shift)), lane / 4 * 2 + 16 * half));
}

// The heads that a block has keys of, one after another.
struct HeadWalk {
  Shares shares;
  u32 at, stop;  // places among all keys
  u32 head;      // of the batch

  CUFLASH_DEVICE explicit HeadWalk(const Params& params) : shares(params) {
    at = shares.start_of_block(ptx::block_index());
    stop = at + shares.heads;
    head = shares.head_at(at);
  }

  CUFLASH_DEVICE bool more() const { return at < stop; }
  CUFLASH_DEVICE void advance() { at = shares.start_of_head(++head); }
};

// What a block has of one head.
struct HeadWork {
  int head_kv, batch;
  int group;  // query heads of the key/value head
  int rows;   // of the product: those that stand for a query
  int key_stop;
  TileRange keys;  // those of this block; but `full_start` and `full_stop` are those of all blocks together

  CUFLASH_DEVICE HeadWork(const Params& params, const HeadWalk& walk) {
    head_kv = walk.head % params.num_heads_kv;
    batch = walk.head / params.num_heads_kv;
    group = params.num_heads / params.num_heads_kv;
    rows = group * params.seqlen_q;
    key_stop = key_stop_of(params, batch);
    keys = key_tiles(params, batch, 0, params.seqlen_q - 1, key_stop);
    const u32 blocks = walk.shares.blocks, num_tiles = keys.stop - keys.start;
    const u32 from = walk.at - walk.shares.start_of_head(walk.head), to = from + (walk.stop - walk.at);
    // num_tiles * steps / blocks, computed without num_tiles * steps, which may be too large.
    const auto tiles_in = [&](u32 steps) {
      return (int)(num_tiles / blocks * steps + num_tiles % blocks * steps / blocks);
    };
    const int first = keys.start;
    keys.start = first + tiles_in(from);
    if (to < blocks) keys.stop = first + tiles_in(to);
  }

  CUFLASH_DEVICE bool has_keys() const { return keys.start < keys.stop; }
  CUFLASH_DEVICE int first_head() const { return head_kv * group; }
};

// A lane holds parts of two rows of the product, which are row 0 and row 1 here. Each stands for a query of some head,
// or for none: then nothing is looked up for it.
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

  // What q is multiplied by.
  CUFLASH_DEVICE void load_scales(const Params& params, const HeadWork& work, const int (&row)[2],
                                  float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = QueryScales(params, work.batch, head_of(params, work, row[i])).of(query[i]);
  }

  // What to_scores asks of a Score and of a Mask.
  CUFLASH_DEVICE float of(float product, int row, int key, float& derivative) const {
    return score[row].of(product, query[row], key, derivative);
  }
  CUFLASH_DEVICE float with_addend(float x, int row, int key) const {
    return score[row].with_addend(x, query[row], key);
  }
  CUFLASH_DEVICE bool visible(int row, int key) const { return mask[row].visible(query[row], key); }
};

CUFLASH_DEVICE void produce(const DecodeParams& params, Shared& shared) {
  Position<kNumStages> at;
  Position<1> q_at;
  for (HeadWalk walk(params.common); walk.more(); walk.advance()) {
    const HeadWork work(params.common, walk);
    for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
      const Barrier k_full = shared.k_ring.full(at), v_full = shared.v_ring.full(at);
      const KeyTile tile(params.common, work.batch, work.head_kv, n_block, work.key_stop);
      shared.k_ring.empty(at).wait(at.parity ^ 1);
      tile.load<kDim, kKeyChunk>(shared.k + at.stage * kBytesK, params.k, k_full);
      if (n_block == work.keys.stop - 1) {
        const Barrier q_full = shared.q_ring.full(q_at);
        shared.q_ring.empty(q_at).wait(q_at.parity ^ 1);
        constexpr int kQueryChunk = kFloat8Queries ? kKeyChunk : kChunk, kQueryChunks = ceil_div(kDim, kQueryChunk);
        q_full.arrive_expect(kQueryChunks * work.rows * kLineBytes);
#pragma unroll
        for (int c = 0; c < kQueryChunks; ++c)
          ptx::load_tensor(shared.q + c * kBlockM * kLineBytes, params.q, q_full.address, c * kQueryChunk, 0,
                           work.first_head(), work.batch);
        q_at.advance();
      }
      shared.v_ring.empty(at).wait(at.parity ^ 1);
      tile.load<kDimV, kKeyChunk>(shared.v + at.stage * kBytesV, params.v, v_full);
    }
  }
}

// Prepares the counters of arrivals of the heads that this block shares with others.
CUFLASH_DEVICE void prepare_arrivals(const Params& params) {
#pragma unroll 1
  for (HeadWalk walk(params); walk.more(); walk.advance()) {
    const Partials partials(params, walk.shares, walk.head);
    if (partials.count > 1) partials.arrivals(params).prepare();
  }
}

// Combines the results of the heads with which this block is the last to be done. It has stored all of its own results
// before.
CUFLASH_DEVICE void combine_heads(const Params& params) {
#pragma unroll 1
  for (HeadWalk walk(params); walk.more(); walk.advance()) {
    const Partials partials(params, walk.shares, walk.head);
    if (partials.count == 1) continue;
    const bool arrives = ptx::thread_index() == 0;
    if (!ptx::sync_named_any(1, kConsumerThreads, arrives && partials.arrivals(params).arrive())) continue;
#pragma unroll 1
    for (int i = warp_index(); i < partials.rows * kChunks; i += kConsumerWarps)
      partials.combine(params, i / kChunks, i % kChunks);
  }
}

CUFLASH_DEVICE void sync_consumer() { ptx::sync_named(1, kConsumerThreads); }
CUFLASH_DEVICE void release_by_warp(const Barrier& empty) {
  if (lane_index() == 0) empty.arrive();
}

// Makes operands of the queries of a head, where they lie; `scale` is what the products of the two rows of a lane are
// multiplied by.
CUFLASH_DEVICE void prepare_queries(u32 tile, int rows, float (&scale)[2]) {
  const u32 thread = ptx::thread_index();
  if constexpr (kFloat8Queries) convert_queries(tile, rows, thread, sync_consumer);
  if constexpr (kNarrowsQueries) narrow_queries(tile, thread, scale);
}

// Makes operands of a tile of one byte, by the consumer or by the last two of its warps. Then all have read it.
template <int columns>
CUFLASH_DEVICE u32 converted(u32 source, u32 target, int valid, const Barrier& empty, bool by_half = false) {
  if constexpr (kHasFloat8) {
    constexpr int kHalf = kConsumerThreads / 2;
    const int thread = ptx::thread_index();
    const auto convert = [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      if (!by_half)
        convert_tile<columns, kConsumerThreads, kWhole>(target, source, valid, thread);
      else if (thread >= kHalf)
        convert_tile<columns, kHalf, kWhole>(target, source, valid, thread - kHalf);
    };
    if (valid >= kBlockN)
      convert(Constant<true>{});
    else
      convert(Constant<false>{});
  }
  ptx::fence_async_proxy();
  sync_consumer();
  release_by_warp(empty);
  return target;
}

// The epilogue: O / l and lse, to the results or, where blocks share the head, to where they are combined.
CUFLASH_DEVICE void store_rows(const Params& common, const HeadWalk& walk, const HeadWork& work, const LaneRows& rows,
                               const int (&lane_row)[2], OnlineSoftmax<1>& softmax,
                               const ValueScales<Operand>& value_scales, float v_scale, float (&o)[1][kDimV / 8][4]) {
  const Partials partials(common, walk.shares, walk.head);
  const bool is_alone = !kSplitsKeys || partials.count == 1;
  if (kHasSinks && is_alone) {
    softmax.add_sinks(o, [&](int, int half) {
      const int head = work.first_head() + lane_row[half] / common.seqlen_q;
      return lane_row[half] < work.rows ? sink_of(common, head) * kExponentOfE : 0.0f;
    });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row[half];
    if (row >= work.rows) continue;
    const float lse = softmax.log_sum_exp(0, half);
    const float factor = value_scales.row_factor(softmax.inverse_sum(0, half), v_scale);
    const auto store = [&](auto store_lse, auto store_columns) {
      if (fragment_column() == 0) store_lse(lse);
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n)
        store_columns(8 * n + fragment_column(), o[0][n][2 * half] * factor, o[0][n][2 * half + 1] * factor);
    };
    if (is_alone) {
      const int head = work.first_head() + row / common.seqlen_q;
      Storage* g_out = out_of(common, work.batch, head, rows.query[half]);
      store([&](float lse) { *lse_of(common, work.batch, head, rows.query[half]) = lse; },
            [&](int column, float left, float right) { store_pair(g_out, column, left, right); });
    } else {
      const int i = ptx::block_index() - partials.first_block;
      float* g_out = partials.out(i, row);
      store([&](float lse) { ptx::store_for_blocks(partials.lse(i, row), lse); },
            [&](int column, float left, float right) { ptx::store_for_blocks_x2(g_out + column, {left, right}); });
    }
  }
}

// The consumer warpgroup takes one head after another.
CUFLASH_DEVICE void consume(const DecodeParams& params, Shared& shared) {
  const Params& common = params.common;
  const u32 thread = ptx::thread_index();
  const int warp_row = warp_index() * 16;
  // This lane holds parts of these two rows of the product.
  const int lane_row[2] = {warp_row + fragment_row(), warp_row + fragment_row() + 8};

  if (kCombines && thread == 0) prepare_arrivals(common);

  // Rows that stand for no query are never loaded, but are multiplied like the others: they are cleared.
  zero_rows<kBlockM, kDim>(shared.q, common.num_heads / common.num_heads_kv * common.seqlen_q, thread);
  ptx::fence_async_proxy();
  sync_consumer();

  Position<kNumStages> at;
  Position<1> q_at;
#pragma unroll 1
  for (HeadWalk walk(common); walk.more(); walk.advance()) {
    const HeadWork work(common, walk);
    const LaneRows rows(common, work, lane_row);
    const HeadScales<kKScale> k_scales(common, common.k_scale, common.k_scale_shift, work.batch, work.head_kv);
    const HeadScales<kVScale> v_scales(common, common.v_scale, common.v_scale_shift, work.batch, work.head_kv);
    const float k_scale = k_scales.of_head(), v_scale = v_scales.of_head();
    float q_scale[1][2];
    rows.load_scales(common, work, lane_row, q_scale[0]);
    float scales_of_keys[ceil_div(kBlockN, 32)], scales_of_values[ceil_div(kBlockN, 32)], scale[kNTiles][2];
    ValueScales<Operand> value_scales;
    OnlineSoftmax<1> softmax;
    float s[1][kNTiles][4], o[1][kDimV / 8][4];
    FragmentOf<Operand> p[kBlockN / 16] = {};
    set_zero(o);
    // Warps none of whose rows stands for a query weigh nothing: all weights are 0. Two of them convert values meanwhile.
    const bool has_rows = !kHasFloat8 || warp_row < work.rows, by_half = work.rows <= kBlockM / 2;
    const auto multiply_s = [&](int n_block) {  // [GEMM 1] S = Q K^T
      u32 k = shared.k + at.stage * kBytesK;
      shared.k_ring.full(at).wait(at.parity);
      if constexpr (kHasFloat8)
        k = converted<kDim>(k, shared.q + kBytesQ, work.key_stop - n_block * kBlockN, shared.k_ring.empty(at));
      issue_rows<kDim, kBlockM, kBlockN, Operand>(s[0], shared.q, k);
      wait_for<0>(s[0]);
      if constexpr (!kHasFloat8) release_by_warp(shared.k_ring.empty(at));
    };
    const auto multiply_o = [&](int n_block) {  // [GEMM 3] O += P V
      u32 v = shared.v + at.stage * kBytesV;
      shared.v_ring.full(at).wait(at.parity);
      // Values of keys past the last one are cleared: their weights are 0, but what lies there may be NaN, and 0 times
      // NaN is NaN. Tensor maps may reach over more keys than there are (cuflash/launch.py says why).
      const int valid = work.key_stop - n_block * kBlockN;
      if constexpr (kHasFloat8) {
        v = converted<kDimV>(v, shared.q + kBytesQ + kConvertedK, valid, shared.v_ring.empty(at), by_half);
      } else if (valid < kBlockN) {
        zero_rows<kBlockN, kDimV>(v, valid, thread);
        ptx::fence_async_proxy();
        sync_consumer();
      }
      issue_weighted<kBlockN>(o[0], p, v);
      wait_for<0>(o[0]);
      if constexpr (!kHasFloat8) release_by_warp(shared.v_ring.empty(at));
    };
    if (work.has_keys()) {
      shared.q_ring.full(q_at).wait(q_at.parity);
      if constexpr (kHasFloat8) prepare_queries(shared.q, work.rows, q_scale[0]);
    }
#pragma unroll 1
    for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
      const int lane_key = n_block * kBlockN + fragment_column();
      k_scales.load_by_lanes(scales_of_keys, n_block * kBlockN, work.key_stop);  // they arrive during the conversion
      v_scales.load_by_lanes(scales_of_values, n_block * kBlockN, work.key_stop);
      multiply_s(n_block);
      if (has_rows) {
        k_scales.gather(scale, scales_of_keys);
        multiply_columns<kKScale>(s, scale, k_scale);
        if constexpr (kQScale || kNarrowsQueries) multiply_rows(s, q_scale);
        const bool masked = n_block < work.keys.full_start || n_block >= work.keys.full_stop;
        rows.score[0].cap(s);
        to_scores<true>(rows, rows, s, [](int, int i) { return i / 2; }, lane_key, masked);
        softmax.update(s, o, rows.score[0].exponent_scale());
        if constexpr (kVScale == 2) {
          v_scales.gather(scale, scales_of_values);
          value_scales.update(scale, o);
          multiply_columns<kVScale>(s, scale, v_scale);
        }
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) to_operand(s[0], k, p[k]);
      }
      multiply_o(n_block);
    }
    if (work.has_keys()) {
      release_by_warp(shared.q_ring.empty(q_at));
      q_at.advance();
    }
    softmax.finish();
    store_rows(common, walk, work, rows, lane_row, softmax, value_scales, v_scale, o);
  }
  if constexpr (kCombines) {
    sync_consumer();
    combine_heads(common);
  }
}

CUFLASH_DEVICE void decode(const DecodeParams& params) {
  Shared shared;
  shared.make_barriers(kConsumerWarps, kConsumerWarps, kConsumerWarps);
  if (ptx::uniform(warp_index()) < kConsumerWarps)
    consume(params, shared);
  else if (ptx::elect_lane())
    produce(params, shared);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, DecodeParams, kNumThreads, kMinBlocks, decode)
