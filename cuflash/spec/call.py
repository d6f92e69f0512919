"""A call, from the arrays of a caller to what a backend computes.

`prepare` is the only door of `FlashAttention.forward`, `backward`, `plan`, `compile` and `tune`, and of the calls of
ranks: it finds out whose arrays these are, and replaces functions by the options that they spell out. Backends bind
what comes out of it (`cuflash.spec.binding`), and split batch axes (`cuflash.spec.batch_axes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cuflash.arrays.dlpack import Imported
from cuflash.spec.array_imports import are_cupy, import_arguments, numpy_arrays
from cuflash.spec.options import Options
from cuflash.spec.outputs import model_of
from cuflash.spec.rewrites import Equivalent, equivalent
from cuflash.spec.streamed import OF_KEYS, Streamed, import_with_streamed, is_streamed
from cuflash.spec.without_values import OF_VALUES, check_without_values, with_no_columns

Backend = Literal["numpy", "cupy", "streamed"]


class Call(NamedTuple):
    """What a backend computes for a call, and the way back."""

    backend: Backend  # which computes
    options: Options
    arrays: dict[str, Any]  # by name; for NumPy only those that are given
    need: tuple[str, ...]  # names of the results, in the order in which the backend returns them
    wanted: tuple[str, ...]  # names of the results of the caller
    given: dict[str, Any]  # the arrays by the names of the caller
    rewrite: Equivalent | None
    imported: Imported | None  # None where the arrays of the caller are those of the backend
    is_direct: bool  # what the backend computes are the results of the caller
    has_values: bool = True  # whether the caller gives v

    def exported(self, computed: Sequence[Any], from_caller: Mapping[str, Any]) -> Sequence[Any]:
        """Results of a backend as those of the caller, who gave arrays `from_caller`: in order, shape and library."""
        return self.as_callers(self.renamed(computed), from_caller)

    def renamed(self, computed: Sequence[Any]) -> Sequence[Any]:
        """Results of a backend as those that the caller wants, still arrays of the backend."""
        if self.rewrite is None or self.need == self.wanted:
            return computed
        return self.rewrite.gradients(computed, self.given, self.wanted)

    def as_callers(self, results: Sequence[Any], from_caller: Mapping[str, Any]) -> Sequence[Any]:
        """The results that the caller wants as arrays of the caller's library, or those that the caller gave.

        Those over the columns of v are None without v.
        """
        if not self.has_values:
            named = zip(self.wanted, self._replace(has_values=True).as_callers(results, from_caller), strict=True)
            return [None if name in OF_VALUES else x for name, x in named]
        if self.imported is None:
            return results
        libraries = dict.fromkeys(self.wanted, self.imported)
        if self.backend == "streamed":
            libraries |= {name: self.given[model_of(name)].imported for name in OF_KEYS}
        return [libraries[name].export(x, from_caller[name]) for name, x in zip(self.wanted, results, strict=True)]

    def rewritten(self, rewrite: Equivalent | None) -> Call:
        """The call with options in place of its functions."""
        if rewrite is None:
            return self
        need, arrays = rewrite.need(self.wanted), rewrite.arrays(self.given)
        return self._replace(options=rewrite.options, arrays=arrays, need=need, rewrite=rewrite, is_direct=False)


def prepare(
    options: Options,
    arrays: dict[str, Any],
    required: Sequence[str],
    wanted: tuple[str, ...],
    written: Sequence[str] = (),
    *,
    rewrites: bool = True,
) -> Call:
    """The call that computes the results `wanted` of a pass.

    `arrays` are those of the caller by name, where None stands for an absent one; `written` names those among them
    that results are written to, `required` those that have to be there. Unless it `rewrites` them, functions stay: a
    rank does not know yet which options they spell out, and calls `Call.rewritten`. Raises as `import_arguments` does.
    """
    if "v" in arrays and arrays["v"] is None:
        return _without_values(options, arrays, required, wanted, written, rewrites)
    imported, given = None, arrays
    if are_cupy(arrays, required):
        backend: Backend = "cupy"
    elif as_numpy := numpy_arrays(arrays, required, written):
        backend, given = "numpy", as_numpy
    elif is_streamed(arrays):
        backend = "streamed"
        imported, given = import_with_streamed(arrays, required, written)
    else:
        imported = import_arguments(arrays, required=required, written=written)
        backend = imported.backend
        given = {name: x for name, x in imported.arrays.items() if x is not None or backend != "numpy"}
    rewrite = equivalent(options, given) if rewrites else None
    call = Call(backend, options, given, wanted, wanted, given, None, imported, imported is None)
    return call if rewrite is None else call.rewritten(rewrite)


def _without_values(
    options: Options,
    arrays: dict[str, Any],
    required: Sequence[str],
    wanted: tuple[str, ...],
    written: Sequence[str],
    rewrites: bool,
) -> Call:
    required_without_v = check_without_values(arrays, required, wanted)
    given = {name: x for name, x in arrays.items() if name != "v"}
    if isinstance(k := arrays["k"], Streamed):
        given["v"] = k.with_array(k.array[..., :0])
    call = prepare(options, given, required_without_v, wanted, written, rewrites=False)
    given = with_no_columns(call.given, required, options.layout)
    call = call._replace(arrays=given, given=given, is_direct=False, has_values=False)
    return call.rewritten(equivalent(options, given) if rewrites else None)
