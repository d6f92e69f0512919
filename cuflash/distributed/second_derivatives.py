"""The methods of `ContextParallel` that take tangents: those of `cuflash.FlashAttention` on each rank's shard."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Generic, overload

from cuflash.distributed import passes
from cuflash.distributed.calls import RankCalls
from cuflash.spec.inputs import NamedGradientTangents
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.results import Array, GradientTangents, JvpResult
from cuflash.spec.score_args import check_tangent_names
from cuflash.spec.type_variables import ArrayT, FunctionT, KeyT, ValueT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.spec.inputs import ScoreGradientTangents, WithTangents
    from cuflash.spec.outputs import OfHessian
    from cuflash.spec.results import NumpyJvpResult
    from cuflash.spec.type_variables import Integer, NumpyArray, ScalarT


class SecondDerivatives(Generic[FunctionT]):
    """`jvp` and `backward_jvp` over ranks."""

    options: Options
    _calls: RankCalls

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
        given = {"q": q, "k": k, "v": v}
        return passes.forward(self._calls, "jvp", given, arrays, (seed, offset), JVP.default, JVP)  # type: ignore[no-any-return]

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
        return passes.backward(self._calls, own, arrays, (seed, offset), need, BACKWARD_JVP)  # type: ignore[no-any-return]
