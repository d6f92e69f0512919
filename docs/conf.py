"""Settings of Sphinx, which makes a site of these pages: ``python -m sphinx -W docs build/site``."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from cuflash import __version__

project = "cuflash"
author = copyright = "The cuflash authors"
release = version = __version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "pydata_sphinx_theme"
html_title = "cuflash"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_sidebars = {"index": [], "start": []}  # pages without pages below them

# A class is one page, with its methods.
autodoc_default_options = {"members": True, "inherited-members": "tuple"}
numpydoc_show_class_members = False
autodoc_typehints = "none"  # types are in the sections, and signatures of overloads would hide the parameters
# Docstrings of `cuflash.torch` and `cuflash.jax` are read without these libraries, too.
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]
if find_spec("jax") is None:  # whose tables of rules are written to, which autodoc's stand-ins refuse
    sys.modules |= dict.fromkeys(("jax", "jax.extend.core", "jax.interpreters"), MagicMock())


def setup(app: Sphinx) -> None:
    """What pages and docstrings are without where they are read, too: on a repository's site and in a terminal.

    Signatures are without overloads.
    """
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}  # for type checkers; readers see all keywords in the signature of the function itself

    ModuleAnalyzer.analyze = analyze_without_overloads  # type: ignore[method-assign]

    def amend(app: Sphinx, name: str, source: list[str]) -> None:
        source[0] = source[0].replace("](../README.md)", "](start.md)")
        if name == "examples":
            source[0] += "\n:::{toctree}\n:hidden:\n:glob:\n\nexamples/*\n:::\n"

    def link(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        lines[:] = [re.sub(r"\bdocs/([\w-]+)\.md\b", r":doc:`/\1`", line) for line in lines]

    app.connect("source-read", amend)
    app.connect("autodoc-process-docstring", link)
