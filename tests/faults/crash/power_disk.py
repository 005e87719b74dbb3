"""A disk whose power can be cut: it knows which bytes and names no completed sync covers, and can lose them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from random import Random

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk

PAGE_BYTES = 4096


class Loss(Enum):
    """What becomes of everything unsynced in one cut; TORN decides page by page and name by name."""

    NOTHING = auto()
    EVERYTHING = auto()
    TORN = auto()


@dataclass(frozen=True, slots=True)
class FileState:
    """What of a file is not safe: whether its name is, which ranges are not, and the size that is."""

    is_named: bool = False
    is_unlinked: bool = False
    unsynced: tuple[tuple[int, int], ...] = ()
    synced_bytes: int = 0


@dataclass(slots=True)
class PowerDisk(Disk):
    """Counts writes, syncs, creations and removals; `on_operation` is called before each, while no other is under way.

    Nothing is really synced: what a sync would have covered is noted. Removed files stay in `graveyard` until their
    directory is synced, since until then they may come back.
    """

    graveyard: Path
    on_operation: Callable[[int], None] = lambda _: None
    states: dict[str, FileState] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _count: int = 0

    def create(self, place: Beneath) -> int:
        with self._lock:
            self.about_to()
            fd = Disk.create(self, place)
            self.states[place.name] = FileState()
            return fd

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            self.about_to()
            count = Disk.write(self, fd, view, offset)
            name = _name(fd)
            state = self.states[name]
            self.states[name] = replace(state, unsynced=(*state.unsynced, (offset, count)))
            return count

    def sync(self, fd: int) -> None:
        """Covers what was written before it began. The pause lets others write meanwhile."""
        name = _name(fd)
        with self._lock:
            self.about_to()
            covered = self.states.setdefault(name, _safe(Path(f"/proc/self/fd/{fd}"))).unsynced
            nbytes = os.fstat(fd).st_size
        with self._lock:
            state = self.states[name]
            left = tuple(one for one in state.unsynced if one not in covered)
            self.states[name] = replace(state, unsynced=left, synced_bytes=max(nbytes, state.synced_bytes))

    def sync_directory(self, place: Beneath) -> None:
        with self._lock:
            self.about_to()
            for name, state in list(self.states.items()):
                if name[:2] != place.name:
                    continue
                if state.is_unlinked:
                    del self.states[name]
                    (self.graveyard / name).unlink()
                else:
                    self.states[name] = replace(state, is_named=True)

    def unlink(self, place: Beneath) -> None:
        path = place.path
        with self._lock:
            self.about_to()
            if path.exists():
                os.link(path, self.graveyard / path.name)
                old = self.states.get(path.name, _safe(path))
                self.states[path.name] = replace(old, is_unlinked=True)
                Disk.unlink(self, place)

    def about_to(self) -> None:
        self._count += 1
        self.on_operation(self._count)


def _name(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}").readlink().name


def _safe(path: Path) -> FileState:
    return FileState(is_named=True, synced_bytes=path.stat().st_size)


def extents_after_cut(
    source: Path, graveyard: Path, states: dict[str, FileState], target: Path, loss: Loss, rng: Random
) -> dict[str, FileState]:
    """Copy DIR/extents as a power cut may leave it. Returns the states that go on: with no loss, those there were."""
    for path in [*(source / "extents").glob("*/*"), *graveyard.iterdir()]:
        state = states.get(path.name) or _safe(path)
        if not (state.is_named or _survives(loss, rng)):
            continue
        if state.is_unlinked and (loss is Loss.NOTHING or rng.random() < 0.5):
            continue
        copy = target / "extents" / path.name[:2] / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        if loss is not Loss.NOTHING:
            _lose(copy, state, loss, rng)
    return {name: state for name, state in states.items() if not state.is_unlinked} if loss is Loss.NOTHING else {}


def _lose(path: Path, state: FileState, loss: Loss, rng: Random) -> None:
    """Zero, or cut off, what no sync covered."""
    with path.open("r+b") as file:
        for start, end in _pages(state.unsynced):
            if not _survives(loss, rng):
                file.seek(start)
                file.write(bytes(end - start))
        nbytes = path.stat().st_size
        if nbytes > state.synced_bytes and not _survives(loss, rng):
            file.truncate(rng.randrange(state.synced_bytes, nbytes))


def _pages(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Each range cut at page boundaries: the disk writes pages, in any order."""
    for offset, nbytes in ranges:
        start = offset
        while start < offset + nbytes:
            end = min((start // PAGE_BYTES + 1) * PAGE_BYTES, offset + nbytes)
            yield start, end
            start = end


def _survives(loss: Loss, rng: Random) -> bool:
    return loss is Loss.NOTHING or (loss is Loss.TORN and rng.random() < 0.5)
