"""Gateways and storage servers: secrets that are replaced while they run, and TLS between them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER
from tests.support.certificates import certificate
from tests.support.clusters import Process
from tests.support.requests import request, s3_client
from tests.support.servers import CONFIG
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs_server
OLD, NEW = "old-" * 10, "new-" * 10


class Pair:
    """A gateway and a storage server, in processes of their own, each with a file of secrets of its own."""

    def __init__(self, folder: Path, server_options: tuple[str, ...], gateway_options: tuple[str, ...]) -> None:
        self.server_secret, self.gateway_secret = folder / "server-secret", folder / "gateway-secret"
        config = folder / "config.toml"
        config.write_text(CONFIG)
        arguments = [
            "storage-server",
            "--data",
            str(folder / "data"),
            "--listen",
            "127.0.0.1:0",
            "--config",
            str(config),
        ]
        self.server = Process([*arguments, "--peer-secret-file", str(self.server_secret), *server_options], {})
        self._gateway = ["gateway", "--port", "0", "--config", str(config), "--peer-secret-file",
                         str(self.gateway_secret), *gateway_options]  # fmt: skip
        self.gateway = Process([], {})

    def start(self) -> None:
        self.server.start()
        self.gateway.arguments = [*self._gateway, "--storage", self.server.url]
        self.gateway.start()

    def is_served(self) -> bool:
        """Whether a call gets through."""
        with contextlib.closing(s3_client(self.gateway.url)) as s3:
            try:
                s3.list_buckets()
            except (ClientError, BotoCoreError):
                return False
        return True

    def reread(self) -> None:
        for process in (self.server, self.gateway):
            process.send(signal.SIGHUP)

    def close(self) -> None:
        self.gateway.kill()
        self.server.kill()


@contextlib.contextmanager
def pair(folder: Path, server_options: tuple[str, ...] = (), gateway_options: tuple[str, ...] = ()) -> Iterator[Pair]:
    made = Pair(folder, server_options, gateway_options)
    try:
        yield made
    finally:
        made.close()


def test_bytes_that_are_no_text_are_refused_like_any_other_signature(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        for file in (both.server_secret, both.gateway_secret):
            file.write_text(f"{OLD}\n")
        both.server.start()
        for name in (AUTH_HEADER, CALL_HEADER):
            headers = {AUTH_HEADER: f"v1 {int(time.time()) + 60} 0 0", CALL_HEADER: "e30=", name: "v1 \xff \xfe \xfd"}
            answer = request(both.server.url, "POST", "/v1/list_buckets", key=None, headers=headers)
            assert answer.status == 403, name


@pytest.mark.slow
def test_a_secret_is_replaced_in_three_steps_without_a_restart_or_a_refusal(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        files = (both.server_secret, both.gateway_secret)
        for file in files:
            file.write_text(f"{OLD}\n")
        both.start()
        assert both.is_served()
        for step in (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n"):
            for file, process in zip(files, (both.server, both.gateway), strict=True):
                file.write_text(step)
                process.send(signal.SIGHUP)
                assert both.is_served()
        both.gateway_secret.write_text(f"{OLD}\n")
        both.reread()
        assert eventually(lambda: not both.is_served())
        both.gateway_secret.write_text("short\n")  # a file that cannot be used changes nothing
        both.gateway.send(signal.SIGHUP)
        assert not both.is_served()
        both.gateway_secret.write_text(f"\n{NEW}\n\n")
        both.gateway.send(signal.SIGHUP)
        assert eventually(both.is_served)


@pytest.mark.slow
def test_peers_speak_tls_with_a_pinned_certificate(tmp_path: Path) -> None:
    own, own_key = certificate(tmp_path, "storage")
    other, _ = certificate(tmp_path, "other")
    options = ("--tls-certificate", own, "--tls-key", own_key)
    with pair(tmp_path, options, ("--peer-ca", own)) as both:
        for file in (both.server_secret, both.gateway_secret):
            file.write_text(f"{OLD}\n")
        both.start()
        assert both.server.url.startswith("https://")
        assert both.is_served()
        both.gateway.kill()
        both.gateway.arguments[both.gateway.arguments.index(own)] = other
        both.gateway.start()
        assert not both.is_served()


@pytest.mark.slow
def test_a_server_may_ask_gateways_for_certificates(tmp_path: Path) -> None:
    own, own_key = certificate(tmp_path, "storage")
    front, front_key = certificate(tmp_path, "gateway")
    options = ("--tls-certificate", own, "--tls-key", own_key, "--peer-ca", front)
    with pair(tmp_path, options, ("--peer-ca", own)) as both:
        for file in (both.server_secret, both.gateway_secret):
            file.write_text(f"{OLD}\n")
        both.start()
        assert not both.is_served()
        both.gateway.kill()
        whole = tmp_path / "gateway-whole.pem"
        whole.write_text(Path(front).read_text() + Path(front_key).read_text())
        both.gateway.arguments += ["--peer-certificate", str(whole)]
        both.gateway.start()
        assert both.is_served()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--peer-certificate", "x"), "needs --peer-ca"),
        (("--peer-ca", "/nowhere.pem"), "--peer-ca"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{OLD}\n")
    command = [sys.executable, "-m", "objectcache", "gateway", "--storage", "http://127.0.0.1:1", "--port", "0"]
    done = subprocess.run(
        [*command, "--peer-secret-file", str(secret), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert problem in done.stderr
