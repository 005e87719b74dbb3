"""A folder that somebody holds is left alone, and one that nobody holds any more is removed by the next."""

from pathlib import Path

from objectcache.adapters.held_folder import held_folder


def test_a_folder_ends_with_its_block(tmp_path: Path) -> None:
    with held_folder("held-", tmp_path) as folder:
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_held_is_left_alone(tmp_path: Path) -> None:
    with held_folder("held-", tmp_path) as first:
        (first / "file").touch()
        with held_folder("held-", tmp_path) as second:
            assert second != first
        assert (first / "file").exists()


def test_a_folder_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    """A process that is killed leaves its folder, and the system gives its lock back."""
    (tmp_path / "held-left").mkdir()
    (tmp_path / "held-left" / "file").touch()
    (tmp_path / "held-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    with held_folder("held-", tmp_path) as folder:
        assert {each.name for each in tmp_path.iterdir()} == {folder.name, "held-link", "other"}
