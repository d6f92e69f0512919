// Loads of eight columns of a row from global memory.
#pragma once
#include "common/config.cuh"

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
