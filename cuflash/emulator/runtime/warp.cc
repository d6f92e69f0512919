// Collectives of a warp: the lanes wait for each other, and the last to arrive does the work of all.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "hot.h"
#include "interface_sm90.h"
#include "numerics.h"
#include "order.h"
#include "shared_memory.h"
#include "turns.h"

namespace emulator {

void collect(const char* operation, Site site, void* argument, void (*perform)(Warp& warp)) {
  Thread& self = *block.current;
  Warp& warp = warp_of(self);
  if (warp.exited)
    fail(self, site, "divergent warp: the thread calls %s, but %u threads of its warp have exited", operation,
         warp.exited);
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.site = site;
  } else if (warp.operation != operation || warp.site != site) {
    fail(self, site, "divergent warp: the thread calls %s here while others of its warp wait in %s at %s:%u", operation,
         warp.operation, file_name(warp.site), warp.site.line);
  }
  const u32 lane = self.index % kWarpLanes;
  warp.argument[lane] = argument;
  if (++warp.arrived < kWarpLanes) {
    wait_for_wake(operation, site);
    return;
  }
  self.site = site;
  // What the lanes did before is ordered before the collective, and what they do next after it.
  order_lanes(warp);
  perform(warp);
  order_lanes(warp);
  warp.arrived = 0;
  const u32 first = self.index - lane;
  for (u32 i = 0; i < kWarpLanes; ++i)
    if (i != lane) wake(*block.threads[first + i]);
}

namespace {

void check_landed(float value) {
  if (is_in_flight(value))
    fail(*block.current, block.current->site, "uses an accumulator of a product in flight: a wgmma_wait is missing");
}

template <class T>
struct Shuffle {
  T value;
  T received;
  u32 from;  // lane
};

template <class T>
void perform_shuffle(Warp& warp) {
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    Shuffle<T>& shuffle = argument_of<Shuffle<T>>(warp, lane);
    shuffle.received = argument_of<Shuffle<T>>(warp, shuffle.from).value;
  }
}

template <class T>
T receive(const char* name, T value, u32 from, Site site) {
  block.current->site = site;
  if constexpr (std::is_same_v<T, float>) check_landed(value);
  if (from >= kWarpLanes) fail(*block.current, site, "%s: from lane %u", name, from);
  Shuffle<T> shuffle = {value, 0, from};
  collect(name, site, &shuffle, perform_shuffle<T>);
  return shuffle.received;
}
template <class T>
T exchange(T value, u32 lane_mask, Site site) {
  return receive("shuffle_xor", value, block.current->index % kWarpLanes ^ lane_mask, site);
}

void perform_vote(Warp& warp) {
  bool any = false;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) any = any || argument_of<bool>(warp, lane);
  for (u32 lane = 0; lane < kWarpLanes; ++lane) argument_of<bool>(warp, lane) = any;
}

struct Ballot {
  bool predicate;
  u32 bits;
};

void perform_ballot(Warp& warp) {
  u32 bits = 0;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) bits |= (u32)argument_of<Ballot>(warp, lane).predicate << lane;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) argument_of<Ballot>(warp, lane).bits = bits;
}

struct MatrixLoad {
  u32* fragment;
  u32 address;
};

// How often the eight rows of one matrix fall into the same 16 bytes of a bank line, beyond the first time.
u32 bank_conflicts(const u32 (&addresses)[8]) {
  constexpr u32 kBanks = 8;  // of 16 bytes
  u32 banks_used = 0;
  for (u32 address : addresses) banks_used |= 1u << address / 16 % kBanks;
  if (banks_used == (1u << kBanks) - 1) return 0;

  u32 rows_of_bank[kBanks] = {};
  for (u32 i = 0; i < 8; ++i) {
    const bool repeated = std::find(addresses, addresses + i, addresses[i]) != addresses + i;
    if (!repeated) ++rows_of_bank[addresses[i] / 16 % kBanks];
  }
  return *std::max_element(rows_of_bank, rows_of_bank + kBanks) - 1;
}

