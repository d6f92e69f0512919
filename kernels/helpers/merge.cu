// Operations on partial results: sums, merges by lse (common/schedule/key_splits.cuh has the
// formula) for ranks, streamed keys and cuflash.merge, and their gradients. All arrays of an operation have the axes of
// the first one and any strides; along an axis that an array lacks, its stride is 0. By element, a thread serves kLanes
// neighbours of the last axis; by row, kThreadsOfRow threads share a row.
//
// CuPy compiles its own elementwise kernels so that subnormal numbers count as zeros. Here they count.
#include "ptx/base.cuh"

template <class E>
struct Stored {
  using Type = u16;
};
template <>
struct Stored<Float32> {
  using Type = float;
};
template <>
struct Stored<Float64> {
  using Type = double;
};

using Partial = CUFLASH_PARTIAL_DTYPE;  // the tag of partial results
using Result = CUFLASH_RESULT_DTYPE;    // the tag of results of their shape
using Real = CUFLASH_REAL;              // the type of lse and of sums
using Index = CUFLASH_INDEX;
constexpr int kPartials = CUFLASH_PARTIALS, kAxes = CUFLASH_AXES, kArrays = CUFLASH_ARRAYS, kLanes = CUFLASH_LANES;
constexpr bool kHasLseRest = CUFLASH_HAS_LSE_REST;        // lse of a partial result comes with what its rounding leaves
constexpr bool kStoresLseRest = CUFLASH_STORES_LSE_REST;  // the merged lse, too
constexpr bool kHasDlse = CUFLASH_HAS_DLSE, kHasTdlse = CUFLASH_HAS_TDLSE, kHasTdout = CUFLASH_HAS_TDOUT;
constexpr bool kHasTangents = CUFLASH_HAS_TANGENTS;  // partial results come with their tangents
constexpr Real kLargeLse = CUFLASH_LARGE_LSE;        // cuflash/spec/row_sums.py
constexpr int kThreads = 256;
constexpr int kThreadsOfRow = 16;
constexpr int kRowLanes = 4;  // neighbours that a thread of a row reads at once; sums have one order for any alignment

struct Array {
  u64 data;
  i64 stride[kAxes];  // bytes
};
struct Params {
  u64 size[kAxes];  // the last one in elements of kLanes neighbours
  Array array[kArrays];
};
static_assert(sizeof(Params) == CUFLASH_PARAMS_BYTES, "Params differs from its description in Python");

template <class E>
CUFLASH_DEVICE Real to_real(E, u16 bits) {
  return ptx::to_float32(E{}, bits);
}
CUFLASH_DEVICE Real to_real(Float32, float x) { return x; }
CUFLASH_DEVICE Real to_real(Float64, double x) { return x; }
template <class E>
CUFLASH_DEVICE u16 from_real(E, Real x) {
  return ptx::pack(E{}, x, 0.0f);
}
CUFLASH_DEVICE float from_real(Float32, Real x) { return x; }
CUFLASH_DEVICE double from_real(Float64, Real x) { return x; }

template <class E, int lanes>
struct alignas(lanes * sizeof(typename Stored<E>::Type)) Vector {
  typename Stored<E>::Type element[lanes];
};

// Where a thread works: an index along each axis, the last one in elements of `lanes` neighbours.
template <int lanes>
struct ElementOfThread {
  const Params& params;
  Index at[kAxes];
  bool is_inside;

  // The `number`-th element of all, whose last axis has `last` elements.
  CUFLASH_DEVICE ElementOfThread(const Params& params, Index number, Index last) : params(params) {
    at[kAxes - 1] = number % last, number /= last;
#pragma unroll
    for (int axis = kAxes - 2; axis >= 0; --axis)
      at[axis] = number % (Index)params.size[axis], number /= (Index)params.size[axis];
    is_inside = number == 0;
  }

  CUFLASH_DEVICE bool is_first() const { return at[kAxes - 1] == 0; }

