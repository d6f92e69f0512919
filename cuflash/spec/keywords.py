"""Keyword arguments that a call does not take: what is meant by them, and where it goes."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from cuflash.spec.inputs import OptionalArrays, Tangents
from cuflash.spec.options import Options
from cuflash.spec.outputs import OF_ROW_REDUCTIONS, ROW_REDUCTIONS, BackwardJvpArrays, JvpArrays, OfGradients

P = ParamSpec("P")
R = TypeVar("R")

# What takes each argument of a user: the first row that has it. Fields of `Options` that are not printed are no
# arguments of users.
_TAKERS: tuple[tuple[str, Collection[str]], ...] = (
    (
        "FlashAttention(...) and ContextParallel(...)",
        {*(field.name for field in fields(Options) if field.repr), "score", "mask"},
    ),
    ("forward and backward", {*OptionalArrays.__annotations__, "seed", "offset"}),
    ("forward and jvp", {"out", "lse"}),
    ("forward", {"want", *ROW_REDUCTIONS}),
    ("backward", {*OfGradients.__annotations__, "dout", "need"}),
    ("jvp and backward_jvp", Tangents.__annotations__),
    ("jvp", JvpArrays.__annotations__),
    ("backward_jvp", BackwardJvpArrays.__annotations__),
    ("tune", {"passes", "remember", "forget"}),
)
# What PyTorch, FlexAttention, FlashAttention, JAX, cuDNN, xFormers, FlashInfer, vLLM and transformers call it: the
# argument here, what to mind, and its names there. Without an argument the note says what to do.
_FOREIGN = (
    ("causal", "", "is_causal use_causal_mask"),
    ("scale", "", "softmax_scale sm_scale attn_scale scaling scale_factor"),
    ("window", "(left, right), with None where others write -1", "window_size local_window_size"),
    ("window", "(sliding_window - 1, 0)", "sliding_window"),
    (
        "mask",
        "of forward: boolean, True is visible; an array that is added to the scores is bias",
        "attn_mask attention_mask",
    ),
    ("mask", "of forward: shape (batch, 1, 1, seqlen_k), True is visible; or kv_lengths", "key_padding_mask"),
    ("bias", "", "attn_bias additive_mask position_bias"),
    (
        "dropout",
        "forward then takes seed and offset",
        "dropout_p dropout_rate attn_dropout attention_dropout p_dropout",
    ),
    ("softcap", "", "logits_soft_cap attn_logits_soft_cap logit_softcapping logit_cap soft_cap tanh_cap"),
    ("score", "a function (s, i, j, *, head, batch, ...)", "score_mod"),
    ("mask", "a function (i, j, *, head, batch, ...), as FlashAttention takes it", "mask_mod"),
    (
        "kv_lengths",
        "with causal='lengths', if queries are the newest tokens",
        "cache_seqlens seqused_k seqlens_k seqlen_kv kv_seqlens seq_len_kv context_lens key_value_seq_lengths lengths",
    ),
    (
        "",
        "queries that pad a batch are computed as others; pack the sequences to leave them out (cu_seqlens_q)",
        "query_seq_lengths seqused_q seq_len_q",
    ),
    ("block_table", "", "page_table block_tables paged_kv_indices"),
    ("cu_seqlens_k", "", "cu_seqlens_kv cu_seq_lens_k kv_indptr offsets_k"),
    ("cu_seqlens_q", "and cu_seqlens_k", "cu_seqlens cu_seq_lens_q qo_indptr offsets_q"),
    ("sinks", "", "sink s_aux learnable_sink attention_sinks softmax_offset"),
    ("q_scale", "", "q_descale descale_q"),
    ("k_scale", "", "k_descale descale_k"),
    ("v_scale", "", "v_descale descale_v"),
    ("alibi_slopes", "", "alibi slopes"),
    ("layout", "'bhsd' or 'bshd'", "qkv_format tensor_layout input_layout qkv_layout"),
    ("seed", "and offset", "rng generator philox_seed dropout_seed rng_state"),
    ("dout", "", "grad_output do grad_out"),
    ("", "leave it out: arrays have their shapes", "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv"),
    ("", "leave it out: num_heads of k and v may divide that of q", "enable_gqa num_key_value_groups n_rep"),
    ("", "leave it out: `plan` decides it", "num_splits kernel_options implementation backend sdpa_backend"),
    ("", "leave it out: dropout acts where it is given", "is_training training"),
    ("", "forward returns out and lse", "return_lse return_softmax_lse return_residual return_aux"),
    (
        "",
        "attention weights are never stored; those of some rows are exp(scores - lse), with the lse of forward, sums "
        "over queries are column_sums, and the largest of each row top_keys",
        "return_attn_probs need_weights output_attentions return_weights",
    ),
    ("", "q, k and v have no keywords but these: attention(q, k, v)", "query key value queries keys values"),
)
# What a derivative of a higher order is made of.
DIFFERENCES_OF = "take the difference of {} at q + h * tq and q - h * tq, divided by 2 * h, in float64"
_OF_SECOND_ORDER = {*JvpArrays.__annotations__, *BackwardJvpArrays.__annotations__}
# Calls of passes, those of ranks among them, without row reductions.
_OF_ROW_REDUCTIONS = ("forward", "backward", "jvp", "backward_jvp")
_MEANT = {name: (argument, note) for argument, note, names in _FOREIGN for name in names.split()}


def unexpected_keyword(method: str, name: str, accepted: Collection[str]) -> TypeError | NotImplementedError:
    """The error about a keyword that a method does not take: in the words of Python, and what to write in its place.

    `accepted` are keywords that it takes, besides those that are known as its arguments. NotImplementedError for
    tangents of tangents, and of what is made of tangents: those are of a higher order. Likewise for row reductions in
    calls of passes that do not give them.
    """
    if method in ("jvp", "backward_jvp") and name.startswith("tt") and name[1:] in {*_OF_SECOND_ORDER, *accepted}:
        return NotImplementedError(
            f"{name}: got a tangent of {name[1:]}, expected derivatives of at most the second order, which jvp and "
            f"backward_jvp give; {DIFFERENCES_OF.format(method)}"
        )
    if method in _OF_ROW_REDUCTIONS and name in ("want", *ROW_REDUCTIONS, *OF_ROW_REDUCTIONS):
        return NotImplementedError(
            f"{name}: got it in {method}, expected in FlashAttention.forward and backward: row reductions have no "
            "tangents, and ranks take want=, but no arrays to write them to"
        )
    remedy = _remedy(method, name, accepted)
    return TypeError(f"{method}() got an unexpected keyword argument {name!r}" + (remedy and f": {remedy}"))


def meant_by(name: str) -> tuple[str, str]:
    """The argument that a name means, here or in another library, and what to mind, or what to do without one.

    Both are empty where nothing is known of the name.
    """
    return (name, "") if _takers_of(name) else _MEANT.get(name, ("", ""))


def _remedy(method: str, name: str, accepted: Collection[str]) -> str:
    def shown(argument: str) -> str:
        is_here = argument in accepted or any(
            argument in names for takers, names in _TAKERS if method in _words(takers)
        )
        return argument if is_here else f"{argument}, which {_takers_of(argument)}"

    if takers := _takers_of(name):
        return f"{takers} it"
    if name in _MEANT:
        argument, note = _MEANT[name]
        return f"expected {shown(argument)}{note and f': {note}'}" if argument else note
    known = dict.fromkeys((*accepted, *(x for _, names in _TAKERS for x in sorted(names)), *_MEANT))
    near = next(iter(difflib.get_close_matches(name.lower(), known, 1, cutoff=0.7)), "")
    argument = _MEANT[near][0] if near in _MEANT else near
    return argument and f"did you mean {shown(argument)}?"


def _takers_of(argument: str) -> str:
    takers = next((takers for takers, names in _TAKERS if argument in names), "")
    return takers and f"{takers} {'take' if ' and ' in takers else 'takes'}"


def _words(takers: str) -> list[str]:
    return takers.replace("(...)", "").split()


def checked(method: str, typed_dict: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays of a typed dictionary by name, None for those that a method was not given as keyword arguments.

    Raises TypeError for other keywords, as Python itself does.
    """
    for name in given:
        if name not in typed_dict.__annotations__:
            raise unexpected_keyword(method, name, typed_dict.__annotations__)
    return {name: given.get(name) for name in typed_dict.__annotations__}


def explains_keywords(method: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function say what is meant by keywords that it does not take; `unexpected_keyword` has the words."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            try:
                return function(*args, **keywords)
            except TypeError:
                accepted = inspect.signature(function).parameters
                unknown = next((name for name in keywords if name not in accepted), None)
                if unknown is None:
                    raise
                raise unexpected_keyword(method, unknown, accepted) from None

        return call

    return decorate
