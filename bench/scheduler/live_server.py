"""A server of our own whose scheduler is told, before each run, by which rules to go."""

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
from typing import Any

from bench.scheduler.variants import EPOCH_S_MAX, Variant
from bench.server import BenchServer, BenchServerError, running_server
from nixl_client.client import ObjectCacheClient, Transport

STATUS_PATH = "/_objectcache/scheduler"
POLL_S = 0.005
CHANGE_TIMEOUT_S = 10.0
CHUNKWISE_FRACTION = 0.001
"""Of the link, kept for chunk-major requests, of which there are none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the scheduler goes by."""

    variant: Variant
    link_bytes_per_s: float
    margin_bytes_per_s: float
    gather_s: float

    def table(self) -> str:
        """The table `[scheduler]`. The layer-major requests' part of the link is what the rules say."""
        variant = self.variant
        lines = [
            "[scheduler]",
            f"link_bytes_per_s = {self.whole_link_bytes_per_s!r}",
            f'policy = "{"slack" if variant.policy is None else variant.policy.value}"',
            f'rates = "{"work-conserving" if variant.is_work_conserving else "held"}"',
            f"margin_bytes_per_s = {self.margin_bytes_per_s!r}",
            f"gather_s = {self.gather_s!r}",
            f"epoch_s_max = {EPOCH_S_MAX!r}",
            f"chunkwise_fraction = {CHUNKWISE_FRACTION!r}",
        ]
        return "\n".join([*lines, ""])

    @property
    def whole_link_bytes_per_s(self) -> float:
        """With the part for chunk-major requests."""
        return self.link_bytes_per_s / (1 - CHUNKWISE_FRACTION)

    def hold(self, status: dict[str, Any]) -> bool:
        """Whether the server says that it goes by them."""
        policy = "slack" if self.variant.policy is None else self.variant.policy.value
        rates = "work-conserving" if self.variant.is_work_conserving else "held"
        link = status["link_bytes_per_s"]
        return (
            (status["policy"], status["rates"]) == (policy, rates)
            and link is not None
            and math.isclose(link, self.whole_link_bytes_per_s, rel_tol=1e-6)
            and math.isclose(status["margin_bytes_per_s"], self.margin_bytes_per_s, rel_tol=1e-6)
        )


class LiveServer:
    """A running server, and its configuration."""

    def __init__(self, server: BenchServer, config: Path, storage_table: str, client: ObjectCacheClient) -> None:
        self.server = server
        self._config = config
        self._storage_table = storage_table
        self._client = client

    def go_by(self, rules: Rules) -> None:
        """Change the scheduler's rules. Raises BenchServerError when it does not take them."""
        new = self._config.with_suffix(".new")
        new.write_text(self._storage_table + rules.table())
        new.replace(self._config)
        os.kill(self.server.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + CHANGE_TIMEOUT_S
        while not rules.hold(status := self.status()):
            if time.monotonic() > deadline_s:
                raise BenchServerError(f"the scheduler still goes by {status}, not by {rules}")
            time.sleep(POLL_S)

    def status(self) -> dict[str, Any]:
        """What the scheduler says of itself."""
        found: dict[str, Any] = self._client._http.request("GET", STATUS_PATH).json()
        return found


@contextmanager
def live_server(folder: Path | None, dram_bytes: int, payload_bytes_max: int, rules: Rules) -> Iterator[LiveServer]:
    """A server that sends payloads of at most that many bytes. Raises BenchServerError."""
    storage_table = f"[storage]\ndram_bytes = {dram_bytes}\ndirect_payload_bytes = {payload_bytes_max}\n\n"
    with tempfile.TemporaryDirectory(prefix="objectcache-scheduler-", dir=folder) as name:
        config = Path(name) / "config.toml"
        config.write_text(storage_table + rules.table())
        with (
            running_server(Path(name), ["--config", str(config)]) as server,
            server.client(Transport.HTTP) as client,
        ):
            yield LiveServer(server, config, storage_table, client)
