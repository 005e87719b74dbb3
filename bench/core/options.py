"""Options of the commands: their parsers, and values that differ between a full run and a smoke run.

The settings of a bench say for each field with which option it is set: `declare` adds the options of a class of
settings to a command, and `filled` makes settings of them. A field has the value of a full run as its default.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from descriptors.descriptor import CHUNK_COUNT_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.units import GIB, KIB, MIB
from objectcache.calibration.content import STAMP_BYTES

RUNS_MAX = 1000
SEED_MAX = 1 << 62
_UNITS = {"": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB}
_SAME = object()
T = TypeVar("T")
Choice = TypeVar("Choice", bound=Enum)
Commands = argparse._SubParsersAction


@dataclass(frozen=True, slots=True)
class Setting:
    """How a field is set: flags, values of a full and of a smoke run, the heading, and argparse's own options."""

    flags: tuple[str, ...]
    full: Any
    smoke: Any
    group: str
    options: Mapping[str, Any]


_SETTING = "setting"


def setting(
    flag: str, full: Any = None, smoke: Any = _SAME, parse: Any = None, text: str = "", group: str = "", **more: Any
) -> Any:
    """A field that an option sets, or without a flag the size of the run alone. `text` is the option's help, to which
    the default is added unless it speaks of one; `more` is for argparse.
    """
    if full is not None and "action" not in more and "default" not in text:
        text = "; ".join(filter(None, (text, f"default: {_said(full)}")))
    options = {"help": text, **more}
    if parse is not None:
        options = {"type": parse, "metavar": "LIST" if isinstance(full, tuple) else "X", **options}
    known = Setting(tuple(flag.split()), full, full if smoke is _SAME else smoke, group, options)
    return field(default=full, metadata={_SETTING: known})


def nested(settings: type) -> Any:
    """A field that has settings of its own, all at their defaults where none are given."""
    return field(default_factory=settings, metadata={_SETTING: settings})


def sized(full: Any, smoke: Any = _SAME) -> Any:
    """A field without an option."""
    return setting("", full, smoke)


def flag(name: str, text: str, given: bool = True, smoke: Any = _SAME) -> Any:
    """A field that is `given` where the option is, and the opposite without."""
    return setting(name, not given, smoke, text=text, action="store_const", const=given)


def count(flag: str, full: Any, smoke: Any = _SAME, least: int = 1, most: int = 1 << 30, **more: Any) -> Any:
    """A field that is a whole number, or a tuple of some."""
    parse: Any = number(least, most)
    return setting(flag, full, smoke, each(parse) if isinstance(full, tuple) else parse, metavar="K", **more)


def choice(flag: str, of: Iterable[Enum], full: Any, smoke: Any = _SAME, text: str = "", **more: Any) -> Any:
    """A field that is one value of an enum, or a tuple of some."""
    known = tuple(of)
    if isinstance(full, tuple):
        return setting(flag, full, smoke, some_of(known), text, **more)
    text = ", ".join(filter(None, (names(known), text)))
    return setting(flag, full, smoke, one_of(known), text, metavar="NAME", **more)


def runs(full: int | None, smoke: int | None = 1, text: str = "counted rounds", **more: Any) -> Any:
    """How often everything is measured."""
    return count("--runs", full, smoke, most=RUNS_MAX, text=text, **more)


def seed() -> Any:
    """The seed of everything that is random."""
    return count("--seed", 1, least=0, most=SEED_MAX)


def folder(what: str = "for the stores", **more: Any) -> Any:
    """Where files are put for the time being."""
    return setting("--folder", None, None, Path, f"{what}; default: temporary files", metavar="DIR", **more)


def moto_python() -> Any:
    """Where moto is."""
    text = "an interpreter that has moto[server]; default: ours"
    return setting("--moto", sys.executable, text=text, metavar="PYTHON")


def serve_options() -> Any:
    """For `objectcache serve`."""
    text = "further options of `objectcache serve`; default: none"
    return setting("--serve-options", (), _SAME, _words_of, text, metavar="TEXT")


def chunk_count(full: int, smoke: int, of: str) -> Any:
    """N."""
    return count("-N --chunks", full, smoke, most=CHUNK_COUNT_MAX, text=f"chunks {of}")


def num_layers(full: int, smoke: int) -> Any:
    """L."""
    return count("-L --layers", full, smoke, most=NUM_LAYERS_MAX, text="layers")


def slice_bytes(full: int, smoke: int, of: str) -> Any:
    """S."""
    text = f"bytes of one layer in one chunk {of}, KiB and MiB understood; default: {full // KIB}KiB"
    return count("-S --slice-bytes", full, smoke, STAMP_BYTES, PER_LAYER_CHUNK_BYTES_MAX, text=text)


def declare(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add the options of settings' fields, under the headings that they name."""
    groups: dict[str, Any] = {"": parser}
    for each in fields(settings):
        known: Setting | type | None = each.metadata.get(_SETTING)
        if isinstance(known, type):
            declare(parser, known)
        elif known is not None and known.flags:
            if known.group not in groups:
                groups[known.group] = parser.add_argument_group(known.group)
            groups[known.group].add_argument(*known.flags, dest=each.name, default=None, **known.options)


def filled(settings: type[T], options: Any, **others: Any) -> T:
    """Settings with the options that are called as their fields are, and with `others`. Where an option was not given,
    the value is that of a full or a smoke run: explicit options win over the size of the run.
    """
    named = dict(others)
    for each in fields(settings):  # type: ignore[arg-type]
        known, given = each.metadata.get(_SETTING), getattr(options, each.name, None)
        if each.name in named:
            continue
        if isinstance(known, type):
            named[each.name] = filled(known, options)
        elif isinstance(known, Setting):
            by_size = known.smoke if options.smoke else known.full
            named[each.name] = given if known.flags and given is not None else by_size
        elif hasattr(options, each.name):
            named[each.name] = given
    return settings(**named)


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


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_said, value))
    return str(value.value if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else value)
