"""A disk that is full, limited, read-only or failing under a running server: clients hear proper errors, what is stored
stays readable, and writing goes on when the disk does.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from descriptors.units import KIB, MIB
from objectcache.adapters import limited_server
from storage_server.kernel.data.extents import extent_place
from storage_server.kernel.upkeep.dedup import TICK_S
from storage_server.planning.durability import Durability
from tests.faults.crash.audit import audit
from tests.faults.crash.client import Client, error_code, tree
from tests.faults.crash.reading import listed
from tests.faults.crash.server import Server
from tests.faults.crash.versions import Piece, md5
from tests.support.faulty_disk import FaultyDisk
from tests.support.requests import Reply
from tests.support.servers import CONFIG, LocalStack
from tests.support.store_bed import files_in, get, opened, put
from tests.support.waiting import eventually, until

BUCKET = "crash"
DISK_BYTES = 48 * MIB
PUTS_MAX = 4000
FAILURES_IN_A_ROW = 12
SIZES = (0, 1, 5000, 300 * KIB, 2 * MIB, 9 * MIB)
FULL = {(507, "InsufficientStorage"), (503, "SlowDown")}
FAILED = FULL | {(500, "InternalError")}
"""Also where a limit is no full disk to the operating system, and where another's body failed in the same segment."""


@dataclass(frozen=True)
class SmallDisk:
    """A memory file system of DISK_BYTES, in a mount namespace of its own that `holder` keeps."""

    holder: int
    inside: Path
    directory: Path

    @property
    def outside(self) -> Path:
        """The data directory as this process sees it."""
        return Path(f"/proc/{self.holder}/root{self.inside}/data")

    def enter(self, *command: str) -> list[str]:
        """A command that runs inside."""
        return ["nsenter", "-t", str(self.holder), "-U", "-m", "--preserve-credentials", *command]

    def remount(self, option: str) -> None:
        """Read-only ("ro") and back ("rw")."""
        subprocess.run(self.enter("mount", "-o", f"remount,{option}", str(self.inside)), check=True)

    @contextlib.contextmanager
    def served(self, mode: Durability = Durability.STRICT, *options: str) -> Iterator[tuple[Server, Client]]:
        """A server on it with these further options, killed when the block ends."""
        with served(self.directory, mode, self.inside / "data", self.enter(), options) as running:
            yield running


@contextlib.contextmanager
def served(
    directory: Path, mode: Durability, data_dir: Path, prefix: list[str], options: Sequence[str] = ()
) -> Iterator[tuple[Server, Client]]:
    config = directory / "config.toml"
    config.write_text(f'[storage]\ndurability = "{mode.value}"\n{CONFIG}')
    server = Server(directory, config, data_dir, prefix, options)
    try:
        with contextlib.closing(Client(server.url(), BUCKET)) as client:
            assert client.call("PUT").status in (200, 409, 507)
            yield server, client
    finally:
        server.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    inside = tmp_path / "disk"
    inside.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES} small {inside} && echo mounted && exec cat"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("this host lets its tests mount nothing")
        yield SmallDisk(holder.pid, inside, tmp_path)


def body(seed: int, nbytes: int) -> bytes:
    return Piece(seed, nbytes).body()


def put_some(client: Client) -> dict[str, bytes]:
    stored = {f"old/{nbytes}": body(nbytes, nbytes) for nbytes in SIZES}
    for key, data in stored.items():
        assert client.call("PUT", key, body=data).status == 200
    return stored


def assert_all_there(client: Client, stored: dict[str, bytes]) -> None:
    """Every byte, and nothing else in the list."""
    for key, data in stored.items():
        reply = client.call("GET", key)
        assert reply.status == 200, (key, reply.body[:300])
        assert reply.body == data, key
    assert listed(client, 1000) == {key: (md5(data), len(data)) for key, data in stored.items()}


