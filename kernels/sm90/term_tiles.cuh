// Tiles of 64 x 64 of float32 as bf16 terms: products of terms, operands in registers and in shared memory, and boxes
// of one term that arrive in turn.
#pragma once
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kRows = 64;  // of every tile
constexpr int kNTiles = kRows / 8, kSteps = kRows / 16;
constexpr u32 kTerm = chunked_bytes(kRows, kChunk);  // one bf16 term of 64 rows and 64 columns

// ---- Products of terms ---------------------------------------------------------------------------------------------

// Calls multiply(a, b, index) for the pairs of terms a and b whose products count, small ones first.
template <class Multiply>
CUFLASH_DEVICE void for_term_products(Multiply multiply) {
  repeat<kTermProducts>([&](auto index) __attribute__((always_inline)) {
    constexpr TermProduct product = term_product(decltype(index)::value);
    multiply(Integer<product.a>{}, Integer<product.b>{}, decltype(index)::value);
  });
}
CUFLASH_DEVICE u64 term_of(u64 tile, int term, u32 term_bytes = kTerm) { return tile + term * (term_bytes / 16); }

using Accumulator = float[kNTiles][4];
template <int steps>
using Terms = u32[kBf16Terms][steps][4];  // of an operand in registers

// Turns 16 columns of an accumulator, from n-tile 2 k on, into terms by `split_pair`. Returns the sum of its results.
template <class SplitPair>
CUFLASH_DEVICE float split_step(const Accumulator& value, int k, u32 (&word)[kBf16Terms][4], SplitPair split_pair) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&pair)[4] = value[2 * k + i / 2];
    u32 terms[kBf16Terms];
    sum += split_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1], terms);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term) word[term][i] = terms[term];
  }
  return sum;
}

// An accumulator as the terms of an operand in registers.
CUFLASH_DEVICE void to_terms(const Accumulator& value, Terms<kSteps>& operand) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 word[kBf16Terms][4];
    split_step(value, k, word, bf16_split_small);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term)
#pragma unroll
      for (int i = 0; i < 4; ++i) operand[term][k][i] = word[term][i];
  }
}

template <int n_tiles>
CUFLASH_DEVICE void add(float (&total)[n_tiles][4], const float (&sum)[n_tiles][4]) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) total[n][i] += sum[n][i];
}

// Stores the terms of an operand whose rows are those of an accumulator, one after the other from `to` on: the columns
// of steps [first, stop), some of which may not be finite, which is rare.
template <int first = 0, int stop = kSteps>
CUFLASH_DEVICE void store_terms(const Accumulator& value, u32 to, u32 thread) {
  const u32 lane = lane_index(), line = to + (thread / 32 * 16 + lane % 16) * kLineBytes;
  const auto store = [&](auto split_pair) __attribute__((always_inline)) {
    float rests = 0.0f;
#pragma unroll
    for (int k = first; k < stop; ++k) {
      u32 word[kBf16Terms][4];
      rests += split_step(value, k, word, split_pair);
#pragma unroll
      for (int term = 0; term < kBf16Terms; ++term)
        ptx::store_matrix_x4(line + term * kTerm + ((k * 32 + lane / 16 * 16) ^ (lane % 8 * 16)), word[term]);
    }
    return rests;
  };
  const float rests = store(bf16_split_small);
  if (ptx::any_lane(rests - rests != 0.0f)) {
    store([](float x, float y, u32(&word)[kBf16Terms]) {
      bf16_split(x, y, word);
      return 0.0f;
    });
  }
}

// ---- Boxes ----------------------------------------------------------------------------------------------------------

template <int stages>
struct BoxRing {
  u32 first;
  Ring<stages> barriers;

  CUFLASH_DEVICE u32 box(const Position<stages>& at) const { return first + at.stage * kTerm; }
  // The producer. Loads a box of chunk `c` as soon as there is a free one.
  CUFLASH_DEVICE void load(Position<stages>& at, const TensorMap& map, int c, int row, int head, int batch) const {
    const Barrier full = barriers.full(at);
    barriers.empty(at).wait(at.parity ^ 1);
    full.arrive_expect(kTerm);
    ptx::load_tensor(box(at), map, full.address, c * kChunk, row, head, batch);
    at.advance();
  }
};

// The boxes of a ring, as a warpgroup takes them and gives them back.
template <int stages>
struct BoxReader {
  const BoxRing<stages>& ring;
  Position<stages> at, oldest;

