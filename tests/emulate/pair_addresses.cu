// Where the lanes of a warp look for the pairs of wide elements that make a fragment, for each loader and each way of
// storing one: two instructions of two addresses a lane, offsets into a tile with rows of kRow bytes.
#include "sm80/mma.cuh"

struct AddressesParams {
  u32* destination;  // (patterns, 32)
};

constexpr int kRow = row_bytes(kDim);

CUFLASH_DEVICE void store_addresses(const AddressesParams& params) {
  const u32 lane = lane_index();
  const auto store = [&](int pattern, u32 address) { params.destination[pattern * 32 + lane] = address; };
  for (int piece = 0; piece < kDim / 16; ++piece) {
    u32 along = along_row(lane_along_row<kRow>(0, 0), piece * 16 * kElementBytes);
    store(4 * piece, along);
    store(4 * piece + 1, along_row(along, 8 * kElementBytes));
    const u32 down = along_row(lane_down_columns<kRow>(0, 0), piece * 16 * kElementBytes);
    store(4 * piece + 2, down);
    store(4 * piece + 3, next_row<kRow>(down));
  }
}
CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, AddressesParams, 32, 1, store_addresses)
