// The numbers that a score_mod or mask_mod reads of queries and of keys, in the backward pass on compute capability
// 9.0. Each lane needs those of a quarter of the queries of a tile. So a warp of a consumer loads the numbers of all 64
// once, and keeps them in shared memory. It keeps those of its 16 keys there, too, so that they take no registers
// between P' and dS'.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/functions.cuh"
#include "sm90/backward_layout.cuh"

#if CUFLASH_HAS_SCORE_FUNCTION
static_assert(kNumPerRow == 0 || kNumPerRow == kNumOfRow,
              "the plan has another number of values per row than the function");
static_assert(kNumPerWarpKey == 0 || kNumPerWarpKey == kNumOfKey, "the plan has another number of values per key");

// Warp. The numbers of two neighbouring queries are interleaved: first number 0 of both, then number 1 of both.
struct PerRowValues {
  u32 s_numbers;
  OfRow own[kNumPerRow > 0 ? kBlockM / 32 : 1];  // of every 32nd query, from the lane on
  OfKey own_key;                                 // of the key of a lane

  // Loads the numbers of a tile. This takes as long as a memory access, so other work should come before `store`.
  CUFLASH_DEVICE PerRowValues(const Functions& functions, u32 s_numbers_, int first_row, int first_key)
      : s_numbers(s_numbers_) {
    if constexpr (kNumPerWarpKey > 0) own_key = functions.of_key(first_key + (int)lane_index() % 16);
    if constexpr (kNumPerRow > 0) {
#pragma unroll
      for (int i = 0; i < kBlockM / 32; ++i) own[i] = functions.of_row(first_row + 32 * i + (int)lane_index());
    }
  }
  // Stores the numbers once all lanes have read the previous ones.
  CUFLASH_DEVICE void store() const {
    if constexpr (kNumPerRow + kNumPerWarpKey > 0) {
      const u32 lane = lane_index(), address = s_numbers + (lane / 2 * kNumPerRow * 2 + lane % 2) * 4;
      ptx::sync_warp();
#pragma unroll
      for (int i = 0; i < kBlockM / 32; ++i)
#pragma unroll
        for (int x = 0; x < kNumPerRow; ++x)
          ptx::store_shared_b32(address + (i * 32 * kNumPerRow + 2 * x) * 4, ptx::bits_of(own[i].x[x]));
      const u32 of_key = s_numbers + kBytesPerRowValues + (lane % 8 * 2 + lane / 8) * 4;
#pragma unroll
      for (int x = 0; x < kNumPerWarpKey; ++x)
        if (lane < 16) ptx::store_shared_b32(of_key + x * 64, ptx::bits_of(own_key.x[x]));
      ptx::sync_warp();
    }
  }
  // Loads the numbers of a lane's two keys, of which `key` is the first.
  CUFLASH_DEVICE static void load_keys(const Functions& functions, u32 s_numbers, int key, OfKey (&of_keys)[2]) {
    if constexpr (kNumPerWarpKey == 0) of_keys[0] = functions.of_key(key), of_keys[1] = functions.of_key(key + 8);
#pragma unroll
    for (int x = 0; x < kNumPerWarpKey; ++x) {
      float of_both[2];
      ptx::load_shared_x2(s_numbers + kBytesPerRowValues + (x * 8 + fragment_row()) * 8, of_both);
      of_keys[0].x[x] = of_both[0], of_keys[1].x[x] = of_both[1];
    }
  }
  // Loads the numbers of a lane's two queries of n-tile `n`, of which `row` is the first.
  CUFLASH_DEVICE static void load(const Functions& functions, u32 s_numbers, int n, int row, OfRow (&of_rows)[2]) {
    if constexpr (kNumPerRow == 0) {
      of_rows[0] = functions.of_row(row), of_rows[1] = functions.of_row(row + 1);
    } else {
      const u32 address = s_numbers + (4 * n + fragment_column() / 2) * kNumPerRow * 8;
#pragma unroll
      for (int x = 0; x < kNumPerRow; x += 2) {
        float of_both[4];
        if (x + 1 < kNumPerRow && kNumPerRow % 2 == 0)
          ptx::load_shared_f32x4(address + x * 8, of_both);
        else
          load_separately(address + x * 8, x + 1 < kNumPerRow, of_both);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (x + i / 2 < kNumPerRow) of_rows[i % 2].x[x + i / 2] = of_both[i];
      }
    }
  }

 private:
  CUFLASH_DEVICE static void load_separately(u32 address, bool two, float (&of_both)[4]) {
    ptx::load_shared_x2(address, (float (&)[2])of_both[0]);
    if (two) ptx::load_shared_x2(address + 8, (float (&)[2])of_both[2]);
  }
};
#endif
