"""Stores whose relaxed durability becomes strict after a quarter of a second, so that no test waits long for it."""

from __future__ import annotations

import pytest

from storage_server.kernel.index import committer


@pytest.fixture(autouse=True)
def _short_relaxed_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "RELAXED_SYNC_INTERVAL_S", 0.25)
