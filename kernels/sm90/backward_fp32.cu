// Backward pass of float32 on compute capability 9.0 (Hopper), transposed, with wgmma and TMA.
//
//   P' = exp(K Q' - lse)    dP' = V dO'    dS' = P' * (dP' - delta)
//   dV = P' dO              dK = dS' Q     dQ += dS K                       (X' is X transposed; rows of X' are keys)
//
// Each factor comes split into three or two bfloat16 terms (common/io/bf16_split.cuh), and each product is a sum of six
// products of terms, or of three. The tensor cores truncate their sums instead of rounding them. So they sum only over
// a chunk of 64 columns, or over the 64 rows of a tile, and chunks and tiles are added with rounding. Only scores are
// one sum of the tensor cores, as in the forward pass.
//
// A block owns 64 keys of one key/value head and iterates over the tiles of 64 queries, and over the query heads that
// share its keys. Nothing is computed twice: the first warpgroup makes P' and dV and hands P' to the second, which
// makes dS' and dK and hands dS' to the third, which makes dQ of the tile and adds it to memory. Two threads of the
// last warpgroup are producers: they load tiles by TMA, chunk by chunk, as soon as a chunk of the tile before is free.
// If the gradient of a per-pair bias is wanted, the second warpgroup leaves dS in place of the tile of bias, and a
// third thread adds it to dbias in memory by TMA, or stores it.
//
//   barrier         one phase is over when                      who waits
//   k_full, v_full  K, or V, has arrived                        the warpgroups that multiply with it
//   q_full[i]       a chunk of Q is in i; with the first chunk  P', dK
//                   also statistics and the bias of its pairs
//   q_empty[i]      dK of the chunk is made, and so is P';      the producer of Q; dQ, if it is late (kDqLate)
//                   dbias has been read
//   do_full[i]      a chunk of dO is in i                       dP', dV
//   do_empty[i]     dP' and dV of the chunk are made            the producer of dO
//   p_full[i]       P' is in buffer i                           dS'
//   ds_full[i]      dS' has replaced P' in buffer i             dQ
//   ds_empty[i]     dQ of this dS' is made                      P', before it is written there again
//   dbias_full[i]   dS has replaced the bias in stage i         the thread that writes dbias
//   named: one for the warpgroup of dK
#include "common/io/bf16_split.cuh"
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/score/scores.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kRows = 64;  // rows of every tile
constexpr int kTileColumns = kRows / 8, kSteps = kRows / 16;
constexpr int kChunkTiles = kChunk / 8;  // n-tiles of a chunk
static_assert(kBlockM == kRows && kBlockN == kRows, "tiles of one product");
static_assert(kNumWarps == 16, "dV, dK, dQ and the producers");
constexpr int kBuffers = CUFLASH_NUM_BUFFERS;  // for P' and dS'
// Whether dQ of a tile waits until the first chunk of its dK is done. Then dK is done sooner, gives Q back sooner, and
// the next tile of Q arrives sooner.
constexpr bool kDqLate = CUFLASH_DQ_LATE;
static_assert(!kDqLate || kBuffers <= kNumStages, "dQ sees every phase of q_empty");

// A tile is stored as chunks of 64 columns, and a chunk as its bfloat16 terms, one after the other. Products skip the
// columns of the last chunk that lie past the head dimension, rounded up to a multiple of 16.
constexpr int kChunks = chunks_of(kDim), kChunksV = chunks_of(kDimV);
constexpr u32 kBytesTerm = chunked_bytes(kRows, kChunk);
constexpr u32 kBytesChunk = kBf16Terms * kBytesTerm;
constexpr u32 kBytesK = kChunks * kBytesChunk, kBytesV = kChunksV * kBytesChunk;
constexpr u32 kBytesStats = kRows * 8;
constexpr u32 kBytesBarriers =
    8 * (2 + 2 * kNumStages * (kChunks + kChunksV) + 3 * kBuffers + kNumStages * kNeedsDbias);