template <bool transposed>
void perform_matrix_load(Warp& warp) {
  const u32 first_thread = (u32)(&warp - block.warps.data()) * kWarpLanes;
  for (u32 matrix = 0; matrix < 4; ++matrix) {
    u32 addresses[8];
    u16 elements[8][8];
    for (u32 row = 0; row < 8; ++row) {
      const u32 lane = 8 * matrix + row;
      addresses[row] = argument_of<MatrixLoad>(warp, lane).address;
      memcpy(elements[row], read_matrix_row(addresses[row], *block.threads[first_thread + lane], warp.site), 16);
    }
    block.statistics.matrix_load_conflicts += bank_conflicts(addresses);
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      const u32 row = lane / 4, column = lane % 4 * 2;
      const u32 low = transposed ? elements[column][row] : elements[row][column];
      const u32 high = transposed ? elements[column + 1][row] : elements[row][column + 1];
      argument_of<MatrixLoad>(warp, lane).fragment[matrix] = low | high << 16;
    }
  }
  ++block.statistics.matrix_loads;
}

struct MatrixStore {
  u32 address;
  const u32* fragment;
};

void perform_matrix_store(Warp& warp) {
  const u32 first_thread = (u32)(&warp - block.warps.data()) * kWarpLanes;
  for (u32 matrix = 0; matrix < 4; ++matrix) {
    u16 elements[8][8];
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      const u32 row = lane / 4, column = lane % 4 * 2;
      const u32 pair = argument_of<MatrixStore>(warp, lane).fragment[matrix];
      elements[row][column] = (u16)pair;
      elements[row][column + 1] = (u16)(pair >> 16);
    }
    for (u32 row = 0; row < 8; ++row) {
      const u32 lane = 8 * matrix + row;
      const u32 address = argument_of<MatrixStore>(warp, lane).address;
      memcpy(write_matrix_row(address, *block.threads[first_thread + lane], warp.site), elements[row], 16);
    }
  }
}

struct MatrixProduct {
  float* d;
  const u32* a;
  u32 b[2];
};

constexpr u32 kRows = 16, kColumns = 8, kDepth = 16;
typedef double RowOfD __attribute__((vector_size(kColumns * sizeof(double))));

struct Operands {
  u16 a[kRows * kDepth];
  u16 b[kDepth * kColumns];
};

// product = a b, everything by rows. Sums are cut off as those of wgmma are: on a device of compute capability 9.0 both
// give the same bits.
template <float (*to_float)(u16)>
inline __attribute__((always_inline)) void multiply(const Operands& operands, RowOfD (&product)[kRows]) {
  double a[kRows * kDepth];
  alignas(RowOfD) double b[kDepth * kColumns];
  for (u32 i = 0; i < kRows * kDepth; ++i) a[i] = to_float(operands.a[i]);
  for (u32 i = 0; i < kDepth * kColumns; ++i) b[i] = to_float(operands.b[i]);
  for (u32 row = 0; row < kRows; ++row) {
    RowOfD sum = {};
    for (u32 k = 0; k < kDepth; ++k) {
      RowOfD b_row;
      memcpy(&b_row, b + k * kColumns, sizeof b_row);
      sum += a[row * kDepth + k] * b_row;
    }
    product[row] = sum;
  }
}
EMULATOR_HOT void multiply_float16(const Operands& operands, RowOfD (&product)[kRows]) {
  multiply<float16_to_float32>(operands, product);
}
EMULATOR_HOT void multiply_bfloat16(const Operands& operands, RowOfD (&product)[kRows]) {
  multiply<bfloat16_to_float32>(operands, product);
}

template <Element type>
void perform_matrix_product(Warp& warp) {
  Operands operands;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    const MatrixProduct& own = argument_of<MatrixProduct>(warp, lane);
    const u32 group = lane / 4, pair = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) memcpy(&operands.a[(group + i % 2 * 8) * kDepth + pair + i / 2 * 8], &own.a[i], 4);
    for (u32 i = 0; i < 2; ++i) {
      operands.b[(pair + 8 * i) * kColumns + group] = (u16)own.b[i];
      operands.b[(pair + 8 * i + 1) * kColumns + group] = (u16)(own.b[i] >> 16);
    }
  }
  RowOfD product[kRows];
  if (type == Element::kFloat16)
    multiply_float16(operands, product);
  else
    multiply_bfloat16(operands, product);
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    float* d = argument_of<MatrixProduct>(warp, lane).d;
    const u32 group = lane / 4, pair = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) d[i] = cut_to_float32(d[i] + product[group + i / 2 * 8][pair + i % 2]);
  }
  ++block.statistics.matrix_products;
}

