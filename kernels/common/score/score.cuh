// Turns the product q.k into the score that the softmax takes: by scale, softcap, slopes and bias, or by a function of
// the caller.
#pragma once
#include "common/config.cuh"
#include "common/softmax/exponential.cuh"
#include "common/score/functions.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

// The score of a pair is factor x + bias term, where x is the product, or its tanh if there is a soft cap. If nothing
// is added (kFactorInExponent), `of` returns x alone. `exponent_scale` turns what `of` returns into an exponent.
struct Score {
  Real scale;
  Real softcap;
  Real cap_factor;  // a product times this is the argument of tanh
  Real factor;
  Real slope;
  int diagonal;
  int seqlen_q;
  int key_stop;
  const void* bias;  // of this head
  i64 bias_row_stride;
  i64 bias_key_stride;
#if CUFLASH_HAS_SCORE_FUNCTION
  Functions functions;
#endif

  CUFLASH_DEVICE Score(const Params& params, Entry batch, int head, int key_stop_)
      : Score(params, batch, head, key_stop_, own_diagonal_of(params, batch)) {}

  CUFLASH_DEVICE Score(const Params& params, Entry batch, int head, int key_stop_, int own_diagonal)
      : scale(scale_of(params)),
        softcap(softcap_of(params)),
        cap_factor(kHasSoftcap && !kWide ? finite(scale / softcap) : 0),
        factor(kHasSoftcap ? softcap : scale),
        slope(0),
        diagonal(params.diagonal + own_diagonal),
        seqlen_q(params.seqlen_q),
        key_stop(key_stop_),
        bias(nullptr),
        bias_row_stride(params.bias.row_stride),
        bias_key_stride(params.bias.key_stride) {
#if CUFLASH_HAS_SCORE_FUNCTION
    functions = Functions(params, batch, head);
#endif
    if (kHasAlibi && !is_left_over(params, batch)) {
      const Tensor& slopes = params.alibi_slopes;
      slope = ((const Real*)slopes.data)[batch * slopes.batch_stride + head * slopes.head_stride];
    }
    if constexpr (kBiasBytes != 0) {
      const i64 offset = batch * params.bias.batch_stride + head * params.bias.head_stride;
      bias = (const u8*)params.bias.data + offset * kBiasBytes;
    }
  }

  CUFLASH_DEVICE Real exponent_scale() const { return kFactorInExponent ? factor * kExponentOfE : kExponentOfE; }

  // The score of (row, key). `derivative`, a Real or Unused, becomes the derivative of the capped score, or of the
  // caller's function, by the scaled product; it is 1 without either.
  template <class Slope>
  CUFLASH_DEVICE Real of(Real product, int row, int key, Slope& derivative) const {
    derivative = 1;
#if CUFLASH_HAS_SCORE_FUNCTION
    return functions.score(product * scale, row, key, derivative);
#endif
    const Real x = capped(product);
    if constexpr (kHasSoftcap) derivative = 1 - x * x;
    return with_bias(x, row, key);
  }

  // The x of a product (see above).
  CUFLASH_DEVICE Real capped(Real product) const {
    if constexpr (!kHasSoftcap) return product;
    return kWide ? accurate_tanh(product * scale / softcap) : fast_tanh(product * cap_factor);
  }

  // The same as `of` for an x that is known.
  CUFLASH_DEVICE Real with_bias(Real x, int row, int key) const {
    if constexpr (kFactorInExponent) return x;
    // A bias of rows is loaded once for all keys of a row that a lane holds.
    const bool exists = kBiasBytes != 0 && row < seqlen_q && (kBiasOfRows || key < key_stop);
    const Real bias = exists ? bias_at(row, kBiasOfRows ? 0 : key) : 0;
    return with_terms<kBiasBytes != 0>(x, factor, slope, kHasAlibi ? distance(row, key) : 0, bias);
  }
  // factor x - slope distance + bias, rounded in the same way wherever it is computed: the same pair has the same score
  // in all kernels and tiles.
  template <bool has_bias>
  CUFLASH_DEVICE static Real with_terms(Real x, Real factor, Real slope, Real distance, Real bias) {
    if constexpr (!kHasAlibi) return has_bias ? ptx::fused(x, factor, bias) : ptx::multiply(x, factor);
    const Real sloped = ptx::fused(-slope, distance, ptx::multiply(x, factor));
    return has_bias ? sloped + bias : sloped;
  }

