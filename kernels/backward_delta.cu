// What the backward pass needs of every query row: delta = rowsum(dout * out) (FlashAttention-2, Algorithm 2, line 4) and
// lse in units of log2. Also clears the accumulator of dq. A block serves the kBlockM rows of one tile of queries.
#include "backward.cuh"
#include "copy.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Lanes that share a row, and elements that one of them reads at once.
constexpr int kVector = kLoadBytes == 16 && kHeadDimV % 8 == 0 ? 8 : 1;
constexpr int kLanes = kHeadDimV > 16 * kVector ? 32 : kHeadDimV > 8 * kVector ? 16 : 8;
constexpr int kRowsAtOnce = kNumThreads / kLanes;
static_assert(kBlockM % (32 / kLanes) == 0, "a warp stays together");

CUFLASH_DEVICE float dot(const u16* a, const u16* b) {
  float sum = 0.0f;
  if constexpr (kVector == 8) {
    const Bytes16 x = *(const Bytes16*)a, y = *(const Bytes16*)b;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u16 low = x.word[i / 2] >> (16 * (i % 2)), high = y.word[i / 2] >> (16 * (i % 2));
      sum += ptx::to_float32(Element{}, low) * ptx::to_float32(Element{}, high);
    }
  } else {
    sum = ptx::to_float32(Element{}, *a) * ptx::to_float32(Element{}, *b);
  }
  return sum;
}

CUFLASH_DEVICE void backward_delta(const Params& params) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM);
  const Work work = schedule(params, ptx::block_index(), num_m_blocks, params.num_heads, false);
  const int m_block = work.block, head = work.head, batch = work.batch;
  const int thread = ptx::thread_index(), lane = thread % kLanes;
  const u16* out = head_of(params.out, batch, head);
  const u16* dout = head_of(params.dout, batch, head);
  const float* lse = (const float*)params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride;

#pragma unroll 2
  for (int i = thread / kLanes; i < kBlockM; i += kRowsAtOnce) {
    const int row = m_block * kBlockM + i;
    float delta = 0.0f;
    // A row that saw no key, or that does not exist, has no weights: 2^(score - inf) = 0.
    float lse_log2 = ptx::infinity();
    if (row < params.seqlen_q) {
#pragma unroll
      for (int c = lane * kVector; c < kHeadDimV; c += kLanes * kVector)
        delta += dot(out + row * params.out.row_stride + c, dout + row * params.dout.row_stride + c);
      const float value = lse[row * params.lse.row_stride];
      if (value != -ptx::infinity()) lse_log2 = value * kLog2e;
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) delta += ptx::shuffle_xor(delta, mask);
    if (lane == 0) {
      float* stats = stats_of(params, batch, head) + row * 2;
      stats[0] = lse_log2;
      stats[1] = delta;
    }
  }

  if constexpr (kDqByReduction) {
    const i64 tile = ((i64)batch * params.num_heads + head) * num_m_blocks + m_block;
    Bytes16* accumulator = (Bytes16*)(params.dq_accumulator + tile * (kBlockM * kDim));
#pragma unroll 4
    for (int i = thread; i < kBlockM * kDim / 4; i += kNumThreads) accumulator[i] = {0, 0, 0, 0};
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_delta)
