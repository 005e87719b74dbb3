"""A journal is written at its place, or not at all: a file system may be unmounted under an open descriptor."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.adapters.beneath import Beneath
from storage_server.home.directory.journal import OwnJournal
from storage_server.kernel.data.disk import Disk


@pytest.mark.parametrize("is_other_there", [True, False])
def test_nothing_is_written_through_a_descriptor_that_lost_its_place(tmp_path: Path, is_other_there: bool) -> None:
    folder = tmp_path / "writer"
    folder.mkdir()
    journal = OwnJournal(Beneath(tmp_path, "writer"), Disk())
    journal.open(0, 0)
    folder.rename(tmp_path / "unmounted")
    folder.mkdir()
    if is_other_there:
        (folder / "journal-1").touch(0o600)
    for write in (lambda: journal.append([b"frame"]), lambda: journal.begin_rewrite([b"frame"])):
        with pytest.raises(OSError, match=r"is the file system mounted|No such file"):
            write()
    assert (tmp_path / "unmounted" / "journal-1").stat().st_size == 0
    folder.rename(tmp_path / "other")
    (tmp_path / "unmounted").rename(folder)
    journal.append([b"frame"])
    assert (folder / "journal-1").read_bytes() == b"frame"
    journal.close()
