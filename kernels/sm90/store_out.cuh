// The epilogue of consumers that own 64 queries of a tile each: stores O / l, where the sums of rows are finished.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/tiles.cuh"

// Rounds o / l * scale of consumer `index` and writes it, `out_columns` columns at a time, to its rows of `s_out` in
// shared memory, once TMA has read what was there before. From there TMA, or store_first_rows, stores the first
// `row_stop` rows.
template <int out_columns, class Softmax, int column_tiles>
CUFLASH_DEVICE void store_rounded(const Tensor& result, const TensorMap& map, const QueryTile& tile, u32 index,
                                  int row_stop, u32 s_out, const Softmax& softmax, float scale,
                                  float (&o)[column_tiles][4]) {
  const u32 thread = ptx::thread_index() % 128;
  const bool elected = thread == 0;
  const int head = tile.work.head, first_row = tile.first_row + index * 64;
  const Entry batch = tile.work.batch;
  const u32 own_out = s_out + index * 64 * kLineBytes;
  const float upper = softmax.inverse_sum(0, 0) * scale, lower = softmax.inverse_sum(0, 1) * scale;
  repeat<ceil_div(kDimV, out_columns)>([&](auto slice) {
    constexpr int kFirst = decltype(slice)::value * out_columns;
    constexpr int kColumns = min_of(out_columns, kDimV - kFirst);
    if (elected) ptx::bulk_wait_read<0>();
    sync_consumer(index);
    store_fragments_chunked<kBlockM>(own_out, thread / 32 * 16, (float (&)[kColumns / 8][4]) o[kFirst / 8], upper,
                                     lower);
    ptx::fence_async_proxy();
    sync_consumer(index);
    if (kStoresByRows || (kIsPacked && row_stop < 64)) {
      Storage* g_out = (Storage*)queries_of(result, batch, head) + first_row * result.row_stride;
      const int rows = min_of(at_least_zero(row_stop), 64);
      store_first_rows<kBlockM, min_of(kColumns, kHeadDimV - kFirst)>(g_out + kFirst, result.row_stride, own_out, rows,
                                                                      thread);
    } else if (elected) {
      const int array_row = query_start_of(batch) + first_row;
      store_chunks<kBlockM, kColumns>(map, own_out, array_row, head, entry_of(batch), kFirst);
      ptx::bulk_commit();
    }
  });
}

// Stores o / l * scale in float32, to be merged with the results of other keys. `lane_row` is the first of a lane's two
// rows, `row_stop` the number of queries.
template <class Softmax, int column_tiles>
CUFLASH_DEVICE void store_wide(const Tensor& result, const Work& work, int lane_row, int row_stop,
                               const Softmax& softmax, float scale, const float (&o)[column_tiles][4]) {
  const i64 stride = result.row_stride;
  float* g_out = row_values_of(result, work.batch, work.head) + lane_row * stride + fragment_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = softmax.inverse_sum(0, half) * scale;
    if (lane_row + 8 * half >= row_stop) continue;
#pragma unroll
    for (int n = 0; n < ceil_div(kHeadDimV, 8); ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (kHeadDimV % 8 == 0 || 8 * n + fragment_column() + i < kHeadDimV)
          g_out[8 * half * stride + 8 * n + i] = o[n][2 * half + i] * factor;
  }
}
