"""`objectcache scrub`: progress while it reads, a line for each damaged object, and an exit status."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path

from storage_server.kernel.upkeep.scrub import Damage, scrub, stored_bytes

CLEAN, DAMAGED, UNREADABLE = 0, 1, 2


def run(directory: Path, report: Path | None) -> int:
    """The exit status: 0 all sound; 1 something is damaged; 2 this is not a store."""
    index = directory / "index.sqlite3"
    if not index.exists():
        print(f"objectcache: {index}: no such file", file=sys.stderr)
        return UNREADABLE
    try:
        damages, extent_count, nbytes = _read_all(directory)
    except (sqlite3.Error, OSError) as error:
        print(f"objectcache: {index}: {error}", file=sys.stderr)
        return UNREADABLE
    for damage in damages:
        name = f"{damage.bucket}/{damage.key}"
        print(f"{name} (part {damage.part_number}), bytes {damage.start} to {damage.end - 1}: {damage.reason}")
    if report is not None:
        fields = {"extents": extent_count, "bytes": nbytes, "damaged": [asdict(damage) for damage in damages]}
        text = json.dumps(fields, indent=2) + "\n"
        if str(report) == "-":
            sys.stdout.write(text)
        else:
            report.write_text(text)
    else:
        print(f"{extent_count} extents, {nbytes} bytes read; {len(damages)} damaged")
    return DAMAGED if damages else CLEAN


def _read_all(directory: Path) -> tuple[list[Damage], int, int]:
    _, total = stored_bytes(directory)
    damages: list[Damage] = []
    extent_count = done = 0
    for checked in scrub(directory):
        extent_count += 1
        done += checked.nbytes
        if checked.damage is not None:
            damages.append(checked.damage)
        _show_progress(done, total)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return damages, extent_count, done


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        share = done / total if total else 1.0
        bar = "#" * round(30 * min(share, 1.0))
        print(f"\rscrub [{bar:<30}] {share:4.0%} of {total / 2**20:.0f} MiB", end="", file=sys.stderr)
