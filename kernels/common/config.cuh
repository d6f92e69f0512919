// The constants that one compilation is specialised for: the CUFLASH_* defines of cuflash/plan/, typed.
#pragma once
#include "ptx/base.cuh"

// Element is the tag of the dtype. Storage is the type of an element in memory, Real the type of accumulators, scores
// and the softmax.
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
using KeyElement = CUFLASH_KV_DTYPE;  // the tag of k and v: Element, or an fp8 type
using KeyStorage = TypesOf<KeyElement>::Storage;
using Storage = TypesOf<Element>::Storage;
using Real = TypesOf<Element>::Real;
constexpr int kElementBytes = sizeof(Storage);
constexpr bool kWide = kElementBytes > 2;
constexpr bool kHasFloat8 = sizeof(KeyStorage) == 1;
// The scales of keys and of values: 0 (there are none), 1 (all keys of a head share one) or 2 (blocks of keys have
// their own).
constexpr int kKScale = CUFLASH_K_SCALE;
constexpr int kVScale = CUFLASH_HEAD_DIM_V > 0 ? CUFLASH_V_SCALE : 0;
constexpr bool kQScale = CUFLASH_Q_SCALE;                // whether queries have scales
constexpr bool kFloat8Queries = CUFLASH_FLOAT8_QUERIES;  // q has fp8 elements, too
constexpr bool kRoundsToTf32 = CUFLASH_ROUNDS_TO_TF32;   // float32 with precision="tf32"

constexpr int kHeadDim = CUFLASH_HEAD_DIM;     // head dimension of q and k, unpadded
constexpr int kHeadDimV = CUFLASH_HEAD_DIM_V;  // the same of v and out
// Whether there are values. Without them lse is the only result, and the products over the columns of V, dO and O, of
// which there are none, leave no instruction in the kernel.
constexpr bool kHasValues = kHeadDimV > 0;
constexpr int kBlockM = CUFLASH_BLOCK_M;  // queries of a tile
constexpr int kBlockN = CUFLASH_BLOCK_N;  // keys of a tile
constexpr int kNumWarps = CUFLASH_NUM_WARPS;
constexpr int kNumStages = CUFLASH_NUM_STAGES;            // stages of the ring of the streamed operands
constexpr int kMinBlocks = CUFLASH_MIN_BLOCKS;            // blocks per SM that registers must allow
constexpr int kFragmentsAhead = CUFLASH_FRAGMENTS_AHEAD;  // how many ldmatrix of B are issued ahead of their product
constexpr int kLoadBytes = CUFLASH_LOAD_BYTES;  // widest access for which every operand that is read is aligned
constexpr int kStoreBytes = CUFLASH_STORE_BYTES;
constexpr bool kStoresByRows = CUFLASH_STORES_BY_ROWS;  // the layout of the results does not allow TMA stores
constexpr int kNumThreads = 32 * kNumWarps;

constexpr bool kPairs = CUFLASH_PAIRS;                 // persistent blocks take tiles of queries in pairs
constexpr bool kDynamicTiles = CUFLASH_DYNAMIC_TILES;  // persistent blocks claim one tile of queries after another
// Whether the batch entries of a head are neighbours in the launch order. Otherwise the heads of a batch entry are.
constexpr bool kBatchFirst = CUFLASH_BATCH_FIRST;

// Passes with tangents: 1, and a bit for each input that has one (cuflash/plan/jvp.py); 0 in all other passes.
#ifndef CUFLASH_TANGENTS
#define CUFLASH_TANGENTS 0
#endif
constexpr bool kMovesQ = CUFLASH_TANGENTS & 2, kMovesK = CUFLASH_TANGENTS & 4,
               kMovesV = kHasValues && CUFLASH_TANGENTS & 8;
constexpr bool kMovesBias = CUFLASH_TANGENTS & 16, kMovesAlibi = CUFLASH_TANGENTS & 32;
constexpr bool kMovesSinks = CUFLASH_TANGENTS & 64, kMovesScale = CUFLASH_TANGENTS & 128;
constexpr bool kMovesSoftcap = CUFLASH_TANGENTS & 256;
constexpr bool kMovesScores = CUFLASH_TANGENTS & ~(1 | 8);