def fill(client: Client, stored: dict[str, bytes], nbytes: int, prefix: str) -> list[tuple[int, str]]:
    """Put until nothing goes in any more; the errors. What went in is added to `stored`."""
    errors: list[tuple[int, str]] = []
    in_a_row = 0
    for number in range(PUTS_MAX):
        key, data = f"{prefix}/{number:05}", body(number, nbytes)
        reply = client.call("PUT", key, body=data)
        if reply.status == 200:
            stored[key] = data
            in_a_row = 0
            continue
        errors.append((reply.status, error_code(reply)))
        in_a_row += 1
        if in_a_row == FAILURES_IN_A_ROW:
            return errors
    raise AssertionError("the disk does not fill up")


@pytest.mark.slow
@pytest.mark.parametrize("mode", Durability)
def test_a_full_disk_refuses_writes_serves_reads_and_is_emptied_by_deletes(
    small_disk: SmallDisk, mode: Durability, tmp_path: Path
) -> None:
    """Large objects first, then small ones until the index has no room, either. Deleting must work then: nothing else
    makes room.
    """
    with small_disk.served(mode) as (server, client):
        stored = put_some(client)
        errors = fill(client, stored, 2 * MIB, "large")
        errors += fill(client, stored, 40 * KIB, "middle")
        errors += fill(client, stored, 1, "small")
        assert set(errors) <= FULL
        assert (507, "InsufficientStorage") in errors
        reply = client.call("PUT", "old/5000", body=body(1, 3 * MIB))
        assert (reply.status, error_code(reply)) in FULL
        assert_all_there(client, stored)
        for key in [key for key in stored if key.startswith("large/")]:
            reply = client.call("DELETE", key)
            assert reply.status == 204, (key, reply.body)
            del stored[key]
        assert_all_there(client, stored)
        for number in range(3):
            key, data = f"new/{number}", body(number, MIB)
            assert retried(client, key, data).status == 200
            stored[key] = data
        assert_all_there(client, stored)
        server.kill()
    with small_disk.served(mode) as (_, client):
        for file in small_disk.outside.glob("index.sqlite3*"):  # SQLite cannot follow a path into another namespace
            shutil.copy(file, tmp_path)
        assert audit(small_disk.outside, tmp_path / "index.sqlite3") == []
        assert_all_there(client, stored)


@pytest.mark.slow
def test_workers_on_a_full_disk_and_on_one_that_is_read_only(small_disk: SmallDisk) -> None:
    """Each connection is another process's: all say the same, and what is stored is served by all."""
    with small_disk.served(Durability.STRICT, "--workers", "3") as (server, client):
        stored = put_some(client)
        others = [Client(client.url, BUCKET) for _ in range(5)]
        assert set(fill(client, stored, 9 * MIB, "large")) <= FULL  # files of their own go at once
        for other in others:
            reply = other.call("PUT", "more", body=body(1, 3 * MIB))
            assert (reply.status, error_code(reply)) in FULL
            assert_all_there(other, stored)
        for number, key in enumerate([key for key in stored if key.startswith("large/")]):
            assert others[number % len(others)].call("DELETE", key).status == 204
            del stored[key]
        stored["again"] = body(2, MIB)
        assert retried(others[0], "again", stored["again"]).status == 200
        for other in others:
            assert_all_there(other, stored)
            other.close()
        assert server.terminate() == 0
    small_disk.remount("ro")
    with (
        pytest.raises(AssertionError, match="Read-only file system") as failed,
        small_disk.served(Durability.STRICT, "--workers", "3"),
    ):
        pass
    assert "Traceback" not in str(failed.value)
    small_disk.remount("rw")
    with small_disk.served(Durability.STRICT, "--workers", "3") as (_, client):
        assert_all_there(client, stored)


