"""Open files: which stay open, and how many are looked at to make room."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.open_files import OpenFiles

FILES_MAX = 64


class Asked:
    """Pins of files, that count how often they are asked for."""

    def __init__(self) -> None:
        self.pinned: set[str] = set()
        self.count = 0

    def is_pinned(self, file_id: str) -> bool:
        self.count += 1
        return file_id in self.pinned


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def files(tmp_path: Path, asked: Asked) -> OpenFiles:
    for number in range(2 * FILES_MAX):
        (tmp_path / str(number)).write_bytes(b"x")
    root = Beneath(tmp_path)
    return OpenFiles(
        root.__truediv__, asked.is_pinned, threading.Lock(), FILES_MAX, Disk(), direct_threads=0, errors_are_damage=True
    )


def test_files_stay_open_until_another_needs_their_room(files: OpenFiles, asked: Asked) -> None:
    """The longest unused goes; one that is pinned stays."""
    asked.pinned = {"0"}
    descriptors = {number: files.held_descriptor(str(number)) for number in range(FILES_MAX)}
    assert {number: files.held_descriptor(str(number)) for number in range(FILES_MAX)} == descriptors
    files.held_descriptor(str(FILES_MAX))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors.pop(1))
    assert files.count == FILES_MAX
    assert {number: files.held_descriptor(str(number)) for number in descriptors} == descriptors
    files.close()


def test_room_is_made_by_looking_at_no_more_files_than_it_takes(files: OpenFiles, asked: Asked) -> None:
    """Each read of a file that is not open would look at hundreds of them, under a lock that all reads need."""
    for number in range(2 * FILES_MAX):
        files.held_descriptor(str(number))
    assert files.count == FILES_MAX
    assert asked.count == FILES_MAX
    files.close()
