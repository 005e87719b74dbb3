"""Clusters of ours for one measurement: storage servers before one home, and a gateway, each a process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.beds.kv_peers.work import S3Target
from bench.beds.ours import home_table
from nixl_client.client import Client, Transport
from objectcache.calibration.origin import python_path
from objectcache.calibration.servers import LocalServerError

READY = "is listening on "
START_S = 60.0
STOP_S = 30.0
SECRET = "a secret of gateways and storage servers"


class Cluster:
    """Members of these names and one gateway, in a folder of its own; `stack` ends them. Raises LocalServerError."""

    def __init__(self, stack: ExitStack, folder: Path, home: S3Target, names: Sequence[str], dram_bytes: int) -> None:
        self._folder, self._home = folder, home
        self._dram_bytes = dram_bytes
        folder.mkdir()
        (folder / "secret").write_text(SECRET)
        (folder / "config.toml").write_text(home_table(home))
        lines = ['cluster = "bench"', "number = 1"]
        for name in names:
            lines += ["[[members]]", f'name = "{name}"', f'endpoint = "unix:{folder / name}.sock"']
        (folder / "members.toml").write_text("\n".join(lines) + "\n")
        self.members = {name: self._member(name) for name in names}
        self._gateway = self._start("gateway", "--port", "0")
        stack.callback(self._end)
        self.url = ""
        for name in names:
            self._wait(self.members[name])
        self.url = self._wait(self._gateway)

    def client(self, bucket: str, transport: Transport, downlink_bytes_per_s: float | None = None) -> Client:
        """A client of the whole, by the gateway."""
        access_key, secret_key = self._home.access_key, self._home.secret_key
        return Client(
            self.url,
            bucket,
            access_key=access_key,
            secret_key=secret_key,
            transport=transport,
            downlink_bytes_per_s=downlink_bytes_per_s,
        )

    def kill(self, name: str) -> None:
        """SIGKILL a member."""
        with self.members[name] as process:
            process.kill()

    def start_again(self, name: str) -> None:
        """Start a member that was killed, on its data."""
        self.members[name] = self._member(name)
        self._wait(self.members[name])

    def _member(self, name: str) -> subprocess.Popen[str]:
        own = ["--data", str(self._folder / name), "--listen", f"unix:{self._folder / name}.sock", "--name", name]
        return self._start("storage-server", *own, "--ucx", "--dram-bytes", str(self._dram_bytes))

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        common = ["--cluster", f"file:{self._folder / 'members.toml'}", "--config", str(self._folder / "config.toml")]
        command = [sys.executable, "-m", "objectcache", *arguments, *common]
        command += ["--peer-secret-file", str(self._folder / "secret")]
        keys = {"AWS_ACCESS_KEY_ID": self._home.access_key, "AWS_SECRET_ACCESS_KEY": self._home.secret_key}
        environment = {**os.environ, **keys, "PYTHONPATH": python_path()}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def _wait(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], START_S)[0]:
            raise LocalServerError(f"a server did not start within {START_S:.0f} s")
        line = process.stdout.readline()
        if READY not in line:
            raise LocalServerError(f"a server did not start: it said {line!r}")
        return line.strip().partition(READY)[2]

    def _end(self) -> None:
        processes = [self._gateway, *self.members.values()]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with process:
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
