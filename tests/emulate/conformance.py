"""What every function of ``kernels/ptx/base.cuh`` computes, in NumPy: checks of ``conformance.cu``.

A check is called with `run`, which runs one kernel somewhere and returns what it wrote::

    run(kernel, source=array, second_source=None, destination=array, count=0, grid=1, threads=128, shared_bytes=0,
        element="Float16", in_turn=False) -> array like destination

`element` is the value of the define ``ELEMENT``; `in_turn` says that blocks must start in the order of their index. The
arguments of a kernel are one struct of type ``PARAMS``.
"""

from typing import Any

import ml_dtypes
import numpy as np

PARAMS = np.dtype(
    [
        ("source", np.uint64),
        ("second_source", np.uint64),
        ("destination", np.uint64),
        ("count", np.uint32),
        ("padding", np.uint32),
    ]
)
WARP, BLOCK = 32, 128
ELEMENTS = {"Float16": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}


def random_bits(dtype, *shape):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(7)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def ones(dtype, *shape):
    """All bits set: not a value that any check expects."""
    dtype = np.dtype(dtype)
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype).reshape(shape)


def threads_of(values):
    """The grid that gives each value a thread."""
    return {"count": len(values), "grid": -(-len(values) // BLOCK)}


# ---- Indices, shared memory, barriers, shuffles ----------------------------------------------------------------------


def check_indices(run):
    got = run("indices", destination=ones(np.uint32, 3, BLOCK, 3), grid=3)
    assert (got == np.stack(np.meshgrid(np.arange(3), np.arange(BLOCK), [3], indexing="ij"), axis=-1)[..., 0, :]).all()


def check_dynamic_shared_alignment(run):
    got = run("dynamic_shared_alignment", destination=ones(np.uint32, 1), threads=WARP, shared_bytes=16)
    assert got[0] == 0


def check_shared_b32_b128(run):
    source = random_bits(np.uint32, BLOCK, 4)
    got = run("shared_b32_b128", source=source, destination=ones(np.uint32, BLOCK, 4), shared_bytes=16 * BLOCK)
    assert (got == source[np.arange(BLOCK) ^ 37]).all()


def check_shared_b128_b16(run):
    source = random_bits(np.uint16, BLOCK, 8)
    got = run("shared_b128_b16", source=source, destination=ones(np.uint16, BLOCK, 8), shared_bytes=16 * BLOCK)
    assert (got == source[np.arange(BLOCK) ^ 37]).all()


def check_shared_f32x4(run):
    source = np.arange(4 * BLOCK, dtype=np.float32).reshape(BLOCK, 4) / 7
    got = run("shared_f32x4", source=source, destination=ones(np.float32, BLOCK, 4), shared_bytes=16 * BLOCK)
    assert (got == source[np.arange(BLOCK) ^ 37]).all()


def check_shared_b16(run):
    source = random_bits(np.uint16, BLOCK)
    got = run("shared_b16", source=source, destination=ones(np.uint16, BLOCK), shared_bytes=2 * BLOCK)
    assert (got == source[np.arange(BLOCK) ^ 37]).all()


def check_sync_block(run):
    source, rounds = np.arange(BLOCK, dtype=np.uint16), 11
    destination = ones(np.uint16, BLOCK)
    got = run("sync_block", source=source, destination=destination, count=rounds, shared_bytes=2 * BLOCK)
    assert (got == np.roll(source, -rounds)).all()


def check_shuffle_xor(run):
    source = np.arange(BLOCK, dtype=np.float32) / 7
    for lane_mask in (1, 2, 4, 8, 16, 31):
        got = run("shuffle_xor", source=source, destination=ones(np.float32, BLOCK), count=lane_mask)
        assert (got == source[np.arange(BLOCK) ^ lane_mask]).all()


def check_sync_warp(run):
    source = random_bits(np.uint16, BLOCK)
    for rounds in (1, 5):
        got = run("sync_warp", source=source, destination=ones(np.uint16, BLOCK), count=rounds, shared_bytes=2 * BLOCK)
        assert (got == source[np.arange(BLOCK) ^ 5]).all()


def check_named_ring(run):
    for rounds in (1, 5):
        source = np.arange(WARP, dtype=np.uint16) * 100
        got = run("named_ring", source=source, destination=ones(np.uint16, WARP), count=rounds, shared_bytes=128)
        assert (got == np.roll(source, -4 * rounds) + rounds * (0 + 1 + 2 + 3)).all()


def check_named_any(run):
    rounds = 2 * WARP + 3  # in the last three no thread is meant
    got = run("named_any", destination=ones(np.uint16, rounds, 2 * WARP), count=rounds)
    assert (got == (np.arange(rounds) < 2 * WARP)[:, None]).all()


def check_any_lane(run):
    for thread in (0, 31, 45, BLOCK):
        got = run("any_lane", destination=ones(np.uint32, BLOCK), count=thread)
        assert (got == (np.arange(BLOCK) // WARP == thread // WARP)).all()


def check_ballot(run):
    source = random_bits(np.uint32, BLOCK)
    source[:WARP], source[WARP : 2 * WARP] = 0, np.arange(WARP) == 5
    bits = (source.reshape(-1, 1, WARP) % 2 << np.arange(WARP)).sum(-1, dtype=np.uint32)
    zeros = [WARP - int(x).bit_length() for x in bits.ravel()]
    got = run("ballot", source=source, destination=ones(np.uint32, BLOCK, 2)).reshape(-1, WARP, 2)
    assert (got[..., 0] == bits).all()
    assert (got[..., 1] == np.array(zeros)[:, None]).all()


def check_match_any(run):
    source = random_bits(np.uint32, BLOCK) % 5
    source[:WARP], source[WARP : 2 * WARP] = 7, np.arange(WARP) << 27
    lanes = source.reshape(-1, WARP, 1) == source.reshape(-1, 1, WARP)
    got = run("match_any", source=source, destination=ones(np.uint32, BLOCK, 2)).reshape(-1, WARP, 2)
    assert (got[..., 0] == (lanes.astype(np.uint32) << np.arange(WARP)).sum(-1, dtype=np.uint32)).all()
    assert (got[..., 1] == lanes.sum(-1)).all()


# ---- Asynchronous copies ---------------------------------------------------------------------------------------------


def _check_copy_async(run, width):
    source = random_bits(np.uint8, BLOCK, 2, width)
    for source_bytes in range(width + 1):
        expected = source.copy()
        expected[:, 0, source_bytes:] = 0
        got = run(
            f"copy_async_{width}",
            source=source,
            destination=ones(np.uint8, BLOCK, 2, width),
            count=source_bytes,
            shared_bytes=2 * width * BLOCK,
        )
        assert (got == expected).all()


def check_copy_async_4(run):
    _check_copy_async(run, 4)


def check_copy_async_8(run):
    _check_copy_async(run, 8)


def check_copy_async_16(run):
    _check_copy_async(run, 16)


# ---- Matrix fragments ------------------------------------------------------------------------------------------------


def _check_load_matrix(run, kernel, transposed):
    source = random_bits(np.uint16, WARP, 8)
    got = run(kernel, source=source, destination=ones(np.uint16, WARP, 4, 2), threads=WARP, shared_bytes=16 * WARP)
    matrices = source[5 * np.arange(WARP) % WARP].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    # Lane l holds elements (l / 4, 2 (l % 4)) and the one right of it: a row-major matrix, two elements a lane.
    assert (got.swapaxes(0, 1) == matrices.reshape(4, WARP, 2)).all()


def check_load_matrix(run):
    _check_load_matrix(run, "load_matrix", False)


def check_load_matrix_transposed(run):
    _check_load_matrix(run, "load_matrix_transposed", True)


def _multiply(run, element, a, b, c):
    """a b + c, b stored by columns."""
    return run("mma", source=a, second_source=np.ascontiguousarray(b.T), destination=c, threads=WARP, element=element)


def check_mma(run):
    rng = np.random.default_rng(7)
    for element, dtype in ELEMENTS.items():
        # Sums of small integers are exact in any order of the additions.
        a = rng.integers(-8, 9, (16, 16)).astype(dtype)
        b = rng.integers(-8, 9, (16, 8)).astype(dtype)
        c = rng.integers(-99, 100, (16, 8)).astype(np.float32)
        expected = a.astype(np.float32) @ b.astype(np.float32) + c
        assert (_multiply(run, element, a, b, c) == expected).all()

        a = rng.standard_normal((16, 16)).astype(dtype)
        b = rng.standard_normal((16, 8)).astype(dtype)
        c = rng.standard_normal((16, 8)).astype(np.float32)
        expected = a.astype(np.float64) @ b.astype(np.float64) + c
        magnitude = abs(a.astype(np.float64)) @ abs(b.astype(np.float64)) + abs(c)
        # The hardware adds the products with fewer bits than float32 has.
        assert (abs(_multiply(run, element, a, b, c) - expected) <= 2.0**-20 * magnitude).all()


def check_mma_special_values(run):
    for element, dtype in ELEMENTS.items():
        a, b, c = np.ones((16, 16), dtype), np.ones((16, 8), dtype), np.zeros((16, 8), np.float32)
        smallest = ml_dtypes.finfo(dtype).smallest_subnormal
        a[1, 2] = np.nan
        a[3, 4] = np.inf
        a[5, 6], b[6, 7] = np.inf, 0
        a[9] = smallest
        expected = np.full((16, 8), 16, np.float32)
        expected[:, 7] = 15
        expected[1] = np.nan
        expected[3] = np.inf
        expected[5] = np.inf
        expected[5, 7] = np.nan
        expected[9] = np.float32(smallest) * expected[0]
        np.testing.assert_array_equal(_multiply(run, element, a, b, c), expected)


WIDE = {"float": np.float32, "double": np.float64}


def check_shared_x2(run):
    for name, dtype in WIDE.items():
        source = np.arange(2 * BLOCK, dtype=dtype).reshape(BLOCK, 2) / 7
        shared_bytes = source.nbytes
        got = run(f"shared_x2_{name}", source=source, destination=ones(dtype, BLOCK, 3), shared_bytes=shared_bytes)
        assert (got == source[np.arange(BLOCK) ^ 37][:, [0, 1, 1]]).all()


def check_shuffle_xor_double(run):
    source = np.arange(BLOCK) / 7
    for lane_mask in (1, 2, 4, 8, 16, 31):
        got = run("shuffle_xor_double", source=source, destination=ones(np.float64, BLOCK), count=lane_mask)
        assert (got == source[np.arange(BLOCK) ^ lane_mask]).all()


def _check_shuffle(run, kernel, source):
    lanes = np.arange(WARP)
    for factor in (0, 1, 2, 5, 31):
        got = run(kernel, source=source, destination=ones(source.dtype, BLOCK), count=factor)
        assert (got.reshape(-1, WARP) == source.reshape(-1, WARP)[:, lanes * factor % WARP]).all()


def check_shuffle_float(run):
    _check_shuffle(run, "shuffle_float", (np.arange(BLOCK) / 7).astype(np.float32))


def check_shuffle_double(run):
    _check_shuffle(run, "shuffle_double", np.arange(BLOCK) / 7)


def check_shuffle_u32(run):
    _check_shuffle(run, "shuffle_u32", random_bits(np.uint32, BLOCK))


def _multiply_wide(run, kernel, a, b, c):
    """a b + c, b stored by columns."""
    return run(kernel, source=a, second_source=np.ascontiguousarray(b.T), destination=c, threads=WARP)


def cut_to_tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def check_mma_wide(run):
    rng = np.random.default_rng(7)
    products: tuple[tuple[str, Any, int, float], ...] = (
        ("mma_tf32", np.float32, 8, 2.0**-21),
        ("mma_float64", np.float64, 16, 2.0**-50),
    )
    for kernel, dtype, depth, unit in products:
        # Sums of small integers are exact in any order of the additions.
        a, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((16, depth), (depth, 8)))
        c = rng.integers(-99, 100, (16, 8)).astype(dtype)
        assert (_multiply_wide(run, kernel, a, b, c) == a @ b + c).all()

        a, b, c = (rng.standard_normal(shape).astype(dtype) for shape in ((16, depth), (depth, 8), (16, 8)))
        seen = [cut_to_tf32(x) if dtype == np.float32 else x for x in (a, b)]  # bits that TF32 has not are ignored
        exact_a, exact_b = (x.astype(np.longdouble) for x in seen)
        magnitude = abs(exact_a) @ abs(exact_b) + abs(c)
        assert (abs(_multiply_wide(run, kernel, a, b, c) - (exact_a @ exact_b + c)) <= unit * magnitude).all()


def check_mma_wide_special_values(run):
    for kernel, dtype, depth in (("mma_tf32", np.float32, 8), ("mma_float64", np.float64, 16)):
        a, b, c = np.ones((16, depth), dtype), np.ones((depth, 8), dtype), np.zeros((16, 8), dtype)
        a[1, 2] = np.nan
        a[3, 4] = np.inf
        a[5, 6], b[6, 7] = np.inf, 0
        a[7, 1] = -np.inf
        a[9] = np.finfo(dtype).tiny  # of the products; those of numbers below it may be flushed
        expected = np.full((16, 8), depth, dtype)
        expected[:, 7] = depth - 1
        expected[1] = np.nan
        expected[3] = np.inf
        expected[5] = np.inf
        expected[5, 7] = np.nan
        expected[7] = -np.inf
        expected[9] = np.finfo(dtype).tiny * expected[0]
        np.testing.assert_array_equal(_multiply_wide(run, kernel, a, b, c), expected)


# ---- Reductions in global memory -------------------------------------------------------------------------------------


def _check_reduction(run, kernel, dtype=np.float32):
    # Integers: exact in any order of the additions.
    values = np.random.default_rng(7).integers(-9, 10, 3 * BLOCK).astype(dtype)
    sums = np.arange(4, dtype=dtype)
    got = run(kernel, source=values, destination=sums.copy(), count=4, grid=3)
    assert (got == sums + values.sum() * np.arange(1, 5)).all()
    # Subnormal float32 are flushed as they are added; what is normal again, 4 * 2**-128 here, is not.
    few = np.zeros(BLOCK, dtype)
    few[0] = 2.0**-128
    got = run(kernel, source=few, destination=np.zeros(4, dtype), count=4, grid=1)
    expected = few[0] * np.arange(1, 5, dtype=dtype)
    assert (got == (expected * (expected >= np.finfo(np.float32).tiny) if dtype == np.float32 else expected)).all()


def check_reduce_add(run):
    _check_reduction(run, "reduce_add")


def check_reduce_integers(run):
    values = np.random.default_rng(7).integers(0, 2**64, 3 * BLOCK, np.uint64)
    start = np.array([2**63 + 5, 2**40], np.uint64)
    got = run("reduce_integers", source=values, destination=start.copy(), count=2, grid=3)
    assert got[0] == np.append(values, start[0]).sum() and got[1] == max(start[1], values.max())


def check_reduce_add_x4(run):
    _check_reduction(run, "reduce_add_x4")


def check_reduce_add_double(run):
    _check_reduction(run, "reduce_add_double", np.float64)


def check_pause(run):
    values = np.random.default_rng(6).standard_normal(BLOCK).astype(np.float32)
    assert (run("pause", source=values, destination=np.zeros(BLOCK, np.float32)) == values).all()


def check_turns(run):
    # Sums of such numbers are rounded at every addition, and differ with their order.
    blocks = 100
    values = np.random.default_rng(7).standard_normal((blocks, BLOCK)).astype(np.float32)
    expected = np.zeros(BLOCK, np.float32)
    for value in values:
        expected += value
    got = run("turns", source=values, destination=np.zeros(BLOCK + 1, np.float32), grid=blocks, in_turn=True)
    assert (got[:BLOCK] == expected).all()
    assert got[BLOCK:].view(np.uint32) == blocks


def check_counts(run):
    blocks = 100
    values = np.random.default_rng(8).integers(-8, 9, (blocks, BLOCK)).astype(np.float32)
    expected = np.zeros((blocks + 1, BLOCK), np.float32)
    for block, value in enumerate(values):
        expected[block + 1] = expected[block, ::-1] + value
    counts = np.zeros((blocks + 1) * BLOCK + 1, np.float32)
    got = run("counts", source=values, destination=counts, grid=blocks, count=blocks, in_turn=True)
    assert (got[:-1].reshape(-1, BLOCK) == expected).all()
    assert got[-1:].view(np.uint32) == blocks * BLOCK


def check_arrivals(run):
    # Sums of such numbers are rounded at every addition, and differ with their order.
    blocks, first = 100, 0x123456789ABC0000
    for name, dtype in (("arrivals", np.float32), ("arrivals_float64", np.float64)):
        values = np.random.default_rng(9).standard_normal((blocks, BLOCK)).astype(dtype)
        expected: Any = np.zeros(BLOCK, dtype)
        for value in values:
            expected += value
        for found in (0, 2**64 - 1, first - 1, first + blocks, 0x7FC00000_7FC00000):
            counter = np.array([found], np.uint64).view(dtype)
            memory = np.concatenate([np.full((blocks + 1) * BLOCK, np.nan, dtype), counter])
            got = run(name, source=values, destination=memory, grid=blocks, count=blocks, shared_bytes=16)
            assert (got[:BLOCK] == expected).all()
            assert got[-counter.size :].view(np.uint64) == first + blocks


CHECKS = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
