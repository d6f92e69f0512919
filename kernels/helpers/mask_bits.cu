// Packs everything that hides pairs (a mask of pairs, blocks of a block mask that tiles cut, windows, lengths) into one
// bit per pair, as common/score/mask_bits.cuh says, and classifies what is visible of each block. A warp makes a block
// of 64 x 64 pairs.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask.cuh"
#include "common/score/mask_bits.cuh"
#include "common/io/params.cuh"

constexpr bool kTransposes = CUFLASH_TRANSPOSES_BITS;  // the lines of accumulators are keys, and not queries
constexpr int kAtOnce = 8;                             // lines whose bytes are on their way together

// The slice of a block that a lane holds: the bits of lines `lane` and `lane` + 32, in words of 32 columns.
using Lines = u32[2][2];

// The mask of one head.
struct MaskBytes {
  const u8* bytes;
  i64 row_stride, key_stride;
  bool by_vectors;  // 16 neighbouring keys are a vector

  CUFLASH_DEVICE MaskBytes(const Params& params, int batch, int head)
      : bytes((const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride),
        row_stride(params.mask.row_stride),
        key_stride(params.mask.key_stride),
        by_vectors(key_stride == 1 && ((u64)bytes | (u64)row_stride) % 16 == 0) {}

  // Reads a block of which `rows` lines and all columns are in the array. Four lanes read the 64 bytes of a line at
  // once, so that a load of the warp touches 8 lines. Then these lanes exchange words, so that each has whole lines.
  CUFLASH_DEVICE void read_vectors(int first_row, int first_key, int rows, Lines& own) const {
    const int slice = lane_index() % 4, first_line = lane_index() - slice;
    const u8* upper = bytes + (first_row + first_line) * row_stride + first_key + 16 * slice;
    const u8* lower = upper + 32 * row_stride;
    Bytes16 vector[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        vector[half][i] = {};
        if (32 * half + first_line + i < rows) vector[half][i] = *(const Bytes16*)(half == 0 ? upper : lower);
        (half == 0 ? upper : lower) += row_stride;
      }
    u32 bits[4];  // by line, both halves in a word; after the exchange, by the 16 keys of a slice
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = bits_of_vector(vector[0][i]) | bits_of_vector(vector[1][i]) << 16;
    exchange<2>(bits);
    exchange<1>(bits);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[half][i / 2] |= (bits[i] >> 16 * half & 0xffff) << i % 2 * 16;
  }

  // Reads any block: lanes read neighbouring keys, one line after another.
  CUFLASH_DEVICE void read_bytes(int first_row, int first_key, int rows, int keys, Lines& own) const {
    const int lane = lane_index();
#pragma unroll 1
    for (int line = 0; line < kBitsBlock; line += kAtOnce) {
      bool shown[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = 32 * half + lane;
          shown[i][half] = line + i < rows && key < keys &&
                           bytes[(first_row + line + i) * row_stride + (first_key + key) * key_stride] != 0;
        }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 bits = ptx::ballot(shown[i][half]);
          if (lane == (line + i) % 32) own[(line + i) / 32][half] = bits;
        }
    }
  }

 private:
  // Warp. Swaps element i of lane l with element i ^ step of lane l ^ step if bit `step` is set in just one of i and l.
  template <int step>
  CUFLASH_DEVICE static void exchange(u32 (&bits)[4]) {
    const bool is_upper = lane_index() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 other = ptx::shuffle(is_upper ? bits[i] : bits[i + step], lane_index() ^ step);
      (is_upper ? bits[i] : bits[i + step]) = other;
    }
  }

  // One bit for each byte: whether it is not 0.
  CUFLASH_DEVICE static u32 bits_of_vector(const Bytes16& vector) {
    constexpr u32 kLow = 0x7f7f7f7f;
    u32 bits = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const u32 word = vector.word[i], not_zero = (((word & kLow) + kLow) | word) & ~kLow;
      bits = bits << 4 | not_zero * 0x00204081 >> 28;  // the product moves bits 7, 15, 23 and 31 to 28 to 31
    }
    return bits;
  }
};

// Keeps bits [start, stop) of 64 and clears the others; `start` and `stop` may lie outside.
CUFLASH_DEVICE void keep_columns(u32 (&line)[2], int start, int stop) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = at_least_zero(start - 32 * half), to = stop - 32 * half;
    const u32 below = to <= 0 ? 0 : to >= 32 ? ~0u : (1u << to) - 1;
    line[half] &= from >= 32 ? 0 : below >> from << from;
  }
}

