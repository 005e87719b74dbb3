"""`objectcache doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from descriptors.conditions import NO_WRITE_CONDITION
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import PutRequest, ReadRequest
from objectcache.cli import doctor, doctor_client, doctor_devices
from objectcache.cli.doctor import PROBE_BYTES, upstream_findings
from objectcache.cli.doctor_findings import Finding, FindingState, described
from storage_server.settings import RemoteDramSettings, UpstreamSettings
from tests.support.foreign_services import moto_service
from tests.support.requests import OWNER, s3_client
from tests.support.servers import Stack, stack
from tests.support.tree import repository


def test_what_to_do_stands_below_what_was_found() -> None:
    text = described(
        [Finding("a", FindingState.GOOD, "there"), Finding("long", FindingState.PROBLEM, "not there", "change it")]
    )
    assert text.splitlines() == ["good     a     there", "problem  long  not there", "               -> change it"]


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_networks_that_are_up_have_their_speed(tmp_path: Path) -> None:
    """As the kernel writes it: a link that is down, and a virtual one, have none."""
    interfaces = {
        "eth0": ("100000", "up", "1"),
        "eth1": ("-1", "up", "1"),
        "eth2": ("25000", "down", "1"),
        "lo": ("", "up", "772"),
    }
    for name, texts in interfaces.items():
        written(
            tmp_path, {f"{name}/{part}": text for part, text in zip(("speed", "operstate", "type"), texts, strict=True)}
        )
    found = [(each.what, each.found) for each in doctor_devices.networks(tmp_path)]
    assert found == [("network eth0", "100 Gbps"), ("network eth1", "speed not told")]
    assert doctor_devices.networks(tmp_path / "none")[0].state is FindingState.MISSING


def test_a_gpu_is_told_by_its_drivers_files_where_there_is_no_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_devices, "ASK_GPUS", ("no-such-command",))
    assert doctor_devices.gpu(tmp_path) == Finding("GPU", FindingState.MISSING, "none")
    card = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01\nGCC version: 12\n"
    written(tmp_path / "driver/nvidia", {"gpus/0000:01:00.0/information": card, "version": version})
    told = "NVIDIA H100 80GB HBM3; driver NVIDIA UNIX x86_64 Kernel Module  535.183.01"
    assert doctor_devices.gpu(tmp_path) == Finding("GPU", FindingState.GOOD, told)
    says = ("printf", "A100, 550.1\\nA100, 550.1\\n")
    monkeypatch.setattr(doctor_devices, "ASK_GPUS", says)
    assert doctor_devices.gpu(tmp_path).found == "A100, A100; driver 550.1"


@pytest.mark.needs_server
def test_the_master_of_remote_dram_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        settings = RemoteDramSettings(f"mooncake://127.0.0.1:{bound.getsockname()[1]}")
        assert doctor_devices.remote_dram_findings(settings)[-1].state is FindingState.GOOD
    gone = doctor_devices.remote_dram_findings(settings)[-1]
    assert (gone.what, gone.state) == ("mooncake master", FindingState.PROBLEM)


def doctored(*arguments: str, account: tuple[str, str] = OWNER) -> tuple[int, dict[str, Any]]:
    """The exit status, and the findings by what was looked at."""
    keys = dict(zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), account, strict=True))
    environment = {**os.environ, **{f"OBJECTCACHE_UPSTREAM_{name}": value for name, value in keys.items()}}
    command = [sys.executable, "-m", "objectcache", "doctor", "--json", "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=repository(), env=environment)
    assert done.stderr == ""
    return done.returncode, {each["what"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack("together", tmp_path_factory.mktemp("doctor")) as running:
        s3_client(running.url).create_bucket(Bucket="probed")
        yield running


@pytest.mark.slow
@pytest.mark.needs_server
def test_it_looks_at_the_host_the_directory_and_the_service(home: Stack, tmp_path: Path) -> None:
    """And leaves nothing behind."""
    arguments = ("--data", str(tmp_path / "new" / "data"), "--upstream", home.url, "--bucket", "probed")
    _, found = doctored(*arguments)
    for what in ("Python", "kernel", "aiohttp", "hole punching", "upstream", "upstream bandwidth"):
        assert found[what]["state"] == "good", found[what]
    assert "MB/s" in found["upstream bandwidth"]["found"]
    assert {found[f"upstream {what}"]["state"] for what in ("trailers", "conditions")} == {"good"}
    assert {"userfaultfd", "io_uring", "locked memory", "open files", "RDMA", "GPU", "UCX", "O_DIRECT"} <= set(found)
    assert any(what.startswith("network") for what in found)
    if found["nixl-cu12"]["state"] == "good":
        assert re.match(r"\d+\.\d+", found["UCX"]["found"])
    assert s3_client(home.url).list_objects_v2(Bucket="probed")["KeyCount"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.needs_server
@pytest.mark.parametrize(
    ("endpoint", "account"),
    [("http://127.0.0.1:1", OWNER), ("", ("OWNERKEY", "another secret"))],
    ids=["gone", "account"],
)
def test_a_service_that_cannot_be_used_is_a_problem(home: Stack, endpoint: str, account: tuple[str, str]) -> None:
    status, found = doctored("--upstream", endpoint or home.url, "--bucket", "probed", account=account)
    assert (status, found["upstream"]["state"]) == (1, "problem")
    assert "upstream bandwidth" not in found


@pytest.mark.slow
@pytest.mark.environments
@pytest.mark.needs_server
@pytest.mark.timeout(180)
def test_it_tries_services_of_others_making() -> None:
    with moto_service() as service:
        s3 = s3_client(service.endpoint, (service.access_key, service.secret_key))
        s3.create_bucket(Bucket="probed")
        arguments = ("--upstream", service.endpoint, "--bucket", "probed")
        _, found = doctored(*arguments, account=(service.access_key, service.secret_key))
        for what in ("trailers", "conditions", "bandwidth"):
            assert found[f"upstream {what}"]["state"] == "good", found
        assert "Contents" not in s3.list_objects_v2(Bucket="probed")


class Careless:
    """A service that ignores conditions and knows no trailers."""

    def __init__(self, *_: object) -> None:
        self.deleted: list[str] = []

    async def list_buckets(self, access_key: str) -> list[object]:
        return []

    async def put_object(self, access_key: str, request: PutRequest, body: object) -> None:
        if request.checksum is not None:
            raise ServerError(ErrorCode.SLOW_DOWN, "knows no trailers", retryable=True)

    async def head_object(self, access_key: str, request: ReadRequest) -> object:
        return SimpleNamespace(info=SimpleNamespace(etag="1" * 32))

    @asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[object]:
        async def body() -> AsyncIterator[bytes]:
            yield bytes(PROBE_BYTES // 2)

        yield SimpleNamespace(body=body())

    async def delete_object(self, access_key: str, bucket: str, key: str) -> None:
        raise ServerError(ErrorCode.INTERNAL_ERROR, "not today")


class Strict(Careless):
    """A service that refuses whatever has a condition."""

    async def put_object(self, access_key: str, request: PutRequest, body: object) -> None:
        if request.condition != NO_WRITE_CONDITION:
            raise CallerError(ErrorCode.PRECONDITION_FAILED, "no", field="if-match")


async def test_a_condition_that_holds_and_is_refused_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "UpstreamObjects", Strict)
    findings = await upstream_findings(UpstreamSettings("http://127.0.0.1:1", *OWNER), "probed")
    found = {each.what: each.found for each in findings}
    assert found["upstream conditions"] == "If-Match is refused on writes where it holds"


async def test_what_it_lacks_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "UpstreamObjects", Careless)
    findings = await upstream_findings(UpstreamSettings("http://127.0.0.1:1", *OWNER), "probed")
    found = {each.what: each for each in findings}
    assert found["upstream trailers"].state is FindingState.MISSING
    said = "If-None-Match: * is ignored on writes; If-Match is ignored on writes"
    assert found["upstream conditions"].found == said
    assert found["upstream bandwidth"].state is FindingState.PROBLEM
    assert "could not be deleted" in capsys.readouterr().err


def test_a_shared_directory_is_tried(tmp_path: Path) -> None:
    def findings(path: Path) -> list[Finding]:
        return asyncio.run(upstream_findings(UpstreamSettings(f"file://{path}"), None))

    tmp_path.chmod(0o700)
    found = {each.what: each for each in findings(tmp_path)}
    assert found["shared directory"].state is FindingState.GOOD
    assert found["shared bandwidth"].state is FindingState.GOOD
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o777)
    open_to_all = findings(tmp_path)[0]
    assert (open_to_all.state, "chmod" in open_to_all.advice) == (FindingState.PROBLEM, True)
    (gone,) = findings(tmp_path / "gone")
    assert (gone.state, "mounted" in gone.advice) == (FindingState.PROBLEM, True)


def doctored_there(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status and the findings by what they are about."""
    command = [sys.executable, "-m", "objectcache", "doctor", "--json", "-", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=repository())
    assert ended.stdout, ended.stderr
    return ended.returncode, {each["what"]: each for each in json.loads(ended.stdout)["findings"]}