// Passes with row reductions: a bit for each that the forward pass gives (common/softmax/row_reductions.cuh), and 16
// bits above it for each whose gradient the backward pass takes (common/softmax/row_reduction_gradients.cuh).
#ifndef CUFLASH_ROW_REDUCTIONS
#define CUFLASH_ROW_REDUCTIONS 0
#endif
// Those that the pass takes the gradients of, in the order of the rows of cuflash/spec/outputs.py.
constexpr bool kTakesDmax = CUFLASH_ROW_REDUCTIONS & 1 << 16, kTakesDentropy = CUFLASH_ROW_REDUCTIONS & 1 << 17;

// Options. An option that is off leaves no instruction in the kernel.
constexpr bool kHasRightBound = CUFLASH_HAS_RIGHT_BOUND;
constexpr bool kHasLeftBound = CUFLASH_HAS_LEFT_BOUND;
// All queries attend to the same number of keys, except queries near the first key or the last one.
constexpr bool kHasWindow = kHasLeftBound && kHasRightBound;
constexpr bool kHasSoftcap = CUFLASH_HAS_SOFTCAP;
constexpr bool kHasAlibi = CUFLASH_HAS_ALIBI;
constexpr bool kHasMask = CUFLASH_HAS_MASK;
constexpr bool kMaskOfKeys = CUFLASH_MASK_OF_KEYS;  // the mask hides keys from all queries: a value for each key
constexpr bool kMaskByBits = CUFLASH_MASK_BY_BITS;  // the mask and all else that hides pairs are read as bits
constexpr bool kLooksUpMask = kHasMask && !kMaskOfKeys && !kMaskByBits;  // the mask is read pair by pair
constexpr bool kHasBlockMask = CUFLASH_MASK_BLOCK_M > 0;
constexpr int kMaskBlockM = kHasBlockMask ? CUFLASH_MASK_BLOCK_M : 1;  // queries per block of the block mask
constexpr int kMaskBlockN = kHasBlockMask ? CUFLASH_MASK_BLOCK_N : 1;  // keys per block
constexpr bool kHasScoreFunction = CUFLASH_HAS_SCORE_FUNCTION;         // see common/score/functions.cuh
constexpr bool kHasMaskFunction = CUFLASH_HAS_MASK_FUNCTION;
constexpr bool kScoreChangesSlope = CUFLASH_SCORE_CHANGES_SLOPE;  // d score / d scaled product is not 1
#define CUFLASH_HAS_FUNCTIONS (CUFLASH_HAS_SCORE_FUNCTION || CUFLASH_HAS_MASK_FUNCTION)
constexpr bool kHasBlockIndex = CUFLASH_HAS_BLOCK_INDEX;  // a block-sparse index, by helpers/block_index.cu
// Tile classes (empty, partial, full) that the kernel reads: of the mask, by helpers/mask_tiles.cu, and of the bias.
constexpr bool kHasTileClasses = CUFLASH_HAS_TILE_CLASSES;
constexpr bool kHasBiasTileClasses = CUFLASH_HAS_BIAS_TILE_CLASSES;
constexpr bool kIsChosen = CUFLASH_CHOSEN_BY_BIAS;    // whether the kernel runs depends on how much the bias hides
constexpr bool kHasSinks = CUFLASH_HAS_SINKS;         // forward pass only: in the backward pass, lse includes them
constexpr bool kLseHasSinks = CUFLASH_LSE_HAS_SINKS;  // backward pass: whether lse includes sinks
constexpr bool kHasDropout = CUFLASH_HAS_DROPOUT;
constexpr bool kIsPacked = CUFLASH_PACKED != 0;     // varlen: batch entries are packed sequences
constexpr bool kAlignsEnds = CUFLASH_PACKED == 2;   // each has its own diagonal, which ends at the last key
constexpr int kBiasBytes = CUFLASH_BIAS_BYTES;      // size of a bias element: 0 (no bias), 2 (Element) or sizeof(Real)
constexpr bool kBiasOfRows = CUFLASH_BIAS_OF_ROWS;  // the bias differs from query to query only, and is contiguous
constexpr int kKvLengthsBytes = CUFLASH_KV_LENGTHS_BYTES;  // 0 (none), 4 (i32) or 8 (i64)
constexpr int kPageSize = CUFLASH_PAGE_SIZE;               // keys per page; 0 if keys are contiguous
constexpr bool kFollowsLengths = CUFLASH_FOLLOWS_LENGTHS;  // the diagonal of a batch entry depends on its length
// Whether a function turns the scaled product into the score. Only then can the derivative of the score by the scaled
// product differ from 1.
constexpr bool kHasDerivative = kHasSoftcap || kScoreChangesSlope;
// The scale can be folded into the exponent only if it is positive and nothing comes between it and the softmax.
constexpr bool kScaleInExponent = CUFLASH_SCALE_IN_EXPONENT && !kMaskOfKeys;
// Whether scores stay without their factor (Score::factor), which is folded into the exponent: they do where it is
// positive and nothing is added to scores. Otherwise scores are natural: exp(score - row max) is their weight. All
// kernels of a plan agree on this, because statistics of rows have the same unit.
constexpr bool kFactorInExponent = !CUFLASH_NATURAL_SCORES;
// The row max and the lse in half precision: natural where scores are, otherwise exponents of base 2.
constexpr bool kNaturalRowMax = !kWide && !kFactorInExponent;

