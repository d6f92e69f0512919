"""Mistakes in the forward kernels of wide heads."""

from tests.emulate.mutants.planting import mutant

DECODE = "sm90/decode_wide.cu"
FORWARD = "sm90/forward_wide.cu"
ROLES = "sm90/wide_roles.cuh"

# fmt: off
MUTANTS = (
    mutant("a box is read before it is there", ROLES,
           "    shared.ring.full(box.stage, reader).wait(parities >> box.stage & 1);\n", "", "wide"),
    mutant("a box is replaced before it is free", ROLES, "    shared.ring.empty(box.stage).wait(box.parity ^ 1);\n", "",
           "wide"),
    mutant("Q is read before it is there", ROLES, "      shared.q_ring.full(query).wait(query.parity);\n", "", "wide"),
    mutant("Q is replaced before it is free", ROLES, "    shared.q_ring.empty(query).wait(query.parity ^ 1);\n", "",
           "wide"),
    mutant("Q is given back with the first keys", ROLES, "if (n_block == work.keys.start && thread == 0)",
           "if (n_block == last && thread == 0)", "wide"),
    mutant("weights are read before they are there", ROLES, "    shared.ready[half].wait(message.parity);\n", "",
           "wide"),
    mutant("weights are replaced before they are read", ROLES, "    rows.drop(s[0], lane_key);\n"
           "    shared.taken.wait(message.parity ^ 1);\n", "    rows.drop(s[0], lane_key);\n", "wide"),
    mutant("the last factors are replaced before they are read", ROLES, "    rows.finish(softmax, factor, pass);\n"
           "    shared.taken.wait(message.parity ^ 1);\n", "    rows.finish(softmax, factor, pass);\n", "wide"),
    mutant("a box of keys is given back in flight", ROLES, "        ptx::wgmma_wait<1>();\n"
           "        boxes.release(box_of(i - 1));\n      }\n    });\n    wait_for<0>(s[0]);",
           "        boxes.release(box_of(i - 1));\n      }\n    });\n    wait_for<0>(s[0]);", "wide short ring"),
    mutant("a box of values is given back in flight", ROLES, "        ptx::wgmma_wait<1>();\n"
           "        boxes.release(box_of(i - 1));\n      }\n    });\n    wait_for<0>(o[0]);",
           "        boxes.release(box_of(i - 1));\n      }\n    });\n    wait_for<0>(o[0]);", "wide short ring"),
    mutant("parities of boxes do not change", ROLES, "    parities ^= 1u << box.stage;\n", "", "wide short ring"),
    mutant("S is read in flight", ROLES, "    wait_for<0>(s[0]);\n", "    ptx::fence_operand(s[0]);\n", "wide"),
    mutant("O is read in flight", ROLES, "    wait_for<0>(o[0]);\n", "    ptx::fence_operand(o[0]);\n", "wide"),
    mutant("O is not rescaled", ROLES, "OnlineSoftmax<1>::rescale(o, factor);\n      multiply", ";\n      multiply",
           "wide"),
    mutant("O does not get its last factor", ROLES, "    receive(false);\n    OnlineSoftmax<1>::rescale(o, factor);\n",
           "    receive(false);\n", "wide"),
    mutant("boxes of keys in another order", ROLES, "return i + min_of(i, kFirstChunks);",
           "return i + min_of(i + 1, kFirstChunks);", "wide"),
    mutant("values of the other half", ROLES, "(pass * kOutChunks + half * kFirstChunks)", "(pass * kOutChunks)",
           "wide"),
    mutant("every pass makes the first columns", ROLES, "const int first_chunk = pass * kOutChunks,",
           "const int first_chunk = 0,", "wide passes"),
    mutant("words of a quad are not gathered", ROLES, "    gather_in_quad(word);\n", "", "wide"),
    mutant("values behind the last key count", ROLES, "if (clears && valid < kBlockN)", "if (false)", "wide lengths"),
    mutant("zeros of values unfenced", ROLES, "        ptx::fence_async_proxy();\n", "", "wide lengths"),
    mutant("zeros of values seen by some", ROLES, "        ptx::sync_named(1 + half, 128);\n", "", "wide lengths"),
    mutant("a block leaves while another one arrives at its barriers", ROLES,
           "  if constexpr (kClusterBlocks > 1) ptx::sync_cluster<kClusterBlocks>();\n", "", "wide", "wide passes"),
    mutant("barriers are used before all blocks have made theirs", ROLES,
           "    ptx::sync_cluster<kClusterBlocks>();\n  }", "  }", "wide"),
    mutant("a box is free when one block is done with it", ROLES, "empty(i).init(kClusterBlocks);",
           "empty(i).init(1);", "wide"),
    mutant("a box is given back in the own block alone", ROLES,
           "ptx::barrier_arrive_in_cluster<kClusterBlocks>(shared.ring.empty(box.stage).address);",
           "shared.ring.empty(box.stage).arrive();", "wide"),
    mutant("half of a box is missing", ROLES, "kBlockN / kClusterBlocks>(\n", "kBlockN / kClusterBlocks / 2>(\n",
           "wide"),
    mutant("all blocks of a cluster have the first rows", FORWARD, "first_own = first_row + rank * kRows;",
           "first_own = first_row;", "wide"),
    mutant("no tile is masked", FORWARD, "return n_block < own.full_start || n_block >= own.full_stop;",
           "return false;", "wide"),
    mutant("rows behind the last one are stored", FORWARD, "own_row < common.seqlen_q ? g_row : nullptr", "g_row",
           "wide"),
    mutant("no sink", FORWARD, "  if constexpr (kHasSinks)", "  if constexpr (false)", "wide"),
    mutant("rows of no query decide", DECODE, "    if (own_rows == kRows) return;\n", "    return;\n", "wide few",
           escapes="they decide when sums are rescaled, which moves rounding alone"),
    mutant("queries of the first block in all", DECODE, "first_head() + first_own / common.seqlen_q,", "first_head(),",
           "wide few"),
    mutant("a sink for each share", DECODE, "if (kHasSinks && is_alone(partials))", "if (kHasSinks)", "wide few"),
    mutant("a head that one cluster has is left to be combined", DECODE, "return !kSplitsKeys || partials.count == 1;",
           "return !kSplitsKeys;", "wide few heads"),
    mutant("shares of blocks", DECODE, "HeadWalk(common, ptx::block_index() / kClusterBlocks)", "HeadWalk(common)",
           "wide few"),
)
# fmt: on