  template <class T>
  CUFLASH_DEVICE T* address(int number) const {
    const Array& array = params.array[number];
    u64 address = array.data;
#pragma unroll
    for (int axis = 0; axis < kAxes; ++axis)
      address += (i64)at[axis] * (array.stride[axis] * (axis == kAxes - 1 ? lanes : 1));
    return (T*)address;
  }
  // A number of a row: the stride of the last axis is 0.
  CUFLASH_DEVICE Real& row(int number) const { return *address<Real>(number); }

  template <class E>
  CUFLASH_DEVICE void load(E, int number, Real (&x)[lanes]) const {
    const auto vector = *address<const Vector<E, lanes>>(number);
#pragma unroll
    for (int i = 0; i < lanes; ++i) x[i] = to_real(E{}, vector.element[i]);
  }
  template <class E>
  CUFLASH_DEVICE void store(E, int number, const Real (&x)[lanes]) const {
    Vector<E, lanes> vector;
#pragma unroll
    for (int i = 0; i < lanes; ++i) vector.element[i] = from_real(E{}, x[i]);
    *address<Vector<E, lanes>>(number) = vector;
  }
};

CUFLASH_DEVICE Index thread_in_all() { return (Index)ptx::block_index() * kThreads + ptx::thread_index(); }
CUFLASH_DEVICE ElementOfThread<kLanes> element_of_thread(const Params& params) {
  return {params, thread_in_all(), (Index)params.size[kAxes - 1]};
}

// CUDA Math API: e^x and log x to 2 ulp (float64: 1 ulp), of subnormal numbers, too.
CUFLASH_DEVICE float exponential(float x) { return expf(x); }
CUFLASH_DEVICE double exponential(double x) { return exp(x); }
CUFLASH_DEVICE float natural_log(float x) { return logf(x); }
CUFLASH_DEVICE double natural_log(double x) { return log(x); }

CUFLASH_DEVICE bool is_infinite(Real x) { return x == ptx::infinity() || x == -ptx::infinity(); }
// What exponents are relative to: a row that attends to no key has no maximum.
CUFLASH_DEVICE Real finite_max(Real x) { return x == -ptx::infinity() ? Real(0) : x; }
CUFLASH_DEVICE Real at_least(Real x, Real y) { return y > x || y != y ? y : x; }

// array 0: the sum of the others, added in their order.
CUFLASH_DEVICE void add(const Params& params) {
  const auto element = element_of_thread(params);
  if (!element.is_inside) return;
  Real sum[kLanes], x[kLanes];
  element.load(Partial{}, 1, sum);
#pragma unroll
  for (int i = 1; i < kPartials; ++i) {
    element.load(Partial{}, 1 + i, x);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += x[lane];
  }
  element.store(Result{}, 0, sum);
}

// The tangents of merged results, behind these, from those of partial results, behind their lses; `weight` has their
// weights, `total` the sum of these. With w = weight / total: tlse = sum w tlse_i, tout = sum w (tout_i + (tlse_i -
// tlse) out_i).
template <class Element>
CUFLASH_DEVICE void merge_tangents(const Element& element, const Real (&weight)[kPartials], Real total) {
  constexpr int kOuts = 4, kTouts = kOuts + 2 * kPartials, kTlses = kTouts + kPartials;
  Real tlse = 0;
#pragma unroll
  for (int i = 0; i < kPartials; ++i) {
    const Real own = weight[i] / total;
    tlse += own == 0 ? Real(0) : own * element.row(kTlses + i);
  }
  if (element.is_first()) element.row(3) = tlse;
  Real tout[kLanes] = {}, x[kLanes], tx[kLanes];
#pragma unroll
  for (int i = 0; i < kPartials; ++i) {
    element.load(Partial{}, kOuts + i, x);
    element.load(Partial{}, kTouts + i, tx);
    const Real own = weight[i] / total, shift = element.row(kTlses + i) - tlse;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) tout[lane] += own == 0 ? Real(0) : own * (tx[lane] + shift * x[lane]);
  }
  element.store(Result{}, 2, tout);
}

