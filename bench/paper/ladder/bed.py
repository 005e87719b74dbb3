"""What the figures share: settings, sizes of the steps, concurrency, a server, and the form of a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.beds.ours import Servers
from bench.core import options
from bench.core.experiment import plain
from bench.core.options import each
from bench.core.show import Json
from descriptors.units import KIB, MIB
from nixl_client.client import Transport
from objectcache.calibration.samples import Cell, cell_json
from objectcache.calibration.servers import LocalServer

FIGURES = ("2", "4", "8", "9", "10", "11", "A8", "A7")
"""The paper's numbers of what can be measured or computed here."""
BLOCK_BYTES = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """What every figure is given. `serve_options` are further ones of `objectcache serve`; `folder` is where stores go
    for the time being; `is_smoke` asks whether it works, not how fast.
    """

    figures: tuple[str, ...] = options.setting("--figures", FIGURES, FIGURES, each(str.upper, FIGURES))
    runs: int = options.runs(5)
    seed: int = options.seed()
    is_smoke: bool = options.sized(False, True)
    transport: Transport = options.choice("--transport", Transport, Transport.UCX, text="of descriptor GETs")
    serve_options: tuple[str, ...] = options.serve_options()
    folder: Path | None = options.folder()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The paper's sizes of blocks, or two of them."""
        return (64 * KIB, MIB) if self.is_smoke else BLOCK_BYTES

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The paper's C: how many requests are in flight."""
        return (8,) if self.is_smoke else (8, 32)


@dataclass
class Session:
    """What the figures of one run share; `stack` ends it."""

    settings: LadderSettings
    stack: ExitStack

    @cached_property
    def server(self) -> LocalServer:
        """The shared server, which starts when a figure first asks for it. Raises LocalServerError."""
        return served(self.settings, self.stack)


def served(settings: LadderSettings, stack: ExitStack, config: str = "") -> LocalServer:
    """A server of our own, which `stack` ends; `config` is TOML. Raises LocalServerError."""
    return Servers(stack, settings.folder, "ladder").serve(config, *settings.serve_options)


class NotRun(Exception):
    """Something that a figure needs is absent here."""


def figure(
    settings: Mapping[str, Any],
    notes: Sequence[str],
    cells: Sequence[Cell] = (),
    rows: Sequence[Json] = (),
    *,
    problem: str = "",
) -> dict[str, Any]:
    """A figure as it is published. `notes` say what a reader must know, `settings` what it takes to run it again,
    `cells` were measured, `rows` computed.
    """
    return {
        "state": "failed" if problem else "done",
        "reason": problem,
        "settings": plain(settings),
        "notes": list(notes),
        "cells": [cell_json(cell) for cell in cells],
        "rows": list(rows),
    }


def even_parts(count: int, parts: int) -> list[range]:
    """`range(count)` cut into at most `parts` consecutive ranges of nearly one length, none of them empty."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds) if first < end]
