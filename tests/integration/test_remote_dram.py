"""Servers in front of one home that keep chunks in remote DRAM for each other, with Mooncake Store played; and with
Mooncake itself, where it is installed (`make peers`).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.beds.kv_peers.install import MOONCAKE
from bench.beds.kv_peers.running import borrowed_mooncake, running_owner
from bench.beds.processes import BaselineError
from descriptors.descriptor import Delivery
from descriptors.errors import ChunkUnavailable
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from objectcache.adapters.memory_area import SharedArea
from storage_server.home.remote_dram import mooncake_process
from storage_server.settings import RemoteDramSettings, UpstreamSettings, Write
from tests.support.chunks import layer_of, make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream
from tests.support.folder_tier import FolderTier
from tests.support.played_mooncake import NO_MASTER, PlayedMooncake
from tests.support.requests import OWNER, request
from tests.support.servers import CONFIG, LocalStack, started
from tests.support.tree import repository
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedMooncake:
    """The one store that all servers of a test join."""
    store = PlayedMooncake()

    async def joined(settings: RemoteDramSettings, areas: Sequence[SharedArea]) -> PlayedMooncake:
        return store

    monkeypatch.setattr(mooncake_process, "joined", joined)
    monkeypatch.setattr(mooncake_process, "require_client", lambda: None)
    return store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture
def way(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The servers' way home."""
    with FaultyUpstream(home.url) as running:
        yield running


Pair = tuple[LocalStack, LocalStack]


@pytest.fixture
def pair(way: FaultyUpstream, played: PlayedMooncake, tmp_path: Path) -> Iterator[Pair]:
    remote = RemoteDramSettings("mooncake://127.0.0.1:1")
    settings = UpstreamSettings(way.url, *OWNER, remote_dram=remote, read_timeout_s=30.0, connect_timeout_s=30.0)
    with LocalStack(tmp_path / "a", upstream=settings) as one, LocalStack(tmp_path / "b", upstream=settings) as other:
        for each in (one, other):
            assert eventually(lambda each=each: each.storage.upstream.remote.store.is_joined)  # type: ignore[misc]
        yield one, other
        for each in (one, other):
            assert eventually(lambda each=each: each.storage.upstream.fetches.landed_bytes == 0)  # type: ignore[misc]


def fetched(server: LocalStack, keys: list[str], chunks: np.ndarray) -> bool:
    """Whether a delivery of these chunks has the right bytes, layer by layer."""
    with server.client("chunks", "http") as client:
        buffer = client.allocate_buffer(chunks.nbytes)
        buffer[:] = 0
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
        layers = buffer.reshape(LAYOUT.num_layers, len(keys), -1)
        return all(np.array_equal(layers[index], layer_of(chunks, LAYOUT, index)) for index in range(LAYOUT.num_layers))


def stored(home: LocalStack, pair: Pair, tmp_path: Path, seed: int) -> tuple[list[str], np.ndarray]:
    """Chunks at home, with their proof, that no server of the pair has."""
    keys, chunks = make_chunks(N, LAYOUT, seed)
    writer = LocalStack(tmp_path / f"writer{seed}", upstream=UpstreamSettings(home.url, *OWNER))
    with writer as running, running.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys, chunks


def test_a_chunk_that_one_server_fetched_comes_to_the_other_without_home(
    home: LocalStack, way: FaultyUpstream, pair: Pair, played: PlayedMooncake, tmp_path: Path
) -> None:
    one, other = pair
    keys, chunks = stored(home, pair, tmp_path, 11)
    assert fetched(one, keys, chunks)
    assert eventually(lambda: len(played.stored) == N)
    way.choose = lambda _: Fault.RESET
    assert fetched(other, keys, chunks)
    assert other.storage.upstream.remote.hit_count == N
    assert eventually(lambda: other.storage.upstream.fetches.running_count == 0)
    assert other.storage.upstream.fetches.fetched_bytes == 0
    assert fetched(other, keys, chunks)  # from its own cache
    assert other.storage.upstream.remote.hit_count == N


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["wrong bytes", "no master", "garbage", "hangs"])
def test_whatever_it_does_the_bytes_come_from_home(
    home: LocalStack, pair: Pair, played: PlayedMooncake, tmp_path: Path, harm: str
) -> None:
    one, other = pair
    keys, chunks = stored(home, pair, tmp_path, 12)
    assert fetched(one, keys, chunks)
    assert eventually(lambda: len(played.stored) == N)
    if harm == "hangs":
        with played.held():
            assert fetched(other, keys, chunks)
        return
    if harm == "wrong bytes":
        played.corrupts = True
    elif harm == "no master":
        played.fails = NO_MASTER
    else:
        played.stored = {key: os.urandom(len(data)) for key, data in played.stored.items()}
    assert fetched(other, keys, chunks)
    assert eventually(lambda: other.storage.upstream.fetches.fetched_bytes == chunks.nbytes)


