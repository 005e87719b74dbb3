"""Options of the commands: their parsers, and values that differ between a full run and a smoke run."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from calibration.content import STAMP_BYTES
from descriptors.descriptor import CHUNK_COUNT_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.units import GIB, KIB, MIB

RUNS_MAX = 1000
SEED_MAX = 1 << 62
_UNITS = {"": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB}
_SAME = object()
T = TypeVar("T")
Choice = TypeVar("Choice", bound=Enum)
Commands = argparse._SubParsersAction


class Options:
    """The options of one command while they are declared. What `add` is told of full and smoke runs comes into force in
    `resolved`, where the option was not given: explicit options win over the size of the run.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser: Any = parser
        self._defaults: dict[str, tuple[Any, Any]] = {}
        parser.set_defaults(defaults=self._defaults)

    def group(self, title: str) -> Options:
        """Further options under a heading of their own."""
        grouped = Options.__new__(Options)
        grouped._parser, grouped._defaults = self._parser.add_argument_group(title), self._defaults
        return grouped

    def add(self, *flags: str, full: Any = None, smoke: Any = _SAME, **options: Any) -> None:
        """As argparse's `add_argument`."""
        made = self._parser.add_argument(*flags, **options)
        if full is not None or smoke is not _SAME:
            self._defaults[made.dest] = (full, full if smoke is _SAME else smoke)

    def flag(self, name: str, text: str) -> None:
        """An option without a value."""
        self._parser.add_argument(name, action="store_true", help=text)

    def choice(self, flag: str, choices: Sequence[Enum], default: Enum, what: str = "") -> None:
        """One value of an enum."""
        text = ", ".join(filter(None, (names(choices), what))) + f"; default: {default.value}"
        self._parser.add_argument(flag, type=one_of(choices), default=default, metavar="NAME", help=text)

    def runs(self, full: int | None, smoke: int | None = 1, what: str = "counted rounds") -> None:
        """How often everything is measured."""
        text = f"{what}; default: {full}"
        self.add("--runs", type=number(1, RUNS_MAX), metavar="K", full=full, smoke=smoke, help=text)

    def seed(self) -> None:
        """Of everything that is random."""
        self._parser.add_argument("--seed", type=number(0, SEED_MAX), default=1, help="default: 1")

    def folder(self, what: str = "for the stores") -> None:
        """Where files are put for the time being."""
        self._parser.add_argument("--folder", type=Path, metavar="DIR", help=f"{what}; default: temporary files")

    def serve_options(self) -> None:
        """For `objectcache serve`."""
        text = "further options of `objectcache serve`"
        self._parser.add_argument("--serve-options", type=_words_of, default=(), metavar="TEXT", help=text)

    def shape(self, chunks: tuple[int, int], layers: tuple[int, int], slice_bytes: tuple[int, int], of: str) -> None:
        """N, L and S, each for a full and a smoke run."""
        size = number(STAMP_BYTES, PER_LAYER_CHUNK_BYTES_MAX)
        many = f"bytes of one layer in one chunk {of}, KiB and MiB understood; default: {slice_bytes[0] // KIB}KiB"
        for letter, name, field, parse, (full, smoke), text in (
            ("N", "chunks", "chunk_count", number(1, CHUNK_COUNT_MAX), chunks, f"chunks {of}; default: {chunks[0]}"),
            ("L", "layers", "num_layers", number(1, NUM_LAYERS_MAX), layers, f"layers; default: {layers[0]}"),
            ("S", "slice-bytes", "per_layer_chunk_bytes", size, slice_bytes, many),
        ):
            options = {"dest": field, "metavar": letter, "type": parse, "help": text}
            self.add(f"-{letter}", f"--{name}", full=full, smoke=smoke, **options)


def resolved(options: argparse.Namespace) -> argparse.Namespace:
    """The same with the values of a full or a smoke run where an option was not given."""
    values = dict(vars(options))
    for name, (full, smoke) in values.pop("defaults").items():
        if values[name] is None:
            values[name] = smoke if values["smoke"] else full
    return argparse.Namespace(**values)


def filled(settings: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Settings with the options that are called as their fields are, and with `others`."""
    assert is_dataclass(settings)
    named = {field.name: getattr(options, field.name) for field in fields(settings) if field.name in options}
    made: T = settings(**{**named, **others})
    return made


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


def real(least: float, most: float, unit: float = 1.0) -> Callable[[str], float]:
    """A parser of numbers from `least` to `most`, which are given in that unit and returned in ours."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}")
        return value * unit

    return parse


def each(of: Callable[[str], T], known: Sequence[T] | None = None) -> Callable[[str], tuple[T, ...]]:
    """A parser of lists with commas between, which name nothing twice; `known` are the values that there are."""

    def parse(text: str) -> tuple[T, ...]:
        try:
            values = tuple(of(part.strip()) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or (known is not None and not set(values) <= set(known)):
            raise argparse.ArgumentTypeError(f"must be some of {_words(known or ())}, with commas between")
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError("must not name anything twice")
        return values

    return parse


def one_of(choices: Sequence[Choice]) -> Callable[[str], Choice]:
    """A parser of an enum's values, in any case of letters."""
    by_name = {str(choice.value).lower(): choice for choice in choices}

    def parse(text: str) -> Choice:
        if text.lower() not in by_name:
            raise argparse.ArgumentTypeError(f"must be one of {','.join(by_name)}, not {text!r}")
        return by_name[text.lower()]

    return parse


def some_of(choices: Sequence[Choice]) -> Callable[[str], tuple[Choice, ...]]:
    """A parser of lists of an enum's values, in any case of letters."""
    return each(one_of(choices))


def ascending(parse: Callable[[str], tuple[Any, ...]]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of lists whose values grow."""

    def checked(text: str) -> tuple[Any, ...]:
        values = parse(text)
        if list(values) != sorted(values):
            raise argparse.ArgumentTypeError("must ascend")
        return values

    return checked


def names(choices: Sequence[Enum]) -> str:
    """For help."""
    return ",".join(str(choice.value) for choice in choices)


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _words(values: Sequence[Any]) -> str:
    return ",".join(str(value) for value in values)
