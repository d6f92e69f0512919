"""The methods of `ContextParallel` that take tangents: those of `cuflash.FlashAttention` on each rank's shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, overload

from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.distributed.calls import Call, Calls, of_pairs
from cuflash.distributed.execution import Execution
from cuflash.spec.inputs import INPUTS, NamedGradientTangents
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS, GRADIENTS, REQUIRED_BY_BACKWARD_JVP
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.results import Array, GradientTangents, JvpResult, named_tuple_of_tangents, needed
from cuflash.spec.score_args import check_tangent_names
from cuflash.spec.type_variables import ArrayT, FunctionT, KeyT, ValueT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.spec.inputs import ScoreGradientTangents, WithTangents
    from cuflash.spec.outputs import OfHessian
    from cuflash.spec.results import NumpyJvpResult
    from cuflash.spec.type_variables import Integer, NumpyArray, ScalarT

_BACKWARD_JVP_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD_JVP)


class SecondDerivatives(Generic[FunctionT]):
    """`jvp` and `backward_jvp` over ranks."""

    options: Options
    _calls: Calls

    # fmt: off
    @overload
    def jvp(
        self: SecondDerivatives[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[WithTangents],
    ) -> NumpyJvpResult[ScalarT]: ...
    @overload
    def jvp(
        self: SecondDerivatives[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[WithTangents],
    ) -> JvpResult[ArrayT, ArrayT]: ...
    @overload
    def jvp(
        self: SecondDerivatives[WithFunction], q: NumpyArray[ScalarT], k: Array, v: Array, **arrays: Any
    ) -> NumpyJvpResult[ScalarT]: ...
    @overload
    def jvp(
        self: SecondDerivatives[WithFunction], q: ArrayT, k: Array, v: Array, **arrays: Any
    ) -> JvpResult[ArrayT, ArrayT]: ...
    # fmt: on

    def jvp(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        **arrays: Array,
    ) -> JvpResult:
        """`forward`, and its derivative in the direction of tangents: a Jacobian-vector product.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them.
        seed, offset : int, optional
            As `forward` takes them.
        **arrays : array, optional
            The optional inputs, as `forward` takes them. And the tangents, of which one that is not given is zero: tq,
            tk and tv of this rank's rows, tbias as bias is; talibi_slopes, tsinks, tscale, tsoftcap, and tgamma for an
            array gamma that the score reads, the same on all ranks. The same tangents are given on all ranks.

        Returns
        -------
        JvpResult
            ``out``, ``lse``, ``tout`` and ``tlse`` of this rank's queries, as `cuflash.FlashAttention.jvp` returns
            them. With `deterministic` they are bitwise the same for any number of ranks, as those of `forward` are.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `cuflash.FlashAttention.jvp` does; ValueError also if a rank makes another call than rank 0.
        RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        forward : The same without tangents.
        backward_jvp : The derivatives of gradients.
        cuflash.FlashAttention.jvp : The same on one device.
        """
        check_tangent_names(self.options)

        def compute(call: Call, run: Execution) -> JvpResult:
            softmax, problem = numpy_dtype(run.problem.softmax_dtype), run.problem
            results, views = {}, {}
            for row in JVP.rows:
                shape, dtype = (
                    (problem.lse_shape, softmax) if row.is_of_rows else (problem.out_shape, numpy_dtype(problem.dtype))
                )
                results[row.name] = x = run.xp.empty(shape, dtype)
                views[row.name] = view_rows(x) if row.is_of_rows else view_4d(x, self.options.layout)
            run.forward(views, JVP)
            return JvpResult(*call.exported(list(results.values())))

        given = {"q": q, "k": k, "v": v}
        return self._calls.carry_out("jvp", given, arrays, INPUTS, (seed, offset), compute, lambda given: JVP.default)

    # fmt: off
    @overload
    def backward_jvp(
        self: SecondDerivatives[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, tdout: Array | None = None, tdlse: Array | None = None, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[OfHessian],
    ) -> GradientTangents[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward_jvp(
        self: SecondDerivatives[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, tdout: Array | None = None, tdlse: Array | None = None, need: Collection[str],
        seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfHessian],
    ) -> NamedGradientTangents[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward_jvp(
        self: SecondDerivatives[WithFunction], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array,
        tout: Array, tlse: Array, **arrays: Any,
    ) -> ScoreGradientTangents[ArrayT, KeyT, ValueT]: ...
    # fmt: on

    def backward_jvp(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        tout: Array,
        tlse: Array,
        *,
        dlse: Array | None = None,
        tdout: Array | None = None,
        tdlse: Array | None = None,
        need: Collection[str] = DEFAULT_NEED_TANGENTS,
        seed: int | None = None,
        offset: int | None = None,
        **arrays: Array,
    ) -> GradientTangents | NamedGradientTangents:
        """The derivatives of what `backward` gives, in the direction of tangents.

        Parameters
        ----------
        dout, q, k, v, out, lse : array
            As `backward` takes them.
        tout, tlse : array
            As `jvp` returned them for the same tangents.
        dlse : array, optional
            As `backward` takes it.
        tdout, tdlse : array, optional
            Tangents of this rank's dout and dlse, each on all ranks or on none; zero if not given.
        need : collection of str, default ("tdq", "tdk", "tdv")
            What is wanted: t and the name of a gradient of `backward`; the same on all ranks.
        seed, offset : int, optional
            As `forward` took them.
        **arrays : array, optional
            The optional inputs and the tangents, as `jvp` took them.

        Returns
        -------
        GradientTangents
            As `cuflash.FlashAttention.backward_jvp` returns them: tdq, tdk, tdv and tdbias are those of this rank's
            shard; all others are complete and the same on all ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `jvp` does.

        See Also
        --------
        jvp : Gives tout and tlse.
        backward : The gradients themselves.
        cuflash.FlashAttention.backward_jvp : The same on one device.
        """
        check_tangent_names(self.options)
        own = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "tout": tout, "tlse": tlse}
        own |= {"dlse": dlse, "tdout": tdout, "tdlse": tdlse}
        of_functions = self.options.score_gradients

        def names(given: Mapping[str, Any]) -> tuple[str, ...]:
            absent = dict.fromkeys(f"t{name}" for name in (*GRADIENTS, *of_functions))
            return needed(need, {**given, **self.options.numbers}, absent, of_functions, prefix="t")

        def compute(call: Call, run: Execution) -> GradientTangents | NamedGradientTangents:
            results = {name: call.empty(name, run.problem) for name in call.need}
            views = {
                name: view_4d(x, self.options.layout) if name in DEFAULT_NEED_TANGENTS else x
                for name, x in results.items()
            }
            if "tdbias" in views:
                views["tdbias"] = of_pairs(views["tdbias"])
            run.backward(call.need, views, BACKWARD_JVP)
            return named_tuple_of_tangents(call.own.wanted)(*call.exported(list(results.values())))

        return self._calls.carry_out("backward_jvp", own, arrays, _BACKWARD_JVP_INPUTS, (seed, offset), compute, names)