static_assert((kNumStages + 1) * (kBytesK + kBytesV) + kBuffers * kBytesChunk +
                      kNumStages * (kBytesBias + kBytesStats) + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them. In all, they are at most as many as the block
// started with.
constexpr int kConsumerRegisters = 200, kDqRegisters = 80, kProducerRegisters = 32;

constexpr u32 kDkWarpgroup = 1;  // named barrier

static_assert(!kNeedsDbias || (kBiasOfPairs && kBiasBytes == 4), "dbias takes the place of the bias");
static_assert(!kNeedsDbias || !kHasDerivative, "the gradient of the score is that of the scaled product");
// Whether tiles of pairs add to the same tile of dbias, because the bias broadcasts. Otherwise each stores its own.
#ifndef CUFLASH_ADDS_DBIAS
#define CUFLASH_ADDS_DBIAS 0
#endif

// The tensor maps: q and k, v and dout, the bias and its gradient.
constexpr int kMapQ = 0, kMapK = 1, kMapV = 2, kMapDout = 3, kMapBias = kHasValues ? 4 : 2;
constexpr int kMaps = kMapBias + kBiasOfPairs + kNeedsDbias, kMapDbias = kMaps - 1;
struct BackwardParams {
  Params common;
  TensorMap maps[kMaps];
};
static_assert(sizeof(BackwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// The barriers of the buffers in which P' and then dS' are handed on.
struct BufferBarriers {
  u32 address;

  CUFLASH_DEVICE Barrier p_full(const Position<kBuffers>& at) const { return {address + 24 * at.stage}; }
  CUFLASH_DEVICE Barrier ds_full(const Position<kBuffers>& at) const { return {address + 24 * at.stage + 8}; }
  CUFLASH_DEVICE Barrier ds_empty(const Position<kBuffers>& at) const { return {address + 24 * at.stage + 16}; }
};

// The ring of tiles of Q, or of dO, with barriers for each chunk of a tile.
template <int chunks>
struct ChunkRing {
  static constexpr u32 kBytes = kNumStages * chunks * kBytesChunk;
  static constexpr u32 kBarrierBytes = Ring<kNumStages * chunks>::kBytes;
  u32 tiles;
  Ring<kNumStages * chunks> barriers;

  CUFLASH_DEVICE u32 tile(const Position<kNumStages>& at) const { return tiles + at.stage * (chunks * kBytesChunk); }
  CUFLASH_DEVICE Barrier full(const Position<kNumStages>& at, int c) const {
    return barriers.full({at.stage * chunks + c});
  }
  CUFLASH_DEVICE Barrier empty(const Position<kNumStages>& at, int c) const {
    return barriers.empty({at.stage * chunks + c});
  }
};

struct Shared {
  u32 k, v, buffers, bias, stats;
  Barrier k_full, v_full;
  ChunkRing<kChunks> q_ring;
  ChunkRing<kChunksV> do_ring;
  BufferBarriers handed;
  u32 dbias_barriers;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    v = k + kBytesK;
    q_ring.tiles = v + kBytesV;
    do_ring.tiles = q_ring.tiles + q_ring.kBytes;
    buffers = do_ring.tiles + do_ring.kBytes;
    bias = buffers + kBuffers * kBytesChunk;
    stats = bias + kNumStages * kBytesBias;
    k_full = {stats + kNumStages * kBytesStats};
    v_full = {k_full.address + 8};
    q_ring.barriers = {v_full.address + 8};
    do_ring.barriers = {q_ring.barriers.address + q_ring.kBarrierBytes};
    handed = {do_ring.barriers.address + do_ring.kBarrierBytes};
    dbias_barriers = handed.address + 24 * kBuffers;
  }
  CUFLASH_DEVICE u32 buffer_of(const Position<kBuffers>& at) const { return buffers + at.stage * kBytesChunk; }
  // The tile of bias, and the pairs of a warp in it, which owns 16 keys from `warp_key` on.
  CUFLASH_DEVICE u32 bias_of(const Position<kNumStages>& at) const { return bias + at.stage * kBytesBias; }
  CUFLASH_DEVICE u32 bias_of(const Position<kNumStages>& at, int warp_key) const {
    return bias_of(at) + warp_key / kBiasChunk * kBlockM * kLineBytes + warp_key % kBiasChunk * kBiasBytes;
  }
  CUFLASH_DEVICE Barrier dbias_full(const Position<kNumStages>& at) const { return {dbias_barriers + 8 * at.stage}; }
};

// ---- Products of terms ---------------------------------------------------------------------------------------------

// Calls multiply(a, b, k, accumulate) for the pairs of terms a and b whose products count, and for each step along k.
template <int steps, class Multiply>
CUFLASH_DEVICE void for_term_products(Multiply multiply) {
  repeat<kTermProducts>([&](auto i) __attribute__((always_inline)) {
    constexpr TermProduct product = term_product(decltype(i)::value);
#pragma unroll
    for (int k = 0; k < steps; ++k)
      multiply(Integer<product.a>{}, Integer<product.b>{}, k, decltype(i)::value > 0 || k > 0);
  });
}
CUFLASH_DEVICE u64 term_of(u64 chunk, int term) { return chunk + term * (kBytesTerm / 16); }

// Issues d = a b', over the first `columns` columns of tiles stored by rows.
template <int columns>
CUFLASH_DEVICE void multiply_rows(float (&d)[kTileColumns][4], u32 a, u32 b) {
  const u64 rows_a = descriptor_of(a), rows_b = descriptor_of(b);
  issue(d, [&]() __attribute__((always_inline)) {
    for_term_products<columns / 16>([&](auto i, auto j, int k, bool accumulate) __attribute__((always_inline)) {
      // The terms of b come in the order in which the forward pass has those of its first factor.
      ptx::wgmma<false, false>(BFloat16{}, d, along_k<kBf16Terms * kRows>(term_of(rows_a, j.value), k),
                               along_k<kBf16Terms * kRows>(term_of(rows_b, i.value), k), accumulate);
    });
  });
}

// The n-tiles of chunk `c` of an accumulator.
template <int c, int n_tiles>
CUFLASH_DEVICE auto& chunk_of(float (&value)[n_tiles][4]) {
  constexpr int kFirst = c * kChunkTiles;
  return (float (&)[min_of(n_tiles - kFirst, kChunkTiles)][4]) value[kFirst];
}

// An accumulator as the terms of an operand in registers.
struct Operand {
  u32 word[kBf16Terms][kSteps][4];
};

// total += a b, with b stored by rows. `arrives(c)` waits for chunk c of b, `release(c)` gives the chunk back, and
// `meanwhile` is called while the first products run.
template <int n_tiles, class Arrives, class Meanwhile, class Release>
CUFLASH_DEVICE void add_product(float (&total)[n_tiles][4], const Operand& a, u32 b, Arrives arrives,
                                Meanwhile meanwhile, Release release) {
  constexpr int kCount = chunks_of(8 * n_tiles);
  float sum[n_tiles][4];
  repeat<kCount>([&](auto chunk) __attribute__((always_inline)) {
    constexpr int c = decltype(chunk)::value;
    auto& chunk_sum = chunk_of<c>(sum);
    const u64 columns = descriptor_of_transposed<kRows>(b + c * kBytesChunk);
    arrives(c);
    issue(chunk_sum, [&]() __attribute__((always_inline)) {
      for_term_products<kSteps>([&](auto i, auto j, int k, bool accumulate) __attribute__((always_inline)) {
        ptx::wgmma<true>(BFloat16{}, chunk_sum, a.word[i.value][k], along_k_transposed(term_of(columns, j.value), k),
                         accumulate);
      });
    });
    if constexpr (c == 0) meanwhile();
  });
  repeat<kCount>([&](auto chunk) __attribute__((always_inline)) {
    constexpr int c = decltype(chunk)::value;
    wait_for<kCount - 1 - c>(chunk_of<c>(sum));
    release(c);
#pragma unroll
    for (int n = c * kChunkTiles; n < min_of(n_tiles, (c + 1) * kChunkTiles); ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[n][i] += sum[n][i];
  });
}

// Splits an accumulator into terms by `split_pair`, and returns the sum of the results of `split_pair`.
template <class SplitPair>
CUFLASH_DEVICE float to_operand(const float (&value)[kTileColumns][4], Operand& operand, SplitPair split_pair) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTileColumns; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 word[kBf16Terms];
      sum += split_pair(value[n][2 * half], value[n][2 * half + 1], word);
#pragma unroll
      for (int term = 0; term < kBf16Terms; ++term) operand.word[term][n / 2][n % 2 * 2 + half] = word[term];
    }
  return sum;
}

// ---- Roles ----------------------------------------------------------------------------------------------------------

// A producer is one thread. It loads K, and tiles of Q as chunks become free, with the statistics of their rows and the
// bias of their pairs. Or it loads V, and tiles of dO.
template <int chunks, bool of_queries>
CUFLASH_DEVICE void produce(const BackwardParams& params, const Shared& shared, const TensorMap& keys, u32 s_keys,
                            const Barrier& keys_full, const TensorMap& queries, const ChunkRing<chunks>& ring) {
  const Params& common = params.common;
  const BackwardWork tile(common);
  if (tile.num_steps == 0) return;
  const int batch = tile.work.batch;
  const auto load = [&](u32 destination, const TensorMap& map, const Barrier& full, int c, int row, int head) {
#pragma unroll 1
    for (int term = 0; term < kBf16Terms; ++term)
      ptx::load_tensor(destination + term * kBytesTerm, map, full.address, c * kChunk, row, head,
                       term * common.batch + batch);
  };
  keys_full.arrive_expect(chunks * kBytesChunk);
#pragma unroll
  for (int c = 0; c < chunks; ++c) load(s_keys + c * kBytesChunk, keys, keys_full, c, tile.first_key, tile.head_kv);

  QueryTileIterator m_tile = tile.first();
  Position<kNumStages> at;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
    const int first_row = m_tile.m_block * kRows;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const Barrier full = ring.full(at, c);
      ring.empty(at, c).wait(at.parity ^ 1);
      const bool is_first = of_queries && c == 0;
      full.arrive_expect(kBytesChunk + (is_first ? kBytesStats + kBytesBias : 0));
      load(ring.tile(at) + c * kBytesChunk, queries, full, c, first_row, m_tile.head);
      if (is_first)
        ptx::load_bulk(shared.stats + at.stage * kBytesStats, stats_of(common, batch, m_tile.head) + first_row * 2,
                       kBytesStats, full.address);
      if constexpr (of_queries && kBiasOfPairs) {
        if (is_first)
          load_bias(common, shared.bias_of(at), params.maps[kMapBias], full, first_row, tile.first_key, m_tile.head,
                    batch);
      }
    }
  }
}

