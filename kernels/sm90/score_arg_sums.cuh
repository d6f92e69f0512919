// Gradients of arrays that a score reads, as the consumers of sm90/backward.cu sum them: the terms are dS times the
// derivatives of the score, of all pairs of a tile.
//
//   an index that depends on   is summed
//   the head                   by each lane, until the loop comes to the next query head
//   the key                    by each lane, for each of its two keys, until then, too
//   the query                  by each warp in every step, over its 16 keys
//   i - j                      by each warp in every step, over its slice of the diagonal
//
// The consumer adds the first two of these sums to memory (common/softmax/exact_sums.cuh). The other two go to shared
// memory with dS'. The warpgroup of dQ adds up those of all warps, and adds the totals to memory.
#pragma once
#include "common/score/score_args_gradients.cuh"
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/functions.cuh"
#include "common/io/params.cuh"
#include "common/softmax/reduce.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/per_row_values.cuh"

#if CUFLASH_NEEDS_SCORE_ARGS
// Slots for the sums of all reads. No read has a derivative where all of them decide a branch, or a floor.
constexpr int kReadSlots = max_of(kNumReads, 1);

// Warp. Sums over the keys of a warp, for each query of a tile, in a tree: at each height, a lane keeps one of two
// n-tiles and passes the other one on.
struct QuerySums {
  float half[3][2];  // at each height of the tree, the n-tile whose neighbour is yet to come

  // Takes a lane's terms of its two queries in n-tile `n`. After the last n-tile, stores the sums.
  CUFLASH_DEVICE void add(int n, const float (&term)[2], u32 s_sums) {
    float value[2] = {term[0], term[1]};
#pragma unroll
    for (int height = 0; height < 3; ++height) {
      if (!(n >> height & 1)) {
        half[height][0] = value[0], half[height][1] = value[1];
        return;
      }
      const bool keeps_second = lane_index() >> (4 - height) & 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float earlier = half[height][i], later = value[i];
        const float kept = keeps_second ? later : earlier, passed = keeps_second ? earlier : later;
        value[i] = kept + ptx::shuffle_xor(passed, 16 >> height);
      }
    }
    const u32 lane = lane_index(),
              own = (lane >> 4 & 1) + (lane >> 2 & 2) + (lane & 4);  // n-tile that the lane is left with
    ptx::store_shared_x2(s_sums + (8 * own + fragment_column()) * 4, value);
  }
};

// Warp. Sums along the diagonals of 64 queries and the 16 keys of a warp. With both counted from their first one,
// query - key is -16 to 63.
struct DiagonalSums {
  float above[2];  // terms of a lane's first key in the n-tile before: those of its second key in this one join them
  float band[2];   // of the band of 8 diagonals before

  CUFLASH_DEVICE void add(int n, const float (&term)[4], u32 s_sums) {
    float next[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) next[i] = (n > 0 ? above[i] : 0.0f) + term[2 + i];
    if (n == 0) band[0] = band[1] = 0;
    store(n - 2, next, s_sums);
    above[0] = term[0], above[1] = term[1];
    if (n + 1 < kQueryTiles) return;
    store(n - 1, {above[0], above[1]}, s_sums);
    store(n, {0.0f, 0.0f}, s_sums);
  }

 private:
  // Stores the sums of diagonals 8m to 8m + 7. A lane has query 2c + i and key r. Its `band` is on diagonal
  // 8m + 2c + i - r, and its `next` on diagonal 8(m + 1) + 2c + i - r. So where 2c + i < r, it is `next` that belongs
  // to these diagonals.
  CUFLASH_DEVICE void store(int m, const float (&next)[2], u32 s_sums) {
    const u32 lane = lane_index();
    const int column = fragment_column(), row = fragment_row();
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = column + i >= row ? band[i] : next[i];
      band[i] = next[i];
    }
    const auto of_lane = [](float x, u32 other) { return ptx::float_of(ptx::shuffle(ptx::bits_of(x), other)); };
    float sum = own[0] + of_lane(own[1], (lane + 4) % 32);
    sum += of_lane(sum, ((lane ^ 1) + (lane & 1 ? 24 : 8)) % 32);
    sum += ptx::shuffle_xor(sum, 18);
    if ((int)(lane % 4) == (m & 3))
      ptx::store_shared_b32(s_sums + (8 * (m + 2) + ((column - row) & 7)) * 4, ptx::bits_of(sum));
  }
};

