"""How many bytes kernels may spill: what the compiler reports. Rows that are not here spill nothing."""

# Bytes that a thread spills at most, by source, bytes of an element, max_dim, tile and resident blocks, in rows that
# are faster that way than with fewer blocks, or that fit no other way; all others spill nothing. What NVRTC 13.0 and
# 13.5 report, and a small margin.
SPILLS = {
    ("sm80/forward.cu", 2, 64, "128x64", 3): 148,
    ("sm80/forward.cu", 2, 96, "128x64", 2): 32,
    ("sm80/forward.cu", 2, 128, "128x64", 2): 80,
    ("sm80/forward.cu", 2, 256, "64x32", 1): 36,
    ("sm80/forward.cu", 2, 128, "128x32", 2): 32,
    ("sm80/forward.cu", 2, 192, "128x128", 1): 32,
    ("sm80/forward.cu", 2, 256, "128x128", 1): 112,
    ("sm80/backward_dq.cu", 2, 64, "128x64", 2): 96,
    ("sm80/backward_dq.cu", 2, 128, "128x32", 1): 24,
    ("sm80/forward.cu", 4, 64, "128x32", 2): 64,
    ("sm80/forward.cu", 4, 128, "128x32", 2): 128,
    ("sm80/forward.cu", 4, 128, "64x32", 1): 48,
    ("sm80/forward.cu", 4, 192, "64x32", 1): 64,
    ("sm80/forward.cu", 4, 256, "64x16", 1): 64,
    ("sm80/forward.cu", 4, 256, "32x16", 1): 32,
    ("sm80/backward.cu", 4, 64, "32x64", 2): 32,
    ("sm80/backward.cu", 4, 64, "32x64", 1): 32,
    ("sm80/backward.cu", 4, 128, "32x64", 1): 32,
    ("sm80/backward.cu", 4, 128, "32x32", 1): 64,
    ("sm80/backward.cu", 4, 192, "32x64", 1): 128,
    ("sm80/backward.cu", 4, 192, "32x16", 1): 208,
    ("sm80/backward.cu", 4, 256, "32x64", 1): 256,
    ("sm80/backward.cu", 4, 256, "32x32", 1): 320,
    ("sm80/backward_dq.cu", 4, 192, "64x16", 1): 48,
    ("sm80/backward_dq.cu", 4, 192, "32x16", 1): 48,
    ("sm80/backward_dq.cu", 4, 256, "64x16", 1): 48,
    ("sm80/backward_dq.cu", 4, 256, "32x16", 1): 48,
    ("sm80/forward.cu", 8, 128, "128x32", 1): 128,
    ("sm80/forward.cu", 8, 128, "64x16", 1): 64,
    ("sm80/forward.cu", 8, 256, "64x16", 1): 64,
    ("sm80/forward.cu", 8, 256, "32x16", 1): 64,
    ("sm80/forward.cu", 8, 256, "16x16", 1): 224,
    ("sm80/backward.cu", 2, 128, "64x128", 1): 16,
    ("sm80/backward.cu", 8, 64, "16x64", 1): 256,
    ("sm80/backward.cu", 8, 128, "32x64", 1): 544,
    ("sm80/backward.cu", 8, 128, "32x32", 1): 432,
    ("sm80/backward.cu", 8, 192, "16x16", 1): 1152,
    ("sm80/backward.cu", 8, 256, "16x32", 1): 440,
    ("sm80/backward.cu", 8, 256, "16x16", 1): 480,
    ("sm80/backward_dq.cu", 8, 128, "64x16", 1): 80,
    ("sm90/forward.cu", 2, 64, "256x64", 1): 64,
    ("sm90/backward.cu", 2, 128, "64x128", 1): 72,
    ("sm80/backward.cu", 4, 256, "16x16", 1): 16,
    ("sm90/forward.cu", 2, 128, "192x80", 1): 16,
    ("sm90/backward_fp32.cu", 4, 128, "64x64", 1): 16,
    ("sm90/forward_fp32.cu", 4, 128, "128x112", 1): 16,
    ("sm80/forward.cu", 8, 192, "64x16", 1): 48,
    ("sm80/forward.cu", 8, 192, "32x16", 1): 32,
    ("sm80/backward_dq.cu", 8, 192, "32x16", 1): 32,
    ("sm80/backward_dq.cu", 8, 192, "16x16", 1): 48,
    ("sm80/backward_dq.cu", 4, 256, "16x16", 1): 16,
    ("sm80/forward.cu", 4, 512, "32x16", 1): 32,
    ("sm80/forward.cu", 4, 512, "16x16", 1): 32,
    ("sm80/forward.cu", 4, 1024, "16x16", 1): 32,
    ("sm80/forward.cu", 8, 512, "16x16", 1): 32,
    ("sm80/backward.cu", 8, 384, "16x16", 1): 304,
    # By the producer, once for a tile of queries.
    ("sm90/forward_wide.cu", 2, 576, "128x128", 1): 16,
    ("sm90/forward_wide.cu", 2, 768, "128x128", 1): 16,
    ("sm90/forward_wide.cu", 2, 1024, "128x128", 1): 16,
}
# Of helpers/backward_preprocess.cu, whatever its row is: where it finds the row sums of a large lse.
SPILLS_OF_ROW_SUMS = 52
# The same on compute capability 10.0 and later, where the compiler loads fragments of wide elements further ahead.
SPILLS_OF_LATER_ARCHS = SPILLS | {
    ("sm80/forward.cu", 4, 64, "64x64", 1): 32,
    ("sm80/forward.cu", 4, 128, "64x32", 1): 32,
    ("sm80/forward.cu", 4, 192, "64x32", 1): 64,
    ("sm80/forward.cu", 4, 256, "64x16", 1): 256,
    ("sm80/backward.cu", 4, 64, "32x64", 2): 48,
    ("sm80/backward.cu", 4, 192, "32x16", 1): 208,
    ("sm80/backward.cu", 4, 256, "16x16", 1): 96,
    ("sm80/backward_dq.cu", 4, 128, "64x16", 1): 16,
    ("sm80/backward_dq.cu", 4, 192, "32x16", 1): 32,
    ("sm80/backward_dq.cu", 4, 256, "32x16", 1): 32,
    ("sm80/forward.cu", 4, 64, "128x32", 2): 96,
    ("sm80/backward.cu", 8, 64, "32x32", 1): 64,
    ("sm80/backward_dq.cu", 4, 64, "64x32", 1): 4,
}
# Of packed sequences, whose ends take registers too; where consumers spare none, the other warps spill.
SPILLS_OF_PACKED = SPILLS | {
    ("sm80/backward.cu", 2, 64, "32x128", 2): 48,
    ("sm90/forward.cu", 2, 256, "128x64", 1): 176,
    ("sm90/forward.cu", 2, 128, "192x80", 1): 48,
    ("sm90/backward.cu", 2, 256, "64x64", 1): 8,
}
# With bounds, with narrow loads, or with every option at once, whose scores take many registers on their way.
SPILLS_OF_OPTIONS = SPILLS | {
    ("sm90/forward_fp32.cu", 4, 128, "128x112", 1): 64,
    ("sm80/forward.cu", 8, 64, "128x48", 1): 64,
    ("sm90/forward_fp32.cu", 4, 128, "128x64", 1): 32,
    ("sm80/forward.cu", 2, 64, "128x64", 3): 1376,
    ("sm80/backward.cu", 2, 64, "32x128", 2): 16,
    ("sm80/backward.cu", 2, 64, "32x128", 1): 16,
    ("sm80/backward_dq.cu", 2, 64, "128x64", 2): 1136,
    ("sm80/forward.cu", 4, 64, "128x32", 2): 96,
    ("sm90/forward.cu", 2, 64, "192x64", 1): 208,
    ("sm90/forward.cu", 2, 128, "128x64", 1): 8,
    ("sm90/forward.cu", 2, 192, "128x96", 1): 424,
    ("sm90/forward.cu", 2, 256, "128x64", 1): 288,
    ("sm90/forward.cu", 2, 128, "192x80", 1): 16,
    ("sm90/backward.cu", 2, 64, "64x128", 1): 112,
    ("sm90/backward.cu", 2, 128, "64x128", 1): 200,
    ("sm90/backward.cu", 2, 192, "64x64", 1): 4,
    ("sm90/backward.cu", 2, 192, "64x128", 1): 16,
    ("sm90/backward.cu", 2, 256, "64x64", 1): 224,
    ("sm90/backward.cu", 2, 256, "64x128", 1): 28,
    ("sm80/forward.cu", 4, 64, "64x64", 1): 16,
    ("sm90/forward_fp32.cu", 4, 64, "128x128", 1): 48,
    ("sm90/backward_fp32.cu", 4, 128, "64x64", 1): 80,
    ("sm80/backward.cu", 8, 64, "16x64", 1): 416,
    ("sm80/forward.cu", 2, 128, "64x32", 2): 16,
    ("sm80/backward_dq.cu", 2, 256, "32x16", 1): 48,
}
# Wide heads: the warpgroup of scores, which waits for the others.
SPILLS_OF_OPTIONS |= {
    ("sm90/forward_wide.cu", 2, dim, tile, 1): 576
    for dim in (320, 512, 576, 768, 1024)
    for tile in ("64x128", "128x128")
} | {("sm90/backward_wide.cu", 2, 320, "64x64", 1): 16, ("sm90/backward_wide.cu", 2, 576, "64x64", 1): 124}
SPILLS_OF_BLOCKS = SPILLS_OF_OPTIONS | {
    ("sm90/forward.cu", 2, 128, "128x128", 1): 32,
    ("sm90/backward_wide.cu", 2, 1024, "64x64", 1): 12,
}
# With one thing that is added to scores.
SPILLS_OF_ADDENDS = SPILLS | {
    **{("sm90/forward_wide.cu", 2, dim, "64x128", 1): 52 for dim in (320, 512, 576, 1024)},
    **{
        ("sm90/decode_wide.cu", 2, dim, tile, 1): 268
        for dim in (320, 512, 576, 768, 1024)
        for tile in ("64x128", "128x128")
    },
    ("sm90/decode.cu", 2, 64, "64x128", 2): 80,
    ("sm90/decode.cu", 2, 128, "64x128", 1): 16,
    ("sm90/decode.cu", 2, 256, "64x64", 1): 4,
    ("sm90/backward.cu", 2, 64, "64x128", 1): 8,
    ("sm90/backward.cu", 2, 128, "64x128", 1): 76,
    ("sm90/backward.cu", 2, 192, "64x64", 1): 4,
    ("sm90/backward.cu", 2, 192, "64x128", 1): 8,
    ("sm90/backward_fp32.cu", 4, 128, "64x64", 1): 112,
    ("sm90/forward.cu", 2, 128, "192x80", 1): 40,
    # Once for a tile of queries.
    ("sm90/forward_fp32.cu", 4, 64, "128x128", 1): 32,
    ("sm90/forward_fp32.cu", 4, 128, "128x64", 1): 16,
    ("sm90/forward_fp32.cu", 4, 128, "128x112", 1): 40,
    ("sm90/backward.cu", 2, 256, "64x64", 1): 80,
    ("sm90/backward_wide.cu", 2, 1024, "64x64", 1): 8,
}
# With pages, whose rows are looked up one by one.
SPILLS_OF_PAGES = SPILLS_OF_OPTIONS | {
    ("sm80/forward.cu", 4, 64, "128x32", 2): 176,
    ("sm90/forward.cu", 2, 192, "128x96", 1): 64,
    ("sm90/forward.cu", 2, 128, "128x64", 1): 24,
}
# With fp8 numbers, and a scale for each key and each value.
SPILLS_OF_FLOAT8 = {
    ("sm80/forward.cu", 2, 96, "128x32", 2): 16,
    ("sm80/forward.cu", 2, 192, "128x32", 1): 32,
    ("sm80/forward.cu", 2, 192, "64x32", 1): 32,
    ("sm80/forward.cu", 2, 256, "128x32", 1): 48,
    ("sm80/forward.cu", 2, 256, "64x32", 1): 48,
    ("sm80/forward.cu", 4, 64, "128x16", 2): 16,
    ("sm80/forward.cu", 4, 128, "128x16", 2): 128,
    ("sm90/forward_float8.cu", 2, 128, "128x128", 1): 8,
    ("sm90/forward_float8.cu", 2, 128, "192x128", 1): 40,
    ("sm90/forward_float8.cu", 2, 256, "128x128", 1): 32,
    ("sm90/decode_float8.cu", 2, 256, "64x128", 1): 8,
}
SPILLS_OF_DROPOUT = SPILLS | {
    **{("sm90/backward_wide.cu", 2, dim, "64x64", 1): 4 for dim in (640, 768, 896, 1024)},
    ("sm90/backward_wide.cu", 2, 576, "64x64", 1): 48,
    ("sm80/forward.cu", 2, 64, "128x64", 3): 160,
    ("sm80/forward.cu", 4, 64, "128x32", 2): 96,
    ("sm80/forward.cu", 8, 64, "128x48", 1): 64,
    ("sm80/backward.cu", 8, 64, "16x64", 1): 280,
    ("sm80/backward_dq.cu", 2, 64, "128x64", 2): 160,
    ("sm80/backward_dq.cu", 4, 64, "64x32", 1): 16,
    ("sm80/backward_dq.cu", 8, 64, "64x16", 1): 16,
    ("sm90/backward.cu", 2, 128, "64x128", 1): 104,
    ("sm90/forward_fp32.cu", 4, 64, "128x128", 1): 16,
    ("sm90/forward_fp32.cu", 4, 128, "128x64", 1): 16,
    ("sm90/forward_fp32.cu", 4, 128, "128x96", 1): 16,
}