@pytest.mark.slow
def test_an_overwrite_and_a_deletion_leave_nothing_there(
    home: LocalStack, pair: Pair, played: PlayedMooncake, tmp_path: Path
) -> None:
    one, other = pair
    keys, chunks = stored(home, pair, tmp_path, 13)
    assert fetched(one, keys, chunks)
    assert eventually(lambda: len(played.stored) == N)
    _, newer = make_chunks(N, LAYOUT, 14)
    with one.client("chunks", "http") as client:
        client.put_chunks(keys[:1], [newer[0]])
        assert len(played.stored) == N - 1
        changed = chunks.copy()
        changed[0] = newer[0]
        assert fetched(other, keys, changed)
        assert eventually(lambda: len(played.stored) == N)
        client.delete(keys)
    assert played.stored == {}
    assert request(one.url, "GET", f"/chunks/{keys[0]}").status == 404


def evicted(server: LocalStack, keys: list[str]) -> None:
    """As eviction does it: clean copies leave the cache."""
    server.call(server.storage.store.objects.delete_objects("", "chunks", keys))


@pytest.mark.parametrize("change", ["overwrite", "DELETE"])
def test_a_change_that_the_store_was_not_told_of_holds_after_a_restart(
    home: LocalStack, played: PlayedMooncake, tmp_path: Path, change: str
) -> None:
    """Both were acknowledged while the store could not be reached. A restart must not bring the old bytes again."""
    settings = UpstreamSettings(home.url, *OWNER, remote_dram=RemoteDramSettings("mooncake://127.0.0.1:1"))
    keys, chunks = stored(home, (home, home), tmp_path, 22)
    _, newer = make_chunks(N, LAYOUT, 23)
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        assert fetched(one, keys, chunks)
        assert eventually(lambda: len(played.stored) == N)
        played.fails = NO_MASTER
        with one.client("chunks", "http") as client:
            if change == "DELETE":
                client.delete(keys)
            else:
                client.put_chunks(keys, list(newer))
    played.fails = 0
    assert len(played.stored) == N
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        if change == "DELETE":
            with pytest.raises(ChunkUnavailable):
                fetched(one, keys, chunks)
        else:
            evicted(one, keys)
            assert fetched(one, keys, newer)


@pytest.mark.slow
def test_an_overwrite_in_a_run_without_remote_dram_holds_afterwards(
    home: LocalStack, played: PlayedMooncake, tmp_path: Path
) -> None:
    plain = UpstreamSettings(home.url, *OWNER)
    settings = replace(plain, remote_dram=RemoteDramSettings("mooncake://127.0.0.1:1"))
    keys, chunks = stored(home, (home, home), tmp_path, 24)
    _, newer = make_chunks(N, LAYOUT, 25)
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        assert fetched(one, keys, chunks)
        assert eventually(lambda: len(played.stored) == N)
    with LocalStack(tmp_path / "a", upstream=plain) as one, one.client("chunks", "http") as client:
        client.put_chunks(keys, list(newer))
        evicted(one, keys)
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        assert fetched(one, keys, newer)


@pytest.mark.slow
def test_an_overwrite_that_is_written_back_leaves_nothing_old_there(
    home: LocalStack, played: PlayedMooncake, tmp_path: Path
) -> None:
    remote = RemoteDramSettings("mooncake://127.0.0.1:1")
    settings = UpstreamSettings(home.url, *OWNER, remote_dram=remote, write=Write.BACK)
    keys, chunks = stored(home, (home, home), tmp_path, 16)
    _, newer = make_chunks(N, LAYOUT, 17)
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        assert fetched(one, keys, chunks)
        assert eventually(lambda: len(played.stored) == N)
        with one.client("chunks", "http") as client:
            client.put_chunks(keys, list(newer))
        assert eventually(lambda: one.storage.upstream.write_back.status.dirty_chunks == 0)
        evicted(one, keys)
        assert fetched(one, keys, newer)


