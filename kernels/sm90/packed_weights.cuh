// Weights that a lane keeps while products read the operands that weights will replace.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"

// Weights in half precision, two in a word. A lane keeps them where P' is multiplied by derivatives of scores in place.
struct PackedWeights {
  // Packs four weights. The two neighbours in a word are swapped.
  CUFLASH_DEVICE static void pack(const float (&p)[4], u32 (&packed)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) packed[half] = ptx::pack(Element{}, p[2 * half + 1], p[2 * half]);
  }
  // Makes operands of P', once the products of the step before have read theirs. Swapping the neighbours back is an
  // instruction after that wait. Without one, the compiler writes the operands before the wait, and makes the products
  // wait for each other.
  template <int rows, int count>
  CUFLASH_DEVICE static void to_operands(const u32 (&packed)[rows][2], Fragment (&operand)[count]) {
#pragma unroll
    for (int k = 0; k < count; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 word = packed[2 * k + i / 2][i % 2];
        operand[k].word[i] = word >> 16 | word << 16;
      }
  }
};
