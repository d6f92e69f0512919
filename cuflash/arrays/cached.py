"""A property that is computed once for each object, without a lock."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """As that of `functools` from Python 3.12 on.

        The one of Python 3.11 has a lock for all objects of a class. If a thread holds it during a fork, it stays
        locked in the child, which then waits for a thread that it does not have.
        """

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            kept = instance.__dict__
            if self.attrname not in kept:
                kept[self.attrname] = self.func(instance)
            return kept[self.attrname]
