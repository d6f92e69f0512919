// What a kernel compiled for the CPU sees of the emulator. No standard header is included here: every kernel
// specialisation compiles this file again.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace emulator __attribute__((visibility("default"))) {

// Where in the kernel's source an operation was called.
struct Site {
  const char* file;
  u32 line;

  // As a default argument this names the line of the caller.
  static constexpr Site here(const char* file = __builtin_FILE(), u32 line = __builtin_LINE()) { return {file, line}; }
};

enum class Element : u32 { kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

// One kernel of a module: its body for one thread.
struct Kernel {
  void (*thread_body)(const void* params);
  u64 params_bytes;
  u32 max_threads;
  u32 min_blocks;  // resident blocks that an SM has to have room for
  u32 cluster;     // blocks of a cluster, which run together
};

// How the driver wants a launch to run. cuflash/emulator/launching.py has the same struct.
struct LaunchOptions {
  u32 grid;
  u32 threads;
  u32 shared_bytes;
  u32 order;  // the enum Order of scheduler.h
  u32 eager_copies;
  u32 trap_unwritten;
  u32 in_turn;  // blocks run in the order of their index, whatever the order of threads; they add in turn
  u32 counted;  // the same; threads that add have waited for a count
  u64 seed;
  double watchdog_seconds;
};

// What a launch did. cuflash/emulator/launching.py has the same fields.
struct Statistics {
  u64 fiber_switches;
  u64 block_barriers;
  u64 matrix_loads;
  u64 matrix_load_conflicts;
  u64 matrix_products;
  u64 bulk_copies;
  u64 warpgroup_products;
  // Of arrays in global memory, by asynchronous copies and reductions. What lies outside of the arrays does not count.
  u64 bytes_loaded;
  u64 bytes_stored;
  u64 bytes_added;
};

// What came of a launch. cuflash/emulator/launching.py has the same struct.
struct Report {
  char message[4096];
  char file[512];
  u32 line;
  u32 block;
  u32 thread;
  u32 has_thread;
  // The instruction that faulted, for looking up its source line; empty if the site above says it all.
  char fault_module[512];
  u64 fault_offset;

  Statistics statistics;
};

// Returns 0 if the kernel ran to its end.
int launch(const Kernel& kernel, const void* params, u64 params_bytes, const LaunchOptions& options, Report& report);

u32 thread_index();
u32 block_index();
u32 num_blocks();
u32 dynamic_shared();
// The same place in the shared memory of another block of the cluster.
u32 address_in(u32 rank, u32 address);

// Checked access to shared memory: the bytes to read from or to write to.
const u8* read_shared(u32 address, u32 bytes, Site site);
u8* write_shared(u32 address, u32 bytes, Site site);

void sync_block(Site site);
void sync_cluster(Site site);
void sync_warp(Site site);
void sync_named(u32 identifier, u32 threads, Site site);
void arrive_named(u32 identifier, u32 threads, Site site);
bool sync_named_any(u32 identifier, u32 threads, bool predicate, Site site);
float shuffle_xor(float value, u32 lane_mask, Site site);
double shuffle_xor(double value, u32 lane_mask, Site site);
float shuffle(float value, u32 lane, Site site);
double shuffle(double value, u32 lane, Site site);
u32 shuffle(u32 value, u32 lane, Site site);
bool any_lane(bool predicate, Site site);
u32 ballot(bool predicate, Site site);

void copy_async(u32 destination, const void* source, u32 bytes, u32 source_bytes, Site site);
void copy_async_commit(Site site);
void copy_async_wait(u32 pending, Site site);

void load_matrix(u32* fragment, u32 address, Site site);
void load_matrix_transposed(u32* fragment, u32 address, Site site);
void multiply_matrix(Element type, float* d, const u32* a, u32 b0, u32 b1, Site site);
void multiply_matrix_tf32(float* d, const float* a, float b0, float b1, Site site);
void multiply_matrix_float64(double* d, const double* a, double b0, double b1, Site site);

float exp2_approx(float x);
float reciprocal_approx(float x);
float sqrt_approx(float x);
float log2_approx(float x);
int floor_to_int(float x);
float floor_to_float(float x);
u16 from_float32(Element type, float value);
float to_float32(Element type, u16 bits);
float round_to_tf32(float x);

void reduce_add(float* address, const float* values, u32 count, Site site);
void reduce_add(double* address, const double* values, u32 count, Site site);
void reduce_add(u64* address, u64 value, Site site);
void reduce_max(u64* address, u64 value, Site site);

void wait_for_count(const u32* counter, u32 count, Site site);
void add_to_count(u32* counter, Site site);
void wait_for_turn(const u32* turns, u32 turn, Site site);
void end_turn(u32* turns, Site site);

void store_for_blocks(void* address, const void* values, u32 bytes, Site site);
void load_of_blocks(const void* address, void* values, u32 bytes, Site site);
u64 load_arrivals(const u64* counter, Site site);
void replace_arrivals(u64* counter, u64 expected, u64 value, Site site);
u64 count_arrival(u64* counter, Site site);

}  // namespace emulator
