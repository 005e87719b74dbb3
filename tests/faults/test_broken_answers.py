"""The client makes a call again where the answer breaks off, at any place, and where a server refuses for a while."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import CallerError, ErrorCode, ServerError
from nixl_client.client import Client
from nixl_client.fetch.fetch_ledger import FetchLedger
from nixl_client.session.retries import Retries
from nixl_client.transports.http import UnansweredError
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.cut_proxy import CutProxy, Place, cut_proxy
from tests.support.servers import LocalStack, is_idle
from tests.support.waiting import eventually


@pytest.fixture
def proxy(local: LocalStack) -> Iterator[CutProxy]:
    with cut_proxy(local.url) as made:
        yield made


@dataclass
class Bed:
    """A client whose server is behind the proxy. It pauses for no time, and its chunks are stored."""

    client: Client
    proxy: CutProxy
    keys: list[str]
    chunks: Any


@pytest.fixture
def bed(local: LocalStack, proxy: CutProxy, keys: list[str]) -> Iterator[Bed]:
    _, chunks = make_chunks(N, LAYOUT)
    with local.client("chunks", "http", url=proxy.url) as client:
        client.http.retries = Retries(chance=lambda: 0.0)
        yield Bed(client, proxy, keys, chunks)
    assert eventually(lambda: is_idle(local))


def fetched(bed: Bed, client: Client, delivery: Delivery) -> None:
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
    with client.fetch(bed.keys, LAYOUT, buffer, delivery=delivery) as fetch:
        for layer_index in range(LAYOUT.num_layers):
            layer = fetch.wait_layer(layer_index, 30).data
            assert np.array_equal(layer, bed.chunks.reshape(N, LAYOUT.num_layers, -1)[:, layer_index])
        fetch.wait(30)


def put(bed: Bed) -> None:
    bed.client.put_chunks(["new"], [bed.chunks[0]])
    assert bed.client.lookup(["new"]) == 1


def looked_up(bed: Bed) -> None:
    assert bed.client.lookup(bed.keys) == N


def get(bed: Bed) -> None:
    buffer = np.zeros(LAYOUT.chunk_bytes, np.uint8)
    moved = bed.client.objects.get_object(bed.keys[1], buffer, path="tcp")
    assert moved.nbytes == LAYOUT.chunk_bytes
    assert np.array_equal(buffer, bed.chunks[1].ravel())


def put_object(bed: Bed) -> None:
    bed.client.objects.put_object("object", bed.chunks[2], path="tcp")
    assert bed.client.lookup(["object"]) == 1


def delete(bed: Bed) -> None:
    bed.client.delete([bed.keys[3]])
    assert bed.client.lookup([bed.keys[3]]) == 0


def listed(bed: Bed) -> None:
    answer = bed.client.http.request("GET", "/chunks", {"list-type": "2", "max-keys": "2"})
    assert answer.body.count(b"<Key>") == 2
    assert answer.body.endswith(b"</ListBucketResult>")


CALLS: dict[str, Callable[[Bed], None]] = {
    "put": put,
    "lookup": looked_up,
    "delete": delete,
    "list": listed,
    "get object": get,
    "put object": put_object,
    "fetch by layers": lambda bed: fetched(bed, bed.client, Delivery.LAYER_MAJOR),
    "fetch by chunks": lambda bed: fetched(bed, bed.client, Delivery.CHUNK_MAJOR),
}
PLACES: dict[str, Place] = {
    "nothing": lambda head, body_bytes: 0,
    "a byte": lambda head, body_bytes: 1,
    "in the status": lambda head, body_bytes: len(b"HTTP/1.1 200 O"),
    "in a header": lambda head, body_bytes: head.index(b"\r\n") + 9,
    "before the empty line": lambda head, body_bytes: len(head) - 2,
    "in the empty line": lambda head, body_bytes: len(head) - 1,
    "after the head": lambda head, body_bytes: len(head),
    "a byte of the body": lambda head, body_bytes: len(head) + 1,
    "half of the body": lambda head, body_bytes: len(head) + body_bytes // 2,
    "before the last byte": lambda head, body_bytes: len(head) + body_bytes - 1,
}
IN_BODY = frozenset({"after the head", "a byte of the body", "half of the body", "before the last byte"})
HAS_NO_BODY = frozenset({"put", "delete", "put object"})


@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_answer_breaks_off_anywhere_is_made_again(bed: Bed, call: str) -> None:
    """Layers that were ready stay good, but a fetch that has told one is not made again."""
    for name, place in PLACES.items():
        if name in IN_BODY and call in HAS_NO_BODY:
            continue
        if call == "delete":
            bed.client.put_chunks([bed.keys[3]], [bed.chunks[3]])
        bed.proxy.break_at(place)
        if call == "fetch by layers" and name in ("half of the body", "before the last byte"):
            with pytest.raises(UnansweredError):
                CALLS[call](bed)
        else:
            CALLS[call](bed)
        assert bed.proxy.breaks_left == 0, name


def test_a_put_that_nobody_acknowledged_is_an_error(bed: Bed) -> None:
    """Not the success that the first 14 bytes of an answer look like."""
    bed.proxy.break_at(*[PLACES["in the status"]] * 5)
    with pytest.raises(UnansweredError, match="broke off within its head") as raised:
        bed.client.put_chunks(["new"], [bed.chunks[0]])
    assert "tried 5 times" in raised.value.__notes__[0]
    assert bed.proxy.breaks_left == 0


def test_a_put_with_a_condition_is_not_made_again_when_its_answer_is_lost(bed: Bed) -> None:
    """It may have been carried out, and would meet its own object."""
    bed.proxy.break_at(PLACES["nothing"])
    with pytest.raises(UnansweredError):
        bed.client.objects.put_object("once", bed.chunks[0], path="tcp", headers={"If-None-Match": "*"})
    with pytest.raises(CallerError) as raised:
        bed.client.objects.put_object("once", bed.chunks[0], path="tcp", headers={"If-None-Match": "*"})
    assert raised.value.code is ErrorCode.PRECONDITION_FAILED


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", pytest.param("ucx", marks=pytest.mark.with_ucx)])
def test_a_fetch_into_memory_whose_answer_is_lost_is_made_again(local: LocalStack, bed: Bed, transport: str) -> None:
    """Where the layers were told, the notices are the answer; where they were not, the server stops and begins anew."""
    with local.client("chunks", transport, url=bed.proxy.url) as client:
        fetched(bed, client, Delivery.LAYER_MAJOR)
        for name in ("nothing", "in the status", "before the empty line"):
            bed.proxy.break_at(PLACES[name])
            fetched(bed, client, Delivery.LAYER_MAJOR)
            assert bed.proxy.breaks_left == 0


@pytest.mark.parametrize("transport", ["http", "shm"])
def test_a_fetch_that_is_refused_for_a_while_is_made_again(
    local: LocalStack, bed: Bed, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [ServerError(ErrorCode.SLOW_DOWN, "busy", retryable=True)] * 2
    deliver = local.storage.prefixes.deliver

    async def busy_at_first(*arguments: Any, **named: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await deliver(*arguments, **named)

    monkeypatch.setattr(FetchLedger, "pause", lambda *_: None)
    with local.client("chunks", transport) as client:
        monkeypatch.setattr(local.storage.prefixes, "deliver", busy_at_first)
        fetched(bed, client, Delivery.LAYER_MAJOR)
    assert not refusals


def test_a_fetch_that_is_cancelled_in_its_pause_ends_at_once(
    local: LocalStack, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: Any, **__: Any) -> Any:
        raise ServerError(ErrorCode.SLOW_DOWN, "busy", retryable=True, retry_after_s=30)

    monkeypatch.setattr(local.storage.prefixes, "deliver", busy)
    fetch = bed.client.fetch(bed.keys, LAYOUT, bed.client.allocate_buffer(LAYOUT.delivery_bytes(N)))
    assert eventually(lambda: fetch.request_id.endswith(".2"))
    fetch.cancel()
    assert fetch.is_settled
    with pytest.raises(ServerError) as raised:
        fetch.wait(30)
    assert raised.value.code is ErrorCode.CANCELLED


def test_a_refusal_that_comes_before_the_body_was_sent_is_heard() -> None:
    """A server need not read a body that it refuses: it answers and hangs up, and the client's next piece is reset."""
    body = b"<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    connection_count = 0

    class Refusing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            nonlocal connection_count
            connection_count += 1
            self.request.recv(1024)
            self.request.sendall(answer)  # the rest of what was sent is unread, so that closing resets the connection

    with socketserver.TCPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        client = Client(url, "chunks", access_key="k", secret_key="s")
        with client, pytest.raises(CallerError, match="not you"):
            client.put_chunks(["key"], [bytes(64 << 20)])
        server.shutdown()
    assert connection_count == 1
