"""Where `objectcache bench` finds the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nixl_client.client import Transport
from objectcache.calibration import servers
from tests.support.tree import repository


@pytest.mark.slow
def test_a_checkout_has_benchmarks_wherever_it_is_called_from(tmp_path: Path) -> None:
    """Also one that is installed as editable, which knows the packages of the product only."""
    for package in ("descriptors", "gateway", "nixl_client", "objectcache", "storage_server"):
        (tmp_path / package).symlink_to(repository() / package)
    command = [sys.executable, "-m", "objectcache", "bench", "ladder", "--figures", "A7", "--smoke"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "everything verified" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_bench_server_offers_ucx_where_nixl_is_installed(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    monkeypatch.setattr(servers, "is_available", lambda: is_installed)
    with servers.running_server(None) as server, server.client(Transport.HTTP) as client:
        offered = client.http.request("GET", "/_objectcache/transports").json()
    assert offered["ucx"] == is_installed
