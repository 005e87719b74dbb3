"""Space comes back while the file system does not answer for one file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data import replaceable_threads
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import ExtentFiles


class HangingDisk(Disk):
    """The first file that is unlinked hangs until `answers` is set, and each other one's name is noted."""

    def __init__(self) -> None:
        self.begun, self.answers, self.another = threading.Event(), threading.Event(), threading.Event()
        self.unlinked = list[str]()

    def unlink(self, place: Beneath) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.answers.wait(60)
        super().unlink(place)
        self.unlinked.append(place.name)
        self.another.set()


@pytest.fixture
def disk() -> Iterator[HangingDisk]:
    disk = HangingDisk()
    yield disk
    disk.answers.set()


def test_a_file_that_cannot_be_deleted_keeps_no_other_file(
    tmp_path: Path, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded cache would take nothing any more."""
    monkeypatch.setattr(replaceable_threads, "SLOW_S", 0.01)
    files = ExtentFiles(tmp_path, 8, disk)
    ids = [f"{number:032x}" for number in range(3)]
    for file_id in ids:
        place = files.place(file_id)
        place.parent.make_folder()
        place.write(b"")
        files.add(file_id)
    files.dispose(ids[0])
    assert disk.begun.wait(60)
    files.dispose(ids[1])
    assert disk.another.wait(60)
    assert disk.unlinked == [ids[1]]
    disk.answers.set()
    files.dispose(ids[2])
    files.close()
    assert sorted(disk.unlinked) == ids
    assert files.count() == 0