def retried(client: Client, key: str, data: bytes) -> Reply:
    """As clients repeat what is answered with 503 or 507: the room is given back a moment after a delete."""
    replies: list[Reply] = []

    def is_stored() -> bool:
        replies.append(client.call("PUT", key, body=data))
        assert replies[-1].status == 200 or (replies[-1].status, error_code(replies[-1])) in FULL
        return replies[-1].status == 200

    eventually(is_stored)
    return replies[-1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", Durability)
def test_a_server_starts_on_a_full_disk_and_can_be_emptied(small_disk: SmallDisk, mode: Durability) -> None:
    """Killed when full, and full when it comes back: what it cleans up must not need room."""
    with small_disk.served(mode) as (server, client):
        stored = put_some(client)
        fill(client, stored, 2 * MIB, "large")
        fill(client, stored, 1, "small")
        time.sleep(3 * TICK_S)  # many of these bodies are equal; sharing them must not use up the reserve
        server.kill()
    ballast = small_disk.outside.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(KIB)):
            pass
    with small_disk.served(mode) as (_, client):
        assert_all_there(client, stored)
        ballast.unlink()
        assert client.call("DELETE", "large/00000").status == 204
        assert retried(client, "new", b"new").status == 200


@pytest.mark.slow
def test_a_body_too_large_for_the_disk_leaves_nothing(small_disk: SmallDisk) -> None:
    """Many at once, into files of their own and into a shared segment: all may fail, none may stay in part."""
    with small_disk.served() as (_, client):
        stored = put_some(client)
        url = client.url

        def put(number: int) -> tuple[str, bytes, Reply]:
            own = Client(url, BUCKET)
            data = body(number, 7 * MIB if number % 2 else 12 * MIB)
            reply = own.call("PUT", f"big/{number}", body=data)
            own.close()
            return f"big/{number}", data, reply

        with ThreadPoolExecutor(8) as pool:
            for key, data, reply in pool.map(put, range(8)):
                if reply.status == 200:
                    stored[key] = data
                else:
                    assert (reply.status, error_code(reply)) in FAILED
        assert_all_there(client, stored)
        for key in list(stored):
            assert client.call("DELETE", key).status == 204
        assert retried(client, "again", body(1, 20 * MIB)).status == 200


@pytest.mark.slow
def test_files_that_may_not_grow_further_are_an_error(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: EFBIG from every write past it, of extents and of the index's log."""
    limit = ["sh", "-c", 'ulimit -f 6144; exec "$0" "$@"']  # 3 or 6 MiB, as the shell counts
    with served(tmp_path, Durability.STRICT, tmp_path / "data", limit) as (_, client):
        stored = {"old": body(1, MIB)}
        assert client.call("PUT", "old", body=stored["old"]).status == 200
        for nbytes in (7 * MIB, 12 * MIB):
            for _ in range(2):
                reply = client.call("PUT", "old", body=body(2, nbytes))
                assert (reply.status, error_code(reply)) in FAILED
        for number in range(30):
            key, data = f"small/{number}", body(number, 400_000)
            reply = client.call("PUT", key, body=data)
            assert reply.status == 200 or (reply.status, error_code(reply)) in FAILED
            if reply.status == 200:
                stored[key] = data
        assert len(stored) > 20
        assert_all_there(client, stored)


@pytest.mark.slow
def test_a_read_only_disk_stops_the_start_with_one_line(small_disk: SmallDisk) -> None:
    with small_disk.served() as (server, client):
        stored = put_some(client)
        assert server.terminate() == 0
    small_disk.remount("ro")
    with pytest.raises(AssertionError, match="Read-only file system") as failed, small_disk.served():
        pass
    assert "Traceback" not in str(failed.value)
    small_disk.remount("rw")
    with small_disk.served() as (_, client):
        assert_all_there(client, stored)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultyDisk, Client]]:
    """A live server in this process on a disk that fails as told. The rest of a refused body is waited for, also beside
    other load: otherwise the connection is closed, and this client repeats nothing.
    """
    monkeypatch.setattr(limited_server, "LINGER_S", 60.0)
    disk = FaultyDisk()
    with (
        LocalStack(tmp_path / "data", disk=disk, packed_bytes_max=64 * KIB) as running,
        contextlib.closing(Client(running.url, BUCKET)) as client,
    ):
        assert client.call("PUT").status == 200
        yield disk, client