// Converts an element to Real.
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
// The larger one. Of a NaN and a number, the result may be either.
CUFLASH_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
CUFLASH_DEVICE double max_of(double a, double b) { return a > b ? a : b; }

// Head dimensions padded for the tensor cores: every warp along them has whole 16-wide steps, and the padding is zero.
constexpr int kDim = round_up(kHeadDim, CUFLASH_DIM_MULTIPLE);
constexpr int kDimV = round_up(kHeadDimV, CUFLASH_DIM_MULTIPLE);

// A shared tile stores its rows in whole lines of 128 bytes (or in a half or a quarter of one) and permutes the 16-byte
// vectors within a line by the row number, so that any 8 neighbouring rows keep a column in 8 different groups of
// banks. Rows are lines instead of padded rows because asynchronous copies write aligned sectors of 32 bytes at once:
// they reach 9.5 TB/s on an H200 with lines, and 5.8 with rows that start in the middle of a sector.
CUFLASH_DEVICE constexpr int row_bytes(int columns, int element_bytes = kElementBytes) {
  const int bytes = columns * element_bytes;
  return element_bytes > 2 || bytes > 64 ? round_up(bytes, 128) : bytes > 32 ? 64 : 32;
}
CUFLASH_DEVICE constexpr u32 tile_bytes(int rows, int columns, int element_bytes = kElementBytes) {
  return columns == 0 ? 0 : rows * row_bytes(columns, element_bytes);
}

// In row `r` of a tile with rows of `row` bytes, the byte offset of a vector within its line is xored with this.
//
// Fragments of wide elements are read as pairs of neighbours (sm80/fragments.cuh), in phases of 128 bytes: 4
// consecutive rows, or 4 even or 4 odd ones, with 2 neighbouring vectors of each (float32), or 2 rows with 4 vectors
// (float64 by rows). For them an odd row number also flips the highest bit, so that none of these accesses conflict.
template <int row, bool wide = kWide>
CUFLASH_DEVICE constexpr u32 row_swizzle(u32 r) {
  return (wide ? r % 8 ^ r % 2 * 4 : row >= 128 ? r % 8 : row == 64 ? r / 2 % 4 : r / 4 % 2) * 16;
}

// Moves `address` by `bytes` along its row: to another line by addition, within the line by exclusive or. `bytes` must
// have no bit in common with the offset of `address` in its line before the swizzle.
CUFLASH_DEVICE constexpr u32 along_row(u32 address, u32 bytes) { return (address ^ (bytes % 128)) + bytes / 128 * 128; }

static_assert(kBlockM % 16 == 0 && kBlockN % 16 == 0, "tiles are made of 16 x 16 fragments");
static_assert(CUFLASH_DIM_MULTIPLE % 16 == 0, "fragments are 16 wide");
static_assert(kHeadDimV <= 1024 && (kHeadDim <= 1024 || !kHasValues), "one row of fragments holds a whole head");

// A compile-time value as an argument, for loop bodies that are compiled in several variants.
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

// Stands for a result that is not needed.
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
