"""What the sub-commands' options have in common."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from descriptors.units import GIB, KIB, MIB

_UNITS = {"": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB}


def writable(*files: Path | None) -> str | None:
    """What is wrong with the first file that cannot be written for want of its folder; None when nothing is."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file.parent}: no such folder"
    return None


def complain(message: str, status: int) -> int:
    """Say what is wrong; the status that was given."""
    print(f"objectcache bench: {message}", file=sys.stderr)
    return status


def number(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`, with an optional binary unit."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+) *([KMG]iB)?", text, re.IGNORECASE)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
        value = int(match[1]) * _UNITS[(match[2] or "").upper()]
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, not {value}")
        return value

    return parse
