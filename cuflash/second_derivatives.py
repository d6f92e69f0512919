"""Second derivatives: tangents of attention and of its gradients.

Two passes close all of second order. With ``phi = sum(dout * out) + sum(dlse * lse)``, `FlashAttention.backward` gives
the gradient of phi. Its derivative in a direction t is the Hessian of phi times t, and phi's own derivative in that
direction is ``sum(dout * tout) + sum(dlse * tlse)``. So `FlashAttention.jvp` and `FlashAttention.backward_jvp` give
Hessian-vector products, the double backward pass, and the gradients of a Jacobian-vector product.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, overload

from cuflash.preparation import Preparation, backend_of
from cuflash.spec.call import prepare
from cuflash.spec.inputs import (
    INPUTS,
    BackwardJvpArrays,
    JvpArrays,
    NamedGradientTangents,
)
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS, REQUIRED_BY_BACKWARD_JVP
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.results import Array, GradientTangents, JvpResult, named_tuple_of_tangents, needed
from cuflash.spec.score_args import check_tangent_names, checked_with_score_args
from cuflash.spec.type_variables import ArrayT, FunctionT, KeyT, ValueT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.spec.inputs import OfThreeTangents, ScoreGradientTangents
    from cuflash.spec.results import NumpyJvpResult
    from cuflash.spec.type_variables import Integer, NumpyArray, ScalarT

_BACKWARD_JVP_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD_JVP)


class SecondDerivatives(Preparation[FunctionT]):
    """The methods of `cuflash.FlashAttention` that take tangents."""

    __slots__ = ()

    # fmt: off
    @overload
    def jvp(
        self: SecondDerivatives[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[JvpArrays],
    ) -> NumpyJvpResult[ScalarT]: ...
    @overload
    def jvp(
        self: SecondDerivatives[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[JvpArrays],
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
        self, q: Array, k: Array, v: Array, *, seed: int | None = None, offset: int | None = None, **arrays: Array
    ) -> JvpResult:
        """Attention, and its derivative in the direction of tangents: a Jacobian-vector product.

        With ``P = softmax(S)``, ``tS = scale * (tq @ k.T + q @ tk.T) + tbias + ...`` through the soft cap or `score`:
        ``tlse = rowsum(P * tS)`` and ``tout = (P * (tS - tlse)) @ v + P @ tv``, in one pass over the keys. Pairs that
        are hidden count for nothing, whatever their tangents are.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them.
        seed, offset : int, optional
            As `forward` takes them. The tangent of lse is that before dropout, as lse is.
        **arrays : array, optional
            bias, mask and so on, and what `score` and `mask` read, as `forward` takes them; out, lse, tout and tlse, to
            be written to. And the tangents, of which one that is not given is zero and saves its products: tq, tk, tv,
            tbias, talibi_slopes, tsinks, and for an array gamma of real numbers that `score` reads tgamma, with the
            shapes and dtypes of what they are tangents of; tscale and tsoftcap, of shape () and the dtype of lse. With
            `cuflash.streamed` k and v, tk and tv are arrays in host memory, which are streamed with them.

        Returns
        -------
        JvpResult
            ``out`` and ``lse``, as `forward` gives them; ``tout`` and ``tlse``, like these. In a row that attends to no
            key both are 0, or tlse is the tangent of the sink.

        Raises
        ------
        TypeError, ValueError, ImportError
            As `forward` does.
        NotImplementedError
            As `backward` does, except that `jvp` takes a `block_table`, tk and tv being pools of pages as k and v are;
            and for CuPy arrays with head dimensions without a tile (`backward_jvp`: 512, 256 of float32 and 192 of
            float64 are the largest).

        See Also
        --------
        forward : The same without tangents.
        backward_jvp : The derivatives of gradients.
        hessian_vector_product : Both, one after the other.

        References
        ----------
        - Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.
        - These equations with dropout: docs/second-derivatives.md, "Definitions".
        """
        own = self.options.score_gradients
        tangents = tuple(f"t{name[1:]}" for name in own)
        check_tangent_names(self.options)
        given = checked_with_score_args("jvp", JvpArrays, self.options, arrays, tangents)
        by_name = {"q": q, "k": k, "v": v, **given}
        random = self.options.random(seed, offset)
        call = prepare(self.options, by_name, INPUTS, JVP.default, JVP.default)
        computed = backend_of(call.backend).jvp(call.options, call.arrays, random, call.need)
        return JvpResult(*(computed if call.is_direct else call.exported(computed, by_name)))

    # fmt: off
    @overload
    def backward_jvp(
        self: SecondDerivatives[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfThreeTangents],
    ) -> GradientTangents[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward_jvp(
        self: SecondDerivatives[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, need: Collection[str] = ..., seed: Integer = None, offset: Integer = None,
        **arrays: Unpack[BackwardJvpArrays],
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
        need: Collection[str] = DEFAULT_NEED_TANGENTS,
        seed: int | None = None,
        offset: int | None = None,
        **arrays: Array,
    ) -> GradientTangents | NamedGradientTangents:
        """The derivatives of what `backward` gives, in the direction of tangents.

        With ``dS = P * (dP - delta)``: ``tdS = (tS - tlse) * dS + P * (tdP - tdelta)``, where ``tdP = dout @ tv.T +
        tdout @ v.T`` and ``tdelta = rowsum(dout * tout + tdout * out) - tdlse``; then ``tdq = scale * (tdS @ k + dS @
        tk)``, ``tdk = scale * (tdS.T @ q + dS.T @ tq)`` and ``tdv = (P * (tS - tlse)).T @ dout + P.T @ tdout``.

        Parameters
        ----------
        dout, q, k, v, out, lse : array
            As `backward` takes them.
        tout, tlse : array
            As `jvp` returned them for the same tangents.
        need : collection of str, default ("tdq", "tdk", "tdv")
            What is wanted, in any order: t and the name of a gradient of `backward`.
        seed, offset : int, optional
            As `forward` took them.
        **arrays : array, optional
            bias, mask and so on, what functions read, and the tangents, as `jvp` took them; dlse as `backward` takes
            it; tdout and tdlse, tangents of dout and dlse, zero if not given; and arrays to write results to.

        Returns
        -------
        GradientTangents
            A named tuple of what is wanted, in the order of the gradients, with their shapes and dtypes.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `jvp` does.

        See Also
        --------
        jvp : Gives tout and tlse.
        backward : The gradients themselves.
        hessian_vector_product, double_backward, jvp_backward : What this pass is used for.

        References
        ----------
        - Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.
        - These equations with dropout: docs/second-derivatives.md, "Definitions".
        """
        gradients = self.options.score_gradients
        check_tangent_names(self.options)
        own = tuple(f"t{name}" for name in gradients)
        given = checked_with_score_args(
            "backward_jvp", BackwardJvpArrays, self.options, arrays, (*(f"t{name[1:]}" for name in gradients), *own)
        )
        by_name = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "tout": tout, "tlse": tlse, **given}
        results = {name: by_name.pop(name) for name in (*(row.name for row in BACKWARD_JVP.rows), *own)}
        names = needed(need, by_name | self.options.numbers, results, gradients, prefix="t")
        by_name |= {name: results[name] for name in names}
        random = self.options.random(seed, offset)
        call = prepare(self.options, by_name, _BACKWARD_JVP_INPUTS, names, names)
        computed = backend_of(call.backend).backward_jvp(call.options, call.arrays, call.need, random)
        return named_tuple_of_tangents(names)(*(computed if call.is_direct else call.exported(computed, by_name)))
