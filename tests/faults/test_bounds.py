"""Bounded caches under writers that never stop, with the server killed in between: tests/faults/bounds.py."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.faults.bounds import KINDS, Flood, upstream_server

SECONDS = 20.0
"""How long each kind runs: a minute in all."""
KILL_EVERY_S = 6.0


@pytest.mark.slow
@pytest.mark.needs_server
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[2], marks=pytest.mark.slow)])  # `make bounds`: all
def test_bounds_hold_at_every_moment(tmp_path: Path, kind: str) -> None:
    """The directory and each bucket stay within theirs. Every byte that is read is right, what nobody declared a cache
    stays, what is pinned or leased stays in the cache itself, and nothing that was acknowledged is lost upstream, where
    it comes later with write = back.
    """
    with contextlib.ExitStack() as stack:
        url = None if kind == "embedded" else stack.enter_context(upstream_server(tmp_path))
        flood = Flood(tmp_path, 20261123, url, writes_back=kind == "written back")
        for _ in flood.run(SECONDS, KILL_EVERY_S):
            pass
    tally = flood.tally
    assert tally.failures == []
    assert tally.kills >= 1  # a busy machine takes its time to start the server again
    assert min(tally.puts, tally.gets, tally.samples) > 20, tally
    assert tally.index_samples > 2, tally
    assert tally.leases_seen > tally.leases > 0, tally
    assert (tally.compared >= tally.puts) is (kind != "embedded"), tally
    assert (tally.most_bucket_bytes > 0) is (kind == "embedded"), tally
