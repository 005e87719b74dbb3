"""Files in a directory where others may put anything in place of a name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from objectcache.adapters import beneath
from objectcache.adapters.beneath import Beneath, UnsafeFileError

SECRET = b"root:x:0:0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of the host that is none of ours."""
    (tmp_path / "host").mkdir()
    file = tmp_path / "host" / "file"
    file.write_bytes(SECRET)
    return file


def linked(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("made"))


def piped(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def listened(path: Path, outside: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def foldered(path: Path, outside: Path) -> None:
    path.mkdir()


NAMED = pytest.mark.parametrize("put_there", [linked, dangling, piped, listened, foldered])
MODES = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC, os.O_APPEND | os.O_RDWR]


@NAMED
@pytest.mark.parametrize("flags", MODES)
def test_what_is_no_file_is_never_opened(
    root: Path, outside: Path, put_there: Callable[[Path, Path], None], flags: int
) -> None:
    """Nothing waits, and nothing outside the directory is read, made or changed."""
    put_there(root / "name", outside)
    with pytest.raises(UnsafeFileError):
        Beneath(root, "name").open(flags)
    with pytest.raises(UnsafeFileError):
        Beneath(root, "name").status()
    assert outside.read_bytes() == SECRET
    assert not outside.with_name("made").exists()


@pytest.mark.parametrize("name", ["a/file", "a/b/file"])
def test_no_folder_of_a_name_may_be_a_link(root: Path, outside: Path, name: str) -> None:
    if name.startswith("a/b"):
        (root / "a").mkdir()
        (root / "a" / "b").symlink_to(outside.parent)
    else:
        (root / "a").symlink_to(outside.parent)
    place = Beneath(root, name)
    for call in (lambda: place.open(os.O_RDONLY), place.status, place.unlink, place.parent.names, place.parent.sync):
        with pytest.raises(UnsafeFileError):
            call()
    with pytest.raises(UnsafeFileError):
        (place.parent / "made").make_folder()
    assert [path.name for path in outside.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["..", "a/../b", "/etc/passwd", "a//b", ".", "a/"])
def test_a_name_stays_beneath_its_directory(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="beneath"):
        Beneath(root, name)


def test_the_directory_itself_may_be_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    """It is the operator's choice, as /data is often a link."""
    (tmp_path / "link").symlink_to(root)
    place = Beneath(tmp_path / "link", "file")
    place.write(b"data")
    assert place.read(10) == b"data"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused_where_everybody_may_write(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Beneath(root, "file")
    place.write(b"data")
    os.chown(root / "file", 12_345, 12_345)
    assert place.read(10) == b"data"  # those who may write there are trusted: a volume's group, a user of before
    root.chmod(0o1777)
    with pytest.raises(UnsafeFileError, match="12345"):
        place.read(10)
    os.chown(root, 12_345, 12_345)  # the directory is theirs
    assert place.read(10) == b"data"
    os.chown(root, 0, 0)
    monkeypatch.setattr(beneath, "_owner_of_new_files", lambda root: 12_345)  # as an NFS server does with root's files
    assert place.read(10) == b"data"


def test_a_file_is_read_up_to_a_bound(root: Path) -> None:
    place = Beneath(root, "file")
    place.write(b"12345")
    assert place.read(5) == b"12345"
    with pytest.raises(UnsafeFileError, match="more than 4 bytes"):
        place.read(4)


def test_a_file_is_written_whole_or_not_at_all(root: Path) -> None:
    place = Beneath(root, "file")
    place.write(b"one")
    (root / "file").unlink()
    (root / "file").mkdir()
    (root / "file" / "full").touch()
    with pytest.raises(OSError, match="directory"):
        place.write(b"two")
    assert Beneath(root).names() == ["file"]


def test_names_can_be_changed_beneath_the_directory(root: Path) -> None:
    folder = Beneath(root, "a/b")
    folder.make_folder()
    folder.make_folder()
    one, two = folder / "one", folder / "two"
    one.touch()
    one.link(two)
    with pytest.raises(FileExistsError):
        one.link(two)
    assert folder.names() == ["one", "two"]
    assert folder.first_names(2) == (folder.first_names(3)[0], True)
    assert sorted(folder.first_names(2)[0]) == ["one", "two"]
    assert [(len(names), are_all) for names, are_all in (folder.first_names(1), folder.first_names(0))] == [
        (1, False),
        (0, False),
    ]
    one.rename(Beneath(root, "a/three"))
    assert not one.exists()
    assert Beneath(root, "a").names() == ["b", "three"]
    two.unlink()
    with pytest.raises(FileNotFoundError):
        two.unlink()
    assert not Beneath(root, "a/none").is_folder()
    assert str(folder) == str(root / "a" / "b")


def test_a_separated_file_keeps_its_holes(root: Path, tmp_path: Path) -> None:
    """Whoever may write there can make a file of a terabyte that takes no disk."""
    path, size = root / "file", 1 << 25
    with path.open("wb") as file:
        file.write(b"front")
        file.seek(size // 2)
        file.write(b"middle")
        file.truncate(size)
    kept = tmp_path / "kept"
    os.link(path, kept)
    Beneath(root, "file").separate()
    assert path.stat().st_ino != kept.stat().st_ino
    assert path.read_bytes() == kept.read_bytes()
    assert path.stat().st_blocks == kept.stat().st_blocks