// m16n8k8 of TF32 (Real = float), or half of m16n8k16 of float64. Both sum in float64; TF32 cuts its operands and its
// sums off.
template <class Real>
struct WideProduct {
  Real* d;
  const Real* a;
  Real b[2];
};

constexpr u32 kWideDepth = 8;
typedef double WideRow __attribute__((vector_size(kColumns * sizeof(double))));

struct WideOperands {
  double a[kRows * kWideDepth];
  WideRow b[kWideDepth];
};

EMULATOR_HOT void multiply_wide(const WideOperands& operands, WideRow (&sum)[kRows]) {
  for (u32 row = 0; row < kRows; ++row)
    for (u32 k = 0; k < kWideDepth; ++k) sum[row] += operands.a[row * kWideDepth + k] * operands.b[k];
}

double operand_of(float x) { return cut_to_tf32(x); }
double operand_of(double x) { return x; }
void store_sum(float& d, double sum) { d = cut_to_float32(sum); }
void store_sum(double& d, double sum) { d = sum; }

template <class Real>
void perform_wide_product(Warp& warp) {
  WideOperands operands;
  WideRow sum[kRows];
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    const WideProduct<Real>& own = argument_of<WideProduct<Real>>(warp, lane);
    const u32 group = lane / 4, in_group = lane % 4;
    for (u32 i = 0; i < 4; ++i)
      operands.a[(group + i % 2 * 8) * kWideDepth + in_group + i / 2 * 4] = operand_of(own.a[i]);
    for (u32 i = 0; i < 2; ++i) operands.b[in_group + 4 * i][group] = operand_of(own.b[i]);
    for (u32 i = 0; i < 4; ++i) sum[group + i / 2 * 8][2 * in_group + i % 2] = own.d[i];
  }
  multiply_wide(operands, sum);
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    Real* d = argument_of<WideProduct<Real>>(warp, lane).d;
    const u32 group = lane / 4, in_group = lane % 4;
    for (u32 i = 0; i < 4; ++i) store_sum(d[i], sum[group + i / 2 * 8][2 * in_group + i % 2]);
  }
  ++block.statistics.matrix_products;
}

}  // namespace

float shuffle_xor(float value, u32 lane_mask, Site site) { return exchange(value, lane_mask, site); }
double shuffle_xor(double value, u32 lane_mask, Site site) { return exchange(value, lane_mask, site); }
float shuffle(float value, u32 lane, Site site) { return receive("shuffle", value, lane % kWarpLanes, site); }
double shuffle(double value, u32 lane, Site site) { return receive("shuffle", value, lane % kWarpLanes, site); }
u32 shuffle(u32 value, u32 lane, Site site) { return receive("shuffle", value, lane % kWarpLanes, site); }

void sync_warp(Site site) {
  collect("sync_warp", site, nullptr, [](Warp&) {});
}

bool any_lane(bool predicate, Site site) {
  collect("any_lane", site, &predicate, perform_vote);
  return predicate;
}

u32 ballot(bool predicate, Site site) {
  Ballot ballot = {predicate, 0};
  collect("ballot", site, &ballot, perform_ballot);
  return ballot.bits;
}

void load_matrix(u32* fragment, u32 address, Site site) {
  MatrixLoad load = {fragment, address};
  collect("load_matrix_x4", site, &load, perform_matrix_load<false>);
}

void load_matrix_transposed(u32* fragment, u32 address, Site site) {
  MatrixLoad load = {fragment, address};
  collect("load_matrix_x4_transposed", site, &load, perform_matrix_load<true>);
}

void multiply_matrix(Element type, float* d, const u32* a, u32 b0, u32 b1, Site site) {
  MatrixProduct product = {d, a, {b0, b1}};
  collect("mma_m16n8k16", site, &product,
          type == Element::kFloat16 ? perform_matrix_product<Element::kFloat16>
                                    : perform_matrix_product<Element::kBFloat16>);
}

void store_matrix(u32 address, const u32* fragment, Site site) {
  MatrixStore store = {address, fragment};
  collect("store_matrix_x4", site, &store, perform_matrix_store);
}