@pytest.mark.slow
class TestAServerAsItsClientsFindIt:
    """`doctor --endpoint`."""

    @pytest.fixture(autouse=True)
    def account(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])

    def test_all_is_well(self, servers: Stack) -> None:
        s3 = servers.s3()
        s3.create_bucket(Bucket="doctored")
        _, found = doctored_there("--endpoint", servers.url, "--bucket", "doctored")
        assert {name: found[name]["state"] for name in ("server", "clock", "version", "key and bucket")} == {
            "server": "good",
            "clock": "good",
            "version": "good",
            "key and bucket": "good",
        }
        assert re.search(r"(shm|ucx): \d+\.\d\d GB/s, first layer after", found["rate"]["found"])
        assert s3.list_objects_v2(Bucket="doctored")["KeyCount"] == 0

    def test_without_a_bucket_nothing_is_written(self, servers: Stack) -> None:
        _, found = doctored_there("--endpoint", servers.url)
        assert found["bucket and rate"]["advice"] == "--bucket NAME tries them"

    def test_a_wrong_key_is_told(self, servers: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        status, found = doctored_there("--endpoint", servers.url, "--bucket", "chunks")
        assert status == 1
        assert "SignatureDoesNotMatch" in found["version"]["found"]
        assert found["key and bucket"]["state"] == "problem"
        assert "rate" not in found

    def test_a_server_that_is_not_there_is_told(self) -> None:
        status, found = doctored_there("--endpoint", "http://127.0.0.1:1")
        assert status == 1
        assert found["server"]["found"] == "no ObjectCache at http://127.0.0.1:1: Connection refused"
        assert "clock" not in found


def test_a_clock_that_is_wrong_is_told() -> None:
    assert doctor_client.clock("Thu, 01 Jan 2026 00:00:00 GMT", 1767225600.5).state is FindingState.GOOD
    late = doctor_client.clock("Thu, 01 Jan 2026 00:10:00 GMT", 1767225600.0)
    assert (late.state, late.found) == (FindingState.PROBLEM, "600 s behind the server's")
    assert doctor_client.clock("soon", 0.0).state is FindingState.MISSING
