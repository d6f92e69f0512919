"""Mistakes in what reads queries, keys and values of one byte."""

from tests.emulate.mutants.planting import mutant

DECODE = "sm90/decode.cu"
FLOAT8 = "common/float8.cuh"
FRAGMENTS = "sm80/float8_fragments.cuh"
PRODUCTS = "sm90/forward_float8.cu"
QUERIES = "sm80/queries.cuh"

# fmt: off
MUTANTS = (
    # ---- common/float8.cuh
    mutant("every key has a scale of its own", FLOAT8, "data[(i64)((first + key) >> shift) * stride]",
           "data[(i64)(first + key) * stride]", "forward float8"),
    mutant("scales count from the start of a sequence", FLOAT8, "(first + key) >> shift", "key >> shift",
           "forward float8 packed"),
    mutant("all pages have the scales of the first", FLOAT8, "data[pages.page_of(key) * page_stride +", "data[",
           "decode float8 pages"),
    mutant("scales past the last key are read", FLOAT8, "key < key_stop ? of(key) : 0.0f", "of(key)",
           "decode float8 lengths"),
    mutant("weights follow no scale", FLOAT8, "scale[n][0] *= inverse,", "scale[n][0] *= 1.0f,",
           "decode float8 lengths"),
    mutant("the output does not follow larger scales", FLOAT8, "out[m][n][i] *= factor;", "out[m][n][i] *= 1.0f;",
           "decode float8 blocks"),
    mutant("the scale of values is left out", FLOAT8, "return inverse_sum * of_head *", "return inverse_sum *",
           "forward float8 packed"),
    mutant("all queries have the scale of the first", FLOAT8, "data[(min_of(first + query, last) >> shift) * stride]",
           "data[0]", "forward float8 queries", "products of bytes"),
    mutant("scales of queries count from the start of a sequence", FLOAT8, "min_of(first + query, last)",
           "min_of(query, last)", "forward float8 queries packed"),
    mutant("two rows have the scale of one query", FLOAT8, "x[m][n][i] *= scale[m][i / 2];",
           "x[m][n][i] *= scale[m][0];", "decode float8 queries", "forward float8 queries"),
    # ---- sm80/queries.cuh
    mutant("queries past the last are read", QUERIES, "first_row + row < row_stop ? columns - column : 0",
           "columns - column", "forward float8 queries"),
    mutant("neighbours change places", QUERIES, "source[j] << j % 2 * 8", "source[j] << (j + 1) % 2 * 8",
           "forward float8 queries"),
    mutant("vectors reach past the last row", QUERIES, "kIsAligned && count >= kVector", "kIsAligned",
           "forward float8 queries packed"),
    # ---- sm80/float8_fragments.cuh
    mutant("the second half of k is the first", FRAGMENTS, "half * 8 * row + i * 8)", "half * 8 * row)",
           "forward float8"),
    mutant("rows of values change places", FRAGMENTS, "(first & 0xff) | second << 8", "(second & 0xff) | first << 8",
           "forward float8"),
    mutant("the next row has the swizzle of this one", FRAGMENTS, "(upper ^ kSwizzles) + row", "upper + row",
           "forward float8"),
    # ---- sm90/decode.cu
    mutant("products read before all have converted", DECODE,
           "  ptx::fence_async_proxy();\n  sync_consumer();\n  release_by_warp(empty);",
           "  ptx::fence_async_proxy();\n  release_by_warp(empty);", "decode float8"),
    mutant("what was converted is not announced", DECODE,
           "  ptx::fence_async_proxy();\n  sync_consumer();\n  release_by_warp(empty);",
           "  sync_consumer();\n  release_by_warp(empty);", "decode float8"),
    mutant("the place is free before it is read", DECODE,
           "    if (valid >= kBlockN)\n      convert(",
           "    release_by_warp(empty);\n    if (valid >= kBlockN)\n      convert(",
           "decode float8"),
    mutant("values past the last key are converted", DECODE, "if (whole || (int)own.row_of(i) < valid) bytes =",
           "bytes =", "decode float8 lengths"),
    mutant("half of the values are not converted", DECODE, "<columns, kHalf, kWhole>", "<columns, 2 * kHalf, kWhole>",
           "decode float8"),
    mutant("scales of the other keys", FLOAT8, "8 * n % 32 + fragment_column() + i", "8 * n % 32 + i", "decode float8"),
    mutant("queries lose their power of two", DECODE, "power_of_two(-shift)", "power_of_two(-shift + 1)",
           "decode float8 narrowed"),
    mutant("the power of another row", DECODE, "lane / 4 * 2 + 16 * half)", "lane / 4 * 2)", "decode float8 narrowed"),
    mutant("queries outgrow float16", DECODE, "min_of(14 - exponent, 126)", "min_of(16 - exponent, 126)",
           "decode float8 narrowed"),
    mutant("half of a row is narrowed by its own largest", DECODE, "largest > other ? largest : other", "largest",
           "decode float8 narrowed"),
    mutant("warps with queries weigh nothing", DECODE, "warp_row < work.rows,", "warp_row + 16 < work.rows,",
           "decode float8"),
    mutant("queries are written before all are read", DECODE, "  sync();\n#pragma", "#pragma", "decode float8 queries"),
    # ---- sm90/forward_float8.cu
    mutant("values past the last key are not cleared", PRODUCTS, "if (valid < kBlockN) {", "if (false) {",
           "products of bytes"),
    mutant("columns do not part", PRODUCTS, "pairs[g][1], 0x7531)", "pairs[g][1], 0x6420)", "products of bytes"),
    mutant("keys lie in order", PRODUCTS, "pairs[g][2], pairs[g][3], 0x6420)", "pairs[g][3], pairs[g][2], 0x6420)",
           "products of bytes"),
    mutant("columns lie in order", PRODUCTS, "o[0][n + i % 2][2 * half + i / 2]", "o[0][n + i / 2][2 * half + i % 2]",
           "products of bytes"),
    mutant("transposed values are not announced to wgmma", PRODUCTS,
           "      ptx::fence_async_proxy();\n      arrive_as_warp(shared.v_ring", "      arrive_as_warp(shared.v_ring",
           "products of bytes"),
    mutant("the place of values is free too early", PRODUCTS,
           "      shared.t_ring.empty(key).wait(key.parity ^ 1);\n", "", "products of bytes"),
    mutant("large weights are not looked for", PRODUCTS, "if (!raise) raise = ptx::any_lane(round_weights(s, factor));",
           "if (!raise) round_weights(s, factor);", "products of bytes in parts"),
    mutant("the output does not follow the offset", PRODUCTS, "softmax.rescale(o, of_sums);", "",
           "products of bytes in parts"),
    mutant("sums of a part are read too early", PRODUCTS, "add_part<kPart - 1, 1>", "add_part<kPart - 1, 2>",
           "products of bytes in parts"),
    mutant("the output is read too early", PRODUCTS, "add_values<1>(n_block + 1, before,",
           "add_values<2>(n_block + 1, before,", "products of bytes ahead"),
    mutant("a tile that is passed over is not given back", PRODUCTS,
           "    release(shared.k_ring.empty(key));\n    release(shared.t_ring.empty(key));\n    key.advance();",
           "    release(shared.t_ring.empty(key));\n    key.advance();", "products of bytes"),
)
# fmt: on