// Where a warp leaves its sums of a read, in the stage of sums at address `stage`.
template <int read>
CUFLASH_DEVICE u32 step_sums_at(u32 stage, u32 warp) {
  return stage + (first_step_sum(read) * kSumWarpsOfTile + warp * step_sums_of(read)) * 4;
}

// The sums of a lane of a consumer.
struct ScoreArgLane {
  float sum[kReadSlots][2];

  CUFLASH_DEVICE ScoreArgLane() { clear(); }
  CUFLASH_DEVICE void clear() {
#pragma unroll
    for (auto& of_read : sum) of_read[0] = of_read[1] = 0;
  }

  // Warp. Adds the terms of a tile, made of the gradients `ds` of its scores, and turns `ds` into gradients of the
  // products. The thread has left the products at `s_scores`; sums of steps go to the stage at `stage`.
  CUFLASH_DEVICE void add(const Functions& functions, float scale, int lane_query, int lane_key, u32 s_scores,
                          u32 s_row_values, u32 stage, u32 warp, float (&ds)[kQueryTiles][4]) {
    QuerySums queries[kReadSlots];
    DiagonalSums diagonals[kReadSlots];
    OfKey of_keys[2];
    PerRowValues::load_keys(functions, s_row_values, lane_key, of_keys);
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float product[4] = {0, 0, 0, 0};
      // Sums of gradients of scores alone start with -0, which leaves the first gradient as it is, even -0.
      float own[kReadSlots][4];
#pragma unroll
      for (int read = 0; read < kNumReads; ++read)
#pragma unroll
        for (float& x : own[read]) x = has_constant_derivative(read) ? -0.0f : 0.0f;
      OfRow of_rows[2];
      PerRowValues::load(functions, s_row_values, n, lane_query + 8 * n, of_rows);
      if constexpr (kKeepsProducts) ptx::load_shared_f32x4(s_scores + n * 128 * 16, product);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float by_s;
        const auto add_term = [&](auto read, i64, float derivative) {
          constexpr int kRead = decltype(read)::value, kClass = class_of_read(kRead);
          const int at = kClass == kReadOfHead ? 0 : kClass == kReadOfKey ? i / 2 : kClass == kReadOfQuery ? i % 2 : i;
          add_product<kRead>(own[kRead][at], ds[n][i], derivative);
        };
        functions.derivatives(product[i] * scale, lane_query + 8 * n + i % 2, lane_key + i / 2 * 8, of_rows[i % 2],
                              of_keys[i / 2], by_s, add_term);
        if constexpr (kHasDerivative) ds[n][i] = score_product(ds[n][i], by_s);
      }
      repeat<kNumReads>([&](auto read) {
        constexpr int kRead = decltype(read)::value, kClass = class_of_read(kRead);
        const u32 s_sums = step_sums_at<kRead>(stage, warp);
        const float (&x)[4] = own[kRead];
        if constexpr (kClass == kReadOfHead)
          sum[kRead][0] += x[0];
        else if constexpr (kClass == kReadOfKey)
          sum[kRead][0] += x[0], sum[kRead][1] += x[1];
        else if constexpr (kClass == kReadOfQuery)
          queries[kRead].add(n, {x[0], x[1]}, s_sums);
        else
          diagonals[kRead].add(n, x, s_sums);
      });
    }
  }
  // Adds a gradient of a score times a derivative. Where the gradient is 0 it adds nothing, whatever the derivative is.
  template <int read>
  CUFLASH_DEVICE static void add_product(float& sum, float ds, float derivative) {
    if constexpr (has_constant_derivative(read))
      sum += ds;
    else
      sum = ds == 0 ? sum : sum + ds * derivative;
  }

  // Warp. Adds the sums that belong to the head to memory.
  CUFLASH_DEVICE void leave(const Params& params, const Functions& functions, int lane_key) {
    repeat<kNumReads>([&](auto read) {
      constexpr int kRead = decltype(read)::value, kClass = class_of_read(kRead), kArray = array_of_read(kRead);
      if constexpr (kClass == kReadOfHead) {
        const float total = score_product((float)warp_sum(sum[kRead][0]), functions.factor_of_read(kRead));
        if (lane_index() == 0) add_exactly(params, kArray, index_of_read<kRead>(functions, 0, 0), total);
      } else if constexpr (kClass == kReadOfKey) {
        float total[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[half] = sum[kRead][half] + ptx::shuffle_xor(sum[kRead][half], 1);
          total[half] += ptx::shuffle_xor(total[half], 2);
          total[half] = score_product(total[half], functions.factor_of_read(kRead));
        }
        const u32 half = lane_index() % 4;
        const float lower = total[0], upper = total[1];
        if (half < 2)
          add_exactly(params, kArray, index_of_read<kRead>(functions, 0, lane_key + 8 * half), half ? upper : lower);
      }
    });
    clear();
  }
};

