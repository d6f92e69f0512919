"""Methods that reduce the attention weights: column sums with their gradients, the column maximum, the strongest keys.

Each recomputes ``P = exp(S - lse)`` tile by tile, and stores no matrix of all pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuflash import dispatch
from cuflash.preparation import Preparation
from cuflash.spec.call import prepare
from cuflash.spec.inputs import INPUTS
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, TOP_KEYS, Pass
from cuflash.spec.reductions import (
    ColumnSums,
    checked_count,
    checked_of_reduction,
    gradients_wanted,
    keys_of,
    prepare_reduction,
)
from cuflash.spec.results import Array, Gradients, TopKeys, named_tuple
from cuflash.spec.type_variables import FunctionT

if TYPE_CHECKING:
    from cuflash.spec.reductions import ColumnGradients


class Reductions(Preparation[FunctionT]):
    """The methods of `cuflash.FlashAttention` that reduce the attention weights."""

    __slots__ = ()

    def column_sums(
        self, q: Array, k: Array, lse: Array, weights: Array | None = None, **optional_inputs: Array
    ) -> Any:
        """The attention that each key receives: ``sum_i weights[i] * P[i, j]``, where ``P = exp(S - lse)``.

        P are the attention weights before dropout, as lse is. The sums are always made in the same order.

        Parameters
        ----------
        q, k : array
            As `forward` takes them; there are no values. Streamed keys are ``cuflash.streamed(k, None)``.
        lse : array
            As `forward` returned it: (..., num_heads, seqlen_q). It may be that of more keys than k has: P are then the
            weights of the keys in k among all of these.
        weights : array, optional
            Shape and dtype of lse: the factor of each query; 1 by default. Zeros leave queries out, such as padding.
        **optional_inputs : array
            bias, mask and so on, and what `score` and `mask` read, as `forward` took them.

        Returns
        -------
        array
            (..., num_heads, seqlen_k) in every layout, float32 (float64 for float64); 0 of keys that no query attends
            to. For the sums over a group of query heads, add up the heads that share a key/value head. Of streamed keys
            in host memory, as dk is.

        Raises
        ------
        TypeError, ValueError, ImportError
            As `forward` does.
        NotImplementedError
            As `forward` does; on the GPU also with a `block_table`.

        See Also
        --------
        column_sums_backward : Their gradients.
        column_max : The largest weight that a key receives.
        top_keys : The strongest keys of each query.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q, k = np.random.default_rng(0).standard_normal((2, 100, 8))
        >>> attn = cuflash.FlashAttention()
        >>> sums = attn.column_sums(q, k, attn.forward(q, k, None).lse)
        >>> sums.shape, float(sums.sum().round(9))
        ((100,), 100.0)
        """
        return self._reduced(COLUMN_SUMS, {"q": q, "k": k, "lse": lse, "weights": weights}, optional_inputs)[0]

    def column_max(self, q: Array, k: Array, lse: Array, **optional_inputs: Array) -> Any:
        """The largest attention weight that each key receives: ``max_i P[i, j]``, where ``P = exp(S - lse)``.

        P are the attention weights before dropout, as lse is. There is no gradient.

        Parameters
        ----------
        q, k, lse : array
            As `column_sums` takes them.
        **optional_inputs : array
            bias, mask and so on, and what `score` and `mask` read, as `forward` took them.

        Returns
        -------
        array
            (..., num_heads, seqlen_k) in every layout, float32 (float64 for float64); 0 of keys that no query attends
            to.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `column_sums` does.

        See Also
        --------
        column_sums : The sum of these weights.
        """
        return self._reduced(COLUMN_MAX, {"q": q, "k": k, "lse": lse}, optional_inputs)[0]

    def top_keys(self, q: Array, k: Array, lse: Array, count: int, **optional_inputs: Array) -> TopKeys:
        """The strongest keys of each query: indices and attention weights of the `count` largest, the largest first.

        Parameters
        ----------
        q, k, lse : array
            As `column_sums` takes them.
        count : int
            1 to 64.
        **optional_inputs : array
            bias, mask and so on, and what `score` and `mask` read, as `forward` took them.

        Returns
        -------
        TopKeys
            ``indices`` and ``weights``. An index counts along the axis of keys of k: with packed sequences from the
            first key of all sequences, with a `block_table` from the first key of the batch entry. Of equal scores the
            lower index comes first; of streamed keys in several chunks, so it does of equal weights. Where a query
            attends to fewer than `count` keys, index -1 and weight 0 follow.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `column_sums` does.

        See Also
        --------
        column_sums : The attention that each key receives.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q, k = np.random.default_rng(0).standard_normal((2, 100, 8))
        >>> attn = cuflash.FlashAttention(causal=True)
        >>> indices, weights = attn.top_keys(q, k, attn.forward(q, k, None).lse, 2)
        >>> indices[:2].tolist(), weights[0].tolist()
        ([[0, -1], [0, 1]], [1.0, 0.0])
        """
        arrays = {"q": q, "k": k, "lse": lse}
        return TopKeys(*self._reduced(TOP_KEYS, arrays, optional_inputs, count))

    def column_sums_backward(
        self,
        dsums: Array,
        q: Array,
        k: Array,
        lse: Array,
        weights: Array | None = None,
        *,
        need: Collection[str] = ("dq", "dk"),
        **optional_inputs: Array,
    ) -> ColumnGradients:
        """Gradients of ``sum(dsums * column_sums)``, with lse as an input like q and k.

        lse depends on q and k itself. For the gradients with respect to q and k alone, ask for "dlse" as well, and add
        the gradients through lse: ``attn.backward(None, q, k, None, None, lse, dlse=dlse)``.

        Parameters
        ----------
        dsums : array
            Gradient with respect to the column sums: (..., num_heads, seqlen_k), dtype of lse, in the memory of k.
        q, k, lse, weights : array
            As `column_sums` took them.
        need : collection of str, default ("dq", "dk")
            The gradients that are wanted: "dlse", "dweights", and those that `backward` gives, but for "dv" and
            "dsinks": sinks act on the sums through lse alone.
        **optional_inputs : array
            As `column_sums` took them.

        Returns
        -------
        Gradients
            A named tuple: first those of `backward` in its order, of shapes and dtypes of what they are gradients of,
            then dlse and dweights, of the shape and dtype of lse. With 16-bit q, dsums and weights are rounded to the
            dtype of q, as dout of `backward` is.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `backward` does.

        See Also
        --------
        column_sums : The sums.
        backward : Gradients of lse, from dlse.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q, k, dsums = *np.random.default_rng(0).standard_normal((2, 100, 8)), np.linspace(0, 1, 100)
        >>> attn = cuflash.FlashAttention()
        >>> lse = attn.forward(q, k, None).lse
        >>> dq, dk, dlse = attn.column_sums_backward(dsums, q, k, lse, need=("dq", "dk", "dlse"))
        >>> through_lse = attn.backward(None, q, k, None, None, lse, dlse=dlse)
        >>> (dq + through_lse.dq).shape
        (100, 8)
        """
        given = checked_of_reduction("column_sums_backward", self.options, optional_inputs)
        names, own = gradients_wanted(self.options, given, need)
        arrays = {"q": q, "k": keys_of(k), "v": None, "lse": lse, "weights": weights, "dsums": dsums} | given
        call = prepare(replace(self.options, dropout=0.0), arrays, (*INPUTS, "lse", "dsums"), names)
        found = ColumnSums(call, dispatch.backend_of(call.backend)).gradients(own)
        exported = call.exported(found[: len(names)], arrays | dict.fromkeys(names)) if names else ()
        of_sums = [x if call.imported is None else call.imported.export(x, None) for x in found[len(names) :]]
        return named_tuple(Gradients, (*names, *own))(*exported, *of_sums)  # type: ignore[no-any-return]

    def _reduced(
        self, pass_: Pass, arrays: dict[str, Any], optional_inputs: dict[str, Array], *count: Any
    ) -> list[Any]:
        """The results of a reduction; `TOP_KEYS` has a `count`."""
        given = checked_of_reduction(pass_.name, self.options, optional_inputs)
        wanted = [checked_count(x) for x in count]
        call = prepare_reduction(pass_.name, self.options, arrays | given)
        found = dispatch.reductions_of(call.backend).compute(pass_, call.options, call.arrays, *wanted)
        return [call.exported(x, of_keys=not count) for x in found]
