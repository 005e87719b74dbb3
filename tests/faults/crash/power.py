"""Power cuts: load a store, cut at random moments, lose what nothing had synced, open what is left, and compare.

strict   every acknowledged write is there, every other is there whole or not at all
relaxed  a key shows some version whole, or nothing; and what was acknowledged before the last sync began is there
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ListRequest, ReadRequest
from storage_server.kernel.data import segments
from storage_server.kernel.index import committer
from storage_server.kernel.upkeep import dedup
from storage_server.planning.durability import Durability
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import StorageSettings
from tests.faults.crash.audit import audit
from tests.faults.crash.journal import CrashFailure, Journal
from tests.faults.crash.model import History, Shown
from tests.faults.crash.power_disk import FileState, Loss, PowerDisk, extents_after_cut
from tests.faults.crash.power_index import LogPosition, WatchedIndex, copy_index, log_position, no_commits
from tests.faults.crash.power_load import BUCKET, PACKED_BYTES_MAX, PowerLoad
from tests.faults.crash.versions import pairs

OPERATIONS_MAX = 250
STEPS = 12
SYNC_INTERVAL_S = 0.02
SEGMENT_EXTENTS_MAX = 8
COMPACT_INTERVAL_S = 0.01
DEDUP_TICK_S = 0.005


@dataclass(frozen=True, slots=True)
class Cut:
    """What was left at a moment, and what was known then. `horizon` is when the last sync of everything began."""

    number: int
    is_after_kill: bool
    directory: Path
    loss: Loss
    histories: dict[str, History]
    now: int
    horizon: int
    states: dict[str, FileState]
    log: LogPosition


class Machine:
    """One store under load, and the cuts taken from it."""

    def __init__(self, directory: Path, durability: Durability, rng: Random, before: Cut | None = None) -> None:
        self.durability = durability
        self.cuts: list[Cut] = []
        self._rng = rng
        self._directory = directory
        self._is_after_kill = before is not None
        self._data = before.directory if before is not None else directory / "data"
        self._graveyard = Path(tempfile.mkdtemp(dir=directory))
        self._moments: set[int] = set()
        self.journal = Journal(histories=copy.deepcopy(before.histories) if before is not None else {})
        if before is not None:
            for _ in range(before.now + 1):
                self.journal.tick()
        self._synced = (before.log, before.horizon) if before is not None else (LogPosition(), -1)
        """What the last sync covered: the log up to there, and all that was answered before that moment. One value,
        because a cut may fall between the sync and the note of it.
        """
        self._sync_began = self._synced[1]
        self._log_at_open = log_position(self._data)
        self._disk = PowerDisk(self._graveyard, self._on_operation, dict(before.states) if before is not None else {})

    async def run(self, cuts: int) -> None:
        """Load, with cuts at random operations of the disk."""
        self._moments = set(self._rng.sample(range(1, OPERATIONS_MAX), cuts))
        storage = opened(self._data, self.durability, self._disk)
        try:
            self._watch_syncs(storage)
            await storage.start()
            await self._resolve(storage)
            load = PowerLoad(self.journal, self._rng, [self._rng.randrange(1 << 40)])
            await load.run(storage, STEPS)
        finally:
            await storage.close()
        self.journal.require()

    async def _resolve(self, storage: EmbeddedStorage) -> None:
        """After a kill: what was not answered has been done or has not, and nothing else is missing."""
        wrong: list[str] = []
        shown = await shown_keys(storage, self.journal.histories, wrong)
        for key, history in self.journal.histories.items():
            now = self.journal.tick()
            if shown.get(key) not in history.allowed(now, now):
                wrong.append(f"after the kill {key} shows {shown.get(key)}")
            history.writes = [one for one in history.writes if one.ended < now or one.result == shown.get(key)]
            for write in history.writes:
                write.ended = min(write.ended, now)
        if wrong:
            raise CrashFailure("\n".join(wrong[:10]))

    def _watch_syncs(self, storage: EmbeddedStorage) -> None:
        """Note what the index has synced. Opening it commits once, in full: then all before is synced, too."""
        inner = storage.store.committer
        if log_position(self._data).frames > self._log_at_open.frames or not self._log_at_open.frames:
            self._synced = (log_position(self._data), self._synced[1])
        if self.durability is Durability.STRICT:
            inner.db.execute("PRAGMA wal_autocheckpoint=30")
            return
        inner.db.execute("PRAGMA wal_autocheckpoint=0")
        inner.db = WatchedIndex(inner.db, self._index_synced, self._sync_begins)  # type: ignore[assignment]

    def _sync_begins(self) -> None:
        """The thread that syncs also carries out the changes, so a sync covers all that was answered before it."""
        self._sync_began = self.journal.tick()

    def _index_synced(self) -> None:
        self._synced = (log_position(self._data), self._sync_began)

    def _on_operation(self, number: int) -> None:
        if number in self._moments:
            with no_commits(self._data):
                self._take(number)

    def _take(self, number: int) -> None:
        loss = self._rng.choice(list(Loss))
        target = Path(tempfile.mkdtemp(dir=self._directory))
        states = extents_after_cut(self._data, self._graveyard, self._disk.states, target, loss, self._rng)
        end = log_position(self._data)
        synced_log, horizon = self._synced
        synced = end.frames
        if self.durability is Durability.RELAXED:
            synced = synced_log.frames if synced_log.salt == end.salt else 0
        frames = {
            Loss.NOTHING: end.frames,
            Loss.EVERYTHING: synced,
            Loss.TORN: self._rng.randint(min(synced, end.frames), end.frames),
        }[loss]
        copy_index(self._data, target, frames)
        now, histories = self.journal.snapshot()
        log = LogPosition(end.salt, synced)
        self.cuts.append(Cut(number, self._is_after_kill, target, loss, histories, now, horizon, states, log))


def opened(
    directory: Path, durability: Durability, disk: PowerDisk, compact_interval_s: float = COMPACT_INTERVAL_S
) -> EmbeddedStorage:
    """A small store. It compacts all the time whatever is worth it, or with an interval of 0 nothing."""
    settings = StorageSettings(
        data_dir=directory,
        durability=durability,
        packed_bytes_max=PACKED_BYTES_MAX,
        ucx=(),
        aggregation_bytes=4096,
        window_bytes=4096,
        staging_bytes=4096,
        compact_interval_s=compact_interval_s,
        compact_live_fraction_max=0.95,
        compact_bytes_per_s=1e9,
        dedup_bytes_per_s=1e12,
    )
    return EmbeddedStorage(settings, disk)


async def compare(cut: Cut, durability: Durability, graveyard: Path) -> None:
    """Open what a cut left. Raises CrashFailure for whatever is wrong."""
    storage = opened(cut.directory, durability, PowerDisk(graveyard), compact_interval_s=0.0)
    wrong: list[str] = []
    try:
        await storage.start()
        wrong += audit(cut.directory)
        shown = await shown_keys(storage, cut.histories, wrong)
    finally:
        await storage.close()
    for key, history in cut.histories.items():
        allowed = allowed_after(history, cut, durability)
        if shown.get(key) not in allowed:
            wrong.append(f"{key} shows {shown.get(key)}; allowed are {[str(one) for one in allowed]}")
    if wrong:
        raise CrashFailure(
            f"cut before disk operation {cut.number}{' after a kill' * cut.is_after_kill}, {cut.loss}:\n"
            + "\n".join(wrong[:10])
        )


def allowed_after(history: History, cut: Cut, durability: Durability) -> list[Shown]:
    """What a key may show after a cut. Pure."""
    if durability is Durability.STRICT:
        return history.allowed(cut.now, cut.now)
    since = history.allowed(cut.horizon, cut.now)
    is_changed = any(write.ended >= cut.horizon for write in history.writes[1:])
    return [*since, None] if is_changed else since


async def shown_keys(storage: EmbeddedStorage, histories: Mapping[str, History], wrong: list[str]) -> dict[str, Shown]:
    """What each key shows, every byte read and compared with some version that was written under that key."""
    shown: dict[str, Shown] = {}
    listed = {entry.key for entry in (await storage.objects.list_objects("OWNERKEY", ListRequest(BUCKET))).objects}
    for key, history in histories.items():
        try:
            async with storage.objects.open_object("OWNERKEY", ReadRequest(BUCKET, key)) as read:
                body = b"".join([bytes(piece) async for piece in read.body])
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_KEY or key in listed:
                wrong.append(f"{key}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{key} cannot be read: {error}")
            continue
        info = read.head.info
        for write in history.writes:
            version = write.result
            if (
                version is not None
                and (version.etag, version.nbytes, version.tags)
                == (info.etag, info.nbytes, pairs(info.attributes.tags))
                and version.body() == body
            ):
                shown[key] = version
        if key not in shown or key not in listed:
            wrong.append(f"{key} shows {len(body)} bytes with ETag {info.etag} that nobody wrote there")
    return shown


async def run_cuts(directory: Path, seed: int, durability: Durability, cuts: int) -> int:
    """One machine and its cuts, compared; how many. Segments are short and relaxed durability syncs often, so that
    cuts fall between.
    """
    with (
        patch.object(committer, "RELAXED_SYNC_INTERVAL_S", SYNC_INTERVAL_S),
        patch.object(segments, "SEGMENT_EXTENTS_MAX", SEGMENT_EXTENTS_MAX),
        patch.object(dedup, "TICK_S", DEDUP_TICK_S),
    ):
        return await _run_cuts(directory, seed, durability, cuts)


async def _run_cuts(directory: Path, seed: int, durability: Durability, cuts: int) -> int:
    """A cut that lost nothing is a kill: the store is opened again, loaded, and cut again."""
    rng = Random(seed)
    storage = opened(directory / "data", Durability.STRICT, PowerDisk(directory))
    await storage.objects.create_bucket("k", BUCKET)
    await storage.close()
    machine = Machine(directory, durability, rng)
    compared = 0
    try:
        await machine.run(cuts)
        again = [cut for cut in machine.cuts if cut.loss is Loss.NOTHING][:1]
        for cut in machine.cuts:
            if cut not in again:
                await compare(cut, durability, Path(tempfile.mkdtemp(dir=directory)))
                compared += 1
        for cut in again:
            machine = Machine(directory, durability, rng, cut)
            await machine.run(max(1, cuts // 2))
            for later in machine.cuts:
                await compare(later, durability, Path(tempfile.mkdtemp(dir=directory)))
                compared += 1
    except Exception as error:
        raise CrashFailure(f"seed {seed}, {durability.value}: {error}\n{machine.journal.tail()}") from error
    return compared
