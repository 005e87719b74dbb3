"""A real etcd on loopback, for tests; skipped where Debian's `etcd-server` is not installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import eventually


class EtcdServer:
    """One node, which can be stopped, continued, killed and started again on its data."""

    def __init__(self, directory: Path, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> None:
        """`prefix` is the words before its command, which runs it on the host of this address."""
        self.directory = directory
        self.address, self._prefix = address, prefix
        self.client_port, self.peer_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.client_port}"

    def start(self) -> None:
        peer = f"http://{self.address}:{self.peer_port}"
        command = [*self._prefix, "etcd", "--name", "n1", "--data-dir", str(self.directory)]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"n1={peer}",
        ]
        command += ["--initial-cluster-token", f"t{self.client_port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert eventually(self._is_ready, 30)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def etcd_server(directory: Path) -> Iterator[EtcdServer]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    server = EtcdServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
