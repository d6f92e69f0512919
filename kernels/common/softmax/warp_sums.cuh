// The sums of a warp, which has 16 rows, over some of the keys, and how the sums of another warp over other keys are
// added through shared memory.
#pragma once
#include "common/softmax/exponential.cuh"
#include "common/io/float8.cuh"
#include "common/softmax/softmax.cuh"

CUFLASH_DEVICE void store_shared_four(u32 address, const float (&value)[4]) { ptx::store_shared_f32x4(address, value); }
CUFLASH_DEVICE void load_shared_four(u32 address, float (&value)[4]) { ptx::load_shared_f32x4(address, value); }
CUFLASH_DEVICE void store_shared_four(u32 address, const double (&value)[4]) {
  ptx::store_shared_x2(address, {value[0], value[1]});
  ptx::store_shared_x2(address + 16, {value[2], value[3]});
}
CUFLASH_DEVICE void load_shared_four(u32 address, double (&value)[4]) {
  double first[2], second[2];
  ptx::load_shared_x2(address, first);
  ptx::load_shared_x2(address + 16, second);
  value[0] = first[0], value[1] = first[1], value[2] = second[0], value[3] = second[1];
}

// E is the element type of the operands that weights become.
template <class E, int out_tiles>
struct WarpSums {
  static constexpr u32 kBytesOfFour = 4 * sizeof(Real), kBytesOut = out_tiles * 32 * kBytesOfFour;
  static constexpr u32 kBytesStatistics = 16 * 2 * sizeof(Real) + 16;  // 16 rows, and an exponent (ValueScales)

  OnlineSoftmax<1> softmax;
  ValueScales<E> value_scales;
  Real out[1][out_tiles][4];

  // Writes the sums for another warp: O in the order of lanes at `address`, the rest at `statistics`.
  CUFLASH_DEVICE void hand_over(u32 address, u32 statistics) const {
#pragma unroll
    for (int n = 0; n < out_tiles; ++n) store_shared_four(address + (n * 32 + lane_index()) * kBytesOfFour, out[0][n]);
    if (fragment_column() != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::store_shared_x2(row_of(statistics, half), {softmax.row_max[0][half], softmax.row_sum[0][half]});
    if (lane_index() == 0) ptx::store_shared_b32(statistics + 16 * 2 * sizeof(Real), value_scales.exponent);
  }
  // Adds the sums that another warp has written.
  CUFLASH_DEVICE void take_in(u32 address, u32 statistics) {
    const int exponent = (int)ptx::load_shared_b32(statistics + 16 * 2 * sizeof(Real));
    const int of_both = max_of(value_scales.exponent, exponent);
    Real own[2], others[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Real handed[2];
      ptx::load_shared_x2(row_of(statistics, half), handed);
      const Real row_max = max_of(softmax.row_max[0][half], handed[0]);
      own[half] = relative(softmax.row_max[0][half], row_max), others[half] = relative(handed[0], row_max);
      softmax.row_sum[0][half] = softmax.row_sum[0][half] * own[half] + handed[1] * others[half];
      softmax.row_max[0][half] = row_max;
      if constexpr (ValueScales<E>::kIsRelative) {
        own[half] *= power_of_two(max_of(value_scales.exponent - of_both, ValueScales<E>::kSmallest));
        others[half] *= power_of_two(max_of(exponent - of_both, ValueScales<E>::kSmallest));
      }
    }
    value_scales.exponent = of_both;
#pragma unroll
    for (int n = 0; n < out_tiles; ++n) {
      Real handed[4];
      load_shared_four(address + (n * 32 + lane_index()) * kBytesOfFour, handed);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[0][n][i] = out[0][n][i] * own[i / 2] + handed[i] * others[i / 2];
    }
  }

 private:
  CUFLASH_DEVICE static u32 row_of(u32 statistics, int half) {
    return statistics + (fragment_row() + 8 * half) * 2 * sizeof(Real);
  }
};
