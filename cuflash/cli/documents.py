"""What a command prints for programs: one JSON document on standard output, as docs/commands.md describes it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from cuflash import __version__

Document = dict[str, Any]


def add_json_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON document in place of the text")


def print_document(command: str, content: Mapping[str, Any]) -> None:
    """Print a document in strict JSON: numbers that are not finite are null."""
    document = {"command": command, "version": __version__, **content}
    print(json.dumps(_strict(document), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
