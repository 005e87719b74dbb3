"""Documents on their way to the gateway: they hold no more than their budget, and one that drips is given up."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from descriptors.descriptor import CHUNK_COUNT_MAX, Descriptor
from descriptors.descriptor_codec import KEY_PREFIX_BYTES_MAX, encode_binary
from gateway import call
from gateway.s3.upload import check_digests
from tests.support.small_gateway import SmallGateway, head_of, sent, signed_headers, small_gateway
from tests.support.waiting import eventually

MIB = 1 << 20


@contextlib.contextmanager
def half_sent(gateway: SmallGateway, nbytes: int, sent: int) -> Iterator[socket.socket]:
    """A lookup of which some bytes have been sent."""
    headers = signed_headers("POST", "/b?lookup", {}, "ab" * 32)
    with gateway.connect() as sock:
        sock.sendall(head_of("POST", "/b?lookup", {**headers, "Content-Length": str(nbytes)}) + b" " * sent)
        yield sock


def status_of(sock: socket.socket) -> int:
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    return reply.status


def test_documents_on_their_way_hold_no_more_than_their_budget() -> None:
    """Forty connections one byte short of 16 MiB held 660 MiB."""
    with (
        small_gateway(document_key_bytes=16 * MIB, document_bytes=16 * MIB) as gateway,
        contextlib.ExitStack() as stack,
    ):
        first = stack.enter_context(half_sent(gateway, 16 * MIB, 12 * MIB))
        assert eventually(lambda: gateway.documents.held_bytes == 12 * MIB)
        second = stack.enter_context(half_sent(gateway, 16 * MIB, 5 * MIB))
        assert status_of(second) == 503
        first.close()
        assert eventually(lambda: gateway.documents.held_bytes == 0)
        third = stack.enter_context(half_sent(gateway, 5 * MIB, 5 * MIB))
        assert status_of(third) == 400  # its digest is wrong, but it was read


def test_a_document_that_drips_is_given_up() -> None:
    """The idle limit begins anew with every byte; the limit for the whole does not."""
    with small_gateway(document_timeout_s=0.5) as gateway, half_sent(gateway, 1000, 1) as sock:
        sock.settimeout(0.1)
        with contextlib.suppress(OSError):
            for _ in range(600):
                sock.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    assert b"RequestTimeout" in sock.recv(65_536)
                    return
            raise AssertionError("it drips on")


def test_large_documents_are_proved_and_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of them. The digest of 16 MiB alone would stop everybody for tens of milliseconds."""
    threads: dict[str, int] = {}

    def noted(document: bytes, *digests: Any) -> None:
        threads[document[:9].decode()] = threading.get_ident()
        check_digests(document, *digests)

    monkeypatch.setattr(call, "check_digests", noted)
    room = "a" * MIB
    bodies = {
        ("POST", "/b?layerwise"): f'{{"desc":["{room}"]}}',
        ("POST", "/b?lookup"): f'{{"look":["{room}"]}}',
        ("POST", "/_objectcache/agents"): f'{{"regs":["{room}"]}}',
        ("POST", "/b?delete"): f"<Delete><Object><Key>{room}</Key></Object></Delete>",
        ("POST", "/b/k?uploadId=u"): f"<CompleteMultipartUpload>{room}</CompleteMultipartUpload>",
    }
    with small_gateway() as gateway:
        for (method, target), text in bodies.items():
            body = text.encode()
            named = {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}
            headers = signed_headers(method, target, named, hashlib.sha256(body).hexdigest())
            reply = sent(gateway.url, head_of(method, target, {**headers, "Content-Length": str(len(body))}), body)
            assert reply.status == 400, reply
        loop_thread = gateway.thread_id
    assert len(threads) == len(bodies)
    assert loop_thread not in threads.values()


def test_the_keys_of_a_descriptor_count_until_its_delivery_ends() -> None:
    """A hundred descriptors of 2 MB held 2.3 GB while nobody read their answers: their keys have one long prefix."""
    keys = tuple(f"{'p' * KEY_PREFIX_BYTES_MAX}{index:064x}" for index in range(CHUNK_COUNT_MAX))
    body = encode_binary(Descriptor(keys, 1, 1, 1))
    with small_gateway(document_key_bytes=16 * MIB, document_bytes=16 * MIB) as gateway:
        assert len(body) < 3 * MIB
        headers = signed_headers("POST", "/b?layerwise", {}, hashlib.sha256(body).hexdigest())
        head = head_of("POST", "/b?layerwise", {**headers, "Content-Length": str(len(body))})
        assert sent(gateway.url, head, body).status == 503
        assert eventually(lambda: gateway.documents.held_bytes == 0)
