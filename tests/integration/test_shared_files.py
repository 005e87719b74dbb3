"""Servers in front of one directory on a shared file system: what one stores, the others deliver."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from objectcache.adapters.beneath import Beneath
from storage_server.home import revalidation
from storage_server.home.claim import WrongDirectoryError, claim
from storage_server.home.directory import files as files_module
from storage_server.home.directory import following as following_module
from storage_server.home.directory.journal import ReadJournal
from storage_server.home.directory.rules import unanswered
from storage_server.home.revalidation import Revalidation
from storage_server.settings import UpstreamSettings, Write
from tests.support.chunks import make_chunks
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import CONFIG, LocalStack, started
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The shared directory."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def pair(root: Path, tmp_path: Path) -> Iterator[tuple[LocalStack, LocalStack]]:
    """Two servers of it, and a bucket."""
    settings = UpstreamSettings(f"file://{root}", poll_s=0.1)
    with LocalStack(tmp_path / "a", upstream=settings) as one, LocalStack(tmp_path / "b", upstream=settings) as other:
        s3_client(one.url, OWNER).create_bucket(Bucket="chunks")
        yield one, other


@pytest.mark.parametrize("transport", ["http", "shm"])
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_a_prefix_that_another_server_stored_is_delivered_and_then_cached(
    pair: tuple[LocalStack, LocalStack], transport: str, delivery: Delivery
) -> None:
    one, other = pair
    keys, chunks = make_chunks(N, LAYOUT, seed=3)
    with one.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    with other.client("chunks", transport) as client:
        assert client.lookup([*keys, "0" * 64]) == N
        buffer = client.allocate_buffer(chunks.nbytes)
        for _ in range(2):
            buffer[:] = 0
            client.fetch(keys, LAYOUT, buffer, delivery=delivery).wait(30)
            wanted = chunks.reshape(N, LAYOUT.num_layers, -1)
            wanted = wanted.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else wanted
            assert np.array_equal(buffer, wanted.ravel())
        assert eventually(lambda: other.storage.upstream.fetches.running_count == 0)
        assert other.storage.upstream.fetches.fetched_bytes == chunks.nbytes


def test_a_copy_leaves_the_cache_when_another_server_changes_the_chunk(pair: tuple[LocalStack, LocalStack]) -> None:
    one, other = pair
    (key,), (before,) = make_chunks(1, LAYOUT, seed=4)
    _, (after,) = make_chunks(1, LAYOUT, seed=5)
    with one.client("chunks", "http") as writing, other.client("chunks", "http") as reading:
        writing.put_chunks([key], [before])
        buffer = reading.allocate_buffer(before.nbytes)
        reading.fetch([key], LAYOUT, buffer).wait(30)
        assert np.array_equal(np.sort(buffer), np.sort(before))

        def shows(wanted: np.ndarray) -> bool:
            return request(other.url, "GET", f"/chunks/{key}").body == wanted.tobytes()

        writing.put_chunks([key], [after])
        assert eventually(lambda: shows(after))
        assert request(one.url, "DELETE", f"/chunks/{key}").status == 204
        assert eventually(lambda: reading.lookup([key]) == 0)
        assert request(other.url, "GET", f"/chunks/{key}").status == 404


def test_a_server_starts_while_a_journal_lies_on_a_bad_sector(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waits for that journal as calls do, and not again in each process that fails."""
    settings = UpstreamSettings(f"file://{root}", poll_s=0.1)
    (key,), (chunk,) = make_chunks(1, LAYOUT, seed=4)
    with LocalStack(tmp_path / "a", upstream=settings) as one:
        s3_client(one.url, OWNER).create_bucket(Bucket="chunks")
        with one.client("chunks", "http") as client:
            client.put_chunks([key], [chunk])
            client.fetch([key], LAYOUT, client.allocate_buffer(chunk.nbytes)).wait(30)
    with LocalStack(tmp_path / "b", upstream=settings) as other:
        bad = other.storage.upstream.service.writer
    read_journal, compare_all = following_module.read_journal, Revalidation.compare_all

    def read(folder: Beneath, *arguments: Any) -> ReadJournal:
        if folder.name == bad:
            raise OSError(errno.EIO, "played")
        return read_journal(folder, *arguments)

    async def compared(comparing: Revalidation) -> None:
        try:
            await compare_all(comparing)
        finally:  # the journal has been waited for
            monkeypatch.setattr(unanswered, "WAITED_S", 0.0)

    monkeypatch.setattr(following_module, "read_journal", read)
    monkeypatch.setattr(Revalidation, "compare_all", compared)
    monkeypatch.setattr(revalidation, "RETRY_S", 0.0)
    with LocalStack(tmp_path / "a", upstream=settings) as again:
        assert request(again.url, "GET", f"/chunks/{key}").body == chunk.tobytes()


