"""The server as a process: workers, TLS, scrub, memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from objectcache.cli.config import ConfigError
from objectcache.cli.listening import tls_of
from tests.clients.server import tls_server
from tests.support.certificates import certificate
from tests.support.memory import MIB, PEAK_BYTES_MAX, measure
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import CONFIG, LocalStack, Stack, started
from tests.support.tree import repository
from tests.support.waiting import eventually


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "objectcache", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=repository(), env={**os.environ, **environment}
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return file


def workers_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found += [child] if "worker" in child.cmdline() else []
    return found


def has_ended(process: psutil.Process) -> bool:
    """Gone, or a zombie nobody in this container waits for."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_workers_answer_as_one_server(tmp_path: Path, config: Path) -> None:
    """What one worker stored, changed or deleted, every other sees at once; each connection is another worker's."""
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--workers", "3", "--config", str(config))
    with started(*serve) as (url, process):
        server = Stack(url, tmp_path / "d", process.pid, [process])
        server.s3().create_bucket(Bucket="shared")

        def use(client: int) -> None:
            for turn in range(12):
                body = os.urandom(turn * 40_000 + client)
                assert server.request("PUT", f"/shared/{client}", body=body).status == 200
                assert server.request("GET", f"/shared/{client}").body == body
            assert server.request("DELETE", f"/shared/{client}").status == 204
            assert server.request("GET", f"/shared/{client}").status == 404

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(use, range(6)))
        assert len(workers_of(process.pid)) == 2


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again_and_all_end_with_the_server(tmp_path: Path, config: Path) -> None:
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--workers", "2", "--config", str(config))
    with started(*serve) as (url, process):
        (worker,) = workers_of(process.pid)
        worker.kill()
        assert eventually(lambda: [w.pid for w in workers_of(process.pid) if w.pid != worker.pid] != [])
        server = Stack(url, tmp_path / "d", process.pid, [process])
        for _ in range(6):
            assert server.request("GET", "/").status == 200
        (worker,) = workers_of(process.pid)
    assert eventually(lambda: has_ended(worker))
    with started(*serve) as (_, process):
        (worker,) = workers_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert eventually(lambda: has_ended(worker))


@pytest.mark.slow
def test_a_worker_that_was_stopped_is_replaced(tmp_path: Path, config: Path) -> None:
    """It would keep its share of all new connections, and answer none of them."""
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--workers", "2", "--config", str(config))
    with started(*serve) as (_, process):
        (worker,) = workers_of(process.pid)
        worker.suspend()
        assert eventually(lambda: [each.pid for each in workers_of(process.pid)] not in ([], [worker.pid]))
        assert has_ended(worker)


@pytest.mark.slow
def test_a_server_that_was_killed_is_started_again_at_once(tmp_path: Path, config: Path) -> None:
    """Its workers hold the port: they end with it, also one that was stopped, and a start waits for that."""
    data = str(tmp_path / "d")
    serve = ("serve", "--data", data, "--workers", "2", "--config", str(config))
    with started(*serve, "--port", "0") as (url, process):
        (worker,) = workers_of(process.pid)
        worker.suspend()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        with started(*serve, "--port", url.rpartition(":")[2]) as (again, _):
            assert again == url
            assert has_ended(worker)


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused_although_workers_share_theirs(tmp_path: Path, config: Path) -> None:
    serve = ("serve", "--port", "0", "--workers", "2", "--config", str(config))
    with started(*serve, "--data", str(tmp_path / "one")) as (url, _):
        port = url.rpartition(":")[2]
        second = ("serve", "--port", port, "--workers", "2", "--config", str(config))
        done = cli(*second, "--data", str(tmp_path / "two"))
        assert done.returncode == 1
        assert "in use" in done.stderr


@pytest.mark.slow
def test_https_with_a_given_certificate(tmp_path: Path) -> None:
    """Clients do the rest in tests/clients/test_clients.py."""
    with tls_server(tmp_path) as (endpoint, ca_file):
        context = ssl.create_default_context(cafile=str(ca_file))
        assert endpoint.startswith("https://")
        with urllib.request.urlopen(f"{endpoint}/_objectcache/health", context=context) as answer:
            assert answer.read() == b'{"status":"ok"}'


