"""The arrays that functions of a caller read: which there are, how kernels read them, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cuflash.arrays.array_info import Operand, Shaped, as_it_is, check_dtype, softmax_dtype_of
from cuflash.arrays.checks import value_error
from cuflash.spec.inputs import SCORE_OPTIONS
from cuflash.spec.keywords import checked, unexpected_keyword
from cuflash.spec.options import Options, beside_score_error
from cuflash.spec.outputs import KNOWN, BackwardJvpArrays, JvpArrays, PassArrays

MOST_AXES = 4
# Names that a function cannot give to its arrays: passes have arguments of these names, tangents among them, and know
# arrays of their own by the others, whose tangents and gradients they look for, too.
_OF_PASSES = (*PassArrays.__annotations__, *JvpArrays.__annotations__, *BackwardJvpArrays.__annotations__)
_OTHERS = ("self", "need", "want", "seed", "offset", "passes", "remember", "forget")
RESERVED = frozenset((*_OF_PASSES, *_OTHERS, *(f"{prefix}{name}" for name in KNOWN for prefix in ("", "t", "d", "td"))))


def check_names(options: Options) -> None:
    """Raise ValueError for names of arrays that are names of other arguments."""
    for name in options.score_args:
        for used in (name, f"d{name}"):
            if used in RESERVED:
                raise value_error("score", f"an array named {name}", f"another name: {used} is an argument of its own")
    taken = set(options.score_args)
    for gradient in options.score_gradients:
        if gradient in taken:
            raise value_error(
                "score", f"arrays named {gradient[1:]} and {gradient}", "names that differ by more than a d"
            )


def check_tangent_names(options: Options) -> None:
    """Raise ValueError for names of arrays whose tangents would have names of other arguments."""
    keywords = {*JvpArrays.__annotations__, *BackwardJvpArrays.__annotations__}
    for name in options.score_args:
        used = next((x for x in (name, f"t{name}", f"td{name}") if x in keywords), None)
        if used is not None:
            raise value_error("score", f"an array named {name}", f"another name: {used} is an argument of its own")
        if f"t{name}" in options.score_args:
            raise value_error("score", f"arrays named {name} and t{name}", "names that differ by more than a t")


def check_names_of_method(method: str, options: Options, own: Iterable[str]) -> None:
    """Raise ValueError for names of arrays, or of their gradients, that are those of a method's `own` arguments."""
    for name in options.score_args:
        for used in (name, f"d{name}"):
            if used in own:
                expected = f"another name, for {method}: {used} is an argument or a result of its own"
                raise value_error("score", f"an array named {name}", expected)


def check_given(method: str, options: Options, given: Mapping[str, Any], results: Iterable[str] = ()) -> dict[str, Any]:
    """The arrays of a call's functions, and of their gradients, by name; None for results that are not given.

    Raises TypeError for keywords that no function has, and for arrays that are missing, as Python does.
    """
    names = options.score_args
    for name in given:
        if name not in names and name not in results:
            raise unexpected_keyword(method, name, (*names, *results))
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise TypeError(f"{method}() missing keyword argument {missing[0]!r}, which the score or the mask reads")
    return {name: given[name] for name in names} | {name: given.get(name) for name in results}


def checked_with_score_args(
    method: str, typed_dict: type, options: Options, given: Mapping[str, Any], results: Iterable[str] = ()
) -> dict[str, Any]:
    """The arrays of a typed dictionary, and those of a call's functions, by name; None for those that are not given."""
    own = {name: x for name, x in given.items() if name in typed_dict.__annotations__}
    others = {name: x for name, x in given.items() if name not in own}
    return checked(method, typed_dict, own) | check_given(method, options, others, results)


def score_arg_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes that the arrays may have with q of a dtype."""
    return tuple(dict.fromkeys((softmax_dtype_of(dtype), dtype, "int32", "int64", "bool")))


def operands_of(
    options: Options, given: Mapping[str, Shaped], dtype: str, *, has_pairs: bool
) -> tuple[tuple[str, Operand], ...]:
    """The arrays as kernels read them, checked. Where there are no pairs of a query and a key, nothing is read."""
    found = []
    allowed = score_arg_dtypes(dtype)
    for name in options.score_args:
        array = given[name]
        check_dtype(name, array, allowed, ", which the score or the mask reads")
        shape = tuple(array.shape)
        if len(shape) > MOST_AXES or (has_pairs and 0 in shape):
            raise value_error(name, f"shape {shape}", f"up to {MOST_AXES} axes, none of which is empty")
        found.append((name, as_it_is(array)))
    return tuple(found)


def check_alone(options: Options, given: Iterable[str]) -> None:
    """Raise NotImplementedError for arrays that cannot be combined with functions."""
    names = set(given)
    if options.score is not None:
        for name in SCORE_OPTIONS:
            if name in names:
                raise beside_score_error(name)
    if (options.score or options.mask_function) and "block_table" in names:
        raise NotImplementedError(
            "block_table: got it together with a function as score or mask, expected one of them; gather the pages of "
            "each batch entry into contiguous k and v"
        )
