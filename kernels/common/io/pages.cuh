// Keys in pages: a block table says which page of a pool holds which keys of a batch entry.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"

constexpr int kKeysOfPage = max_of(kPageSize, 1);

// The pages of one batch entry.
struct Pages {
  const i32* table;
  i64 stride;
  int num_pages;

  CUFLASH_DEVICE Pages(const Params& params, int batch)
      : table(params.block_table.data + batch * params.block_table.batch_stride),
        stride(params.block_table.page_stride),
        num_pages(params.num_pages) {}

  // The page of a key, which must exist. Entries of the table after the last page are never read. Other entries have
  // not been checked before; those that are no page are clamped to the nearest page here.
  CUFLASH_DEVICE int page_of(int key) const {
    const int page = table[(u32)key / kKeysOfPage * stride];
    return page < 0 ? 0 : page < num_pages ? page : num_pages - 1;
  }
  CUFLASH_DEVICE static int row_in_page(int key) { return (u32)key % kKeysOfPage; }
};

// The keys or values of one head of a batch entry, where `load_tile` takes the address of a head.
struct PagedHead {
  using Stored = KeyStorage;

  Pages pages;
  const KeyStorage* pool;  // of the head
  i64 page_stride;
  i64 row_stride;

  CUFLASH_DEVICE PagedHead(const Params& params, const Tensor& tensor, int batch, int head)
      : pages(params, batch),
        pool((const KeyStorage*)tensor.data + head * tensor.head_stride),
        page_stride(tensor.batch_stride),
        row_stride(tensor.row_stride) {}

  CUFLASH_DEVICE const KeyStorage* row(int key) const {
    return pool + pages.page_of(key) * page_stride + Pages::row_in_page(key) * row_stride;
  }
  CUFLASH_DEVICE const KeyStorage* anywhere() const { return pool; }
};
