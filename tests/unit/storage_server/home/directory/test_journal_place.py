"""A journal is written at its place, or not at all: a file system may be unmounted under an open descriptor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from objectcache.adapters.beneath import Beneath
from storage_server.home.directory.journal import OwnJournal
from storage_server.home.directory.rules.records import Record, framed
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.rules.rows import Touched


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


def test_a_torn_frame_behind_a_new_generation_is_cut_off(tmp_path: Path) -> None:
    """The server was killed before its index knew of the generation, and did not start again."""
    frames = [*framed([Record(Touched("bucket", "bbb"), 1, None)])]
    (tmp_path / "writer").mkdir(mode=0o700)
    journal = OwnJournal(Beneath(tmp_path, "writer"), Disk())
    journal.open(0, 0)
    journal.append(frames)
    known = journal.generation, journal.end
    rewrite = journal.begin_rewrite(frames)
    journal.finish_rewrite(rewrite)
    coming = rewrite.generation + 1, rewrite.end
    journal.append(frames)
    whole = journal.end
    journal.append(frames)
    journal.close()
    os.truncate(tmp_path / "writer" / "journal-2", whole + 3)
    with pytest.raises(OSError, match="damaged"):  # of another one nobody knows what lies behind
        journal.open(*known)
    journal.open(*known, coming)
    assert (journal.generation, journal.end) == (2, whole)
    journal.close()


def test_a_rewrite_that_is_given_up_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "writer").mkdir(mode=0o700)
    journal = OwnJournal(Beneath(tmp_path, "writer"), Disk())
    journal.open(0, 0)
    rewrite = journal.begin_rewrite([b"frame"])
    assert (tmp_path / "writer" / "journal-2.new").exists()
    journal.give_up(rewrite)
    assert [path.name for path in (tmp_path / "writer").iterdir()] == ["journal-1"]
    journal.close()


def test_a_rewrite_drops_nothing_that_another_server_has_written(tmp_path: Path) -> None:
    """A server that was started with a copy of this one's data directory writes this journal, too."""
    frames = [*framed([Record(Touched("bucket", "bbb"), 1, None)])]
    (tmp_path / "writer").mkdir(mode=0o700)
    journal, copied = (OwnJournal(Beneath(tmp_path, "writer"), Disk()) for _ in range(2))
    journal.open(0, 0)
    copied.open(0, 0)
    journal.append(frames)
    rewrite = copied.begin_rewrite([])
    with pytest.raises(OSError, match="another server writes this journal"):
        copied.finish_rewrite(rewrite)
    copied.give_up(rewrite)
    assert (tmp_path / "writer" / "journal-1").read_bytes() == frames[0]
    journal.close()
    copied.close()


@pytest.mark.parametrize("is_opened", [True, False])
def test_a_new_generation_with_several_names_is_copied_and_no_closed_file_is_used(
    tmp_path: Path, is_opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup has linked it before it came to count. Where it cannot be opened, the one before stays open."""
    frames = [*framed([Record(Touched("bucket", "bbb"), 1, None)])]
    (tmp_path / "writer").mkdir(mode=0o700)
    journal = OwnJournal(Beneath(tmp_path, "writer"), Disk())
    journal.open(0, 0)
    rewrite = journal.begin_rewrite(frames)
    os.link(tmp_path / "writer" / "journal-2.new", tmp_path / "backup")
    if not is_opened:
        monkeypatch.setattr(Beneath, "separate", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            journal.finish_rewrite(rewrite)
        assert os.fstat(journal._fd).st_ino == (tmp_path / "writer" / "journal-1").stat().st_ino
        monkeypatch.undo()
        journal.find_end_again()
    else:
        journal.finish_rewrite(rewrite)
    journal.append(frames)
    assert (tmp_path / "writer" / "journal-2").read_bytes() == 2 * frames[0]
    assert (tmp_path / "backup").read_bytes() == frames[0]
    rewrite.close()
    journal.close()
