"""A delivery whose reader does not take it, of chunks that are deleted meanwhile: others get their room."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from storage_server.kernel import slow_readers
from tests.support.chunks import make_chunks
from tests.support.requests import OWNER, descriptor_request
from tests.support.servers import LocalStack, is_idle
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(8, 16, 128 * KIB)
COUNT = 24


@pytest.mark.slow
@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_delivery_that_is_not_taken_gives_way_to_writes_only_where_it_keeps_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """In a directory of 47 MiB for extents 24 MiB are being delivered, and 30 MiB want in. Where the chunks are stored
    in any case, the end of their delivery would give nobody room.
    """
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.3)
    with LocalStack(tmp_path / "data", disk_bytes=64 * MIB) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        keys, chunks = make_chunks(COUNT, LAYOUT)
        later, wanted = make_chunks(30, LAYOUT, seed=2)

        def is_written() -> bool:
            with local.client("chunks", "http") as client, suppress(ObjectCacheError):
                client.put_chunks(later, list(wanted))
                return True
            return False

        with local.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        descriptor = Descriptor(tuple(keys), LAYOUT.num_layers, 16, LAYOUT.per_layer_chunk_bytes, Delivery.LAYER_MAJOR)
        address = urlsplit(local.url)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
            sock.settimeout(60)
            sock.connect((address.hostname, address.port))
            sock.sendall(descriptor_request(local.url, encode_binary(descriptor)))
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            assert not is_idle(local)
            if not is_deleted:
                assert not is_written()
                assert not eventually(lambda: is_idle(local), 1.5)
                return
            for key in keys:
                local.call(local.storage.objects.delete_object(OWNER[0], "chunks", key))
            assert eventually(is_written)
            assert eventually(lambda: is_idle(local))
            assert local.storage.store.slow_readers.ended_count == 1
