// What the two kernels of the backward pass of long heads without values share. Without values dP and delta are 0, so
// that dS = P * dlse, and
//
//   S = Q K^T        dS = exp(S - lse) * dlse        dQ = dS K        dK = dS^T Q
//
// A block owns a tile of rows, of queries or of keys, and kSlice columns of their gradient, which its registers hold.
// It streams tiles of the other operand: first all chunks, which make dS, then once more those of its own columns.
// Neither needs sums of other blocks, so that gradients are deterministic. kWarpsD warps share 16 kMTiles rows: each
// makes the dS of some of the streamed rows, which all of them read from shared memory, and some of the columns.
#pragma once
#include "common/score/dropout.cuh"
#include "common/softmax/backward.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm80/chunks.cuh"

constexpr int kOwnRows = CUFLASH_OWNS_KEYS ? kBlockN : kBlockM, kStreamedRows = CUFLASH_OWNS_KEYS ? kBlockM : kBlockN;
constexpr int kWarpsD = CUFLASH_CHUNK_WARPS;
constexpr int kMTiles = kOwnRows * kWarpsD / (16 * kNumWarps);
constexpr int kNTiles = kStreamedRows / (8 * kWarpsD);  // of a warp's dS
constexpr int kSliceChunks = CUFLASH_SLICE_CHUNKS, kSlices = ceil_div(kChunks, kSliceChunks);
constexpr int kColumnTiles = kChunk / (8 * kWarpsD);  // of a warp's columns of a chunk
constexpr int kRowS = row_bytes(kStreamedRows);
static_assert(kMTiles * 16 * kNumWarps == kOwnRows * kWarpsD, "every warp owns the same number of whole fragments");
static_assert(kNTiles % 2 == 0 && kColumnTiles % 2 == 0, "columns come 16 at a time");

// Shared memory: dS, then the ring, whose stages have a chunk of the block's own rows and one of the streamed rows.
constexpr u32 kBytesS = tile_bytes(kOwnRows, kStreamedRows);
constexpr u32 kBytesOwn = tile_bytes(kOwnRows, kChunk), kBytesStage = kBytesOwn + tile_bytes(kStreamedRows, kChunk);
static_assert(kBytesS + kNumStages * kBytesStage == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

// The columns of the gradient that a block makes.
struct Slice {
  int first_chunk, num_chunks;
  u32 unit;  // of the blocks, without slices: those of one tile of rows are neighbours in launch order

  CUFLASH_DEVICE explicit Slice(u32 block)
      : first_chunk(block % kSlices * kSliceChunks),
        num_chunks(min_of(kSliceChunks, kChunks - first_chunk)),
        unit(block / kSlices) {}
  // The steps of one tile of streamed rows.
  CUFLASH_DEVICE int num_steps() const { return kChunks + num_chunks; }
};

// One block at work. Own and streamed rows are those of `Head`s in global memory.
struct ChunkedGradient {
  const u32 s_ds, s_ring;
  const int warp_row, warp_d;
  Real gradient[kSliceChunks][kMTiles][kColumnTiles][4];

  CUFLASH_DEVICE ChunkedGradient()
      : s_ds(ptx::dynamic_shared()),
        s_ring(s_ds + kBytesS),
        warp_row(warp_index() / kWarpsD * 16 * kMTiles),
        warp_d(warp_index() % kWarpsD) {
#pragma unroll
    for (auto& chunk : gradient) set_zero(chunk);
  }

  // S of a tile of streamed rows.
  template <class Ring>
  CUFLASH_DEVICE void multiply_rows(Ring& ring, Real (&s)[kMTiles][kNTiles][4]) const {
    const RowMajorA<kRow> own(s_ring, warp_row);
    const ColumnMajorB<kRow, kWarpsD> streamed(s_ring + kBytesOwn, warp_d);
    multiply_all_chunks(ring, kBytesStage, s, own, streamed);
  }
  // Adds the products of dS and the streamed rows. Warps read the dS of others: the barrier in `ring.next` separates
  // this from the stores.
  template <class Ring>
  CUFLASH_DEVICE void add_products(Ring& ring, const Slice& slice, const Real (&ds)[kMTiles][kNTiles][4]) {
    store_fragments<Order::kPlain, kRowS, kWarpsD>(s_ds, warp_row, warp_d, ds, [](int, int) { return (Real)1; });
    const RowMajorA<kRowS> rows(s_ds, warp_row);
    const RowMajorB<kRow, kWarpsD> streamed(s_ring + kBytesOwn, warp_d);
    repeat<kSliceChunks>([&](auto chunk) __attribute__((always_inline)) {
      constexpr int i = decltype(chunk)::value;
      if (i >= slice.num_chunks) return;
      const u32 stage = ring.next() * kBytesStage;
      add_product<kStreamedRows / kStep>(gradient[i], rows, shifted(streamed, stage));
    });
  }

  // Stores the gradient times `scale` to rows [first_row, row_stop): rounded, through the shared memory of the ring; or
  // as it was summed, to be added to other partial sums.
  template <bool wide, class Head>
  CUFLASH_DEVICE void store(const Slice& slice, Head* result, i64 row_stride, int first_row, int row_stop, Real scale) {
    const auto factor = [scale](int, int) { return scale; };
    repeat<kSliceChunks>([&](auto chunk) __attribute__((always_inline)) {
      constexpr int i = decltype(chunk)::value;
      if (i >= slice.num_chunks) return;
      Head* columns = result + (slice.first_chunk + i) * kChunk;
      const bool last = kLastColumns < kChunk && slice.first_chunk + i + 1 == kChunks;
      if constexpr (wide) {
        if (last)
          store_sums<kLastColumns, kWarpsD>(gradient[i], warp_row, warp_d, factor, columns, row_stride, first_row,
                                            row_stop);
        else
          store_sums<kChunk, kWarpsD>(gradient[i], warp_row, warp_d, factor, columns, row_stride, first_row, row_stop);
      } else {
        store_fragments<Order::kPairedColumns, kRow, kWarpsD>(s_ring, warp_row, warp_d, gradient[i], factor);
        ptx::sync_block();
        if (last)
          store_tile<kOwnRows, kLastColumns>(s_ring, columns, row_stride, first_row, row_stop);
        else
          store_tile<kOwnRows, kChunk>(s_ring, columns, row_stride, first_row, row_stop);
        ptx::sync_block();
      }
    });
  }
};
