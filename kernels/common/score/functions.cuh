// score_mod and mask_mod, for one head. cuflash/score_mod writes their code.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

#if CUFLASH_HAS_FUNCTIONS
struct Functions {
  const ScoreArg* arrays = nullptr;
  int head = 0, batch = 0;
  OfHead of_head = {};

  CUFLASH_DEVICE Functions() {}
  CUFLASH_DEVICE Functions(const Params& params, int batch_, int head_)
      : arrays(params.score_args),
        head(head_),
        batch(batch_),
        of_head(read_of_head(params.score_args, head_, batch_)) {}

#if CUFLASH_HAS_SCORE_FUNCTION
  // What the score reads for a row, and for a key.
  CUFLASH_DEVICE OfRow of_row(int row) const { return read_of_row(of_head, arrays, row, head, batch); }
  CUFLASH_DEVICE OfKey of_key(int key) const { return read_of_key(of_head, arrays, key, head, batch); }
  // The score of a pair whose scaled product is s, and its derivative by s: a Real, or Unused.
  template <class Slope>
  CUFLASH_DEVICE Real score(Real s, int row, int key, Slope& by_s) const {
    return score(s, row, key, of_row(row), of_key(key), by_s);
  }
  template <class Slope>
  CUFLASH_DEVICE Real score(Real s, int row, int key, const OfRow& of_row, const OfKey& of_key, Slope& by_s) const {
    return score_function(of_head, of_row, of_key, arrays, s, row, key, head, batch, by_s);
  }
#endif
#if CUFLASH_TANGENTS && CUFLASH_HAS_SCORE_FUNCTION
  // The tangent of the score of a pair whose scaled product is s, with the tangent ts.
  CUFLASH_DEVICE Real tangent(Real s, Real ts, int row, int key) const {
    return score_tangent(of_head, arrays, s, ts, row, key, head, batch);
  }
  // The tangent of the derivative of the score by s. It is a template, as its caller is, so that kernels that do not
  // call it do not compile the second derivatives.
  template <class Number>
  CUFLASH_DEVICE Number slope_tangent(Number s, Number ts, int row, int key) const {
    return ::slope_tangent(of_head, arrays, s, ts, row, key, head, batch);
  }
#endif
#if CUFLASH_NEEDS_SCORE_ARGS
  // Calls `visit` for each read of an array whose gradient is wanted, with the number of the read, the index in the
  // array, and the derivative of the score by that entry without the factor of the read.
  template <class Visit>
  CUFLASH_DEVICE void derivatives(Real s, int row, int key, Real& by_s, Visit visit) const {
    derivatives(s, row, key, of_row(row), of_key(key), by_s, visit);
  }
  template <class Visit>
  CUFLASH_DEVICE void derivatives(Real s, int row, int key, const OfRow& of_row, const OfKey& of_key, Real& by_s,
                                  Visit visit) const {
    score_derivatives(of_head, of_row, of_key, arrays, s, row, key, head, batch, by_s, visit);
  }
#if CUFLASH_TANGENTS
  // The same for tangents of derivatives: `visit` gets the whole derivative, and then its tangent.
  template <class Visit>
  CUFLASH_DEVICE void derivative_tangents(Real s, Real ts, int row, int key, Visit visit) const {
    score_derivative_tangents(of_head, arrays, s, ts, row, key, head, batch, visit);
  }
#endif
  // The factor that derivatives by a read have for all pairs of the head.
  CUFLASH_DEVICE Real factor_of_read(int read) const {
    Real of_read[max_of(kNumReads, 1)];
    factors_of_reads(of_head, arrays, head, batch, of_read);
    return of_read[read];
  }
#endif
#if CUFLASH_HAS_MASK_FUNCTION
  CUFLASH_DEVICE bool shows(int row, int key) const { return mask_function(of_head, arrays, row, key, head, batch); }
  // Warp. Whether the function shows all pairs of these rows and keys, or none, as far as bounds tell.
  CUFLASH_DEVICE Truth shows(Integers rows, Integers keys) const {
    return mask_bounds(arrays, rows, keys, head, batch);
  }
#endif
};
#endif
