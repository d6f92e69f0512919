// fp8 queries, keys and values: their conversion for products, and their scales.
//
// An fp8 number is exactly representable in 16 bits. The scales of queries and keys multiply the scores. The
// scales of values multiply the weights or, if all values of a head share a scale, the output. So the operands are not
// rounded by their scales.
#pragma once
#include "common/io/fragments.cuh"
#include "common/io/pages.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

// ---- Numbers --------------------------------------------------------------------------------------------------------

#if CUFLASH_ARCH >= 89
template <class Float8>
CUFLASH_DEVICE u32 to_float16x2(Float8 type, u16 pair) {
  return ptx::to_float16x2(type, pair);
}
#else
// Earlier devices have no instruction for it. Exponent and fraction are moved to where float16 has them; the product
// with 2^8 then corrects for the difference of the exponent biases.
CUFLASH_DEVICE u32 to_float16x2(Float8E4M3, u16 pair) {
  const u32 spread = (pair & 0xffu) | (pair & 0xff00u) << 8;
  const u32 moved = (spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7;
  // A NaN has all bits set. Then the sum carries into bit 14, which is turned into an exponent of ones and a fraction.
  const u32 is_nan = ((moved & 0x3f803f80u) + 0x00800080u) & 0x40004000u;
  return ptx::multiply_f16x2(moved, 0x5c005c00u) | is_nan | (is_nan - (is_nan >> 5));
}
CUFLASH_DEVICE u32 to_float16x2(Float8E5M2, u16 pair) { return (pair & 0xffu) << 8 | (pair & 0xff00u) << 16; }
#endif

// Converts two fp8 numbers to the elements of operands of products.
template <class Float8>
CUFLASH_DEVICE u32 to_elements(Float16, Float8 type, u16 pair) {
  return to_float16x2(type, pair);
}
template <class Float8>
CUFLASH_DEVICE u32 to_elements(BFloat16, Float8 type, u16 pair) {
  const u32 halves = to_float16x2(type, pair);
  return ptx::pack(BFloat16{}, ptx::to_float32(Float16{}, (u16)halves),
                   ptx::to_float32(Float16{}, (u16)(halves >> 16)));
}
template <class Float8>
CUFLASH_DEVICE void to_numbers(Float8 type, u16 pair, Real& first, Real& second) {
  const u32 halves = to_float16x2(type, pair);
  first = ptx::to_float32(Float16{}, (u16)halves), second = ptx::to_float32(Float16{}, (u16)(halves >> 16));
}

// ---- Scales ---------------------------------------------------------------------------------------------------------

// The scales of the keys, or of the values, of one head. `scaling` is kKScale or kVScale.
template <int scaling>
struct HeadScales {
  const float* data;  // of the head; with pages: of the head in all pages
  i64 stride;         // from one block of keys to the next
  i64 page_stride;
  int shift;  // base-2 logarithm of the keys of a block
  int first;  // index of the first key among all rows
  Pages pages;

  CUFLASH_DEVICE HeadScales(const Params& params, const Tensor& scale, int shift, Entry batch, int head)
      : data((const float*)scale.data + (kPageSize == 0 ? entry_of(batch) * scale.batch_stride : 0) +
             head * scale.head_stride),
        stride(scale.row_stride),
        page_stride(scale.batch_stride),
        shift(shift),
        first(key_start_of(batch)),
        pages(params, kPageSize == 0 ? 0 : (int)batch) {}

  // The scale of a key, which must exist.
  CUFLASH_DEVICE float of(int key) const {
    if constexpr (kPageSize == 0) return data[(i64)((first + key) >> shift) * stride];
    return data[pages.page_of(key) * page_stride + (Pages::row_in_page(key) >> shift) * stride];
  }
  // The scale of all keys of the head, if they share one; otherwise 1.
  CUFLASH_DEVICE float of_head() const {
    if constexpr (scaling == 1) return *data;
    return 1.0f;
  }

  // The scales of this lane's columns of a tile, whose first key is `lane_key`; 0 for keys at and past `key_stop`.
  template <int n_tiles>
  CUFLASH_DEVICE void load(float (&scale)[n_tiles][2], int lane_key, int key_stop) const {
    if constexpr (scaling == 2) {
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[n][i] = of_any(lane_key + 8 * n + i, key_stop);
    }
  }

  // Loads the scales of a tile by the lanes of a warp: each lane holds one of every 32 keys. `gather` then gets those
  // of a lane's columns, two of each 8.
  template <int count>
  CUFLASH_DEVICE void load_by_lanes(float (&scale)[count], int first_key, int key_stop) const {
    if constexpr (scaling == 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) scale[i] = of_any(first_key + 32 * i + lane_index(), key_stop);
    }
  }
  template <int n_tiles, int count>
  CUFLASH_DEVICE static void gather(float (&scale)[n_tiles][2], const float (&by_lanes)[count]) {
    if constexpr (scaling == 2) {
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[n][i] = ptx::shuffle(by_lanes[n / 4], 8 * n % 32 + fragment_column() + i);
    }
  }

 private:
  CUFLASH_DEVICE float of_any(int key, int key_stop) const { return key < key_stop ? of(key) : 0.0f; }
};

