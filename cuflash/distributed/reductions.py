"""The methods of `ContextParallel` that reduce attention weights: those of `cuflash.FlashAttention` on each shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from cuflash.arrays.array_info import numpy_dtype
from cuflash.distributed import passes
from cuflash.distributed.agreement import reporting_failures
from cuflash.distributed.arguments import not_served
from cuflash.distributed.calls import RankCall, RankCalls
from cuflash.distributed.execution import Execution
from cuflash.spec.call import prepare
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import Options
from cuflash.spec.outputs import REQUIRED_BY_BACKWARD
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, FORWARD, TOP_KEYS, Pass
from cuflash.spec.reductions import (
    OWN_ARGUMENTS,
    ColumnSums,
    check_weights,
    checked_count,
    checked_of_reduction,
    gradients_wanted,
)
from cuflash.spec.results import Array, Gradients, TopKeys, named_tuple
from cuflash.spec.score_args import check_names_of_method
from cuflash.spec.type_variables import FunctionT

if TYPE_CHECKING:
    from cuflash.spec.reductions import ColumnGradients


class RankReductions(Generic[FunctionT]):
    """`column_sums`, its gradients, `column_max` and `top_keys` over ranks."""

    options: Options
    _calls_of_weights: RankCalls

    def column_sums(
        self, q: Array, k: Array, lse: Array, weights: Array | None = None, **optional_inputs: Array
    ) -> Any:
        """The attention that each key of this rank receives from the queries of all ranks.

        Parameters
        ----------
        q, k : array
            This rank's rows, as `forward` takes them; there are no values.
        lse : array
            That of this rank's queries, as `forward` returned it.
        weights : array, optional
            Shape and dtype of lse: the factor of each of this rank's queries; on all ranks or on none.
        **optional_inputs : array
            As `forward` took them.

        Returns
        -------
        array
            The columns of this rank's keys, as `cuflash.FlashAttention.column_sums` returns them.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        column_sums_backward : Their gradients.
        cuflash.FlashAttention.column_sums : The same on one device.
        """
        return self._reduced(COLUMN_SUMS, q, k, {"lse": lse, "dlse": weights}, optional_inputs)

    def column_max(self, q: Array, k: Array, lse: Array, **optional_inputs: Array) -> Any:
        """The largest attention weight that each key of this rank receives from a query of any rank.

        Parameters
        ----------
        q, k, lse : array
            As `column_sums` takes them.
        **optional_inputs : array
            As `forward` took them.

        Returns
        -------
        array
            The columns of this rank's keys, as `cuflash.FlashAttention.column_max` returns them.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        cuflash.FlashAttention.column_max : The same on one device.
        """
        return self._reduced(COLUMN_MAX, q, k, {"lse": lse}, optional_inputs)

    def top_keys(self, q: Array, k: Array, lse: Array, count: int, **optional_inputs: Array) -> TopKeys:
        """The strongest keys of each query of this rank, among those of all ranks.

        Parameters
        ----------
        q, k, lse : array
            As `column_sums` takes them.
        count : int
            1 to 64: the same on all ranks.
        **optional_inputs : array
            As `forward` took them.

        Returns
        -------
        TopKeys
            As `cuflash.FlashAttention.top_keys` returns it, for this rank's queries. An index counts the keys of the
            whole sequences. Of equal weights of keys that come in several calls the lower index is first.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        cuflash.FlashAttention.top_keys : The same on one device.
        """
        return TopKeys(*self._reduced(TOP_KEYS, q, k, {"lse": lse}, optional_inputs, count))

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
        """Gradients of the sum over all ranks of ``sum(dsums * column_sums)``, with lse as an input like q and k.

        Parameters
        ----------
        dsums : array
            Gradient with respect to the column sums of this rank's keys.
        q, k, lse, weights : array
            As `column_sums` took them.
        need : collection of str, default ("dq", "dk")
            As `cuflash.FlashAttention.column_sums_backward` takes it: the same on all ranks.
        **optional_inputs : array
            As `column_sums` took them.

        Returns
        -------
        Gradients
            As `cuflash.FlashAttention.column_sums_backward` returns them: dq, dk, dlse and dweights are those of this
            rank's shard, and so is dbias unless the bias is the same for all queries. All others are complete.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `backward` does.

        See Also
        --------
        column_sums : The sums.
        backward : Gradients of lse, from dlse.
        cuflash.FlashAttention.column_sums_backward : The same on one device.
        """
        with reporting_failures(self._calls_of_weights.transport):
            given = checked_of_reduction("column_sums_backward", self.options, optional_inputs)
            names, of_column_sums = gradients_wanted(self.options, given, need)
            arrays = {"q": q, "k": k, "v": None, "lse": lse, "weights": weights, "dsums": dsums} | given
            options = replace(self.options, dropout=0.0)
            call = prepare(options, arrays, (*INPUTS, "lse", "dsums"), names, rewrites=False)
            if call.backend == "streamed":
                raise not_served("k", "Streamed", "keys where q is: each rank has only a shard of them")
            sums = ColumnSums(call, _Passes(self._calls_of_weights))
        gradients = sums.gradients(of_column_sums)
        return named_tuple(Gradients, (*names, *of_column_sums))(  # type: ignore[no-any-return]
            *(x if call.imported is None else call.imported.export(x, None) for x in gradients)
        )

    def _reduced(
        self, pass_: Pass, q: Array, k: Array, of_rows: dict[str, Any], optional_inputs: dict[str, Any], *count: Any
    ) -> Any:
        """The result of a reduction, or the results of `TOP_KEYS`, which has a `count`."""

        def compute(call: RankCall, run: Execution) -> Any:
            lse, dtype = run.arrays["lse"], numpy_dtype(run.problem.softmax_dtype)
            shape = (*lse.shape, *count) if count else (*lse.shape[:2], run.arrays["k"].shape[2])
            results = {row.name: run.xp.empty(shape, "int32" if row.dtype == "index" else dtype) for row in pass_.rows}
            if count:
                run.top_keys(results)
            else:
                run.columns(results, pass_)
            exported = [_exported(call, x) for x in results.values()]
            return exported if count else exported[0]

        def no_gradients(arrays: Mapping[str, Any]) -> tuple[str, ...]:
            if "dlse" in arrays:
                check_weights(arrays["dlse"], arrays["lse"])
            return ()

        arrays, required = {"q": q, "k": k, "v": None, **of_rows}, (*INPUTS, "lse")
        calls = self._calls_of_weights
        with reporting_failures(calls.transport):
            check_names_of_method(pass_.name, self.options, OWN_ARGUMENTS[pass_.name])
            count = tuple(map(checked_count, count))
        return calls.carry_out(pass_.name, arrays, optional_inputs, required, (None, None), compute, no_gradients)


class _Passes(NamedTuple):
    """The passes over ranks, as a backend runs them."""

    calls: RankCalls

    def compute(self, pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> Any:
        names = INPUTS if pass_ is FORWARD else (*INPUTS, *REQUIRED_BY_BACKWARD)
        required = {name: arrays[name] for name in names}
        others = {name: x for name, x in arrays.items() if name not in names and x is not None}
        if pass_ is FORWARD:
            return passes.forward(self.calls, "forward", required, others, (None, None), need)
        return passes.backward(self.calls, required, others, (None, None), need)


def _exported(call: RankCall, x: Array) -> Any:
    """A result, (batch, num_heads, ...), as the caller gets it: with the axes of lse in place of the first two."""
    lse = call.arrays["lse"].shape if call.batch_axes is None else call.batch_axes.axes.shapes["lse"]
    x = x.reshape(*lse[:-1], *x.shape[2:])
    return x if call.local.imported is None else call.local.imported.export(x, None)
