"""The folder of slots' files, into which others may put anything."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from nixl_client.connectors.llama_cpp.slot_folder import SlotFolder


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    folder = SlotFolder(tmp_path)
    name = folder.new_name()
    with folder.made(name) as file:
        file.reserve(100)
        file[10:13] = np.array([1, 2, 3], np.uint8)
    with folder.read(name) as file:
        assert (len(file), file[9:14].tolist()) == (100, [0, 1, 2, 3, 0])
    folder.remove(name)
    folder.remove(name)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A map of the file would end the process."""
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    with SlotFolder(tmp_path).read("a") as file:
        assert len(file[: 1 << 20]) == 1 << 20
        os.truncate(tmp_path / "a", 4096)
        with pytest.raises(OSError, match="shorter"):
            file[: 1 << 20]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    target, place = tmp_path / "target", tmp_path / "slots" / "a"
    target.write_bytes(b"secret")
    place.parent.mkdir()
    match kind:
        case "link":
            place.symlink_to(target)
        case "fifo":
            os.mkfifo(place)
        case _:
            place.mkdir()
    with pytest.raises(OSError, match="file"), SlotFolder(place.parent).read("a"):
        pass


def test_what_a_killed_process_left_is_removed_and_all_else_stays(tmp_path: Path) -> None:
    """A folder with the name of a file must not keep the proxy from starting."""
    folder = SlotFolder(tmp_path)
    left, other = tmp_path / folder.new_name(), tmp_path / "mine.slot"
    left.write_bytes(b"")
    other.write_bytes(b"")
    (tmp_path / "objectcache-0.slot").mkdir()
    folder.clean()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.slot", "objectcache-0.slot"]
