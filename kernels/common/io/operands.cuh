// Where the rows of an operand lie in global memory, and how float32 results are stored there.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/pages.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

// First element of head (batch, head) of an operand.
template <class T = Storage>
CUFLASH_DEVICE const T* head_of(const Tensor& tensor, int batch, int head) {
  return (const T*)tensor.data + batch * tensor.batch_stride + head * tensor.head_stride;
}

// The row of the first query, or of the first key, of batch entry `batch` in an operand that has a row for each. k and
// v may lie in pages.
template <class T = Storage>
CUFLASH_DEVICE const T* queries_of(const Tensor& tensor, Entry batch, int head) {
  return head_of<T>(tensor, entry_of(batch), head) + query_start_of(batch) * tensor.row_stride;
}
using KeyHead = Either<kPageSize == 0, const KeyStorage*, PagedHead>::Type;
CUFLASH_DEVICE auto keys_of(const Params& params, const Tensor& tensor, Entry batch, int head) {
  if constexpr (kPageSize == 0)
    return head_of<KeyStorage>(tensor, entry_of(batch), head) + key_start_of(batch) * tensor.row_stride;
  else
    return PagedHead(params, tensor, batch, head);
}
// The same for arrays with one number for each query, such as lse and its gradient.
CUFLASH_DEVICE Real* row_values_of(const Tensor& tensor, Entry batch, int head) {
  const i64 offset = query_start_of(batch) * tensor.row_stride;
  return (Real*)tensor.data + entry_of(batch) * tensor.batch_stride + head * tensor.head_stride + offset;
}
// The same for a gradient of keys that has sums instead of elements.
CUFLASH_DEVICE Real* per_key_values_of(const Tensor& tensor, Entry batch, int head) {
  const i64 offset = key_start_of(batch) * tensor.row_stride;
  return (Real*)tensor.data + entry_of(batch) * tensor.batch_stride + head * tensor.head_stride + offset;
}

// Stores row `half` of the two that a lane has of n-tiles, times its factor, to a row of float32 in global memory.
// `first` is the first column of the n-tiles.
template <int head_dim, int n_tiles>
CUFLASH_DEVICE void store_row(float* row, const float (&value)[n_tiles][4], int half, float factor, int first = 0) {
  constexpr bool kByPairs = kStoreBytes >= 8 && head_dim % 2 == 0;
  struct alignas(8) Pair {
    float value[2];
  };
#pragma unroll
  for (int n = 0; n < n_tiles; ++n) {
    const int column = first + 8 * n + fragment_column();
    const Pair pair = {value[n][2 * half] * factor, value[n][2 * half + 1] * factor};
    if constexpr (kByPairs) {
      if (column < head_dim) *(Pair*)(row + column) = pair;
    } else {
      if (column < head_dim) row[column] = pair.value[0];
      if (column + 1 < head_dim) row[column + 1] = pair.value[1];
    }
  }
}

// Loads of eight columns of a row from global memory.
constexpr int kLoadElements = kLoadBytes / kElementBytes;
struct alignas(kLoadBytes) Loaded {
  Storage value[kLoadElements];
};

// Loads eight columns of a row of `columns` columns, with zeros past its end.
template <int columns>
CUFLASH_DEVICE void load_columns(const Storage* row, int column, Storage (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += kLoadElements) {
    if (columns % 8 == 0 || column + i + kLoadElements <= columns) {
      const Loaded loaded = *(const Loaded*)(row + column + i);
#pragma unroll
      for (int j = 0; j < kLoadElements; ++j) x[i + j] = loaded.value[j];
    } else {
#pragma unroll
      for (int j = 0; j < kLoadElements; ++j) x[i + j] = column + i + j < columns ? row[column + i + j] : Storage(0);
    }
  }
}
