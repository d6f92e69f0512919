// What one compilation is specialised for: the CUFLASH_* defines of cuflash/plan.py and tiles.py as typed constants.
#pragma once
#include "ptx/base.cuh"

// The tag of the dtype; how an element lies in memory; and what accumulators, scores and the softmax are made of.
using Element = CUFLASH_DTYPE;
template <class E>
struct TypesOf {
  using Storage = u16;
  using Real = float;
};
template <>
struct TypesOf<Float32> {
  using Storage = float;
  using Real = float;
};
template <>
struct TypesOf<Float64> {
  using Storage = double;
  using Real = double;
};
template <>
struct TypesOf<Float8E4M3> {
  using Storage = u8;
  using Real = float;
};
template <>
struct TypesOf<Float8E5M2> {
  using Storage = u8;
  using Real = float;
};
using KeyElement = CUFLASH_KV_DTYPE;  // of k and v: Element, or of one byte
using KeyStorage = TypesOf<KeyElement>::Storage;
using Storage = TypesOf<Element>::Storage;
using Real = TypesOf<Element>::Real;
constexpr int kElementBytes = sizeof(Storage);
constexpr bool kWide = kElementBytes > 2;
constexpr bool kHasFloat8 = sizeof(KeyStorage) == 1;
// Which keys and values share a number that they are multiplied by: 0 (there is none), 1 (those of a head) or 2.
constexpr int kKScale = CUFLASH_K_SCALE;
constexpr int kVScale = CUFLASH_V_SCALE;
constexpr bool kQScale = CUFLASH_Q_SCALE;                // whether queries have such numbers
constexpr bool kFloat8Queries = CUFLASH_FLOAT8_QUERIES;  // q is of one byte a number, too
constexpr bool kRoundsToTf32 = CUFLASH_ROUNDS_TO_TF32;   // of float32: precision="tf32"

constexpr int kHeadDim = CUFLASH_HEAD_DIM;     // of q and k, as the arrays have it
constexpr int kHeadDimV = CUFLASH_HEAD_DIM_V;  // of v and out
constexpr int kBlockM = CUFLASH_BLOCK_M;       // queries of a tile
constexpr int kBlockN = CUFLASH_BLOCK_N;       // keys of a tile
constexpr int kNumWarps = CUFLASH_NUM_WARPS;
constexpr int kNumStages = CUFLASH_NUM_STAGES;            // tiles in flight in the ring of the streamed operands
constexpr int kMinBlocks = CUFLASH_MIN_BLOCKS;            // resident blocks a multiprocessor that registers must allow
constexpr int kFragmentsAhead = CUFLASH_FRAGMENTS_AHEAD;  // ldmatrix of B ahead of the product that needs it
constexpr int kLoadBytes = CUFLASH_LOAD_BYTES;  // widest aligned access that serves every operand that is read
constexpr int kStoreBytes = CUFLASH_STORE_BYTES;
constexpr bool kStoresByRows = CUFLASH_STORES_BY_ROWS;  // results lie so that TMA cannot write them
constexpr int kNumThreads = 32 * kNumWarps;

constexpr bool kPairs = CUFLASH_PAIRS;  // blocks that stay take tiles of queries in pairs
// Whether a head's batch entries are neighbours in the launch order, and not the heads of an entry.
constexpr bool kBatchFirst = CUFLASH_BATCH_FIRST;

