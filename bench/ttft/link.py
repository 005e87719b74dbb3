"""The link that is played: the budget of the server's scheduler, with one request at a time that one's rate."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.server import BenchServer, BenchServerError, running_server
from nixl_client.client import ObjectCacheClient, Transport

STATUS_PATH = "/_objectcache/scheduler"
POLL_S = 0.005
CHANGE_TIMEOUT_S = 10.0
CHUNKWISE_FRACTION = 1e-6
"""Of the link, kept back from layer-major requests for chunk-major ones: here there is only one request at a time."""


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """What stays while links change. `gather_s` is how long the scheduler waits for company before it begins an epoch;
    None: its default.
    """

    dram_bytes: int
    gather_s: float | None = None


class PlayedLink:
    """A running server, and its link's rate."""

    def __init__(self, server: BenchServer, config: Path, client: ObjectCacheClient, fixed: FixedConfig) -> None:
        self.server = server
        self._config = config
        self._client = client
        self._fixed = fixed
        self._bytes_per_s: float | None = None

    def data_files(self) -> list[Path]:
        """The store's files of chunks; its index is not among them."""
        return sorted(self._config.parent.rglob("data/extents/*/*"))

    def set(self, bytes_per_s: float | None) -> None:
        """Play a link of that rate from now on; None: do not limit it. Raises BenchServerError."""
        if bytes_per_s == self._bytes_per_s:
            return
        new = self._config.with_suffix(".new")
        new.write_text(config_text(self._fixed, bytes_per_s))
        new.replace(self._config)
        os.kill(self.server.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + CHANGE_TIMEOUT_S
        while not _is_same(self._seen_bytes_per_s(), bytes_per_s):
            if time.monotonic() > deadline_s:
                raise BenchServerError(f"the link is still {self._seen_bytes_per_s()} bytes/s, not {bytes_per_s}")
            time.sleep(POLL_S)
        self._bytes_per_s = bytes_per_s

    def _seen_bytes_per_s(self) -> float | None:
        found = self._client._http.request("GET", STATUS_PATH).json()["link_bytes_per_s"]
        return None if found is None else float(found)


@contextmanager
def served_link(folder: Path | None, fixed: FixedConfig) -> Iterator[PlayedLink]:
    """A server of our own whose link is not limited yet. Raises BenchServerError."""
    with tempfile.TemporaryDirectory(prefix="objectcache-ttft-", dir=folder) as name:
        config = Path(name) / "config.toml"
        config.write_text(config_text(fixed, None))
        with (
            running_server(Path(name), ["--config", str(config)]) as server,
            server.client(Transport.HTTP) as client,
        ):
            yield PlayedLink(server, config, client, fixed)


def config_text(fixed: FixedConfig, link_bytes_per_s: float | None) -> str:
    """The server's config file."""
    lines = ["[storage]", f"dram_bytes = {fixed.dram_bytes}"]
    if link_bytes_per_s is not None:
        lines += ["[scheduler]", 'policy = "equal"', f"chunkwise_fraction = {CHUNKWISE_FRACTION!r}"]
        lines.append(f"link_bytes_per_s = {link_bytes_per_s!r}")
        if fixed.gather_s is not None:
            lines.append(f"gather_s = {fixed.gather_s!r}")
    return "\n".join([*lines, ""])


def _is_same(seen: float | None, wanted: float | None) -> bool:
    if seen is None or wanted is None:
        return seen is wanted
    return math.isclose(seen, wanted, rel_tol=1e-6)