// Stores dK or dV: as rows of the result, or as this block's partial sums where several blocks add to the same rows.
template <int head_dim, int n_tiles>
CUFLASH_DEVICE void store_rows(const Params& params, const Tensor& result, const BackwardWork& tile, Real* partials,
                               u32 thread, const float (&value)[n_tiles][4], float factor) {
  if (tile.is_shared) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
      *(Real4*)(partials + n * 128 * 4) = {value[n][0], value[n][1], value[n][2], value[n][3]};
    return;
  }
  Storage* head = (Storage*)head_of(result, tile.work.batch, tile.head_kv);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = tile.first_key + thread / 32 * 16 + fragment_row() + half * 8;
    if (key >= params.seqlen_k) continue;
    store_row<head_dim>(head + key * result.row_stride, value, half, factor);
  }
}

// [3] P' = exp(S' - lse), in place of S'. The second warpgroup gets a factor for dP' - delta: P' times the derivative
// of the score in the scaled product. Its sign marks the weights that dropout drops.
// `row_of_query(query, lse)` is a row as weights take it.
template <class Row>
CUFLASH_DEVICE void hand_over_p(float (&p)[kTileColumns][4], const Weights& weights, const BiasTerms<true>& bias_terms,
                                const Dropout& dropout, bool masked, int lane_query, int lane_key, u32 s_stats, u32 s_p,
                                Row row_of_query) {
  [[maybe_unused]] KeptWeights<true> kept;
  float stats[4], factor[4];  // lse and delta of this lane's two queries in an n-tile
  const auto start = [&](int n) __attribute__((always_inline)) {
    if (kHasDropout && n % 2 == 0) kept = dropout.transposed(lane_query + 8 * n, lane_key);
    ptx::load_shared_f32x4(s_stats + n * 64, stats);
  };
  const auto finish = [&](int n, int i, float derivative) __attribute__((always_inline)) {
    factor[i] = kHasDerivative ? p[n][i] * derivative : p[n][i];
    if (kHasDropout && !kept.keeps(n, i)) factor[i] = -factor[i], p[n][i] = 0.0f;
    if (i % 2 == 1) ptx::store_shared_x2(s_p + n * 2048 + i / 2 * 1024, {factor[i - 1], factor[i]});
  };
  if constexpr (kAddsByTile) {
    bias_terms.visit<kTileColumns>([&](int n, int i, auto score_of) __attribute__((always_inline)) {
      if (i == 0) start(n);
      const int query = lane_query + 8 * n + i % 2;
      float derivative;
      p[n][i] = weights.of_added(p[n][i], query, lane_key + i / 2 * 8, masked, row_of_query(query, stats[i % 2 * 2]),
                                 derivative, score_of);
      finish(n, i, derivative);
    });
  } else {
#pragma unroll
    for (int n = 0; n < kTileColumns; ++n) {
      start(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = lane_query + 8 * n + i % 2;
        float derivative;
        p[n][i] = weights.of_hidden(p[n][i], query, lane_key + i / 2 * 8, masked, row_of_query(query, stats[i % 2 * 2]),
                                    derivative);
        finish(n, i, derivative);
      }
    }
  }
}

