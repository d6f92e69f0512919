"""Mutants of the kernels of long heads without values on compute capability 9.0."""

from tests.emulate.mutants.mutant import mutant

CHUNKED_RING = "sm90/chunked_ring.cuh"
DS_CHUNK = "sm90/ds_chunk.cuh"
DS = "sm90/backward_chunked_ds.cu"
FORWARD = "sm90/forward_chunked.cu"
PRODUCTS = "sm90/backward_chunked.cu"

# fmt: off
MUTANTS = (
    # ---- sm90/chunked_ring.cuh
    mutant("the producer does not wait for a free stage", CHUNKED_RING,
           "    shared.ring.empty(at).wait(at.parity ^ 1);\n", "", "sm90 chunked"),
    mutant("no wait for a chunk", CHUNKED_RING, "    shared.ring.full(at).wait(at.parity);\n", "", "sm90 chunked"),
    mutant("a stage is given back before its products are done", CHUNKED_RING,
           "      ptx::wgmma_wait<1>();\n", "", "sm90 chunked"),
    mutant("the rows of the first consumer for all", CHUNKED_RING, "shared.left(at) + index * kBytesBox",
           "shared.left(at)", "sm90 chunked"),
    mutant("sums are of the last chunk alone", CHUNKED_RING, "chunk > 0 || k > 0);", "k > 0);", "sm90 chunked"),
    mutant("stages do not wait for the other block of the cluster", CHUNKED_RING,
           "ring.init(4 * kConsumers * kRowBlocks)", "ring.init(4 * kConsumers)", "sm90 chunked cluster"),
    # ---- sm90/forward_chunked.cu
    mutant("no tile needs a mask", FORWARD, "return n_block < keys.full_start || n_block >= keys.full_stop;",
           "return false;", "sm90 chunked"),
    mutant("all blocks of a cluster have the first rows", FORWARD, "own(ptx::cluster_rank<kRowBlocks>() * kRows)",
           "own(0)", "sm90 chunked cluster"),
    mutant("each split has all keys", FORWARD, "start = cut(split), stop = cut(split + 1);",
           "start = keys.start, stop = keys.stop;", "sm90 chunked splits"),
    mutant("splits are combined before all statistics are stored", FORWARD,
           "  if constexpr (kSplitsKeys || kRowBlocks > 1) ptx::sync_cluster<kRowBlocks>();\n", "",
           "sm90 chunked splits"),
    mutant("both keys of a lane have the bias of the first", FORWARD, "const int key = lane_key + 8 * n + j;",
           "const int key = lane_key + 8 * n;", "sm90 chunked bias"),
    # ---- sm90/ds_chunk.cuh
    mutant("boxes are written while TMA reads them", DS_CHUNK,
           "    if (thread == 0) ptx::bulk_wait_read<kResultBoxes - 1>();\n", "", "backward sm90 chunked"),
    mutant("no fence before TMA reads a box", DS_CHUNK, "    ptx::fence_async_proxy();\n", "", "backward sm90 chunked"),
    mutant("boxes begin every 32 columns", DS_CHUNK, "column + (along_columns ? i * 64 : 0)",
           "column + (along_columns ? i * 32 : 0)", "backward sm90 chunked"),
    # ---- sm90/backward_chunked_ds.cu
    mutant("keys of the array for those of the chunk", DS, "n_block * kBlockN - tile.first_key, tile.first_row",
           "n_block * kBlockN, tile.first_row", "backward sm90 chunked"),
    mutant("no tile of dS needs a mask", DS, "n_block < tile.keys.full_start || n_block >= tile.keys.full_stop;",
           "false;", "backward sm90 chunked"),
    mutant("launches of dS are not counted", DS, "    own.arrive();\n", "", "backward sm90 chunked"),
    mutant("the keys of the head of the queries", DS, "n_block * kBlockN, tile.head_kv,",
           "n_block * kBlockN, tile.work.head,", "backward sm90 chunked"),
    # ---- sm90/backward_chunked.cu
    mutant("dk of one head of a group", PRODUCTS, "num_heads = params.num_heads / params.num_heads_kv;",
           "num_heads = 1;", "backward sm90 chunked"),
    mutant("earlier chunks are left out of dq", PRODUCTS, "  if (tile.chunk > 0)\n#pragma", "  if (false)\n#pragma",
           "backward sm90 chunked"),
    mutant("dk of queries that dS does not have", PRODUCTS, "first = range.start * kBlockM;", "first = 0;",
           "backward sm90 chunked"),
    mutant("launches of products are not counted", PRODUCTS,
           "ptx::thread_index() == 0) launches_of_products(params.common).arrive();",
           "ptx::thread_index() == 0) return;",
           "backward sm90 chunked"),
)
