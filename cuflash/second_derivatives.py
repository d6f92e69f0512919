"""Second derivatives: tangents of attention and of its gradients, and what is made of these.

Two passes close all of second order. With ``phi = sum(dout * out) + sum(dlse * lse)``, `FlashAttention.backward` gives
the gradient of phi. Its derivative in a direction t is the Hessian of phi times t, and phi's own derivative in that
direction is ``sum(dout * tout) + sum(dlse * tlse)``. So `FlashAttention.jvp` and `FlashAttention.backward_jvp` give
Hessian-vector products, the double backward pass, and the gradients of a Jacobian-vector product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cuflash.preparation import Preparation, backend_of
from cuflash.spec.call import prepare
from cuflash.spec.inputs import INPUTS, BackwardJvpArrays, JvpArrays, Tangents
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS, REQUIRED_BY_BACKWARD_JVP
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.results import Array, GradientTangents, JvpResult, named_tuple_of, needed
from cuflash.spec.score_args import check_tangent_names, checked_with_score_args

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.flash_attention import FlashAttention

_BACKWARD_JVP_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD_JVP)


class SecondDerivatives(Preparation):
    """The methods of `cuflash.FlashAttention` that take tangents."""

    __slots__ = ()

    def jvp(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        **arrays: Unpack[JvpArrays],
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
            shapes and dtypes of what they are tangents of; tscale and tsoftcap, of shape () and the dtype of lse.

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
            As `backward` does; and for arrays on a GPU and streamed keys, whose tangents are not computed yet.
        """
        own = self.options.score_gradients
        tangents = tuple(f"t{name[1:]}" for name in own)
        check_tangent_names(self.options)
        given = checked_with_score_args("jvp", JvpArrays, self.options, arrays, tangents)
        by_name = {"q": q, "k": k, "v": v, **given}
        random = self.options.random(seed, offset)
        call = prepare(self.options, by_name, INPUTS, JVP.default, JVP.default)
        computed = backend_of(call.kind).jvp(call.options, call.arrays, random, call.need)
        return JvpResult(*(computed if call.is_direct else call.exported(computed, by_name)))

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
        **arrays: Unpack[BackwardJvpArrays],
    ) -> GradientTangents:
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
        computed = backend_of(call.kind).backward_jvp(call.options, call.arrays, call.need, random)
        kind = cast("Callable[..., GradientTangents]", named_tuple_of(names))
        return kind(*(computed if call.is_direct else call.exported(computed, by_name)))


def hessian_vector_product(
    attention: FlashAttention,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> GradientTangents:
    """The Hessian of ``sum(dout * out) + sum(dlse * lse)`` with respect to q, k, v and so on, times a vector.

    Parameters
    ----------
    attention : FlashAttention
    dout, q, k, v : array
        As `FlashAttention.backward` takes them.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The parts of the product that are wanted, as `FlashAttention.backward_jvp` names them.
    seed, offset : int, optional
        As `FlashAttention.forward` takes them.
    **arrays : array, optional
        The vector, as tangents tq, tk, tv, tbias and so on; dlse; and bias, mask and so on.

    Returns
    -------
    GradientTangents
    """
    both = {"seed": seed, "offset": offset}
    own = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse, tout, tlse = attention.jvp(q, k, v, **both, **own)
    return attention.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays)


class DoubleGradients(NamedTuple):
    """What `double_backward` returns."""

    ddout: Array
    ddlse: Array
    gradients: GradientTangents


def double_backward(
    attention: FlashAttention,
    cotangents: Mapping[str, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> DoubleGradients:
    """Gradients of ``sum(c * g)`` over gradients g that `FlashAttention.backward` gave, for cotangents c of them.

    That sum is the derivative of ``sum(dout * out) + sum(dlse * lse)`` in the direction c of the inputs. It is linear
    in dout and dlse, whose gradients are therefore tout and tlse; and those of the inputs are the Hessian times c,
    because it is symmetric. None are due to out and lse as inputs of the backward pass: what goes through them is in
    the gradients of q, k and v.

    Parameters
    ----------
    attention : FlashAttention
    cotangents : Mapping
        By the name of a gradient, "dq", "dbias" and so on: an array of its shape and dtype.
    dout, q, k, v : array
        As `FlashAttention.backward` took them.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The inputs whose gradients are wanted: "tdx" stands for that of x.
    seed, offset : int, optional
        As `FlashAttention.forward` took them.
    **arrays : array, optional
        dlse, bias, mask and so on, as `FlashAttention.backward` took them.

    Returns
    -------
    DoubleGradients
        ``ddout`` and ``ddlse``, the gradients with respect to dout and dlse, and ``gradients``: tdq is that with
        respect to q, and so on.
    """
    both = {"seed": seed, "offset": offset}
    tangents = {f"t{name.removeprefix('d')}": x for name, x in cotangents.items()}
    own = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse, tout, tlse = attention.jvp(q, k, v, **both, **own, **tangents)
    found = attention.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays, **tangents)
    return DoubleGradients(tout, tlse, found)


class JvpGradients(NamedTuple):
    """What `jvp_backward` returns."""

    gradients: GradientTangents
    of_tangents: Any


def jvp_backward(
    attention: FlashAttention,
    dtout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    tout: Array,
    tlse: Array,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dtlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> JvpGradients:
    """Gradients of ``sum(dtout * tout) + sum(dtlse * tlse) + sum(dout * out) + sum(dlse * lse)``: `jvp` backwards.

    tout and tlse are linear in the tangents, whose gradients are those of `FlashAttention.backward` for dtout and
    dtlse. Those of q, k, v and so on are what `FlashAttention.backward_jvp` gives where dout and dlse are the tangents
    of dtout and dtlse, because the backward pass is linear in these.

    Parameters
    ----------
    attention : FlashAttention
    dtout, dtlse : array
        Gradients with respect to tout and tlse; dtlse may be missing.
    q, k, v, out, lse, tout, tlse : array
        As `FlashAttention.jvp` took and returned them.
    dout, dlse : array, optional
        Gradients with respect to out and lse.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The inputs whose gradients are wanted, and with them those of their tangents.
    seed, offset : int, optional
        As `FlashAttention.jvp` took them.
    **arrays : array, optional
        The tangents, bias, mask and so on, as `FlashAttention.jvp` took them.

    Returns
    -------
    JvpGradients
        ``gradients``, in which tdq is that with respect to q, and so on; and ``of_tangents``, in which dq is that with
        respect to tq, and so on.
    """
    both = {"seed": seed, "offset": offset}
    extra = {"dlse": dtlse, "tdout": dout, "tdlse": dlse}
    found = attention.backward_jvp(dtout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays, **extra)
    tangents = {*Tangents.__annotations__, *(f"t{name}" for name in attention.options.score_args)}
    inputs = {name: x for name, x in arrays.items() if name not in tangents}
    of_tangents = attention.backward(
        dtout, q, k, v, out, lse, need=tuple(name[1:] for name in found._fields), dlse=dtlse, **both, **inputs
    )
    return JvpGradients(found, of_tangents)