// Options. One that is off leaves no instruction behind.
constexpr bool kHasRightBound = CUFLASH_HAS_RIGHT_BOUND;
constexpr bool kHasLeftBound = CUFLASH_HAS_LEFT_BOUND;
// Queries see as many keys each, but for those near the first key or the last one.
constexpr bool kHasWindow = kHasLeftBound && kHasRightBound;
constexpr bool kHasSoftcap = CUFLASH_HAS_SOFTCAP;
constexpr bool kHasAlibi = CUFLASH_HAS_ALIBI;
constexpr bool kHasMask = CUFLASH_HAS_MASK;
constexpr bool kMaskOfKeys = CUFLASH_MASK_OF_KEYS;  // it hides keys from all queries: it is added to their scores
constexpr bool kMaskByBits = CUFLASH_MASK_BY_BITS;  // it, and all else that hides pairs, is seen as bits
constexpr bool kLooksUpMask = kHasMask && !kMaskOfKeys && !kMaskByBits;  // each pair is looked for in it
constexpr bool kHasBlockMask = CUFLASH_MASK_BLOCK_M > 0;
constexpr int kMaskBlockM = kHasBlockMask ? CUFLASH_MASK_BLOCK_M : 1;  // queries of a block of the block mask
constexpr int kMaskBlockN = kHasBlockMask ? CUFLASH_MASK_BLOCK_N : 1;  // and keys
constexpr bool kHasScoreFunction = CUFLASH_HAS_SCORE_FUNCTION;         // of the caller, by common/functions.cuh
constexpr bool kHasMaskFunction = CUFLASH_HAS_MASK_FUNCTION;
constexpr bool kScoreChangesSlope = CUFLASH_SCORE_CHANGES_SLOPE;  // its derivative by the scaled product is not 1
#define CUFLASH_HAS_FUNCTIONS (CUFLASH_HAS_SCORE_FUNCTION || CUFLASH_HAS_MASK_FUNCTION)
constexpr bool kHasLists = CUFLASH_HAS_LISTS;           // of tiles, by around/lists.cu
constexpr bool kHasNotes = CUFLASH_HAS_NOTES;           // of tiles, by around/mask_tiles.cu: the main kernel reads them
constexpr bool kHasBiasNotes = CUFLASH_HAS_BIAS_NOTES;  // of what the bias leaves of tiles, which the kernel reads
constexpr bool kIsChosen = CUFLASH_CHOSEN_BY_BIAS;      // what the bias leaves decides whether the kernel runs
constexpr bool kHasSinks = CUFLASH_HAS_SINKS;  // of the forward pass; the backward pass has in lse what they did
constexpr bool kHasDropout = CUFLASH_HAS_DROPOUT;
constexpr bool kIsPacked = CUFLASH_PACKED != 0;    // varlen: batch entries are packed sequences
constexpr bool kAlignsEnds = CUFLASH_PACKED == 2;  // each with a diagonal of its own, that ends with the last key
constexpr int kBiasBytes = CUFLASH_BIAS_BYTES;     // size of a bias element: 0 (no bias), 2 (Element) or of Real
constexpr int kKvLengthsBytes = CUFLASH_KV_LENGTHS_BYTES;  // 0 (none), 4 (i32) or 8 (i64)
constexpr int kPageSize = CUFLASH_PAGE_SIZE;               // keys of a page: 0 where they are contiguous
constexpr bool kFollowsLengths = CUFLASH_FOLLOWS_LENGTHS;  // the diagonal of a batch entry depends on its length
// Whether a function stands between a scaled product and its score. Only then is the derivative of the score in the
// scaled product not 1.
constexpr bool kHasDerivative = kHasSoftcap || kScoreChangesSlope;
// The scale can be folded into the exponent only when nothing stands between it and the softmax and it is positive.
constexpr bool kScaleInExponent = CUFLASH_SCALE_IN_EXPONENT && !kMaskOfKeys;
// Whether scores have addends; and whether, without any, the factor of what is left of a product can be folded.
constexpr bool kAddsToScore = kHasAlibi || kBiasBytes != 0 || kMaskOfKeys || kHasScoreFunction;
constexpr bool kFactorInExponent = kScaleInExponent || (kHasDerivative && !kAddsToScore);

// An element as a number to calculate with.
template <class E>
CUFLASH_DEVICE Real to_real(u16 element) {
  return ptx::to_float32(E{}, element);
}
template <class E>
CUFLASH_DEVICE Real to_real(Real element) {
  return element;
}

