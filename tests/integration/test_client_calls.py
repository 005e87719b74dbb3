"""What a program that uses the client meets first: names of options, buckets, deletes, timeouts."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.recompute import AdviceRequest, PrefillCosts
from nixl_client.client import Client
from nixl_client.objects import Path
from tests.support.chunks import LAYOUT, make_chunks
from tests.support.requests import OWNER
from tests.support.servers import LocalStack


def test_options_may_be_given_by_name(local: LocalStack) -> None:
    """A wrong one ended as InternalError, after the request."""
    keys, chunks = make_chunks(3, LAYOUT)
    buffer = np.zeros(LAYOUT.delivery_bytes(3), dtype=np.uint8)
    with local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        fetch = client.fetch([*keys, "missing"][:3], LAYOUT, buffer, delivery="chunk-major", on_missing="prefix")
        assert fetch.wait(30).mode.value == "chunk-major"
        assert buffer.tobytes() == chunks.tobytes()
        for wrong in ({"delivery": "layer_major"}, {"on_missing": "skip"}):
            with pytest.raises(ValueError, match="is one of"):
                client.fetch(keys, LAYOUT, buffer, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="path is one of 'tcp', 'buffer', 'direct'"):
            client.objects.get_object(keys[0], buffer, path="udp")
        assert client.objects.get_object(keys[0], buffer, path="tcp").path is Path.TCP
    with pytest.raises(ValueError, match="transport is one of"):
        Client(local.url, "chunks", access_key=OWNER[0], secret_key=OWNER[1], transport="rdma")


def test_deletes_are_of_this_bucket_and_may_be_repeated(local: LocalStack) -> None:
    keys, chunks = make_chunks(5, LAYOUT)
    local.call(local.storage.objects.create_bucket(OWNER[0], "others"))
    with local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        client.in_bucket("others").put_chunks(keys, list(chunks))
        client.delete(keys[2:])
        client.delete(keys[2:])
        assert client.lookup(keys) == 2
        assert client.in_bucket("others").lookup(keys) == 5
        with pytest.raises(ObjectCacheError) as refused:
            client.in_bucket("no-such-bucket").delete(keys)
        assert refused.value.code is ErrorCode.NO_SUCH_BUCKET


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx", "http"])
def test_one_client_serves_many_buckets_and_threads(local: LocalStack, transport: str) -> None:
    """They share what is registered: one agent, one buffer."""
    stored = {}
    with local.client("chunks", transport) as client:
        for index in range(3):
            bucket = f"bucket-{index}"
            local.call(local.storage.objects.create_bucket(OWNER[0], bucket))
            keys, chunks = make_chunks(3, LAYOUT, seed=1 + index)
            stored[bucket] = (keys, chunks.tobytes())
            with client.in_bucket(bucket) as other:
                other.put_chunks(keys, list(chunks))
        nbytes = LAYOUT.delivery_bytes(3)
        whole = client.allocate_buffer(3 * nbytes)
        wrong: list[str] = []

        def fetch(bucket: str, offset: int) -> None:
            keys, expected = stored[bucket]
            for _ in range(5):
                part = whole[offset : offset + nbytes]
                part[:] = 0
                client.in_bucket(bucket).fetch(keys, LAYOUT, part, delivery="chunk-major").wait(30)
                if part.tobytes() != expected:
                    wrong.append(bucket)

        threads = [threading.Thread(target=fetch, args=(name, at * nbytes)) for at, name in enumerate(stored)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        if transport != "http":
            assert len(local.storage.agents.table) <= 3


@pytest.mark.slow
def test_a_call_has_a_timeout_of_its_own() -> None:
    """A server that accepts and says nothing. The client's own timeout is longer than any test."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(endpoint, "b", access_key="k", secret_key="s" * 8, transport="http", timeout_s=600.0) as client:
            for call in (
                lambda: client.lookup(["k"], timeout_s=0.2),
                lambda: client.delete(["k"], timeout_s=0.2),
                lambda: client.put_chunks(["k"], [b"x"], timeout_s=0.2),
                lambda: client.fetch(["k"], LAYOUT, np.zeros(120_000, np.uint8), timeout_s=0.2).wait(30),
                lambda: client.objects.get_object("k", np.zeros(9, np.uint8), path="tcp", timeout_s=0.2),
                lambda: client.objects.put_object("k", np.zeros(9, np.uint8), path="tcp", timeout_s=0.2),
            ):
                with pytest.raises(ObjectCacheError):
                    call()


async def test_an_asynchronous_call_has_a_timeout_of_its_own() -> None:
    prompt = AdviceRequest(64, LAYOUT, PrefillCosts(token_us=100.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(endpoint, "b", access_key="k", secret_key="s" * 8, transport="http", timeout_s=600.0) as client:
            for call in (
                client.lookup_async(["k"], timeout_s=0.2),
                client.advise_async(["k"], prompt, timeout_s=0.2),
                client.put_chunks_async(["k"], [b"x"], timeout_s=0.2),
                client.delete_async(["k"], timeout_s=0.2),
            ):
                with pytest.raises(ObjectCacheError):
                    await call


async def test_asynchronous_calls_do_what_the_blocking_ones_do(local: LocalStack) -> None:
    keys, chunks = make_chunks(4, LAYOUT)
    prompt = AdviceRequest(64, LAYOUT, PrefillCosts(token_us=100.0))
    with local.client("chunks", "http") as client:
        await client.put_chunks_async(keys, list(chunks))
        assert await client.lookup_async(keys) == 4
        assert (await client.advise_async(keys, prompt))[0] == 4
        await client.delete_async(keys[1:])
        assert await client.lookup_async(keys) == 1