// The first warpgroup makes P', which it hands to the second one, and dV.
CUFLASH_DEVICE void make_dv(const BackwardParams& params, const Shared& shared, u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common);
  const int batch = tile.work.batch;
  const int warp_key = thread / 32 * 16, lane_key = tile.first_key + warp_key + fragment_row();
  float dv[max_of(kDimV / 8, 1)][4];
#pragma unroll
  for (auto& tile : dv) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;

  if (tile.num_steps > 0) shared.k_full.wait(0);
  QueryTileIterator m_tile = tile.first();
  Position<kNumStages> at;
  Position<kBuffers> buffer;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step) {
    const int head = m_tile.head, m_block = m_tile.m_block, first_row = m_block * kRows;
    float p[kTileColumns][4];
    // [GEMM 1] S' = K Q'. Scores are one sum of the tensor cores, as in the forward pass: then lse lacks what they cut
    // off, just as S' does.
#pragma unroll
    for (int c = 0; c < kChunks; ++c) shared.q_ring.full(at, c).wait(at.parity);
    const u32 s_stats = shared.stats + at.stage * kBytesStats + fragment_column() * 8;
    const bool large = is_of_large(ptx::float_of(ptx::load_shared_b32(s_stats)));
    multiply_rows<kDim>(p, shared.k, shared.q_ring.tile(at));

    const Weights weights(common, batch, head, tile.key_stop);
    const bool masked = m_tile.needs_mask(tile.queries);
    const auto row_of = [&](int n, int i) { return first_row + 8 * n + fragment_column() + i % 2; };
    const auto key_of = [&](int, int i) { return lane_key + i / 2 * 8; };
    BiasTerms<true> bias_terms(weights.score, row_of(0, 0), lane_key, shared.bias_of(at, warp_key));
    if constexpr (kHasPerKeyValues) {  // loaded before the wait, because they are needed right after it
      const PerKeyValues numbers(common, weights.score, batch, head);
      bias_terms.of_keys[0] = numbers.of(lane_key), bias_terms.of_keys[1] = numbers.of(lane_key + 8);
    }
    wait_for<0>(p);
    weights.hide_products((float (&)[1][kTileColumns][4])p, masked, row_of, key_of);
    const u32 s_p = shared.buffer_of(buffer) + thread * 8;
    shared.handed.ds_empty(buffer).wait(buffer.parity ^ 1);
    const Dropout dropout(common, batch, head);
    const auto hand_over = [&](auto row_of_query) __attribute__((always_inline)) {
      hand_over_p(p, weights, bias_terms, dropout, masked, row_of(0, 0), lane_key, s_stats, s_p, row_of_query);
    };
    const auto row_sum_of = [&](int n, int i) -> const RowSum& {
      return row_sums_of(common, batch, head)[row_of(n, i)];
    };
    const auto by_row_sum_or_lse = [&](auto by_row_sum) __attribute__((always_inline)) {
      if constexpr (by_row_sum)
        hand_over([row_sums = row_sums_of(common, batch, head)](int query, float) { return row_sums[query]; });
      else
        hand_over([](int, float lse) { return PlainRow{lse}; });
    };
    weights.by_statistics((float (&)[1][kTileColumns][4])p, large, row_sum_of, by_row_sum_or_lse);
    ptx::fence_async_proxy();  // lse has been read where TMA writes next
    shared.handed.p_full(buffer).arrive();

    if constexpr (kHasValues) {
      Operand operand;
      to_operand(p, operand, bf16_split_small);
      add_product(  // [GEMM 5] dV += P' dO
          dv, operand, shared.do_ring.tile(at), [&](int c) { shared.do_ring.full(at, c).wait(at.parity); }, [] {},
          [&](int c) {
            if (thread == 0) shared.do_ring.empty(at, c).arrive();
          });
    }
    at.advance();
    buffer.advance();
    m_tile.advance(tile.queries);
  }

  if constexpr (kNeedsDv) {
    Real* partials = tile.partials(common, thread) + kRows * kDim;
    store_rows<kHeadDimV>(common, common.dv, tile, partials, thread, dv, kept_scale_of(common));
  }
}

