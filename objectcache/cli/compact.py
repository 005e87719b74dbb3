"""`objectcache compact`: rewrite sparse and small segments of a store that is not served, at the disk's full speed."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from descriptors.errors import ObjectCacheError
from objectcache.calibration.samples import progress_bar
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.upkeep.compaction import CompactionTally
from storage_server.settings import StorageSettings

DONE, FAILED, NO_STORE = 0, 1, 2


def run(settings: StorageSettings, report: Path | None) -> int:
    """The exit status: 0 done; 1 segments are damaged, or the disk failed; 2 this is not a store. Raises OSError where
    the store is being served.
    """
    index = settings.data_dir / "index.sqlite3"
    if not index.exists():
        print(f"objectcache: {index}: no such file", file=sys.stderr)
        return NO_STORE
    try:
        tally = asyncio.run(_compact(settings))
    except ObjectCacheError as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return FAILED
    for damaged in tally.damaged:
        print(f"segment {damaged.file_id} stays as it is: {damaged.reason}")
    if report is not None:
        text = json.dumps(asdict(tally), indent=2) + "\n"
        if str(report) == "-":
            sys.stdout.write(text)
        else:
            report.write_text(text)
    else:
        print(
            f"{tally.segments_read} segments became {tally.segments_written}:"
            f" {tally.extents} extents, {tally.nbytes} bytes moved; {len(tally.damaged)} segments damaged"
        )
    return FAILED if tally.damaged else DONE


async def _compact(settings: StorageSettings) -> CompactionTally:
    store = EmbeddedStore(settings)
    try:
        await store.start()
        with progress_bar(None, "segments rewritten") as advance:
            seen = 0

            def count(tally: CompactionTally) -> None:
                nonlocal seen
                advance(tally.segments_read - seen)
                seen = tally.segments_read

            return await store.compactor.compact(on_job=count)
    finally:
        store.close()
