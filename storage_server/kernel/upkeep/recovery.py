"""Recovery after a crash under relaxed durability: rows whose bytes did not reach the disk are deleted at the start."""

from __future__ import annotations

from collections.abc import Sequence

from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.transaction import Transaction
from storage_server.planning.extent import CorruptExtentError, Extent

PROOF_BYTES = 1 << 20


async def drop_unsynced(
    suspects: Sequence[tuple[int, int, Extent]], files: ExtentFiles, committer: Committer, io: IoThreads
) -> int:
    """Prove every suspect extent (version, part, extent) and delete objects and parts that fail. Returns how many
    failed.
    """
    if not suspects:
        return 0
    for _, _, extent in suspects:
        if extent.file_id:
            files.add(extent.file_id)
    bad = await io.run(lambda: _unproved(suspects, files))

    def drop(tx: Transaction) -> None:
        for version, number in bad:
            tx.has_moved = True
            if tx.db.execute("DELETE FROM objects WHERE version = ?", (version,)).rowcount:
                tx.drop_extents(version)
            else:
                tx.drop_extents(version, [number])
        tx.db.execute("UPDATE extents SET synced = 1 WHERE synced = 0")

    await committer.commit(drop, frees=True)
    return len(bad)


def _unproved(suspects: Sequence[tuple[int, int, Extent]], files: ExtentFiles) -> list[tuple[int, int]]:
    """Version and part of every suspect that fails its checksums. The others are synced on return, because the bytes
    that were proved may have come from the page cache.
    """
    for file_id in {extent.file_id for _, _, extent in suspects if extent.file_id}:  # an empty body has no file
        files.open.sync(file_id)
    return [(version, number) for version, number, extent in suspects if not is_intact(files, extent)]


def is_intact(files: ExtentFiles, extent: Extent) -> bool:
    """Whether every block of an extent passes its checksum."""
    buffer = memoryview(bytearray(min(PROOF_BYTES, extent.nbytes)))
    try:
        for start in range(0, extent.nbytes, PROOF_BYTES):
            files.open.read_into(extent, start, buffer[: min(PROOF_BYTES, extent.nbytes - start)])
    except CorruptExtentError:
        return False
    return True