bool elect_lane(Site site) {
  collect("elect_lane", site, nullptr, [](Warp&) {});
  // Any lane will do, as long as it is the same one for the whole launch.
  const u32 elected =
      (Order)block.options.order == Order::kFirstInFirstOut ? 0 : (block.options.seed + 31) % kWarpLanes;
  return block.current->index % kWarpLanes == elected;
}

u32 uniform(u32 value, Site site) {
  u32 argument = value;
  collect("uniform", site, &argument, [](Warp& warp) {
    for (u32 lane = 1; lane < kWarpLanes; ++lane) argument_of<u32>(warp, lane) = argument_of<u32>(warp, 0);
  });
  return argument;
}

u32 to_uniform_register(u32 value, Site site) {
  u32 argument = value;
  collect("to_uniform_register", site, &argument, [](Warp& warp) {
    u32 largest = 0;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) largest = std::max(largest, argument_of<u32>(warp, lane));
    for (u32 lane = 0; lane < kWarpLanes; ++lane) argument_of<u32>(warp, lane) = largest;
  });
  return argument;
}

void keep_before(float value, u32 scratch, Site site) {
  Thread& self = *block.current;
  self.site = site;
  checked_offset(scratch, sizeof(u32), sizeof(u32), self, site);
  if (value < 0.0f) fail(self, site, "the value is negative, %g: it would be stored", value);
}

void multiply_matrix_tf32(float* d, const float* a, float b0, float b1, Site site) {
  WideProduct<float> product = {d, a, {b0, b1}};
  collect("mma_m16n8k8", site, &product, perform_wide_product<float>);
}

void multiply_matrix_float64(double* d, const double* a, double b0, double b1, Site site) {
  WideProduct<double> product = {d, a, {b0, b1}};
  collect("mma_m16n8k16", site, &product, perform_wide_product<double>);
}

// ---- Operations of one thread that need no checks -------------------------------------------------------------------

namespace {
float flush_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
}  // namespace

float exp2_approx(float x) {
  check_landed(x);
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
float sqrt_approx(float x) {
  check_landed(x);
  return std::sqrt(flush_subnormal(x));
}
float reciprocal_approx(float x) {
  check_landed(x);
  return flush_subnormal(1.0f / flush_subnormal(x));
}
float log2_approx(float x) { return std::log2(x); }
int floor_to_int(float x) {
  check_landed(x);
  if (x != x) return 0;
  const double whole = std::floor((double)x);
  return (int)std::fmin(std::fmax(whole, -2147483648.0), 2147483647.0);
}
float floor_to_float(float x) {
  check_landed(x);
  return std::floor(x);
}

u16 from_float32(Element type, float value) {
  check_landed(value);
  if (type == Element::kFloat8E4M3) return float32_to_e4m3(value);
  return type == Element::kFloat16 ? float32_to_float16(value) : float32_to_bfloat16(value);
}
float to_float32(Element type, u16 bits) { return element_to_float32(type, bits); }

float round_to_tf32(float x) { return rounded_to_tf32(x); }

namespace {
// Additions of float32 to global memory take subnormal numbers, and make them, zeros (PTX ISA, atom).
float flushed(float x) { return x != 0 && x > -0x1p-126f && x < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
double flushed(double x) { return x; }
u64 flushed(u64 x) { return x; }

template <class T>
void reduce(T* address, const T* values, u32 count, Site site) {
  Thread& self = *block.current;
  self.site = site;
  if ((unsigned long)address % (count * sizeof(T)))
    fail(self, site, "misaligned reduction: %p is not a multiple of %zu bytes", (void*)address, count * sizeof(T));
  if (!std::is_same<T, u64>::value) check_turn(self, site);  // integers add up to the same in any order
  for (u32 i = 0; i < count; ++i) address[i] = flushed(flushed(address[i]) + flushed(values[i]));
  block.statistics.bytes_added += count * sizeof(T);
}
}  // namespace

void reduce_add(float* address, const float* values, u32 count, Site site) { reduce(address, values, count, site); }
void reduce_add(double* address, const double* values, u32 count, Site site) { reduce(address, values, count, site); }
void reduce_add(u64* address, u64 value, Site site) { reduce(address, &value, 1, site); }
void reduce_max(u64* address, u64 value, Site site) {
  const u64 more = value > *address ? value - *address : 0;
  reduce(address, &more, 1, site);
}

}  // namespace emulator