// Warpgroup. The totals of all warps over a tile of queries and the keys of the block, for each read. Threads divide
// the queries, or the diagonals.
struct StepSums {
  static constexpr int kRounds = ceil_div(kBlockM + kBlockN, 128);
  float sum[kReadSlots][kRounds];

  CUFLASH_DEVICE void load(u32 stage, u32 thread) {
    repeat<kNumReads>([&](auto read) {
      constexpr int kRead = decltype(read)::value, kClass = class_of_read(kRead);
      if constexpr (kClass == kReadOfQuery || kClass == kReadOfDiagonal) {
#pragma unroll
        for (int round = 0; round < (kClass == kReadOfQuery ? 1 : kRounds); ++round) {
          sum[kRead][round] = 0;
#pragma unroll
          for (int warp = 0; warp < kSumWarpsOfTile; ++warp) {
            // The diagonals of a warp begin 16 before its first key.
            const int at = kClass == kReadOfQuery ? thread : first_diagonal(thread, round) + 16 * (warp + 1);
            float partial = 0;
            if (at >= 0 && at < step_sums_of(kRead))
              ptx::load_shared(step_sums_at<kRead>(stage, warp) + at * 4, partial);
            sum[kRead][round] += partial;
          }
        }
      }
    });
  }

  CUFLASH_DEVICE void add(const Params& params, const Functions& functions, int first_row, int first_key,
                          u32 thread) const {
    repeat<kNumReads>([&](auto read) {
      constexpr int kRead = decltype(read)::value, kClass = class_of_read(kRead), kArray = array_of_read(kRead);
      if constexpr (kClass == kReadOfQuery) {
        const int row = first_row + thread;
        const float total = score_product(sum[kRead][0], functions.factor_of_read(kRead));
        if (thread < kBlockM) add_exactly(params, kArray, index_of_read<kRead>(functions, row, 0), total);
      } else if constexpr (kClass == kReadOfDiagonal) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          const int diagonal = first_row - first_key + first_diagonal(thread, round);
          const int row = diagonal > 0 ? diagonal : 0;
          add_of_warp(params, kArray, index_of_read<kRead>(functions, row, row - diagonal),
                      score_product(sum[kRead][round], functions.factor_of_read(kRead)));
        }
      }
    });
  }

 private:
  // The diagonal that a thread has in a round, counted in the tile.
  CUFLASH_DEVICE static int first_diagonal(u32 thread, int round) { return (int)thread + 128 * round - kBlockN; }
};
#else
struct ScoreArgLane {};
#endif
