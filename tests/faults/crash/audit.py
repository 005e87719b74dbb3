"""What must hold between the index and the files beside it, looked at from outside while the server rests."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path


def audit(data_dir: Path, index: Path | None = None) -> list[str]:
    """Everything that is wrong in a data directory right after a start; `index` is a copy of its index, if not that."""
    with closing(sqlite3.connect(f"file:{index or data_dir / 'index.sqlite3'}?mode=ro", uri=True, timeout=30)) as db:
        db.execute("BEGIN")
        extents = db.execute("SELECT version, file_id, file_offset, nbytes FROM extents").fetchall()
        owners = {row[0] for row in db.execute("SELECT version FROM objects UNION SELECT version FROM uploads")}
        short = db.execute(
            "SELECT o.key FROM objects AS o WHERE o.nbytes <>"
            " (SELECT coalesce(sum(e.nbytes), 0) FROM extents AS e WHERE e.version = o.version)"
        ).fetchall()
        integrity = db.execute("PRAGMA quick_check").fetchone()[0]
    sizes = {path.name: path.stat().st_size for path in (data_dir / "extents").glob("*/*")}
    named = {file_id for _, file_id, _, _ in extents if file_id}
    wrong = [] if integrity == "ok" else [f"the index is damaged: {integrity}"]
    wrong += [f"{key!r} has extents of another length than its own" for (key,) in short]
    wrong += [f"file {name} is named by no row" for name in sorted(sizes.keys() - named)]
    wrong += [f"file {name} is missing" for name in sorted(named - sizes.keys())]
    wrong += [f"extents of version {version} are nobody's" for version in sorted({row[0] for row in extents} - owners)]
    wrong += [
        f"{name} has {sizes[name]} bytes, an extent of version {version} ends at {offset + nbytes}"
        for version, name, offset, nbytes in extents
        if name in sizes and sizes[name] < offset + nbytes
    ]
    return wrong + _overlaps(extents)


def _overlaps(extents: list[tuple[int, str, int, int]]) -> list[str]:
    """Extents share all of their bytes (copies) or none."""
    spans = sorted({(name, offset, offset + nbytes) for _, name, offset, nbytes in extents if nbytes})
    pairs = itertools.pairwise(spans)
    return [f"extents of {a[0]} overlap at {b[1]}" for a, b in pairs if a[0] == b[0] and b[1] < a[2]]
