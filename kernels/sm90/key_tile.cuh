// A tile of keys, or of their values, for TMA: contiguous, or in boxes that each lie in one page.
#pragma once
#include "common/io/pages.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

// Rows of a box. A page consists of whole boxes, and so does a tile.
constexpr int kBoxRows = kPageSize != 0 && kPageSize < (kBlockN & -kBlockN) ? kPageSize : kBlockN & -kBlockN;
constexpr int kBoxes = kPageSize == 0 ? 1 : kBlockN / kBoxRows;

struct KeyTile {
  int first_key, head, batch;  // in the arrays
  int page[kBoxes];            // of each box

  // `key_start` is the row where a packed sequence starts.
  CUFLASH_DEVICE KeyTile(const Params& params, int batch_, int head_, int n_block, int key_stop, int key_start = 0)
      : first_key(key_start + n_block * kBlockN), head(head_), batch(batch_) {
    if constexpr (kPageSize != 0) {
      const Pages pages(params, batch);
      // The page of a box without keys is not looked up. The box gets a page outside of the pool, for which TMA brings
      // zeros.
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int key = first_key + i * kBoxRows;
        page[i] = key < key_stop ? pages.page_of(key) : params.num_pages;
      }
    }
  }

  // Issues the load of the tile, which has `columns` columns, `chunk` of them in a line. `full` then expects the bytes
  // of this load, and `other_bytes` of loads that the caller issues.
  template <int columns, int chunk = kChunk>
  CUFLASH_DEVICE void load(u32 tile, const TensorMap& map, const Barrier& full, u32 other_bytes = 0) const {
    constexpr int kChunks = ceil_div(columns, chunk);
    full.arrive_expect(kChunks * kBlockN * kLineBytes + other_bytes);
    issue<columns, chunk>(tile, map, full);
  }
  // The same where `full` expects the bytes already.
  template <int columns, int chunk = kChunk>
  CUFLASH_DEVICE void issue(u32 tile, const TensorMap& map, const Barrier& full) const {
    constexpr int kChunks = ceil_div(columns, chunk);
    if constexpr (kPageSize == 0) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        ptx::load_tensor(tile + c * kBlockN * kLineBytes, map, full.address, c * chunk, first_key, head, batch);
    } else {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int row = Pages::row_in_page(first_key + i * kBoxRows);
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          ptx::load_tensor(tile + (c * kBlockN + i * kBoxRows) * kLineBytes, map, full.address, c * chunk, row, head,
                           page[i]);
      }
    }
  }
};