// arrays 0 and 1: out and lse of partial outs, which follow, and of their lses, which follow these. With tangents, tout
// and tlse come before the partial outs, and partial touts and tlses after their lses.
CUFLASH_DEVICE void merge(const Params& params) {
  const auto element = element_of_thread(params);
  if (!element.is_inside) return;
  constexpr int kOuts = kHasTangents ? 4 : 2;
  Real lse[kPartials], rest[kPartials];
#pragma unroll
  for (int i = 0; i < kPartials; ++i) {
    const Real* own = &element.row(kOuts + kPartials + i);
    lse[i] = own[0];
    rest[i] = kHasLseRest ? own[1] : Real(0);
  }
  Real row_max = lse[0];
#pragma unroll
  for (int i = 1; i < kPartials; ++i) row_max = at_least(row_max, lse[i]);
  row_max = finite_max(row_max);
  Real sum = 0, weight[kPartials];
#pragma unroll
  for (int i = 0; i < kPartials; ++i) sum += weight[i] = exponential((lse[i] - row_max) + rest[i]);
  if (element.is_first()) {
    Real* result = &element.row(1);
    const Real all = result[0] = row_max + natural_log(sum);
    if constexpr (kStoresLseRest) {
      const bool is_large = (all >= kLargeLse || all <= -kLargeLse) && !is_infinite(all);
      result[1] = is_large ? (row_max - all) + natural_log(sum) : Real(0);
    }
  }
  const Real total = sum == 0 ? Real(1) : sum;
  if constexpr (kHasTangents) merge_tangents(element, weight, total);
  Real out[kLanes] = {}, x[kLanes];
#pragma unroll
  for (int i = 0; i < kPartials; ++i) {
    element.load(Partial{}, kOuts + i, x);
    const Real own = weight[i] / total;
    // What a partial result without weight has in memory, which may be NaN, counts for nothing.
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) out[lane] += own == 0 ? Real(0) : own * x[lane];
  }
  element.store(Result{}, 0, out);
}

// One step of online softmax over partial results (Milakov and Gimelshein 2018, Algorithm 3), by row. arrays 0 and 1:
// the row max and the row sum so far, 2 and 3: the factors of what has been added and of the partial out, last: its
// lse. With tangents, 4: the tangent of lse so far, to which it moves; 5 and 6: by how much it, and that of the partial
// result, which follows lse, lie above the new one.
CUFLASH_DEVICE void softmax_step(const Params& params) {
  constexpr int kLse = kHasTangents ? 7 : 4;
  const auto element = element_of_thread(params);
  if (!element.is_inside) return;
  const Real before = element.row(0), row_max = at_least(before, element.row(kLse)), shift = finite_max(row_max);
  const Real factor = exponential(before - shift), weight = exponential(element.row(kLse) - shift);
  element.row(0) = row_max;
  const Real row_sum = element.row(1) = element.row(1) * factor + weight;
  if constexpr (kHasTangents) {
    const Real tlse = element.row(4), own_tlse = element.row(kLse + 1);
    const Real moved = weight == 0 ? tlse : tlse + weight / row_sum * (own_tlse - tlse);
    element.row(4) = moved;
    element.row(5) = tlse - moved;
    element.row(6) = own_tlse - moved;
  }
  element.row(2) = factor;
  element.row(3) = weight;
}

// array 0: what has been added, rescaled, and a partial out (1); factors as above (2, 3). With tangents, 0 and 1: what
// has been added of both, 2: a partial out, 3: its tangent, then factors, and by how much tlse lie above the new one.
CUFLASH_DEVICE void rescale_and_add(const Params& params) {
  constexpr int kOut = kHasTangents ? 2 : 1, kFactor = kHasTangents ? 4 : 2;
  const auto element = element_of_thread(params);
  if (!element.is_inside) return;
  const Real factor = element.row(kFactor), weight = element.row(kFactor + 1);
  Real total[kLanes], x[kLanes];
  element.load(Result{}, 0, total);
  element.load(Partial{}, kOut, x);
  if constexpr (kHasTangents) {
    const Real shift = element.row(kFactor + 2), own_shift = element.row(kFactor + 3);
    Real tangent[kLanes], tx[kLanes];
    element.load(Result{}, 1, tangent);
    element.load(Partial{}, kOut + 1, tx);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      tangent[lane] = (tangent[lane] + shift * total[lane]) * factor +
                      (weight == 0 ? Real(0) : weight * (tx[lane] + own_shift * x[lane]));
    element.store(Result{}, 1, tangent);
  }
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane)
    total[lane] = total[lane] * factor + (weight == 0 ? Real(0) : weight * x[lane]);
  element.store(Result{}, 0, total);
}