// Makes dP' of the sums of its chunks. The tensor cores sum each chunk by itself, and chunks are added with rounding.
constexpr int kChunkSums = max_of(kChunksV, 1);
CUFLASH_DEVICE void add_chunks(float (&ds)[kTileColumns][4], const float (&chunk_sum)[kChunkSums][kTileColumns][4]) {
#pragma unroll
  for (int n = 0; n < kTileColumns; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ds[n][i] = kHasValues ? chunk_sum[0][n][i] : 0.0f;
#pragma unroll
      for (int c = 1; c < kChunksV; ++c) ds[n][i] += chunk_sum[c][n][i];
    }
}

// [4] dS' = P' * (dP' - delta), in place of dP'. Pairs without weight add nothing to dbias, even if dP' is a NaN there,
// as it may be for keys that a mask hides.
CUFLASH_DEVICE void make_ds(float (&ds)[kTileColumns][4], u32 s_p, u32 s_stats, float kept_scale) {
#pragma unroll
  for (int n = 0; n < kTileColumns; ++n) {
    float stats[4];
    ptx::load_shared_f32x4(s_stats + n * 64, stats);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float p[2];
      ptx::load_shared_x2(s_p + n * 2048 + half * 1024, p);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& made = ds[n][2 * half + i];
        made = gradient_of(p[i], made, kept_scale, stats[2 * i + 1]);
        if (kNeedsDbias && p[i] == 0.0f) made = 0.0f;
      }
    }
  }
}

