// What a kernel compiled for the CPU sees of the emulator, for the functions of ptx/tma.cuh and ptx/wgmma.cuh.
#pragma once
#include "interface.h"

namespace emulator __attribute__((visibility("default"))) {

void barrier_init(u32 barrier, u32 count, Site site);
void fence_barrier_init(Site site);
void barrier_arrive(u32 barrier, u32 bytes, Site site);
void barrier_wait(u32 barrier, u32 parity, Site site);

void fence_async_proxy(Site site);
void load_tensor(u32 destination, const void* map, u32 barrier, const int (&coordinates)[4], Site site);
void store_tensor(const void* map, u32 source, const int (&coordinates)[4], Site site);
void add_tensor(const void* map, u32 source, const int (&coordinates)[4], Site site);
void load_bulk(u32 destination, const void* source, u32 bytes, u32 barrier, Site site);
void store_remote(u32 destination, const void* source, u32 bytes, u32 barrier, Site site);
void bulk_commit(Site site);
void bulk_wait(u32 pending, Site site);
void bulk_wait_read(u32 pending, Site site);

bool elect_lane(Site site);
u32 uniform(u32 value, Site site);
u32 to_uniform_register(u32 value, Site site);
void keep_before(float value, u32 scratch, Site site);
void store_matrix(u32 address, const u32* fragment, Site site);
void decrease_registers(u32 registers, Site site);
void increase_registers(u32 registers, Site site);

// One product of a warpgroup: the operand `a` is in registers if `a_registers` is given.
struct Product {
  Element type;  // of a
  Element b_type;
  u32 n_tiles;  // of 8 columns
  float* d;
  const u32* a_registers;
  u64 a;
  u64 b;
  bool a_transposed;
  bool b_transposed;
  bool accumulate;
};
void wgmma(const Product& product, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(u32 pending, Site site);

}  // namespace emulator