@pytest.mark.slow
def test_a_change_that_a_server_has_heard_of_is_not_undone(played: PlayedMooncake, tmp_path: Path) -> None:
    """In front of a shared directory, where another server without remote DRAM overwrites the chunks."""
    (tmp_path / "shared").mkdir()
    remote = RemoteDramSettings("mooncake://127.0.0.1:1")
    plain = UpstreamSettings(f"file://{tmp_path}/shared", poll_s=0.1)
    keys, chunks = make_chunks(N, LAYOUT, 18)
    _, newer = make_chunks(N, LAYOUT, 19)
    with (
        LocalStack(tmp_path / "a", upstream=replace(plain, remote_dram=remote)) as one,
        LocalStack(tmp_path / "b", upstream=plain) as other,
        other.client("chunks", "http") as writing,
    ):
        other.call(other.storage.objects.create_bucket(OWNER[0], "chunks"))
        assert eventually(lambda: one.storage.upstream.remote.store.is_joined)
        writing.put_chunks(keys, list(chunks))
        assert fetched(one, keys, chunks)
        store = one.storage.store.objects
        assert eventually(lambda: all(store.stored("chunks", key) is not None for key in keys))
        assert eventually(lambda: len(played.stored) == N)
        writing.put_chunks(keys, list(newer))
        assert eventually(lambda: all(store.stored("chunks", key) is None for key in keys))
        assert fetched(one, keys, newer)


@pytest.mark.slow
def test_a_further_tier_serves_deliveries_and_is_never_believed(
    home: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    monkeypatch.setattr("storage_server.home.upstream.further_tiers", lambda *_: [FolderTier(folder)])
    keys, chunks = make_chunks(N, LAYOUT, 21)
    with FaultyUpstream(home.url) as way:
        settings = UpstreamSettings(way.url, *OWNER)
        with LocalStack(tmp_path / "w", upstream=settings) as writer, writer.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        with LocalStack(tmp_path / "a", upstream=settings) as one:
            assert fetched(one, keys, chunks)
            assert eventually(lambda: len(list(folder.glob("*[!w]"))) == N)
        with LocalStack(tmp_path / "b", upstream=settings) as other:
            way.choose = lambda _: Fault.RESET
            assert fetched(other, keys, chunks)
            assert other.storage.upstream.tiers[0].read_count == N
            assert other.storage.upstream.fetches.fetched_bytes == 0
            way.choose = lambda _: None
        for file in folder.iterdir():
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        with LocalStack(tmp_path / "c", upstream=settings) as third:
            assert fetched(third, keys, chunks)
            assert eventually(lambda: third.storage.upstream.fetches.fetched_bytes == chunks.nbytes)
            for key in keys:
                assert request(third.url, "DELETE", f"/chunks/{key}").status == 204
            assert list(folder.iterdir()) == []


CLIENT = """
[upstream]
endpoint = "{home}"
access_key = "{key}"
secret_key = "{secret}"
[upstream.remote_dram]
endpoint = "mooncake://{master}"
"""


@pytest.mark.environments
@pytest.mark.timeout(180)
def test_mooncake_itself_keeps_chunks_for_another_server(home: LocalStack, tmp_path: Path) -> None:
    """Two servers in processes of their own, and Mooncake's master and an owner of memory."""
    try:
        borrowed = borrowed_mooncake(tmp_path)
    except BaselineError as error:
        pytest.skip(f"Mooncake's client cannot be loaded: {error}")
    keys, chunks = stored(home, (home, home), tmp_path, 15)
    with running_owner(MOONCAKE.folder / "bin", 64 << 20, tmp_path) as (master, _):
        config = tmp_path / "config.toml"
        text = CLIENT.format(home=home.url, key=OWNER[0], secret=OWNER[1], master=master)
        config.write_text(textwrap.dedent(text) + CONFIG)
        path = f"{borrowed}:{repository()}"
        for name, hits in (("a", 0), ("b", N)):
            arguments = ("--data", str(tmp_path / name), "--port", "0", "--config", str(config))
            with started("serve", *arguments, environment={"PYTHONPATH": path}) as (url, _):
                assert eventually(lambda url=url: metric(url, "joined_stores") == 1, 60)  # type: ignore[misc]
                assert fetched_from(url, keys, chunks)
                assert eventually(lambda url=url, hits=hits: metric(url, "hit_chunks_total") == hits, 60)  # type: ignore[misc]
                if not hits:
                    assert eventually(lambda url=url: metric(url, "admitted_bytes_total") == chunks.nbytes, 60)  # type: ignore[misc]


def metric(url: str, name: str) -> float:
    text = request(url, "GET", "/_objectcache/metrics").body.decode()
    line = next(line for line in text.splitlines() if line.startswith(f"objectcache_remote_dram_{name} "))
    return float(line.split()[1])


def fetched_from(url: str, keys: list[str], chunks: np.ndarray) -> bool:
    access_key, secret_key = OWNER
    client = Client(url, "chunks", access_key=access_key, secret_key=secret_key, transport="http")
    with client:
        buffer = client.allocate_buffer(chunks.nbytes)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(60)
        return np.array_equal(buffer.reshape(LAYOUT.num_layers, N, -1)[0], layer_of(chunks, LAYOUT, 0))