// Leaves dS' of this lane in place of the bias: `pairs` are those of its warp.
CUFLASH_DEVICE void replace_bias(const float (&ds)[kTileColumns][4], u32 pairs) {
#pragma unroll
  for (int n = 0; n < kTileColumns; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared_b32(BiasTerms<true>::pair_at(pairs, n, i), ptx::bits_of(ds[n][i]));
}

CUFLASH_DEVICE void split(const float (&ds)[kTileColumns][4], Operand& operand) {
  const float rests = to_operand(ds, operand, bf16_split_small);
  if (rests - rests != 0.0f) {  // some are not finite, which is rare
    to_operand(ds, operand, [](float x, float y, u32(&word)[kBf16Terms]) {
      bf16_split(x, y, word);
      return 0.0f;
    });
  }
}

// Stores dS', whose rows are keys, from the address `line` of this lane on.
CUFLASH_DEVICE void store_ds(const Operand& operand, u32 line, u32 lane) {
#pragma unroll
  for (int term = 0; term < kBf16Terms; ++term)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      ptx::store_matrix_x4(line + term * kBytesTerm + ((k * 32 + lane / 16 * 16) ^ (lane % 8 * 16)),
                           operand.word[term][k]);
}

// The second warpgroup makes dP', then dS', which it hands to the third one, and dK.
CUFLASH_DEVICE void make_dk(const BackwardParams& params, const Shared& shared, u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common);
  const u32 lane = lane_index(), warp_key = thread / 32 * 16;
  const float kept_scale = kept_scale_of(common);
  float dk[kDim / 8][4];
#pragma unroll
  for (auto& tile : dk) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;

  if (kHasValues && tile.num_steps > 0) shared.v_full.wait(0);
  Position<kNumStages> at;
  Position<kBuffers> buffer;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step) {
    // [GEMM 2] dP' = V dO'.
    float ds[kTileColumns][4], chunk_sum[kChunkSums][kTileColumns][4];
    repeat<kChunksV>([&](auto chunk) __attribute__((always_inline)) {
      constexpr int c = decltype(chunk)::value, kColumns = min_of(kDimV - c * kChunk, kChunk);
      shared.do_ring.full(at, c).wait(at.parity);
      multiply_rows<kColumns>(chunk_sum[c], shared.v + c * kBytesChunk, shared.do_ring.tile(at) + c * kBytesChunk);
    });
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kChunksV; ++c) ptx::fence_operand(chunk_sum[c]);
    add_chunks(ds, chunk_sum);
    if (thread == 0) {
#pragma unroll
      for (int c = 0; c < kChunksV; ++c) shared.do_ring.empty(at, c).arrive();
    }
    const u32 s_buffer = shared.buffer_of(buffer);
    const u32 s_stats = shared.stats + at.stage * kBytesStats + fragment_column() * 8;
    shared.q_ring.full(at, 0).wait(at.parity);
    shared.handed.p_full(buffer).wait(buffer.parity);
    make_ds(ds, s_buffer + thread * 8, s_stats, kept_scale);
    if constexpr (kNeedsDbias) replace_bias(ds, shared.bias_of(at, warp_key));
    Operand operand;
    split(ds, operand);

    // Once all threads have read P', dS' is stored in its memory. There, rows are keys. The statistics have been read,
    // too, where TMA writes next; and TMA may read dbias.
    ptx::fence_async_proxy();
    if constexpr (kNeedsDbias) shared.dbias_full(at).arrive();
    ptx::sync_named(kDkWarpgroup, 128);
    store_ds(operand, s_buffer + (warp_key + lane % 16) * kLineBytes, lane);
    add_product(  // [GEMM 6] dK += dS' Q
        dk, operand, shared.q_ring.tile(at), [&](int c) { shared.q_ring.full(at, c).wait(at.parity); },
        [&] {
          ptx::fence_async_proxy();
          shared.handed.ds_full(buffer).arrive();
        },
        [&](int c) {
          if (thread == 0) shared.q_ring.empty(at, c).arrive();
        });
    at.advance();
    buffer.advance();
  }

  if constexpr (!kNeedsDk) return;
  store_rows<kHeadDim>(common, common.dk, tile, tile.partials(common, thread), thread, dk, common.scale);
}