@pytest.mark.slow
def test_a_tls_handshake_that_stalls_is_given_up(tmp_path: Path) -> None:
    """Before it is done a connection counts for nobody's limits, so it must not last."""
    with tls_server(tmp_path) as (endpoint, _):
        place = urlsplit(endpoint)
        with contextlib.ExitStack() as held:
            socks = [
                held.enter_context(socket.create_connection((place.hostname, place.port), timeout=30)) for _ in range(3)
            ]
            for sock, garbage in zip(socks, (b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"), strict=True):
                sock.sendall(garbage)
            for sock in socks:
                with contextlib.suppress(ConnectionError):
                    while sock.recv(4096):
                        continue


@pytest.mark.slow
@pytest.mark.parametrize("command", [("serve", "--data", "d"), ("orchestrator", "--engine", "http://127.0.0.1:1")])
def test_tls_files_that_cannot_be_used_are_a_configuration_error(command: tuple[str, ...], tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for words, named in [
        (("--tls-certificate", str(bad)), "needs its key"),
        (("--tls-certificate", str(bad), "--tls-key", str(bad)), "cannot be used"),
    ]:
        found = tuple(str(tmp_path / each) if each == "d" else each for each in command)
        done = cli(*found, "--port", "0", *words, XDG_STATE_HOME=str(tmp_path))
        assert done.returncode == 2
        assert named in done.stderr


@pytest.mark.slow
def test_the_admin_token_is_made_at_the_first_start_and_found_by_the_command(tmp_path: Path) -> None:
    """What docs/guides/orchestrator.md says: no option, and nobody else on this host has it."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    command = ("orchestrator", "--engine", "http://127.0.0.1:1", "--port", "0")
    with started(*command, environment=state) as (url, _):
        token = (tmp_path / "objectcache" / "admin-token").read_text().strip()
        curl = ["curl", "-s", "-H", f"Authorization: Bearer {token}", f"{url}/_orchestrator/status"]
        status = json.loads(subprocess.run(curl, capture_output=True, check=True, timeout=30).stdout)
        assert [engine["url"] for engine in status["engines"]] == ["http://127.0.0.1:1"]
        found = cli("orchestrator", "explain", "no-such-request-id", url, **state)
        assert (found.returncode, "404" in found.stderr) == (1, True), found.stderr
        refused = cli("orchestrator", "explain", "id", url, XDG_STATE_HOME=str(tmp_path / "other"))
        assert refused.returncode == 2
        assert "OBJECTCACHE_ADMIN_TOKEN" in refused.stderr


@pytest.mark.slow
def test_scrub_finds_what_is_damaged_before_anyone_asks_for_it(tmp_path: Path) -> None:
    """On a store that is being served, with the object's name and place; its exit status says so to scripts."""
    with LocalStack(tmp_path / "d") as local:
        request(local.url, "PUT", "/bbb")
        for index in range(5):
            request(local.url, "PUT", f"/bbb/key-{index}", body=os.urandom(3 * MIB))
        clean = cli("scrub", "--data", str(tmp_path / "d"))
        assert (clean.returncode, clean.stdout) == (0, "5 extents, 15728640 bytes read; 0 damaged\n")
        local.damage("bbb", "key-3", 2 * MIB + 5)
        found = cli("scrub", "--data", str(tmp_path / "d"), "--json", "-")
        assert found.returncode == 1
        report = json.loads(found.stdout[found.stdout.index("{") :])
        (damage,) = report["damaged"]
        assert (damage["bucket"], damage["key"], damage["start"], damage["end"]) == (
            "bbb",
            "key-3",
            2 * MIB,
            3 * MIB,
        )
        assert len(request(local.url, "GET", "/bbb/key-2").body) == 3 * MIB
    assert cli("scrub", "--data", str(tmp_path / "nothing")).returncode == 2


@pytest.mark.slow
def test_large_bodies_take_little_memory(tmp_path: Path) -> None:
    """Eight clients at once; `python -m tests.support.memory` does it with 5 GiB each."""
    assert measure(tmp_path, clients=8, nbytes=96 * MIB + 7) < PEAK_BYTES_MAX


@pytest.mark.slow
def test_relaxed_durability_can_be_chosen(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    (tmp_path / "relaxed.toml").write_text('[storage]\ndurability = "relaxed"\n')
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--config", str(tmp_path / "relaxed.toml"))
    with started(*serve, environment=keys) as (url, process):
        server = Stack(url, tmp_path / "d", process.pid, [process])
        server.s3().create_bucket(Bucket="bbb")
        server.s3().put_object(Bucket="bbb", Key="k", Body=b"kept")
        process.kill()
        process.wait(30)
    with started(*serve, environment=keys) as (url, process):
        assert Stack(url, tmp_path / "d", process.pid, [process]).s3().get_object(Bucket="bbb", Key="k")["Body"].read()


def served_certificate(url: str) -> str:
    """The certificate that a new connection gets, as PEM."""
    address = urlsplit(url)
    return ssl.get_server_certificate((address.hostname or "", address.port or 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_renews_the_certificate_and_the_credentials(tmp_path: Path, workers: int) -> None:
    """Certificates of three months are renewed without a restart; files that do not fit change nothing."""
    own, own_key = certificate(tmp_path, "first", "127.0.0.1")
    renewed, renewed_key = certificate(tmp_path, "second", "127.0.0.1")
    live, live_key, config = tmp_path / "live.pem", tmp_path / "live.key", tmp_path / "config.toml"
    shutil.copy(own, live)
    shutil.copy(own_key, live_key)
    config.write_text(CONFIG)
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--workers", str(workers), "--config", str(config))
    with started(*serve, "--tls-certificate", str(live), "--tls-key", str(live_key)) as (url, process):

        def is_known(trusted: str, key: tuple[str, str]) -> bool:
            with contextlib.closing(s3_client(url, key, verify=trusted)) as s3:
                try:
                    s3.list_buckets()
                except s3.exceptions.ClientError as error:
                    return bool(error.response["Error"]["Code"] != "InvalidAccessKeyId")
            return True

        assert served_certificate(url) == Path(own).read_text()
        assert is_known(own, OWNER)
        shutil.copy(renewed, live)  # and not yet its key
        process.send_signal(signal.SIGHUP)
        assert served_certificate(url) == Path(own).read_text()
        shutil.copy(renewed_key, live_key)
        config.write_text(CONFIG.replace(f'"{OWNER[0]}"', '"NEWKEY"'))
        process.send_signal(signal.SIGHUP)
        assert eventually(lambda: all(served_certificate(url) == Path(renewed).read_text() for _ in range(8)))
        assert eventually(lambda: not any(is_known(renewed, OWNER) for _ in range(4)))
        assert is_known(renewed, ("NEWKEY", OWNER[1]))
        config.write_text("no TOML")
        process.send_signal(signal.SIGHUP)
        assert is_known(renewed, ("NEWKEY", OWNER[1]))


def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    """OpenSSL asked for it on the terminal, and the server waited."""
    own, key = certificate(tmp_path, "own")
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", f"{key}.encrypted"],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="the key is encrypted"):
        tls_of(Path(own), Path(f"{key}.encrypted"))
