"""A real etcd on loopback, for tests; skipped where Debian's `etcd-server` is not installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.support.waiting import eventually


class EtcdServer:
    """One node, which can be stopped, continued, killed and started again on its data."""

    def __init__(
        self, directory: Path, address: str = "127.0.0.1", prefix: tuple[str, ...] = (), name: str = "n1"
    ) -> None:
        """`prefix` is the words before its command, which runs it on the host of this address."""
        self.directory = directory
        self.name, self.address, self._prefix = name, address, prefix
        self.client_port, self.peer_port = free_port(), free_port()
        self.nodes = [self]
        """All nodes of its cluster."""
        self.certificate: tuple[str, str] | None = None
        """PEM files of the certificate and the key with which it speaks TLS to clients."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://{self.address}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.address}:{self.peer_port}"

    @property
    def membership(self) -> list[str]:
        """The options that say who the nodes are, of etcd and of `etcdctl snapshot restore`."""
        return [
            *("--name", self.name, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)),
            *("--initial-cluster-token", f"t{self.nodes[0].client_port}"),
        ]

    def start(self) -> None:
        self.spawn()
        assert eventually(self.is_ready, 30)

    def spawn(self) -> None:
        command = [*self._prefix, "etcd", "--data-dir", str(self.directory), *self.membership]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer_url]
        if self.certificate is not None:
            command += ["--cert-file", self.certificate[0], "--key-file", self.certificate[1]]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

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

    def is_ready(self) -> bool:
        """Whether it answers, and a majority of the nodes has a leader."""
        trusted = None
        if self.certificate is not None:
            trusted = ssl.create_default_context(cafile=self.certificate[0])
            trusted.check_hostname = False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1, context=trusted) as answer:
                return b"true" in answer.read()
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def etcd_server(directory: Path, certificate: tuple[str, str] | None = None) -> Iterator[EtcdServer]:
    """One node; it speaks TLS where a certificate is given."""
    require_program("etcd", "etcd-server")
    server = EtcdServer(directory)
    server.certificate = certificate
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def etcd_nodes(directory: Path, count: int = 3) -> Iterator[list[EtcdServer]]:
    """Several nodes that agree by majority."""
    require_program("etcd", "etcd-server")
    nodes = [EtcdServer(directory / f"n{number}", name=f"n{number}") for number in range(1, count + 1)]
    for node in nodes:
        node.nodes = nodes
    try:
        for node in nodes:
            node.spawn()
        for node in nodes:
            assert eventually(node.is_ready, 30)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def require_program(name: str, package: str) -> None:
    """Skip the test where a program is not there."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