// The third warpgroup makes dQ of each tile of queries and these keys, and adds it to the sum in memory.
CUFLASH_DEVICE void accumulate_dq(const BackwardParams& params, const Shared& shared, u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common);
  if (tile.num_steps == 0) return;
  shared.k_full.wait(0);
  const u64 keys = ptx::descriptor(shared.k, kBytesChunk, 8 * kLineBytes);  // chunks next to each other
  QueryTileIterator m_tile = tile.first();
  Position<kNumStages> at;
  Position<kBuffers> buffer;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance(), buffer.advance()) {
    float* accumulator = (float*)common.dq_accumulator + tile.index_of(common, m_tile) * (kRows * kDim) + thread * 4;
    const u64 ds = descriptor_of_transposed<kRows>(shared.buffer_of(buffer));
    shared.handed.ds_full(buffer).wait(buffer.parity);
    if constexpr (!kDqByReduction) {  // dq is not wanted
      arrive_as_warp(shared.handed.ds_empty(buffer));
      continue;
    }
    if constexpr (kDqLate) shared.q_ring.empty(at, 0).wait(at.parity);
    // dQ is made a chunk at a time. With more columns at once, dS' would be read less often, but registers would be
    // needed for them.
    repeat<kChunks>([&](auto chunk) __attribute__((always_inline)) {
      constexpr int c = decltype(chunk)::value, kNTiles = min_of(kDim / 8 - c * kChunkTiles, kChunkTiles);
      const u64 columns = keys + c * (kBytesChunk / 16);
      float dq[kNTiles][4];
      issue(dq, [&]() __attribute__((always_inline)) {  // [GEMM 7] dQ += dS K
        for_term_products<kSteps>([&](auto i, auto j, int k, bool accumulate) __attribute__((always_inline)) {
          ptx::wgmma<true, true>(BFloat16{}, dq, along_k_transposed(term_of(ds, i.value), k),
                                 along_k_transposed(term_of(columns, j.value), k), accumulate);
        });
      });
      wait_for<0>(dq);
      if constexpr (c == kChunks - 1) arrive_as_warp(shared.handed.ds_empty(buffer));  // warps end at different times
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) ptx::reduce_add_x4(accumulator + (c * kChunkTiles + n) * 128 * 4, dq[n]);
    });
  }
}