// arrays 0 and 1: out and lse, of what has been added (2), the row max (3) and the row sum (4).
CUFLASH_DEVICE void normalize(const Params& params) {
  const auto element = element_of_thread(params);
  if (!element.is_inside) return;
  const Real sum = element.row(4);
  if (element.is_first()) element.row(1) = element.row(3) + natural_log(sum);
  Real x[kLanes];
  element.load(Partial{}, 2, x);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) x[lane] /= sum == 0 ? Real(1) : sum;
  element.store(Result{}, 0, x);
}

// A row that kThreadsOfRow threads of a warp share.
struct Row {
  const ElementOfThread<1> element;  // of column 0
  const u32 thread;
  const Index columns;

  CUFLASH_DEVICE Row(const Params& params)
      : element(params, thread_in_all() / kThreadsOfRow, 1),
        thread(ptx::thread_index() % kThreadsOfRow),
        columns(element.is_inside ? params.size[kAxes - 1] * kLanes : 0) {}

  // The first of this thread's neighbours in the `step`-th slice of the row.
  CUFLASH_DEVICE Index column(int step) const { return (Index)(step * kThreadsOfRow + thread) * kRowLanes; }

  template <class E>
  CUFLASH_DEVICE void load(E, int number, Index column, Real (&x)[kRowLanes]) const {
    const auto* first = element.template address<const typename Stored<E>::Type>(number) + column;
    if constexpr (kLanes == kRowLanes) {
      const auto vector = *(const Vector<E, kRowLanes>*)first;
#pragma unroll
      for (int i = 0; i < kRowLanes; ++i) x[i] = to_real(E{}, vector.element[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRowLanes; ++i) x[i] = column + i < columns ? to_real(E{}, first[i]) : Real(0);
    }
  }
  template <class E>
  CUFLASH_DEVICE void store(E, int number, Index column, const Real (&x)[kRowLanes]) const {
    auto* first = element.template address<typename Stored<E>::Type>(number) + column;
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i)
      if (column + i < columns) first[i] = from_real(E{}, x[i]);
  }
};

CUFLASH_DEVICE Real sum_of_row(Real x) {
#pragma unroll
  for (int mask = kThreadsOfRow / 2; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}
CUFLASH_DEVICE Real dot(const Real (&x)[kRowLanes], const Real (&y)[kRowLanes]) {
  Real sum = 0;
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) sum += x[i] * y[i];
  return sum;
}

// array 0: dlse (3) - rowsum(dout * out), all that the gradients of a row need of out (1), dout (2) and dlse.
CUFLASH_DEVICE void minus_delta(const Params& params) {
  const Row row(params);
  Real delta = 0, out[kRowLanes], dout[kRowLanes];
  for (int step = 0; row.column(step) < row.columns; ++step) {
    row.load(Partial{}, 1, row.column(step), out);
    row.load(Partial{}, 2, row.column(step), dout);
    delta += dot(out, dout);
  }
  delta = sum_of_row(delta);
  if (row.columns == 0 || row.thread != 0) return;
  Real found = -delta;
  if constexpr (kHasDlse) found = row.element.row(3) + found;
  row.element.row(0) = found;
}

