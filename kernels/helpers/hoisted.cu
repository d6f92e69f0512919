// Fills the tables of subexpressions of a score that take few values (cuflash/score_mod/hoisting.py): a thread makes an
// entry. After the main kernel, which sums the gradients of entries, it leads these on to the arrays that the
// subexpressions read: a term is the gradient of an entry times a derivative, and sums are exact
// (common/score/score_args_gradients.cuh).
#include "common/score/score_args_gradients.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"

// Calls `visit` with the number of a table, the table, and the index of the thread's entry in it, if the thread has
// one. A row is whole lines of 32 entries, so that a warp has entries of one row.
template <class Visit>
CUFLASH_DEVICE void with_entry(const Params& params, Visit visit) {
  i64 index = (i64)ptx::block_index() * kNumThreads + ptx::thread_index();
  repeat<kNumTables>([&](auto number) {
    const ScoreArg& table = params.score_args[array_of_table(decltype(number)::value)];
    const i64 count = table.size[0] * table.size[1] * table.size[2];
    if (index >= 0 && index < count) visit(number, table, index);
    index -= count;
  });
}

// Where an entry is.
struct TableIndex {
  int batch, head, position;

  CUFLASH_DEVICE TableIndex(const ScoreArg& table, i64 index)
      : batch((int)(index / (table.size[1] * table.size[2]))),
        head((int)(index / table.size[2] % table.size[1])),
        position((int)(index % table.size[2] + table.first)) {}
};

CUFLASH_DEVICE void hoisted(const Params& params) {
  with_entry(params, [&](auto number, const ScoreArg& table, i64 index) {
    const TableIndex at(table, index);
#if CUFLASH_NEEDS_SCORE_ARGS
    constexpr int kArray = array_of_table(decltype(number)::value);
    if constexpr (has_sums(kArray)) {
      // If an infinite or NaN term was added for a table, its gradients are NaN, as are those they are led on to.
      const bool is_finite = score_arg_largest_of(params)[kArray] < ptx::bits_of((double)ptx::infinity());
      const i64* sum = score_arg_sums_of(params, 0) + (first_sum_of(params, kArray) + index) * kSumWords;
      const Real gradient = is_finite ? (Real)exact_sum(sum) : score_nan();
      lead_on(number, params.score_args, at.batch, at.head, at.position, [&](int array, i64 element, Real derivative) {
        add_of_warp(params, array, element, score_product(gradient, derivative));
      });
    }
#else
    fill_table(number, (void*)table.data, index, params.score_args, at.batch, at.head, at.position);
#endif
  });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, hoisted)
