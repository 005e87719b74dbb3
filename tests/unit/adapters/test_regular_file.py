"""Files that may be something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from objectcache.adapters.regular_file import read_regular


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    """Kubernetes mounts secrets, and model hubs keep models, behind links."""
    (tmp_path / "file").write_bytes(b"said")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_regular(tmp_path / name, 4) == b"said"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_regular(tmp_path / "file", 3)


@pytest.mark.parametrize("kind", ["fifo", "folder", "nothing"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    with pytest.raises(OSError, match=r"no file|directory|No such"):
        read_regular(place, 4)