// Clears the bits that windows, lengths and the block mask hide in the line of one query.
CUFLASH_DEVICE void hide(const Mask& mask, int row, int first_key, u32 (&line)[2]) {
  int start = 0, stop = mask.key_stop;
  if constexpr (kHasRightBound) stop = min_of(stop, row + mask.right_offset + 1);
  if constexpr (kHasLeftBound) start = at_least_zero(row + mask.left_offset);
  keep_columns(line, start - first_key, stop - first_key);
  if constexpr (kHasBlockMask) {
    stop = min_of(mask.key_stop, first_key + kBitsBlock);
    for (int block = first_key / kMaskBlockN; block * kMaskBlockN < stop; ++block) {
      if (mask.blocks.has(row / kMaskBlockM, block)) continue;
      const int from = block * kMaskBlockN - first_key;
      u32 hidden[2] = {~0u, ~0u};
      keep_columns(hidden, from, from + kMaskBlockN);
      line[0] &= ~hidden[0];
      line[1] &= ~hidden[1];
    }
  }
}

// Warp. Transposes a matrix of 32 x 32 bits, of which each lane has one line.
CUFLASH_DEVICE u32 transpose(u32 line) {
  const u32 lane = lane_index();
  u32 low = 0x0000ffff;  // columns without the bit `step`
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2, low ^= low << step) {
    const u32 other = ptx::shuffle(line, lane ^ step);
    line = lane & step ? (line & ~low) | (other >> step & low) : (line & low) | (other & low) << step;
  }
  return line;
}

// Warp. Clears what is hidden of a block of `rows` lines, and returns what is visible of it.
CUFLASH_DEVICE TileClass hide_lines(const Mask& mask, int first_row, int first_key, int rows, Lines& own) {
  u32 shown = 0, hidden = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = 32 * half + (int)lane_index();
    // Past the last query it does not matter what is visible.
    if (!kHasMask || line >= rows) own[half][0] = own[half][1] = ~0u;
    if (line < rows) {
      hide(mask, first_row + line, first_key, own[half]);
      shown |= own[half][0] | own[half][1];
      hidden |= ~(own[half][0] & own[half][1]);
    }
  }
  const bool any_shown = ptx::any_lane(shown != 0), any_hidden = ptx::any_lane(hidden != 0);
  return !any_shown ? TileClass::kEmpty : any_hidden ? TileClass::kPartial : TileClass::kFull;
}

// Warp. Stores the words of a block, whose lines are keys with kTransposes.
CUFLASH_DEVICE void store_words(const Params& params, u32 index, Lines& own) {
  if constexpr (kTransposes) {
    const u32 right_upper = own[0][1];
    own[0][0] = transpose(own[0][0]);
    own[0][1] = transpose(own[1][0]);
    own[1][0] = transpose(right_upper);
    own[1][1] = transpose(own[1][1]);
  }
  u32* words = (u32*)params.mask_words + (i64)index * kBitsWords + lane_index();
#pragma unroll
  for (int strip = 0; strip < 4; ++strip) {
    u32 line[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int columns = 0; columns < 2; ++columns)
        line[half][columns] = ptx::shuffle(own[strip / 2][columns], strip % 2 * 16 + half * 8 + fragment_row());
    words[strip * 32] = word_of(line[0], line[1]);
  }
}

CUFLASH_DEVICE void mask_bits(const Params& params) {
  const MaskBits bits(params);
  const u32 index = ptx::block_index() * kNumWarps + warp_index();
  if (index >= bits.count()) return;
  const int n_block = index % bits.n_blocks, m_block = index / bits.n_blocks % bits.m_blocks;
  const int matrix = index / bits.n_blocks / bits.m_blocks, head = matrix % bits.matrices.heads;
  const int batch = matrix / bits.matrices.heads;
  const int first_row = m_block * kBitsBlock, first_key = n_block * kBitsBlock;
  const int rows = params.seqlen_q - first_row, keys = params.seqlen_k - first_key;

  Lines own = {};
  if constexpr (kHasMask) {
    const MaskBytes mask(params, batch, head);
    if (mask.by_vectors && keys >= kBitsBlock)
      mask.read_vectors(first_row, first_key, rows, own);
    else
      mask.read_bytes(first_row, first_key, rows, keys, own);
  }
  const Mask mask(params, batch, head, key_stop_of(params, batch));
  const TileClass pairs = hide_lines(mask, first_row, first_key, rows, own);
  if (lane_index() == 0) ((u8*)params.mask_blocks)[index] = (u8)pairs;
  store_words(params, index, own);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, mask_bits)