CUFLASH_DEVICE constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
CUFLASH_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
CUFLASH_DEVICE constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
CUFLASH_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
CUFLASH_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
CUFLASH_DEVICE int at_least_zero(int a) { return a > 0 ? a : 0; }
// The larger one; of a NaN and a number it may be either.
CUFLASH_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
CUFLASH_DEVICE double max_of(double a, double b) { return a > b ? a : b; }

// Head dimensions as the tensor cores see them: whole 16-wide steps for every warp along them, zeros past the end.
constexpr int kDim = round_up(kHeadDim, CUFLASH_DIM_MULTIPLE);
constexpr int kDimV = round_up(kHeadDimV, CUFLASH_DIM_MULTIPLE);

// A shared tile stores its rows in whole lines of 128 bytes (or in a half or a quarter of one) and permutes the 16-byte
// vectors within a line by the row number, so that any 8 neighbouring rows keep a column in 8 different groups of
// banks. Lines, and not padded rows, because asynchronous copies write aligned sectors of 32 bytes at once: on rows
// that start in the middle of a sector they reach 5.8 TB/s on an H200, on these 9.5.
CUFLASH_DEVICE constexpr int row_bytes(int columns, int element_bytes = kElementBytes) {
  const int bytes = columns * element_bytes;
  return element_bytes > 2 || bytes > 64 ? round_up(bytes, 128) : bytes > 32 ? 64 : 32;
}
CUFLASH_DEVICE constexpr u32 tile_bytes(int rows, int columns, int element_bytes = kElementBytes) {
  return rows * row_bytes(columns, element_bytes);
}

// What the byte offset of a vector within its line is xored with in row `r` of a tile with rows of `row` bytes.
//
// Fragments of wide elements are read as pairs of neighbours (sm80/fragments.cuh), in phases of 128 bytes: 4
// consecutive rows, or 4 even or 4 odd ones, with 2 neighbouring vectors of each (float32), or 2 rows with 4 vectors
// (float64 by rows). For them an odd row number also flips the highest bit; then none of these meet in a bank.
template <int row, bool wide = kWide>
CUFLASH_DEVICE constexpr u32 row_swizzle(u32 r) {
  return (wide ? r % 8 ^ r % 2 * 4 : row >= 128 ? r % 8 : row == 64 ? r / 2 % 4 : r / 4 % 2) * 16;
}

// `address` moved by `bytes` along its row: to another line by addition, within the line by exclusive or. `bytes` has
// no bit in common with the offset of `address` in its line before the swizzle.
CUFLASH_DEVICE constexpr u32 along_row(u32 address, u32 bytes) { return (address ^ (bytes % 128)) + bytes / 128 * 128; }

static_assert(kBlockM % 16 == 0 && kBlockN % 16 == 0, "tiles are made of 16 x 16 fragments");
static_assert(CUFLASH_DIM_MULTIPLE % 16 == 0, "fragments are 16 wide");
static_assert(kHeadDim <= 1024 && kHeadDimV <= 1024, "one row of fragments holds a whole head");

// A compile-time value as an argument, for loop bodies that come in variants.
template <bool b>
struct Constant {
  static constexpr bool value = b;
  CUFLASH_DEVICE constexpr operator bool() const { return b; }
};
// A if b, else B.
template <bool b, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};
template <int n>
struct Integer {
  static constexpr int value = n;
};

// In the place of a result that nobody needs.
struct Unused {
  template <class Result>
  CUFLASH_DEVICE void operator=(Result) {}
};

// f(Integer<0>{}), …, f(Integer<count - 1>{}): a loop whose index is a constant.
template <int count, int first = 0, class Function>
CUFLASH_DEVICE void repeat(Function f) {
  if constexpr (first < count) {
    f(Integer<first>{});
    repeat<count, first + 1>(f);
  }
}
