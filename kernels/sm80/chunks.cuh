// Products of long rows without values: q and k arrive kChunk columns at a time, so that shared memory holds any head
// dimension. A ring of stages has a chunk of the block's own rows and one of the streamed rows each.
#pragma once
#include "common/io/operands.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kChunk = CUFLASH_CHUNK_COLUMNS;
constexpr int kChunks = kDim / kChunk;
constexpr int kLastColumns = kHeadDim - (kChunks - 1) * kChunk;  // of the last chunk; zeros are loaded after them
constexpr int kRow = row_bytes(kChunk);
static_assert(!kHasValues, "values would be rows of the same length, and so would the output");
static_assert(CUFLASH_DIM_MULTIPLE == kChunk, "the padded head dimension is made of chunks");
static_assert(kNumStages >= 2, "a chunk arrives while another is used");

// The columns of a head from `column` on.
template <class T>
CUFLASH_DEVICE const T* from_column(const T* head, int column) {
  return head + column;
}
CUFLASH_DEVICE PagedHead from_column(PagedHead head, int column) {
  head.pool += column;
  return head;
}

// Loads chunk `chunk` of rows of a head, as `load_tile` does.
template <int rows, class Head>
CUFLASH_DEVICE void load_chunk(u32 tile, const Head& head, i64 row_stride, int first_row, int row_stop, int chunk) {
  const auto columns = from_column(head, chunk * kChunk);
  if (kLastColumns == kChunk || chunk + 1 < kChunks)
    load_tile<rows, kChunk>(tile, columns, row_stride, first_row, row_stop);
  else
    load_tile<rows, kLastColumns>(tile, columns, row_stride, first_row, row_stop);
}

// s += a b' of one chunk. Tensor cores that cut their sums off often get a sum of their own for each chunk, which is
// then added with rounding.
template <int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void multiply_chunk(Real (&s)[m_tiles][n_tiles][4], LoadA load_a, LoadB load_b) {
  if constexpr (kPartialSums) {
    Real sum[m_tiles][n_tiles][4];
    set_zero(sum);
    multiply_unrolled<kChunk / kStep>(sum, load_a, load_b);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] += sum[m][n][i];
  } else {
    multiply_unrolled<kChunk / kStep>(s, load_a, load_b);
  }
}

// The ring. `load(step, stage)` issues the copies of a step; steps are numbered through, and `num_steps` are all. Call
// `next` before each step: it waits for the step's operands, and issues the copies of a later one.
template <class Load>
struct ChunkRing {
  const Load& load;
  const int num_steps;
  int step = 0, stage = 0;

  CUFLASH_DEVICE ChunkRing(const Load& load_, int num_steps_) : load(load_), num_steps(num_steps_) {
#pragma unroll
    for (int i = 0; i < kNumStages - 1; ++i) {
      if (i < num_steps) load(i, i);
      ptx::copy_async_commit();
    }
  }
  // The stage of the step.
  CUFLASH_DEVICE int next() {
    ptx::copy_async_wait<kNumStages - 2>();
    ptx::sync_block();
    const int later = step + kNumStages - 1;
    if (later < num_steps) load(later, stage == 0 ? kNumStages - 1 : stage - 1);
    ptx::copy_async_commit();
    const int now = stage;
    stage = stage == kNumStages - 1 ? 0 : stage + 1;
    ++step;
    return now;
  }
  CUFLASH_DEVICE void finish() const {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
  }
};

// s = a b' of all chunks, the next steps of the ring. The operands are those of its first stage; `bytes` are those of a
// stage.
template <class Ring, int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void multiply_all_chunks(Ring& ring, u32 bytes, Real (&s)[m_tiles][n_tiles][4], const LoadA& load_a,
                                        const LoadB& load_b) {
  set_zero(s);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const u32 stage = ring.next() * bytes;
    multiply_chunk(s, shifted(load_a, stage), shifted(load_b, stage));
  }
}