def test_chunks_written_back_reach_the_other_server(root: Path, tmp_path: Path) -> None:
    settings = UpstreamSettings(f"file://{root}", write=Write.BACK, poll_s=0.1)
    keys, chunks = make_chunks(N, LAYOUT, seed=6)
    with LocalStack(tmp_path / "a", upstream=settings) as one, LocalStack(tmp_path / "b", upstream=settings) as other:
        s3_client(one.url, OWNER).create_bucket(Bucket="chunks")
        with one.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        with other.client("chunks", "http") as client:
            assert eventually(lambda: client.lookup(keys) == N)
        assert eventually(lambda: one.storage.upstream.write_back.status.dirty_chunks == 0)


def test_any_s3_client_works_on_either_server(pair: tuple[LocalStack, LocalStack]) -> None:
    one, other = (s3_client(each.url, OWNER) for each in pair)
    data = os.urandom(300_000)
    one.put_object(Bucket="chunks", Key="a/b", Body=data, Tagging="x=1", Metadata={"m": "v"}, ContentType="text/plain")
    found = other.get_object(Bucket="chunks", Key="a/b")
    assert found["Body"].read() == data
    assert (found["Metadata"], found["ContentType"], found["TagCount"]) == ({"m": "v"}, "text/plain", 1)
    other.copy_object(Bucket="chunks", Key="copy", CopySource="chunks/a/b")
    one.delete_object(Bucket="chunks", Key="a/b")
    assert one.get_object(Bucket="chunks", Key="copy", Range="bytes=1000-1999")["Body"].read() == data[1000:2000]
    assert [entry["Key"] for entry in other.list_objects_v2(Bucket="chunks")["Contents"]] == ["copy"]


@pytest.mark.slow
def test_the_command_serves_a_shared_directory(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    data = os.urandom(100_000)
    for name in ("a", "b"):
        arguments = ("--data", str(tmp_path / name), "--port", "0", "--config", str(config), "--disk-bytes", "200MB")
        with started("serve", *arguments, "--upstream", f"file://{root}", "--workers", "2") as (url, _):
            s3 = s3_client(url, OWNER)
            if name == "a":
                s3.create_bucket(Bucket="chunks")
                s3.put_object(Bucket="chunks", Key="key", Body=data)
            assert s3.get_object(Bucket="chunks", Key="key")["Body"].read() == data


def test_the_local_index_counts_among_the_bytes_of_the_cache(root: Path, tmp_path: Path) -> None:
    with LocalStack(tmp_path / "a", upstream=UpstreamSettings(f"file://{root}"), disk_bytes=400_000_000) as one:
        s3_client(one.url, OWNER).create_bucket(Bucket="chunks")
        s3_client(one.url, OWNER).put_object(Bucket="chunks", Key="ab" * 32, Body=bytes(1_000_000))
        one.storage.store.space.measure()
        files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
        assert one.storage.store.space.used_bytes == sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.parametrize("endpoint", ["file://host/shared", "file:relative", "file:///shared?x=1", "ftp://x/"])
def test_an_address_that_names_no_directory_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="upstream"):
        UpstreamSettings(endpoint, *OWNER)


def test_a_data_directory_belongs_to_one_shared_directory(root: Path, tmp_path: Path) -> None:
    settings = UpstreamSettings(f"file://{root}")
    claim(tmp_path / "a", settings)
    claim(tmp_path / "a", settings)
    with pytest.raises(WrongDirectoryError):
        claim(tmp_path / "a", UpstreamSettings("file:///elsewhere"))


def test_a_server_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises((ObjectCacheError, Exception), match="mounted"),
        LocalStack(tmp_path / "a", upstream=UpstreamSettings(f"file://{tmp_path}/nothing")),
    ):
        pass


def test_files_are_striped_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by a program that notes how it is called: Lustre is not here."""
    tool = tmp_path / "bin" / "lfs"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    folder = tmp_path / "folder"
    folder.mkdir()
    files_module.stripe(folder)
    assert (tmp_path / "called").read_text().split() == ["setstripe", "-c", "16", "-S", "4m", str(folder)]
