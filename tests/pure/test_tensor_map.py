"""Tensor maps: what is asked of the driver, and how often."""

import ctypes
import sys
import types
from dataclasses import FrozenInstanceError, replace

import pytest

from cuflash.arrays.array_info import Operand
from cuflash.plan import tensor_map
from cuflash.plan.tensor_map import encoder, tensor_map_spec

OPERAND = Operand(shape=(2, 3, 300, 72), strides=(65_000, 21_600, 80, 1), dtype="bfloat16")


class FakeDriver(types.ModuleType):
    """Stands for cuda.bindings.driver, keeps what it is asked, and returns the address as the map."""

    def __init__(self, error=0):
        super().__init__("cuda.bindings.driver")
        self.calls = []
        self.error = error
        for name in ("cuuint64_t", "cuuint32_t"):
            setattr(self, name, int)

    def __getattr__(self, name):
        if not name.startswith("CU"):
            raise AttributeError(name)
        return _Names()

    def cuTensorMapEncodeTiled(self, *arguments):
        self.calls.append(arguments)
        result = types.SimpleNamespace(value=self.error, name="CUDA_ERROR_INVALID_VALUE")
        content = ctypes.create_string_buffer(arguments[2].to_bytes(128, "little"), 128)
        return result, types.SimpleNamespace(getPtr=lambda: ctypes.addressof(content), content=content)


class _Names:
    """An enumeration whose members are their names."""

    def __getattr__(self, name):
        return name


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    for cached in (tensor_map._driver, encoder):
        cached.cache_clear()
    yield fake
    for cached in (tensor_map._driver, encoder):
        cached.cache_clear()


def test_what_the_driver_is_asked(driver):
    content = encoder(tensor_map_spec("q", OPERAND, 192))(2**33 + 16, 300)
    assert len(content) == tensor_map.BYTES
    assert int.from_bytes(content[:8], "little") == 2**33 + 16
    ((dtype, rank, address, shape, strides, box, steps, interleave, swizzle, _, fill),) = driver.calls
    assert (dtype, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 4, 2**33 + 16)
    assert (shape, strides) == ([72, 300, 3, 2], [160, 43_200, 130_000])
    assert (box, steps) == ([64, 192, 1, 1], [1, 1, 1, 1])
    assert interleave == "CU_TENSOR_MAP_INTERLEAVE_NONE"
    assert swizzle == "CU_TENSOR_MAP_SWIZZLE_128B"  # that kernels/sm90/tiles.cuh expects
    assert fill == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"  # zeros


def test_a_box_of_several_heads(driver):
    encoder(tensor_map_spec("q", OPERAND, 4, heads=3))(32, 300)
    assert driver.calls[0][5] == [64, 4, 3, 1]


def test_errors_of_the_driver_name_the_array(driver):
    driver.error = 1
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE for TensorMapSpec\(name='k'"):
        encoder(tensor_map_spec("k", OPERAND, 64))(32, 300)


def test_a_map_is_made_once_for_an_address_and_rows(driver):
    map_of = encoder(tensor_map_spec("k", OPERAND, 64))
    maps = [map_of(address, 300) for address in (32, 48, 32, 48, 32)]
    assert len(driver.calls) == 2
    assert maps[0] == maps[2] == maps[4] != maps[1]
    for rows in (301, 301, 299, 300):
        map_of(32, rows)
    assert [call[3] for call in driver.calls] == [[72, rows, 3, 2] for rows in (300, 300, 301, 299)]


def test_specs_of_any_rows_share_an_encoder(driver):
    long, short = (tensor_map_spec("k", replace(OPERAND, shape=(2, 3, n, 72)), 64) for n in (300, 200))
    assert long != short
    assert encoder(long.of_any_rows) is encoder(short.of_any_rows)


def test_encoders_do_not_share_maps(driver):
    for rows in (64, 128):
        encoder(tensor_map_spec("q", OPERAND, rows))(32, 300)
    assert [call[5][1] for call in driver.calls] == [64, 128]


def test_specs_are_values():
    spec = tensor_map_spec("q", OPERAND, 64)
    assert spec == tensor_map_spec("q", OPERAND, 64)
    assert hash(spec) == hash(tensor_map_spec("q", OPERAND, 64))
    assert spec != tensor_map_spec("k", OPERAND, 64)
    with pytest.raises(FrozenInstanceError):
        spec.rows = 128  # type: ignore[misc]  # what is tested


def test_strides_of_axes_that_are_not_stepped_along():
    operand = Operand(shape=(1, 1, 1, 8), strides=(-3, 0, 2**50, 1), dtype="float16")
    assert tensor_map_spec("q", operand, 64).strides_bytes == (16, 16, 16)
