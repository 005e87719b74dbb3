"""The head of a command: what it is called, its options, what it refuses, how it is run, and how it is published."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.beds.processes import BaselineError
from bench.core.lines import plain as plain
from bench.core.options import Commands, declare, filled
from bench.core.show import Json, Sections, as_text
from descriptors.errors import ObjectCacheError
from objectcache.adapters.nixl_agent import NixlFailure, is_available
from objectcache.calibration.origin import describe_commit, describe_machine
from objectcache.calibration.servers import LocalServerError

FAILURES = (BaselineError, LocalServerError, ObjectCacheError, NixlFailure, TimeoutError, OSError)
"""Errors that end a run early: the command prints one line, and its status is 1."""
WRONG_USE = 2


class WrongUse(Exception):
    """The options ask for something that cannot be done here, or that means nothing. Nothing was measured."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One sub-command. `settings` is the class of its settings, whose fields say their options. `measure` is
    given them, and commit and machine, and returns the result that `published`
    makes: plain values, of which `problem` is the first wrong byte or token. It raises WrongUse for what does not fit
    together, and FAILURES. `show` and `plot` make sections and charts of a result. `charts` is what `--plot` names: a
    file or a folder.
    """

    name: str
    help: str
    description: str
    settings: type
    measure: Callable[[Any, Mapping[str, Any]], Json]
    show: Callable[[Json], Sections]
    plot: Callable[[Json, Path], None]
    charts: str = "FILE"

    def add(self, commands: Commands[argparse.ArgumentParser]) -> None:
        """Add the sub-command."""
        parser = commands.add_parser(self.name, help=self.help, description=self.description)
        declare(parser, self.settings)
        parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
        parser.add_argument("--plot", type=Path, metavar=self.charts, help="draw it there; needs the extra 'demo'")
        parser.set_defaults(command=self.run)

    def run(self, options: argparse.Namespace) -> int:
        """0: done, and every byte right; 1: failed; 2: wrong use."""
        if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
            return _complain("--plot needs matplotlib: pip install matplotlib", WRONG_USE)
        for file in (options.json, options.plot):
            if file is not None and not file.absolute().parent.is_dir():
                return _complain(f"{file.parent}: no such folder", WRONG_USE)
        origin = {**describe_commit(), "machine": describe_machine()}
        try:
            result = self.measure(filled(self.settings, options), origin)
        except WrongUse as error:
            return _complain(str(error), WRONG_USE)
        except FAILURES as error:
            return _complain(str(error), 1)
        except MemoryError:
            return _complain("not enough memory: ask for less", 1)
        print(as_text(result, self.show(result)))
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        if options.plot is not None:
            if self.charts == "DIR":
                options.plot.mkdir(exist_ok=True)
            self.plot(result, options.plot)
        return 0 if result["problem"] is None else 1


def published(name: str, origin: Mapping[str, Any], settings: Any, problem: str | None, **found: Any) -> dict[str, Any]:
    """A result as it is written: whether it is right, where it comes from, its settings, and what was found."""
    return {
        "bench": name,
        "verified": problem is None,
        "problem": problem,
        **origin,
        "settings": plain(settings),
        **{key: plain(value) for key, value in found.items()},
    }


def need_nixl(is_needed: bool, instead: str) -> None:
    """Raises WrongUse where UCX is asked for and NIXL is not installed."""
    if is_needed and not is_available():
        raise WrongUse(f"NIXL is not installed: pip install nixl-cu12, or pass {instead}")


def _complain(message: str, status: int) -> int:
    print(f"objectcache bench: {message}", file=sys.stderr)
    return status
