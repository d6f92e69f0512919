"""Mistakes in how kernels compute scores and masks that are functions of the caller."""

from tests.emulate.mutants.planting import mutant

CAPTURED = "around/captured.cu"
FUNCTIONS = "common/functions.cuh"
HOISTED = "around/hoisted.cu"
CAPTURED_SUMS = "sm90/captured_sums.cuh"
EXACT = "common/exact_sums.cuh"
GRADIENTS = "common/captured_gradients.cuh"
LIBRARY = "common/score_functions.cuh"
MASK_TILES = "around/mask_tiles.cu"
BOUNDS = "common/tile_bounds.cuh"
WEIGHTS = "sm90/function_weights.cuh"

# fmt: off
MUTANTS = (
    # ---- common/score_functions.cuh
    mutant("axes have the stride of the first one", LIBRARY, "within * (Offset)array.stride[axis]",
           "within * (Offset)array.stride[0]", "functions"),
    mutant("gradients lie in the order of Fortran", LIBRARY, "place * array.size[axis] + within", "place + within",
           "functions"),
    mutant("remainders of the next number", LIBRARY, "a % (b == 0 ? 1 : b)", "a % (b == 0 ? 1 : b + 1)",
           "functions float64"),
    mutant("16 bits are stored as they are", LIBRARY, "(u16)ptx::pack(E{}, value, value)", "(u16)value",
           "functions in 16 bits"),
    mutant("quotients are products", LIBRARY, "x * (Real)ptx::reciprocal_approx((float)y)", "x * y",
           "functions sm90 without room"),
    mutant("a table begins at its first place", LIBRARY, "(row - table.first)", "row", "functions tables"),
    mutant("heads have the table of head 0", LIBRARY, "batch * table.stride[0] + head * table.stride[1];",
           "batch * table.stride[0];", "functions sm90 tables"),
    mutant("entries of all batch entries are those of one", LIBRARY, "(batch * table.size[1] + head)", "head",
           "functions sm90 tables of entries"),
    # ---- around/hoisted.cu
    mutant("the second table has no entries", HOISTED, "    index -= count;\n", "    index -= 2 * count;\n",
           "functions tables"),
    mutant("entries are those of the next place", HOISTED, "table.size[2] + table.first)",
           "table.size[2] + table.first + 1)", "functions sm90 tables"),
    mutant("all entries are of head 0", HOISTED, "(index / table.size[2] % table.size[1])", "(0)",
           "functions sm90 tables"),
    mutant("sums of entries are those of the first array", HOISTED, "(first_sum_of(params, kArray) + index)", "index",
           "functions sm90 tables"),
    mutant("infinite terms are led on as sums", HOISTED, "is_finite ? (Real)", "true ? (Real)", "functions sm90 tables",
           escapes="no trial has an infinite term of a table"),
    # ---- common/functions.cuh
    mutant("scores are those of head 0", FUNCTIONS, "score_function(of_head, of_key, arrays, s, row, key, head,",
           "score_function(of_head, of_key, arrays, s, row, key, 0,", "functions"),
    mutant("rows and keys change places", FUNCTIONS, "mask_function(of_head, arrays, row, key, head,",
           "mask_function(of_head, arrays, key, row, head,", "functions"),
    mutant("what is read of a head is that of head 0", FUNCTIONS, "read_of_head(params.captured, head_, batch_)",
           "read_of_head(params.captured, 0, batch_)", "functions"),
    # ---- sm90/forward.cu
    mutant("both rows of a lane have the score of the upper one", "sm90/forward.cu",
           "x * score.scale, lane_row + i / 2 * 8,", "x * score.scale, lane_row,", "functions sm90"),
    # ---- sm90/function_weights.cuh
    mutant("both keys of a lane are the first", WEIGHTS, "key = lane_key + i / 2 * 8;", "key = lane_key;",
           "functions sm90"),
    mutant("what a function hides has weights", WEIGHTS, "          exponent = -ptx::infinity();\n", "          ;\n",
           "functions sm90"),
    mutant("rows that do not exist have weights", WEIGHTS,
           "        if (masked && lse[i % 2] == ptx::infinity()) p[n][i] = 0.0f;\n", "", "functions sm90 without room"),
    mutant("derivatives of pairs without weight count", WEIGHTS, "p[n][i] == 0.0f ? 0.0f : p[n][i] * derivative[i]",
           "p[n][i] * derivative[i]", "functions sm90 without room"),
    mutant("weights keep the other sign", WEIGHTS, " ^ 0x80008000u", "", "functions sm90"),
    mutant("weights of dv have the derivatives, too", WEIGHTS,
           "ptx::pack(Element{}, -p[n][2 * half], -p[n][2 * half + 1])",
           "ptx::pack(Element{}, -p[n][2 * half] * derivative[2 * half], -p[n][2 * half + 1])", "functions sm90"),
    # ---- around/mask_tiles.cu
    mutant("a tile with a visible pair is whole", MASK_TILES, "ptx::any_lane(!all) ? Pairs::kSome : Pairs::kAll",
           "Pairs::kAll", "functions of pairs"),
    mutant("a tile with a hidden pair is hidden", MASK_TILES, "!ptx::any_lane(any) ? Pairs::kNone",
           "ptx::any_lane(!all) ? Pairs::kNone", "functions of pairs"),
    mutant("the first row tells of all", MASK_TILES,
           "row < tile.stop_row; row += rows)", "row < tile.first_row + 1; row += rows)",
           "functions of pairs"),
    mutant("batch entries have each other's tiles", MASK_TILES, "matrix / params.list_heads, head", "0, head",
           "functions in 16 bits"),
    mutant("the least number tells of all", BOUNDS, "return {known && a.high < b.low, known && a.low >= b.high};",
           "return {known && a.low < b.low, known && a.low >= b.high};", "functions"),
    mutant("entries of the first lane alone", BOUNDS, "  for (u32 lanes = 16; lanes > 0; lanes /= 2)\n"
           "    found = hull", "  for (u32 lanes = 0; lanes > 0; lanes /= 2)\n    found = hull", "functions of pairs"),
    mutant("entries of the first row alone", BOUNDS, "- first[axis] + 1;", "- first[axis] + 1, count[axis] = 1;",
           "functions of pairs"),
    mutant("equal where they may be", BOUNDS, "return {known && a.low == a.high && b.low == b.high && a.low == b.low,",
           "return {known && a.low == b.low,", "functions of pairs"),
    mutant("no byte of a word is 0", MASK_TILES,
           "return ((word - 0x01010101) & ~word & 0x80808080) != 0;", "return false;", "looked at"),
    mutant("all vectors are of the first row", MASK_TILES, "index / kVectors * row_stride", "0 * row_stride",
           "looked at"),
    mutant("vectors of every tile", MASK_TILES, " && tile.stop_key - tile.first_key == kBlockN)", ")", "looked at"),
    mutant("vectors of any alignment", MASK_TILES, "key_stride == 1 && ((u64)first | (u64)row_stride) % 16 == 0",
           "key_stride == 1", "looked at by bytes"),
    mutant("whole tiles of masks of pairs", MASK_TILES, "kMaskOfKeys && pairs == Pairs::kSome",
           "pairs == Pairs::kSome", "looked at", "looked at by bytes"),
    mutant("the mask of the first head", MASK_TILES, " + head * params.mask.head_stride", "", "looked at",
           "looked at by bytes"),
    mutant("the mask of the first batch entry", MASK_TILES, " + batch * params.mask.batch_stride", "", "looked at"),
    mutant("lists know nothing of masks", "around/lists.cu", "(kHasMask && !kMaskByBits) || kHasMaskFunction",
           "kHasMaskFunction", "looked at"),
    # ---- common/captured_gradients.cuh
    mutant("sums of arrays lie on each other", GRADIENTS,
           "if (has_sums(i)) first += elements_of(params.captured[i]);", ";", "functions"),
    mutant("the largest term is not looked for", GRADIENTS, "if (largest[kRead] > 0) ptx::reduce_max",
           "if (false) ptx::reduce_max",
           "functions"),
    mutant("sums are not scaled back", GRADIENTS, "return units / first;", "return units;", "functions"),
    mutant("the second word is forgotten", GRADIENTS, "units += (double)word[1] / second;", ";", "functions float64"),
    mutant("sums of a head are not added", GRADIENTS, "if (own_place[kRead] >= 0) add_words", "if (false) add_words",
           "functions"),
    mutant("lanes add before all have the same place", GRADIENTS, "(float)warp_sum(term)", "term",
           "functions sm90 arrays"),
    # ---- common/exact_sums.cuh
    mutant("negative terms are added", EXACT, "is_negative ? 0 - part[i] : part[i]", "part[i]",
           "functions sm90 arrays"),
    mutant("upper parts of terms are lost", EXACT, "for (int i = 0; i < 2; ++i)", "for (int i = 0; i < 1; ++i)",
           "functions sm90 arrays"),
    # ---- sm90/captured_sums.cuh
    mutant("lanes pass on what they keep", CAPTURED_SUMS, "keeps_second ? half[height][i] : value[i];", "kept;",
           "functions sm90 arrays"),
    mutant("diagonals that leave a band stay in it", CAPTURED_SUMS, "column + i >= row ? band[i] : next[i]", "band[i]",
           "functions sm90 arrays"),
    mutant("the last band of diagonals", CAPTURED_SUMS, "    store(n, {0.0f, 0.0f}, s_sums);\n", "",
           "functions sm90 arrays"),
    mutant("diagonals of a warp begin at its key", CAPTURED_SUMS, "16 * (warp + 1)", "16 * warp",
           "functions sm90 arrays"),
    mutant("sums of a head are those of the next, too", CAPTURED_SUMS, "    });\n    clear();\n", "    });\n",
           "functions sm90 arrays"),
    mutant("derivatives of pairs without weight have terms", CAPTURED_SUMS,
           ": score_product(ds[n][i], derivative);", ": ds[n][i] * derivative;", "functions sm90 arrays of s"),
    # ---- sm90/backward.cu
    mutant("sums of steps before their stage is free", "sm90/backward.cu",
           "    if constexpr (kStepSums > 0) shared.ds_ring.empty(ds_at).wait(ds_at.parity ^ 1);\n", "",
           "functions sm90 arrays"),
    # ---- around/captured.cu
    mutant("the largest term begins with what lay there", CAPTURED, "captured_largest_of(params)[i] = 0;", ";",
           "functions"),
    mutant("gradients of the first array alone", CAPTURED, "array < kNumCaptured; ++array)", "array < 1; ++array)",
           "functions"),
    mutant("elements lie one after another", CAPTURED, "offset += place % array.size[axis] * array.stride[axis];",
           "offset += place % array.size[axis];", "functions"),
    # ---- numbers of keys
    mutant("numbers of a key follow those before them", "sm90/forward.cu", "k * kBlockN * 4 + n * 32", "n * 32",
           "functions sm90 arrays"),
    mutant("numbers are those of a pair of keys", "sm90/forward.cu", "of_key[1].x[k] = two[1]",
           "of_key[1].x[k] = two[0]", "functions sm90 arrays"),
    mutant("numbers are stored for every key", "sm90/addends.cuh", "at + n * kBlockN * 4", "at",
           "functions sm90 arrays"),
)
# fmt: on
