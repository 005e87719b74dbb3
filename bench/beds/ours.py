"""Servers of ours for one measurement: with a configuration, or in front of a home of their chunks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.beds.kv_peers.work import S3Target
from objectcache.calibration.servers import BUCKET, REGION, LocalServer, running_server


def target_of(server: LocalServer, bucket: str = BUCKET) -> S3Target:
    """A server of ours as an S3 service."""
    return S3Target(server.url, server.access_key, server.secret_key, bucket, REGION)


def home_table(home: S3Target, further: str = "") -> str:
    """The configuration of a server in front of an S3 service."""
    keys = f'access_key = "{home.access_key}"\nsecret_key = "{home.secret_key}"\nregion = "{home.region}"\n'
    return f'[upstream]\nendpoint = "{home.url}"\n{keys}{further}'


class Servers:
    """Servers, with their files in one folder; `stack` ends them, and removes the folder. Raises LocalServerError."""

    def __init__(self, stack: ExitStack, parent: Path | None, name: str) -> None:
        made = tempfile.TemporaryDirectory(prefix=f"objectcache-{name}-", dir=parent)
        self.stack, self.folder = stack, Path(stack.enter_context(made))
        self._numbers = itertools.count()

    def serve(self, text: str = "", *options: str) -> LocalServer:
        """A server with a bucket, and with a configuration of that text."""
        return self.stack.enter_context(running_server(self.folder, [*self._configured(text), *options]))

    def front(self, text: str, dram_bytes: int, disk_bytes: int, python_path: Sequence[Path] = ()) -> LocalServer:
        """A server with an empty cache in front of the home that the configuration names."""
        options = [*self._configured(text), "--dram-bytes", str(dram_bytes), "--disk-bytes", str(disk_bytes)]
        running = running_server(self.folder, options, makes_bucket=False, python_path=python_path)
        return self.stack.enter_context(running)

    def _configured(self, text: str) -> list[str]:
        file = self.folder / f"config-{next(self._numbers)}.toml"
        file.write_text(text)
        return ["--config", str(file)]