  // Warp. The soft cap in half precision: replaces the products that a lane holds by tanh. If all arguments of a warp
  // are small, a series is enough, which saves the unit of the exponentials two results per score. The results are
  // those of fast_tanh to the bit, whatever the other arguments are. Returns whether all arguments are small.
  template <int m_tiles, int n_tiles>
  CUFLASH_DEVICE bool cap(float (&s)[m_tiles][n_tiles][4]) const {
    return kHasSoftcap && cap(s, largest_of(s));
  }
  // The same, with shorter series for arguments that are smaller still. All arguments must be of pairs that exist,
  // because together they decide which series is used.
  template <int m_tiles, int n_tiles>
  CUFLASH_DEVICE bool cap_near(float (&s)[m_tiles][n_tiles][4]) const {
    if constexpr (!kHasSoftcap) return false;
    const float largest = largest_of(s);
    return cap_by<3>(s, largest) || cap_by<4>(s, largest) || cap(s, largest);
  }
  // The largest magnitude of all elements, or a NaN. In one chain of maxima each would wait for the one before, so
  // there are four. Maxima are of integers, because non-negative numbers have the order of their bits, and one
  // instruction takes the maximum of three integers.
  template <int m_tiles, int n_tiles>
  CUFLASH_DEVICE static float largest_of(const float (&s)[m_tiles][n_tiles][4]) {
    u32 chain[4] = {};
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32& largest = chain[n % 2 * 2 + half];
          largest = max_of(largest, ptx::bits_of(max_of(fabsf(s[m][n][2 * half]), fabsf(s[m][n][2 * half + 1]))));
        }
    return ptx::float_of(max_of(max_of(chain[0], chain[1]), max_of(chain[2], chain[3])));
  }
  template <int m_tiles, int n_tiles>
  CUFLASH_DEVICE bool cap(float (&s)[m_tiles][n_tiles][4], float largest) const {
    for_each(s, [&](float& x) { x *= cap_factor; });
    if (!ptx::any_lane(!(largest * fabsf(cap_factor) <= kTanhSeriesStop))) {
      for_each(s, [](float& x) { x = tanh_by_series(x); });
      return true;
    }
    // Each n-tile has a branch of its own, because all at once would need too many registers. Zeros stay zero.
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        float (&four)[4] = s[m][n];
        if (ptx::any_lane(four[0] != 0.0f || four[1] != 0.0f || four[2] != 0.0f || four[3] != 0.0f)) {
#pragma unroll
          for (float& x : four) x = fast_tanh(x);
        }
      }
    return false;
  }

  // What a bias adds if it depends on the key only.
  CUFLASH_DEVICE Real bias_of_key(int key) const { return bias_at(0, key); }

  // A slope is multiplied by this distance.
  CUFLASH_DEVICE Real distance(int row, int key) const {
    const int distance = row + diagonal - key;
    return (Real)(distance < 0 ? -distance : distance);
  }

  // The derivative of softcap tanh(x), x = scale product / softcap, by softcap: tanh(x) - x (1 - tanh(x)^2). Near 0 the
  // two terms cancel, so it is (sinh(2x) - 2x) / 2 (1 - tanh(x)^2) there, with the first factor from its series.
  CUFLASH_DEVICE Real derivative_by_softcap(Real product) const {
    const Real x = product * scale / softcap, x2 = x * x;
    const Real t = kWide ? accurate_tanh(x) : fast_tanh(x), slope = 1 - t * t;
    if (x2 >= (Real)0.25) return t - x * slope;
    Real series = 1;
#pragma unroll
    for (int n = 18; n >= 4; n -= 2) series = 1 + 4 * x2 / (n * (n + 1)) * series;
    return x * x2 * (2 / (Real)3) * series * slope;
  }
  // The same from t = tanh(x), as accurate as half precision needs. Near 0 it is t^3 times the polynomial in t^2 of
  // least relative error, which is 1.3e-4. `small`, a Constant, says that `cap` found all arguments to be that near.
  template <class Small>
  CUFLASH_DEVICE static float derivative_by_softcap_of(float t, Small small) {
    constexpr float kStop = 0.60886f;  // tanh(kTanhSeriesStop), rounded up
    const float t2 = t * t, near = t * t2 * (0.66675054f + t2 * (0.12952618f + t2 * 0.08166679f));
    if constexpr (Small::value) return near;
    // Where 1 - t^2 vanishes, x is infinite.
    const float magnitude = fabsf(t), slope = 1.0f - t2;
    const float x = kLn2 / 2 * (ptx::log2_approx(1.0f + magnitude) - ptx::log2_approx(1.0f - magnitude));
    const float far = slope > 0.0f ? magnitude - x * slope : magnitude;
    return magnitude <= kStop ? near : t < 0 ? -far : far;
  }

 private:
  // Replaces an infinity, whose product with 0 would be NaN, by the largest finite number.
  CUFLASH_DEVICE static Real finite(Real x) {
    constexpr float kLargest = 3.402823466e38f;
    return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
  }

  // Caps by a series if that is accurate for all elements. Returns whether it is.
  template <int terms, int m_tiles, int n_tiles>
  CUFLASH_DEVICE bool cap_by(float (&s)[m_tiles][n_tiles][4], float largest) const {
    const NearTanh<terms> near(cap_factor);
    if (ptx::any_lane(!near.serves(largest))) return false;
    for_each(s, [&](float& x) { x = near.of(x); });
    return true;
  }

  template <int m_tiles, int n_tiles, class Function>
  CUFLASH_DEVICE static void for_each(float (&s)[m_tiles][n_tiles][4], Function function) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) function(s[m][n][i]);
  }

  CUFLASH_DEVICE Real bias_at(int row, int key) const {
    const i64 index = kBiasOfRows ? row : row * bias_row_stride + key * bias_key_stride;
    if constexpr (kBiasBytes == sizeof(Real)) return ((const Real*)bias)[index];
    return to_real<Element>(((const Storage*)bias)[index]);
  }
};

// What a score_mod or mask_mod reads for the two rows, of a distance of 8, of a lane's scores. If it is little, it is
// kept for all keys: if it were read for each tile of keys, it would arrive a memory access later than the products.
struct RowsOfLane {
#if CUFLASH_HAS_SCORE_FUNCTION
  static constexpr bool kKept = kNumOfRow <= 2;
  OfRow kept[2];

  CUFLASH_DEVICE RowsOfLane(const Score& score, int row) {
    if constexpr (kKept) kept[0] = score.functions.of_row(row), kept[1] = score.functions.of_row(row + 8);
  }
  CUFLASH_DEVICE OfRow at(const Score& score, int row, int half) const {
    return kKept ? kept[half] : score.functions.of_row(row + half * 8);
  }
#else
  CUFLASH_DEVICE RowsOfLane(const Score&, int) {}
#endif
};
