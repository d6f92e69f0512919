"""``batch_invariant=True`` on NumPy arrays: a sequence has the same bits alone and among any others."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
from tests.compiled import INSTRUCTION_SETS, NUMPY, much_work, way_taken
from tests.invariance import OF_HEADS, Sequences, assert_invariant, sequences
from tests.sampling import examples

WAYS = (*INSTRUCTION_SETS, NUMPY)
PASSES = ("want", "backward", "tangents", "column_sums")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_sequence_has_the_same_bits_among_others(way):
    @settings(max_examples=examples(400))
    @given(sequences(), st.sampled_from([(), *((name,) for name in PASSES)]), st.sampled_from([1, 7]))
    def holds(drawn, passes, threads):
        with way_taken(way[1]), pytest.MonkeyPatch.context() as patch, cuflash.cpu_threads(threads):
            much_work(patch)
            assert_invariant(drawn, passes)

    holds()


# What has other bits without the option: sequences, and where they are.
SEQUENCE = Sequences(
    lengths=((1, 3000), (300, 300)), heads_kv=1, group=4, head_dim=16, head_dim_v=16, dtype="float32", options={}
)
DIFFERENT = {
    "splits of keys": (SEQUENCE, "batch", ()),
    "small heads": (replace(SEQUENCE, lengths=((60, 60), (300, 300))), "packed", ()),
    "rows of a block": (replace(SEQUENCE, lengths=((200, 600),), options={"window": (50, 0)}), "heads", ()),
    "tiles of dq": (replace(SEQUENCE, lengths=((200, 3000),)), "batch", ("backward",)),
    "a longer cache": (replace(SEQUENCE, capacity=3000), "lengths", ()),
}


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="there is no compiled core")
@pytest.mark.parametrize("name", DIFFERENT)
def test_without_the_option_bits_differ(name):
    """So the test above would notice a path that ignores the option."""
    drawn, batching, passes = DIFFERENT[name]
    assert_invariant(drawn, passes, batchings=(batching,))
    with pytest.raises(AssertionError, match=f"{batching} and alone"):
        for seed in range(8):
            plain = replace(drawn, seed=seed, options=drawn.options | {"batch_invariant": False})
            assert_invariant(plain, passes, batchings=(batching,))


@given(sequences(dtypes=("float32",), queries=(1, 20, 70), keys=(40, 300, 700)), st.booleans())
@settings(max_examples=examples(100))
def test_ranks_and_streamed_keys(drawn, has_ranks):
    """A chunk, and a rank, compute their part of a sequence as if it were alone, too."""
    assert_invariant(drawn, (), on_ranks if has_ranks else in_chunks, ("batch", "heads"))


def in_chunks(options, arrays, passes):
    given = {name: x for name, x in arrays.items() if name != "dout"}
    q, k, v = (given.pop(name) for name in ("q", "k", "v"))
    return cuflash.FlashAttention(**options).forward(q, *cuflash.streamed(k, v, chunk=100), **given)._asdict()


def on_ranks(options, arrays, passes):
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    others = {name: x for name, x in arrays.items() if name in OF_HEADS}
    split_q, split_k = (cd.contiguous(x.shape[-2], 2) for x in (q, k))

    def of_rank(comm):
        attn = cd.ContextParallel(comm, split=split_q, split_k=split_k, chunks=2, **options)
        own = (split.part(x, comm.rank) for split, x in ((split_q, q), (split_k, k), (split_k, v)))
        return attn.forward(*own, **others)

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(of_rank, cd.threads(2)))
    return {"out": np.concatenate([x.out for x in parts], axis=-2), "lse": np.concatenate([x.lse for x in parts], -1)}


def test_a_chunk_is_named():
    q = np.zeros((1, 3, 4))
    attn = cuflash.FlashAttention(batch_invariant=True)
    with pytest.raises(NotImplementedError, match=r"^chunk: got None together with batch_invariant=True"):
        attn.forward(q, *cuflash.streamed(q, q))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
@pytest.mark.parametrize("side", [2**30 - 1, 2**31, 2**40 + 1, 2**63 - 1, 2**63, 2**64])
def test_a_side_of_the_window_may_be_of_any_length(way, side):
    """It hides nothing in any call, and has the bits of one that does not exist, or of the longest sequence."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 200, 8))
    with way_taken(way[1]):
        for window, same in (((side, 3), (None, 3)), ((3, side), (3, None)), ((side, side), None)):
            one, other = (cuflash.FlashAttention(window=x, batch_invariant=True) for x in (window, same))
            for x, y in zip(one.forward(q, k, v), other.forward(q, k, v), strict=True):
                np.testing.assert_array_equal(x, y)
