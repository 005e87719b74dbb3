"""The memory that an engine offers, and what others may have put where its link belongs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nixl_client.connectors.vllm_tier import region
from nixl_client.connectors.vllm_tier.region import OfferedRegion


def test_a_second_process_opens_the_memory_of_the_first(tmp_path: Path) -> None:
    first, second = (OfferedRegion(tmp_path / "link", 8192, 1) for _ in range(2))
    assert first.cards(1) == second.cards(1) == [None]
    first.close()
    second.close()
    assert not os.path.lexists(tmp_path / "link")


def test_a_link_whose_engine_has_ended_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    offered = OfferedRegion(tmp_path / "link", 8192, 1)
    assert offered.cards(1) == [None]
    offered.close()


def test_a_file_of_another_kind_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "link").write_bytes(b"1" * 16384)
    with pytest.raises(FileExistsError, match="is not this engine's memory"):
        OfferedRegion(tmp_path / "link", 8192, 1)
    assert (tmp_path / "link").read_bytes() == b"1" * 16384


def test_a_pipe_in_its_place_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "link")
    with pytest.raises(FileExistsError, match="is not this engine's memory"):
        OfferedRegion(tmp_path / "link", 8192, 1)


def test_a_link_of_another_user_is_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(region.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        OfferedRegion(tmp_path / "link", 8192, 1)


def test_a_link_that_another_user_makes_in_between_is_never_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is there at the first look; then somebody is faster than this engine."""
    path, is_there = tmp_path / "link", region._is_there
    looks: list[Path] = []

    def looked(found: Path) -> bool:
        looks.append(found)
        if len(looks) > 1:
            monkeypatch.setattr(region.os, "getuid", lambda: os.geteuid() + 1)
            return is_there(found)
        path.symlink_to(tmp_path / "theirs")
        return False

    (tmp_path / "theirs").write_bytes(bytes(16384))
    monkeypatch.setattr(region, "_is_there", looked)
    with pytest.raises(PermissionError, match="belongs to another user"):
        OfferedRegion(path, 8192, 1)