@pytest.mark.parametrize(
    ("call", "error", "status", "code"),
    [
        ("write", errno.EIO, 500, "InternalError"),
        ("write", errno.EROFS, 500, "InternalError"),
        ("write", errno.ENOSPC, 507, "InsufficientStorage"),
        ("write", errno.EDQUOT, 507, "InsufficientStorage"),
        ("sync", errno.EIO, 500, "InternalError"),
        ("sync", errno.ENOSPC, 507, "InsufficientStorage"),
        ("create", errno.EROFS, 500, "InternalError"),
        ("create", errno.EMFILE, 503, "SlowDown"),
        ("sync_directory", errno.EIO, 500, "InternalError"),
    ],
)
def test_a_failing_disk_is_a_proper_error_to_every_client_and_passes(
    faulty: tuple[FaultyDisk, Client], call: str, error: int, status: int, code: str
) -> None:
    """Puts, overwrites, parts and copied parts; then deletes and tags, which write no bytes, still work."""
    disk, client = faulty
    stored = put_some(client)
    upload_id = tree(client.call("POST", "made-of-parts", "uploads=")).findtext("UploadId")
    part = f"partNumber=1&uploadId={upload_id}"
    disk.fail[call] = error
    attempts: list[tuple[str, str, int, dict[str, str]]] = [
        ("old/5000", "", 300_000, {}),
        ("old/2097152", "", 2 * MIB, {}),
        ("made-of-parts", part, 300_000, {}),
    ]
    attempts.append(("made-of-parts", part, 0, {"x-amz-copy-source": f"/{BUCKET}/old/307200"}))
    for key, query, nbytes, headers in attempts:
        reply = client.call("PUT", key, query, body=body(7, nbytes), headers=headers)
        assert (reply.status, error_code(reply)) == (status, code), (key, query)
    assert_all_there(client, stored)
    assert client.call("DELETE", "old/1").status == 204
    del stored["old/1"]
    disk.fail.clear()
    for key, query, nbytes, headers in attempts:
        assert client.call("PUT", key, query, body=body(8, nbytes), headers=headers).status == 200, (key, query)
        if not query:
            stored[key] = body(8, nbytes)
    assert_all_there(client, stored)


def test_a_disk_that_cannot_be_read_is_an_error_and_never_bytes(faulty: tuple[FaultyDisk, Client]) -> None:
    disk, client = faulty
    stored = put_some(client)
    disk.fail["read"] = errno.EIO
    for key, data in stored.items():
        reply = client.call("GET", key)
        assert (reply.status, error_code(reply)) == (500, "InternalError") if data else reply.status == 200
        assert client.call("HEAD", key).status == 200
    disk.fail.clear()
    assert_all_there(client, stored)


class FullIndex:
    """A connection that has no room to note what is synced, as long as `reserve` is there."""

    def __init__(self, connection: sqlite3.Connection, reserve: Path) -> None:
        self._connection = connection
        self._reserve = reserve
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def executemany(self, sql: str, rows: Any) -> Any:
        if self._reserve.exists() and sql.startswith("UPDATE extents SET synced"):
            self.refused += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._connection.executemany(sql, rows)


async def test_deletes_give_space_back_where_the_index_has_no_room_to_note_what_is_synced(tmp_path: Path) -> None:
    """Deletes themselves may find room in the log, and what is behind them none: then the disk would stay full."""
    store = await opened(tmp_path, durability=Durability.RELAXED, packed_bytes_max=8 * MIB)
    await store.objects.create_bucket("A", "bbb")
    full = FullIndex(store.committer.db, tmp_path / "reserve")
    store.committer.db = full  # type: ignore[assignment]
    for key in ("kept", "deleted"):
        await put(store, key, bytes([1]) * 4 * MIB)
    (segment,) = files_in(store)
    await store.objects.delete_object("k", "bbb", "deleted")
    await until(lambda: full.refused > 0 and extent_place(tmp_path, segment).path.stat().st_blocks * 512 < 5 * MIB)
    assert await get(store, "kept") == bytes([1]) * 4 * MIB
    await put(store, "new", b"new")
    store.close()