  CUFLASH_DEVICE explicit BoxReader(const BoxRing<stages>& ring_) : ring(ring_) {}

  CUFLASH_DEVICE u32 take() {
    ring.barriers.full(at).wait(at.parity);
    const u32 box = ring.box(at);
    at.advance();
    return box;
  }
  // Ends a group of products with the last `count` boxes. Waits for the group before, and gives back its boxes.
  template <int count = 1>
  CUFLASH_DEVICE void commit() {
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    release();
    in_flight = count;
  }
  // Waits for all products, and gives all boxes back.
  CUFLASH_DEVICE void finish() {
    ptx::wgmma_wait<0>();
    release();
    in_flight = 0;
  }

 private:
  int in_flight = 0;  // boxes of the last group

  CUFLASH_DEVICE void release() {
#pragma unroll
    for (int i = 0; i < in_flight; ++i, oldest.advance()) arrive_as_warp(ring.barriers.empty(oldest));
  }
};

template <int count, int stages>
CUFLASH_DEVICE void take_boxes(BoxReader<stages>& reader, u64 (&box)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) box[i] = descriptor_of(reader.take());
  ptx::wgmma_fence();
}

// Calls multiply(other, k, box, first) for all steps k along the columns of boxes, from chunk `first_chunk` on: `box`
// describes those of the step in the box, `first` says whether nothing has been summed yet.
template <int columns, int count, class Multiply>
CUFLASH_DEVICE void multiply_chunks(const u64 (&box)[count], int first_chunk, int other, bool begins,
                                    Multiply multiply) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int c = first_chunk + i;
#pragma unroll
    for (int k = 0; k < min_of(columns - c * kChunk, kChunk) / 16; ++k)
      multiply(other, c * (kChunk / 16) + k, along_k<kRows>(box[i], k), begins && c == 0 && k == 0);
  }
}

// Takes the boxes of a term, of `columns` columns. Calls `multiply` as above for all terms of the other operand that
// count. The boxes of the highest term are multiplied together, so that the products of the highest terms come last.
template <int term, int columns, int stages, class Multiply>
CUFLASH_DEVICE void multiply_boxes(BoxReader<stages>& reader, Multiply multiply) {
  constexpr int kCount = chunks_of(columns), kOthers = kBf16Terms - term, kTogether = term == kHigh ? kCount : 1;
  repeat<kCount / kTogether>([&](auto group) __attribute__((always_inline)) {
    u64 box[kTogether];
    take_boxes(reader, box);
#pragma unroll
    for (int other = kOthers - 1; other >= 0; --other)
      multiply_chunks<columns>(box, decltype(group)::value * kTogether, other, term == kLast, multiply);
    reader.template commit<kTogether>();
  });
}

// The same of an operand and of another one, whose boxes follow, where both add to one sum. Of the highest terms the
// products with the highest ones of the other operands come last of all: tensor cores truncate each sum to the bits of
// its size, so products that come after large ones lose what they have below these.
template <int term, int columns, int stages, class Multiply, class MultiplyNext>
CUFLASH_DEVICE void multiply_boxes(BoxReader<stages>& reader, Multiply multiply, MultiplyNext multiply_next) {
  if constexpr (term != kHigh) {
    multiply_boxes<term, columns>(reader, multiply);
    multiply_boxes<term, columns>(reader, multiply_next);
  } else {
    constexpr int kCount = chunks_of(columns);
    u64 box[kCount], next[kCount];
    const auto multiply_small = [&](const auto& boxes, auto own) __attribute__((always_inline)) {
#pragma unroll
      for (int other = kLast; other > kHigh; --other) multiply_chunks<columns>(boxes, 0, other, false, own);
    };
    take_boxes(reader, box);
    multiply_small(box, multiply);
    reader.template commit<0>();  // gives back the boxes of the terms before; these stay
    take_boxes(reader, next);
    multiply_small(next, multiply_next);
    multiply_chunks<columns>(box, 0, kHigh, false, multiply);
    reader.template commit<kCount>();
    multiply_chunks<columns>(next, 0, kHigh, false, multiply_next);
    reader.template commit<kCount>();
  }
}

// The n-tiles of chunk `c` of an accumulator.
template <int c, int n_tiles>
CUFLASH_DEVICE auto& chunk_of(float (&value)[n_tiles][4]) {
  constexpr int kFirst = c * kNTiles;
  return (float (&)[min_of(n_tiles - kFirst, kNTiles)][4]) value[kFirst];
}
