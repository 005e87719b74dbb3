"""The files of a process's metrics have their room before anything is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.adapters import metrics


def test_no_file_has_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fills the memory later than that ends no process: writing to a hole would (SIGBUS)."""
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    metrics._reserve_files()
    found = sorted(tmp_path.iterdir())
    assert [file.name.partition("_")[0] for file in found] == ["counter", "gauge", "histogram"]
    assert all(file.stat().st_blocks * 512 >= metrics.FILE_BYTES for file in found)


def test_a_process_alone_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metrics.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    metrics._reserve_files()
    assert list(tmp_path.iterdir()) == []