// One thread adds dbias of each tile of pairs to memory, or stores it, and then gives the stage back.
CUFLASH_DEVICE void write_dbias(const BackwardParams& params, const Shared& shared) {
  const ScoreTensor& dbias = params.common.dbias;
  const TensorMap& map = params.maps[kMapDbias];
  const BackwardWork tile(params.common);
  QueryTileIterator m_tile = tile.first();
  Position<kNumStages> at;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
    const int first_row = m_tile.m_block * kRows;
    const int head = dbias.head_stride != 0 ? m_tile.head : 0, batch = dbias.batch_stride != 0 ? tile.work.batch : 0;
    shared.dbias_full(at).wait(at.parity);
#pragma unroll
    for (int c = 0; c < kBiasChunks; ++c) {
      const u32 chunk = shared.bias_of(at, c * kBiasChunk);
      const int first_key = tile.first_key + c * kBiasChunk;
      if constexpr (CUFLASH_ADDS_DBIAS)
        ptx::add_tensor(map, chunk, first_key, first_row, head, batch);
      else
        ptx::store_tensor(map, chunk, first_key, first_row, head, batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) shared.q_ring.empty(at, c).arrive();
  }
  ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void backward(const BackwardParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.k_full.init(1);
    shared.v_full.init(1);
    shared.q_ring.barriers.init(1 + kNeedsDbias);
    shared.do_ring.barriers.init(2);
    for (int i = 0; i < kBuffers; ++i) {
      shared.handed.p_full({i}).init(128);
      shared.handed.ds_full({i}).init(128);
      shared.handed.ds_empty({i}).init(4);
    }
    for (int i = 0; kNeedsDbias && i < kNumStages; ++i) shared.dbias_full({i}).init(128);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128), thread = ptx::thread_index() % 128;
  if (warpgroup == 0) {
    ptx::increase_registers<kConsumerRegisters>();
    make_dv(params, shared, thread);
  } else if (warpgroup == 1) {
    ptx::increase_registers<kConsumerRegisters>();
    make_dk(params, shared, thread);
  } else if (warpgroup == 2) {
    ptx::decrease_registers<kDqRegisters>();
    accumulate_dq(params, shared, thread);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (thread == 0)
      produce<kChunks, true>(params, shared, params.maps[kMapK], shared.k, shared.k_full, params.maps[kMapQ],
                             shared.q_ring);
    if constexpr (kHasValues) {
      if (thread == 32)
        produce<kChunksV, false>(params, shared, params.maps[kMapV], shared.v, shared.v_full, params.maps[kMapDout],
                                 shared.do_ring);
    }
    if constexpr (kNeedsDbias) {
      if (thread == 64) write_dbias(params, shared);
    }
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardParams, kNumThreads, 1, backward)