// The scales of the queries of one head.
struct QueryScales {
  const float* data;
  i64 stride;  // from one block of queries to the next
  int shift;   // base-2 logarithm of the queries of a block
  int first;   // index of the first query among all rows
  int last;    // the last of all rows

  CUFLASH_DEVICE QueryScales(const Params& params, Entry batch, int head)
      : data((const float*)params.q_scale.data + entry_of(batch) * params.q_scale.batch_stride +
             head * params.q_scale.head_stride),
        stride(params.q_scale.row_stride),
        shift(params.q_scale_shift),
        first(query_start_of(batch)),
        last(params.seqlen_q - 1) {}

  // The scale of a query. Rows that stand for no query get that of some query.
  CUFLASH_DEVICE float of(int query) const {
    if constexpr (!kQScale) return 1.0f;
    return data[(min_of(first + query, last) >> shift) * stride];
  }
};

// Multiplies rows of a tile by the scales of their queries. A lane has two of each 16 rows.
template <int m_tiles, int n_tiles>
CUFLASH_DEVICE void multiply_rows(Real (&x)[m_tiles][n_tiles][4], const float (&scale)[m_tiles][2]) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] *= scale[m][i / 2];
}

// Multiplies the columns of a tile by the scales of their keys, or by the scale of the head.
template <int scaling, int m_tiles, int n_tiles>
CUFLASH_DEVICE void multiply_columns(Real (&x)[m_tiles][n_tiles][4], const float (&scale)[n_tiles][2], float of_head) {
  if constexpr (scaling != 0) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= scaling == 1 ? of_head : scale[n][i % 2];
  }
}

template <class E>
constexpr bool kIsFloat16 = false;
template <>
constexpr bool kIsFloat16<Float16> = true;

CUFLASH_DEVICE float power_of_two(int n) { return ptx::float_of((u32)(n + 127) << 23); }

// Weights times the scales of values are operands of 16 bits. In float16 large or small scales would make them leave
// its range, so the scales are divided by a power of two that is near the largest scale so far. The output is relative
// to that power of two.
template <class E>  // the operands
struct ValueScales {
  static constexpr bool kIsRelative = kVScale == 2 && kIsFloat16<E>;
  static constexpr int kSmallest = -126, kLargest = 126;
  int exponent = kSmallest;  // of the power of two

  // Warp. Takes in the scales of a tile and divides them. Rescales the output if the power of two grows.
  template <int m_tiles, int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(float (&scale)[n_tiles][2], Real (&out)[m_tiles][out_tiles][4]) {
    if constexpr (kIsRelative) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) largest = fmaxf(largest, fmaxf(fabsf(scale[n][0]), fabsf(scale[n][1])));
      largest = fmaxf(largest, ptx::shuffle_xor(largest, 1));
      largest = fmaxf(largest, ptx::shuffle_xor(largest, 2));
      const int needed = min_of((int)(ptx::bits_of(largest) >> 23) - 127, kLargest);
      if (needed > exponent) {
        const float factor = power_of_two(max_of(exponent - needed, kSmallest));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int n = 0; n < out_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[m][n][i] *= factor;
        exponent = needed;
      }
      const float inverse = power_of_two(-exponent);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) scale[n][0] *= inverse, scale[n][1] *= inverse;
    }
  }
  // The factor of the output of a row: the inverse of its sum, times the scale of the head or the power of two. A row
  // that saw no key stays zero, whatever the scale of the head is.
  CUFLASH_DEVICE Real row_factor(Real inverse_sum, Real of_head) const {
    if (kVScale == 0 || inverse_sum == 0) return inverse_sum;
    return inverse_sum * of_head * (kIsRelative ? power_of_two(exponent) : 1.0f);
  }
};