// arrays 0 and 1: gradients of a partial out (3) and of its lse (5), by dout (2), with out (4), lse (6) and dlse (7).
CUFLASH_DEVICE void merge_backward(const Params& params) {
  const Row row(params);
  Real weight = 0, delta = 0, own_delta = 0;
  if (row.columns != 0) {
    const Real own_lse = row.element.row(5);
    weight = own_lse == -ptx::infinity() ? Real(0) : exponential(own_lse - row.element.row(6));
  }
  Real dout[kRowLanes], own_dout[kRowLanes], x[kRowLanes];
  for (int step = 0; row.column(step) < row.columns; ++step) {
    const Index column = row.column(step);
    row.load(Partial{}, 2, column, dout);
    row.load(Partial{}, 4, column, x);
    delta += dot(dout, x);
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i) {
      // Sums take the rounded gradient, so that delta of the partial result, which is the same number, cancels it.
      own_dout[i] = to_real(Partial{}, from_real(Partial{}, weight == 0 ? Real(0) : weight * dout[i]));
    }
    row.load(Partial{}, 3, column, x);
    own_delta += dot(own_dout, x);
    row.store(Partial{}, 0, column, own_dout);
  }
  delta = sum_of_row(delta);
  own_delta = sum_of_row(own_delta);
  if (row.columns == 0 || row.thread != 0) return;
  Real found = own_delta - weight * delta;
  if constexpr (kHasDlse) found += weight * row.element.row(7);
  row.element.row(1) = weight == 0 ? Real(0) : found;
}

// The tangents of what merge_backward makes. arrays 0 and 1: those of the gradients of a partial out (3) and of its lse
// (7); 2: dout, 4: out, 5 and 6: the tangents of both outs, 8: lse, 9 and 10: the tangents of both lses; then dlse,
// tdlse and tdout, as far as there are any.
CUFLASH_DEVICE void merge_backward_tangents(const Params& params) {
  constexpr int kDlse = 11, kTdlse = kDlse + kHasDlse, kTdout = kTdlse + kHasTdlse;
  const Row row(params);
  Real weight = 0, moved = 0;  // and its tangent
  if (row.columns != 0) {
    const Real own_lse = row.element.row(7);
    weight = own_lse == -ptx::infinity() ? Real(0) : exponential(own_lse - row.element.row(8));
    moved = weight == 0 ? Real(0) : weight * (row.element.row(9) - row.element.row(10));
  }
  Real delta = 0, tdelta = 0, own_tdelta = 0;
  Real dout[kRowLanes], tdout[kRowLanes] = {}, own_dout[kRowLanes], own_tdout[kRowLanes], x[kRowLanes];
  for (int step = 0; row.column(step) < row.columns; ++step) {
    const Index column = row.column(step);
    row.load(Partial{}, 2, column, dout);
    if constexpr (kHasTdout) row.load(Partial{}, kTdout, column, tdout);
    row.load(Partial{}, 4, column, x);
    delta += dot(dout, x);
    tdelta += dot(tdout, x);
    row.load(Partial{}, 6, column, x);
    tdelta += dot(dout, x);
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i) {  // rounded, as in merge_backward
      own_dout[i] = to_real(Partial{}, from_real(Partial{}, weight == 0 ? Real(0) : weight * dout[i]));
      const Real own = weight == 0 ? Real(0) : moved * dout[i] + weight * tdout[i];
      own_tdout[i] = to_real(Partial{}, from_real(Partial{}, own));
    }
    row.load(Partial{}, 3, column, x);
    own_tdelta += dot(own_tdout, x);
    row.load(Partial{}, 5, column, x);
    own_tdelta += dot(own_dout, x);
    row.store(Partial{}, 0, column, own_tdout);
  }
  delta = sum_of_row(delta);
  tdelta = sum_of_row(tdelta);
  own_tdelta = sum_of_row(own_tdelta);
  if (row.columns == 0 || row.thread != 0) return;
  Real found = own_tdelta - moved * delta - weight * tdelta;
  if constexpr (kHasDlse) found += moved * row.element.row(kDlse);
  if constexpr (kHasTdlse) found += weight * row.element.row(kTdlse);
  row.element.row(1) = weight == 0 ? Real(0) : found;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kThreads, 1, CUFLASH_OPERATION)
