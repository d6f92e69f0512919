"""What every function of ``ptx/tma.cuh`` and ``ptx/wgmma.cuh`` computes, in NumPy: for ``conformance_sm90.cu``.

As in ``conformance.py`` a check is called with `run`, which runs one kernel somewhere and returns what it wrote::

    run(kernel, destination=array, source=None, second_source=None, tensor=None, count=0, coordinates=(0, 0, 0, 0),
        grid=1, threads=128, shared_bytes=0, element="Float16") -> array like destination

`element` is the value of the define ``ELEMENT``. `tensor` says which array the tensor map describes, and how. The
arguments of a kernel are one struct of type ``PARAMS``.
"""

import dataclasses

import ml_dtypes
import numpy as np

from tests.emulate.conformance import ones, random_bits

PARAMS = np.dtype(
    [
        ("map", np.uint64, 16),
        ("source", np.uint64),
        ("second_source", np.uint64),
        ("destination", np.uint64),
        ("count", np.uint32),
        ("coordinates", np.int32, 4),
        ("padding", np.uint32, 5),
    ]
)
WARP, WARPGROUP, LINE_BYTES = 32, 128, 128
SIXTEEN_BIT = {"Float16": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}
COLUMNS = range(16, 257, 16)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a tensor map says. The fields are those of `emulator.tensor_map`."""

    array: str  # "source" or "destination"
    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]


# ---- Barriers --------------------------------------------------------------------------------------------------------


def check_barrier_ring(run):
    rounds, readers = 11, 3
    source = random_bits(np.uint16, rounds, WARP)
    got = run(
        "barrier_ring",
        source=source,
        destination=ones(np.uint16, rounds, readers, WARP),
        count=rounds,
        shared_bytes=512,
    )
    for warp in range(1, readers + 1):
        assert (got[:, warp - 1] == source[:, np.arange(WARP) ^ warp]).all()


# ---- Copies by TMA ---------------------------------------------------------------------------------------


def check_bulk_load(run):
    for size in (32, 4096):
        source = random_bits(np.uint8, size)
        got = run("bulk_load", source=source, destination=ones(np.uint8, size), count=size, shared_bytes=size + 8)
        assert (got == source).all()


def _swizzled(image):
    """The bytes of a box where TMA puts them: 16-byte chunks of line i are permuted by i modulo 8."""
    chunks = image.reshape(-1, 16)
    return chunks[np.arange(len(chunks)) ^ (np.arange(len(chunks)) // 8 % 8)].reshape(-1)


def _view(array, tensor):
    """The elements that a tensor map describes: batch, head, row, column."""
    strides = (*tensor.strides[::-1], array.itemsize)
    return np.ndarray(tensor.dims[::-1], array.dtype, array, strides=strides)


def _box_of(view, box, coordinates):
    """The box, with zeros outside of the array, and which of its elements are inside."""
    values, inside = np.zeros(box[::-1], view.dtype), np.zeros(box[::-1], bool)
    for index_in_box in np.ndindex(values.shape):
        index = tuple(np.add(index_in_box, coordinates[::-1]))
        if all(0 <= i < n for i, n in zip(index, view.shape, strict=True)):
            values[index_in_box], inside[index_in_box] = view[index], True
    return values, inside


# Elements, dims, strides in bytes, box, coordinates; columns first.
BOXES = {
    "whole": (np.uint16, (64, 24, 2, 2), (128, 3072, 6144), (64, 16, 1, 1), (0, 8, 1, 0)),
    "below_the_end": (np.uint16, (64, 24, 2, 2), (128, 3072, 6144), (64, 16, 1, 1), (0, 16, 1, 1)),
    "outside": (np.uint16, (64, 24, 2, 2), (128, 3072, 6144), (64, 8, 1, 1), (0, 24, 0, 0)),
    "head_outside": (np.uint16, (64, 24, 2, 2), (128, 3072, 6144), (64, 8, 1, 1), (0, 0, 2, 0)),
    "beside_the_end": (np.uint16, (72, 10, 1, 1), (160, 1600, 1600), (64, 8, 1, 1), (64, 1, 0, 0)),
    "odd_width": (np.uint16, (45, 10, 1, 1), (96, 960, 960), (64, 8, 1, 1), (0, 1, 0, 0)),
    "second_chunk": (np.uint16, (128, 10, 3, 1), (768, 256, 7680), (64, 8, 1, 1), (64, 1, 2, 0)),
    "several_heads": (np.uint16, (64, 4, 5, 3), (128, 512, 2560), (64, 4, 3, 2), (0, 0, 3, 1)),
    "float32": (np.uint32, (32, 20, 1, 1), (128, 2560, 2560), (32, 256, 1, 1), (0, 0, 0, 0)),
    "float32_across_the_end": (np.uint32, (44, 20, 2, 2), (192, 3840, 7680), (32, 16, 1, 1), (32, 8, 1, 1)),
}


def _sizes(box):
    dtype, dims, strides, sizes, _ = box
    extent = sum((n - 1) * stride for n, stride in zip(dims[1:], strides, strict=True)) + dims[0] * dtype().itemsize
    return -(-extent // 16) * 16 // dtype().itemsize, int(np.prod(sizes)) * dtype().itemsize


def check_tensor_load(run):
    margin = 1024
    for name, box in BOXES.items():
        dtype, dims, strides, sizes, coordinates = box
        elements, size = _sizes(box)
        source = random_bits(dtype, elements)
        tensor = Tensor("source", dims, strides, sizes)
        got = run(
            "tensor_load",
            source=source,
            destination=np.zeros(size + margin, np.uint8),
            tensor=tensor,
            coordinates=coordinates,
            count=size,
            shared_bytes=size + margin + 8,
        )
        values, _ = _box_of(_view(source, tensor), sizes, coordinates)
        assert (got[:size] == _swizzled(values.view(np.uint8))).all(), name
        assert (got[size:] == 0xFF).all(), name


def check_cluster_load(run):
    boxes, rows, columns = 7, 16, 64
    source = random_bits(np.uint16, boxes, rows, columns)
    row_bytes = columns * source.itemsize
    got = run(
        "cluster_load",
        source=source,
        destination=ones(np.uint8, boxes, 2, rows * row_bytes),
        tensor=Tensor("source", (columns, rows, boxes, 1), (row_bytes, rows * row_bytes, source.nbytes), (64, 8, 1, 1)),
        count=boxes,
        grid=2,
        shared_bytes=rows * row_bytes + 16,
    )
    for i in range(boxes):
        assert (got[i] == _swizzled(source[i].view(np.uint8))).all()


def check_exchanged(run):
    rounds = 9
    source = np.random.default_rng(7).standard_normal((rounds, 2, WARPGROUP, 4)).astype(np.float32)
    destination = ones(np.float32, *source.shape)
    shared_bytes = 16 * WARPGROUP + 16
    got = run("exchanged", source=source, destination=destination, count=rounds, grid=2, shared_bytes=shared_bytes)
    np.testing.assert_array_equal(got, source[:, ::-1])


def _check_way_back(run, kernel, name, image, before, result_of):
    """Each element inside of the box becomes result_of(what was there, what comes), all others stay."""
    _, dims, strides, sizes, coordinates = BOXES[name]
    tensor = Tensor("destination", dims, strides, sizes)
    got = run(
        kernel,
        source=_swizzled(image),
        destination=before,
        tensor=tensor,
        coordinates=coordinates,
        count=image.size,
        shared_bytes=image.size,
    )
    expected = before.copy()
    view = _view(expected, tensor)
    _, inside = _box_of(view, sizes, coordinates)
    values = image.view(before.dtype).reshape(sizes[::-1])
    for index_in_box in np.argwhere(inside):
        index = tuple(index_in_box + coordinates[::-1])
        view[index] = result_of(view[index], values[tuple(index_in_box)])
    assert (got == expected).all(), name


def check_tensor_store(run):
    for name, box in BOXES.items():
        dtype, dims, *_ = box
        if dims[0] * np.dtype(dtype).itemsize % 16:  # stores write the whole of the last 16 bytes: not emulated
            continue
        elements, size = _sizes(box)
        image = random_bits(np.uint8, size)
        _check_way_back(run, "tensor_store", name, image, ones(dtype, elements), lambda before, value: value)


def check_tensor_addition(run):
    """Of float32: integers, whose sums are exact; and subnormal numbers, which are added as all others are."""
    random = np.random.default_rng(7)
    for name, box in BOXES.items():
        elements, size = _sizes(box)
        if box[0] != np.uint32:
            continue
        before, values = (random.integers(-99, 100, n).astype(np.float32) for n in (elements, size // 4))
        for unit in np.array([1, 2.0**-149, 2.0**-130], np.float32):
            _check_way_back(run, "tensor_addition", name, (unit * values).view(np.uint8), unit * before, np.add)


# ---- Warps and their registers ---------------------------------------------------------------------------------------


def check_elected(run):
    got = run("elected", destination=ones(np.uint32, WARPGROUP // WARP, WARP, 4))
    assert (got[:, :, 0].sum(axis=1) == 1).all()
    assert (got[:, :, 0] == got[:, :, 1]).all()
    assert (got[:, :, 2] == 7 * WARP * np.arange(WARPGROUP // WARP)[:, None]).all()
    assert (got[:, :, 3] == 7 * np.arange(WARPGROUP // WARP)[:, None]).all()


def check_kept(run):
    values = np.resize(np.array([0, -0.0, 1, 1e-40, np.inf, np.nan], np.float32), WARPGROUP)
    got = run("kept", source=values, destination=ones(np.uint16, WARPGROUP), shared_bytes=4 * WARPGROUP)
    assert (got == np.arange(WARPGROUP)).all()


def check_store_matrix(run):
    # Lane l passes elements (l / 4, 2 (l % 4)) and the one right of it of each of four matrices.
    matrices = random_bits(np.uint16, 4, 8, 8)
    source = np.ascontiguousarray(matrices.reshape(4, WARP, 2).swapaxes(0, 1))
    destination = ones(np.uint16, WARP, 8)
    got = run("store_matrix", source=source, destination=destination, threads=WARP, shared_bytes=16 * WARP)
    assert (got[5 * np.arange(WARP) % WARP] == matrices.reshape(WARP, 8)).all()


def check_registers(run):
    threads = 3 * WARPGROUP
    got = run("registers", destination=ones(np.uint32, threads), threads=threads)
    assert (got == np.arange(threads)).all()


# ---- Products of a warpgroup -----------------------------------------------------------------------------------------


def _lines(rows):
    """A matrix as lines of 128 bytes: the first columns of all rows, then the next columns, zeros at the end."""
    per_line = LINE_BYTES // rows.itemsize
    padded = np.zeros((len(rows), -(-rows.shape[1] // per_line) * per_line), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.reshape(len(rows), -1, per_line).swapaxes(0, 1))


def _multiply(run, kernel, element, a, b, c, accumulate):
    transposed = kernel.partition(f"_{c.shape[1]}")[2]
    a_lines = _lines(a.T if "a" in transposed else a)
    b_lines = _lines(b if "b" in transposed else b.T)
    return run(
        kernel,
        source=a_lines,
        second_source=b_lines,
        destination=c.copy(),
        count=int(accumulate),
        shared_bytes=a_lines.nbytes + b_lines.nbytes,
        element=element,
    )


def _check_product(run, kernel, element, dtype, columns):
    rng = np.random.default_rng(columns)
    depth = 2 * LINE_BYTES // dtype.itemsize
    # Sums of small integers are exact in any order of the additions.
    a = rng.integers(-8, 9, (64, depth)).astype(dtype)
    b = rng.integers(-8, 9, (depth, columns)).astype(dtype)
    c = rng.integers(-99, 100, (64, columns)).astype(np.float32)
    product = a.astype(np.float32) @ b.astype(np.float32)
    assert (_multiply(run, kernel, element, a, b, c, True) == c + product).all()
    assert (_multiply(run, kernel, element, a, b, np.full_like(c, np.nan), False) == product).all()


def _check_products(run, operand):
    for columns in COLUMNS:
        for element, dtype in SIXTEEN_BIT.items():
            _check_product(run, f"product_{operand}_{columns}", element, dtype, columns)


def check_product_shared(run):
    _check_products(run, "shared")


def check_product_registers(run):
    _check_products(run, "registers")


def check_product_transposed(run):
    for columns in (32, 64, 96, 256):
        for kernel in ("shared_{}_b", "shared_{}_a", "shared_{}_ab", "registers_{}_b"):
            for element, dtype in SIXTEEN_BIT.items():
                _check_product(run, f"product_{kernel.format(columns)}", element, dtype, columns)


def check_product_rounding(run):
    rng = np.random.default_rng(7)
    for element, dtype in SIXTEEN_BIT.items():
        depth = 2 * LINE_BYTES // dtype.itemsize
        a, b = rng.standard_normal((64, depth)).astype(dtype), rng.standard_normal((depth, 64)).astype(dtype)
        c = rng.standard_normal((64, 64)).astype(np.float32)
        exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
        expected, magnitude = exact_a @ exact_b + c, abs(exact_a) @ abs(exact_b) + abs(c)
        for operand in ("shared", "registers"):
            got = _multiply(run, f"product_{operand}_64", element, a, b, c, True)
            # The hardware adds the products with fewer bits than float32 has.
            assert (abs(got - expected) <= 2.0**-18 * magnitude).all()


def check_fp8_matmul(run):
    """Sums of small integers fit into the 14 bits that are kept of sums of fp8 products."""
    for columns in (8, 40, 64, 72, 96, 104, 128, 136):
        for kinds in ("shared_e4m3_e4m3", "shared_e5m2_e5m2", "registers_e4m3_e4m3", "registers_e4m3_e5m2"):
            _, *names = kinds.split("_")
            a_dtype, b_dtype = (
                np.dtype(getattr(ml_dtypes, {"e4m3": "float8_e4m3fn"}.get(x, f"float8_{x}"))) for x in names
            )
            rng = np.random.default_rng(columns)
            a = rng.integers(-2, 3, (64, 2 * LINE_BYTES)).astype(a_dtype)
            b = rng.integers(-2, 3, (2 * LINE_BYTES, columns)).astype(b_dtype)
            c = rng.integers(-99, 100, (64, columns)).astype(np.float32)
            product = a.astype(np.float32) @ b.astype(np.float32)
            for start, expected in ((c, c + product), (np.full_like(c, np.nan), product)):
                kernel, adds = f"bytes_{kinds}_{columns}", start is c
                assert (_multiply(run, kernel, "Float16", a, b, start, adds) == expected).all(), kernel


def check_fp8_matmul_rounding(run):
    """Sums are cut off after 14 bits: what is far less than a large sum is lost, which float32 would keep."""
    rng = np.random.default_rng(7)
    a = rng.standard_normal((64, 2 * LINE_BYTES)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.standard_normal((2 * LINE_BYTES, 64)).astype(ml_dtypes.float8_e4m3fn)
    c = np.zeros((64, 64), np.float32)
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    for operand in ("shared", "registers"):
        got = _multiply(run, f"bytes_{operand}_e4m3_e4m3_64", "Float16", a, b, c, False)
        assert (abs(got - exact_a @ exact_b) <= 2.0**-10 * (abs(exact_a) @ abs(exact_b))).all()
        large = np.full_like(c, 2.0**20)
        got = _multiply(run, f"bytes_{operand}_e4m3_e4m3_64", "Float16", a, b, large, True)
        assert (abs(got - (large + exact_a @ exact_b)) <= 8 * 2.0**-13 * large).all()


def check_product_loaded(run):
    rows = np.random.default_rng(7).integers(-8, 9, (128, 64)).astype(np.float16)
    got = run(
        "product_loaded",
        source=rows,
        destination=ones(np.float32, 2, 64, 64),
        tensor=Tensor("source", (64, 128, 1, 1), (LINE_BYTES, 128 * LINE_BYTES, 128 * LINE_BYTES), (64, 64, 1, 1)),
        shared_bytes=2 * 64 * LINE_BYTES + 8,
    )
    a, b = rows.astype(np.float32).reshape(2, 64, 64)
    assert (got == np.stack([a @ b.T, b @ b.T])).all()


CHECKS = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
