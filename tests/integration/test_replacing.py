"""Buckets with `lossy = "replace"`: chunks are encoded before they would leave. The encoded chunk is an object of its
own, readers that accept it get it, and for everybody else the chunk is missing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ClientError

from descriptors.descriptor import Accept, OnMissing
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.headers import CODEC_HEADER, DECODE_HEADER, LAYOUT_HEADER
from descriptors.kv_forms import EncodedForm, KvLayout
from descriptors.layer_forms import LossBasis
from descriptors.objects import ListRequest
from nixl_client.client import Client
from objectcache.kv_codecs.encoding import decode
from objectcache.kv_codecs.layer import Codec
from objectcache.kv_codecs.loss import loss
from storage_server.cache.caches import ahead_bytes_of
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.cache.recoding import Recoder
from storage_server.planning.extent import aligned
from storage_server.planning.losses import LossTable, MeasuredLoss, ModelLosses
from storage_server.settings import CacheSettings
from tests.integration.test_compression import FIGURES, LAYERS, LAYOUT, SHAPE, decoded, kv_chunks
from tests.support.requests import OTHER, OWNER, request, s3_client
from tests.support.servers import CONFIG, LocalStack, stack
from tests.support.waiting import eventually

CAPACITY_BYTES = 1 << 20
KV_LAYOUT = KvLayout(LAYERS, SHAPE.tokens, SHAPE.width, "bfloat16")
ACCEPT = Accept((Codec.KIVI4.value, Codec.FP8.value), "bfloat16")
COUNT = 18
"""Chunks that fit exactly, but not with the room that is kept ahead of writes, and for those that wait."""
SETTINGS = UtilitySettings({Codec.KIVI4: FIGURES[Codec.KIVI4]})


@contextmanager
def serving(folder: Path, cache: CacheSettings | None = None, **settings: Any) -> Iterator[LocalStack]:
    cache = cache or CacheSettings("chunks", CAPACITY_BYTES, Eviction.LRU, replaces=True)
    chosen = {"caches": (cache,), "compression": SETTINGS, "dram_bytes": 0, "theta_bytes": 0, **settings}
    with LocalStack(folder, **chosen) as running:
        yield running


def make_bucket(local: LocalStack) -> None:
    local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))


def replaced_count(local: LocalStack) -> int:
    replacer = local.storage.store.replacer
    assert replacer is not None
    return replacer.replaced_count


def fill(client: Client, local: LocalStack, replaced: int = 4) -> tuple[list[str], np.ndarray]:
    """Store chunks, and wait until the first ones have been replaced."""
    keys, chunks = kv_chunks(COUNT)
    put_slowly(client, local, keys, chunks)
    assert eventually(lambda: has_room(local) and replaced_count(local) >= replaced)
    return keys, chunks


def put_slowly(client: Client, local: LocalStack, keys: list[str], chunks: np.ndarray) -> None:
    """Store chunks as fast as they are encoded."""
    for key, chunk in zip(keys, chunks, strict=True):
        client.put_chunks([key], [chunk], kv_layout=KV_LAYOUT)
        assert eventually(lambda: has_room(local))


def has_room(local: LocalStack) -> bool:
    """Whether the bucket has the room that is kept ahead, so that nothing more leaves it."""
    page = local.call(local.storage.objects.list_objects("OWNERKEY", ListRequest("chunks")))
    stored_bytes = sum(aligned(info.nbytes) for info in page.objects)
    is_waited_for = local.storage.store.evictor.replacements.nbytes > 0
    return not is_waited_for and stored_bytes <= CAPACITY_BYTES - 2 * ahead_bytes_of(CAPACITY_BYTES)


def forms_of(local: LocalStack, keys: list[str]) -> dict[str, EncodedForm]:
    """The forms of those that are stored encoded."""
    found = {}
    for key in keys:
        headers = request(local.url, "HEAD", f"/chunks/{key}").headers
        if CODEC_HEADER in headers:
            assert LAYOUT_HEADER not in headers
            found[key] = EncodedForm.parse(headers[CODEC_HEADER])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "dram_bytes"), [("http", 0), ("shm", 0), ("shm", 64 << 20)])
def test_chunks_that_would_leave_are_encoded_and_told(tmp_path: Path, transport: str, dram_bytes: int) -> None:
    with serving(tmp_path, dram_bytes=dram_bytes) as local, local.client("chunks", transport) as client:
        make_bucket(local)
        keys, chunks = fill(client, local)
        encoded = forms_of(local, keys)
        first = next(index for index, key in enumerate(keys) if key in encoded)
        assert len(encoded) >= 4
        assert client.lookup(keys) == first
        assert client.lookup(keys, accept=ACCEPT) == COUNT
        assert client.lookup(keys, accept=Accept((Codec.KIVI8.value,), "bfloat16")) == first
        assert client.lookup(keys, accept=Accept(ACCEPT.codecs, "float32")) == first
        assert client.lookup(keys, accept=Accept(ACCEPT.codecs, "bfloat16", 0.001)) == first

        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
        expected = [
            decoded(chunk, Codec.KIVI4) if key in encoded else chunk for key, chunk in zip(keys, chunks, strict=True)
        ]
        for _ in range(3):  # also out of memory
            fetch = client.fetch(keys, LAYOUT, buffer, accept=ACCEPT)
            forms = fetch.wait(30).forms
            assert forms is not None
            assert forms.encoded_count == len(encoded)
            assert forms.worst_error == max(form.worst_error for form in encoded.values())
            come = np.asarray(buffer).reshape(LAYERS, COUNT, SHAPE.nbytes).transpose(1, 0, 2)
            for index, chunk in enumerate(expected):
                assert np.array_equal(come[index].reshape(-1), chunk)


@pytest.mark.slow
def test_for_readers_of_exact_chunks_an_encoded_one_is_missing(tmp_path: Path) -> None:
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, _ = fill(client, local)
        encoded = forms_of(local, keys)
        buffer = np.zeros(LAYOUT.delivery_bytes(COUNT), dtype=np.uint8)
        with pytest.raises(ChunkUnavailable) as missing:
            client.fetch(keys, LAYOUT, buffer).wait(30)
        assert missing.value.code is ErrorCode.NO_SUCH_CHUNK
        assert keys[missing.value.index or 0] in encoded
        exact = [key for key in keys if key not in encoded]
        asked = [*exact[:2], next(iter(encoded))]
        assert client.fetch(asked, LAYOUT, buffer, on_missing=OnMissing.PREFIX).wait(30).chunk_count == 2


@pytest.mark.slow
def test_an_encoded_chunk_is_an_object_of_its_own(tmp_path: Path) -> None:
    """A plain GET returns the encoded bytes; length and ETag are theirs, and so is the error that is told."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = fill(client, local)
        key, form = next(iter(forms_of(local, keys).items()))
        exact = chunks[keys.index(key)]
        answer = request(local.url, "GET", f"/chunks/{key}")
        assert len(answer.body) < exact.nbytes / 2
        assert answer.headers["etag"].strip('"') == hashlib.md5(answer.body).hexdigest()
        assert form.layout == KV_LAYOUT
        out, errors = np.empty(SHAPE.nbytes, dtype=np.uint8), []
        for layer in range(LAYERS):
            size = len(answer.body) // LAYERS
            decode(answer.body[layer * size : (layer + 1) * size], SHAPE, out)
            lost = loss(exact[layer * SHAPE.nbytes : (layer + 1) * SHAPE.nbytes], out, SHAPE)
            errors += [lost.keys, lost.values]
        assert max(errors) <= form.worst_error <= max(errors) * 1.0001
        assert sum(errors) / len(errors) <= form.mean_error <= form.worst_error

        for directive, named in (("COPY", {}), ("REPLACE", {LAYOUT_HEADER: KV_LAYOUT.text, "x-amz-meta-a": "b"})):
            copying = {"x-amz-copy-source": f"/chunks/{key}", "x-amz-metadata-directive": directive, **named}
            assert request(local.url, "PUT", "/chunks/copy", headers=copying).status == 200
            assert forms_of(local, ["copy"])["copy"] == form
        s3 = s3_client(local.url)
        upload = {"Bucket": "chunks", "Key": "parts"}
        upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
        with pytest.raises(ClientError, match="NotImplemented"):
            s3.upload_part_copy(**upload, PartNumber=1, CopySource=f"chunks/{key}")
        client.put_chunks([key], [exact], kv_layout=KV_LAYOUT)
        assert request(local.url, "GET", f"/chunks/{key}").body == exact.tobytes()
        assert not forms_of(local, [key])


@pytest.mark.slow
def test_a_client_that_cannot_decode_may_have_it_decoded(tmp_path: Path) -> None:
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = fill(client, local)
        encoded = forms_of(local, keys)
        wanted = {DECODE_HEADER: "true"}
        for key, chunk in zip(keys, chunks, strict=True):
            answer = request(local.url, "GET", f"/chunks/{key}", headers=wanted)
            assert answer.status == 200
            assert answer.body == (decoded(chunk, Codec.KIVI4) if key in encoded else chunk).tobytes()
            assert (answer.headers.get(DECODE_HEADER) == "true") == (key in encoded) == ("etag" not in answer.headers)
        key = next(iter(encoded))
        assert request(local.url, "GET", f"/chunks/{key}", headers={DECODE_HEADER: "no"}).code == "InvalidArgument"
        ranged = request(local.url, "GET", f"/chunks/{key}", headers={**wanted, "range": "bytes=0-9"})
        assert (ranged.status, ranged.code) == (501, "NotImplemented")
        local.damage("chunks", key, 3000)
        assert request(local.url, "GET", f"/chunks/{key}", headers=wanted).status == 500


def test_what_is_replaced_stays_so_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, _ = fill(client, local)
        before = forms_of(local, keys)
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        assert before.items() <= forms_of(local, keys).items()
        assert client.lookup(keys, accept=ACCEPT) == COUNT


def test_chunks_without_a_layout_are_evicted(tmp_path: Path) -> None:
    """Whoever puts a chunk decides whether it may be replaced."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(COUNT)
        for key, chunk in zip(keys, chunks, strict=True):
            client.put_chunks([key], [chunk])
        assert eventually(lambda: local.storage.store.evictor.evictions.evicted_count >= 4)
        assert replaced_count(local) == 0


@pytest.mark.parametrize("wrong", [KvLayout(LAYERS, 32, SHAPE.width, "bfloat16"), None])
def test_chunks_that_cannot_be_encoded_are_evicted(tmp_path: Path, wrong: KvLayout | None) -> None:
    """A layout of other bytes; and elements that are no numbers, which no error can be told of."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(COUNT)
        chunks[:, :2] = 0xFF  # NaN
        for key, chunk in zip(keys, chunks, strict=True):
            client.put_chunks([key], [chunk], kv_layout=wrong or KV_LAYOUT)
        assert eventually(lambda: local.storage.store.evictor.evictions.evicted_count >= 4)
        assert replaced_count(local) == 0


def test_an_error_above_the_bucket_s_bound_is_not_kept(tmp_path: Path) -> None:
    cache = CacheSettings("chunks", CAPACITY_BYTES, Eviction.LRU, replaces=True, max_error=1e-4)
    with serving(tmp_path, cache) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(COUNT)
        for key, chunk in zip(keys, chunks, strict=True):
            client.put_chunks([key], [chunk], kv_layout=KV_LAYOUT)
        assert eventually(lambda: local.storage.store.evictor.evictions.evicted_count >= 4)
        assert not forms_of(local, keys)


def losses(kl: float) -> LossTable:
    forms = {(Codec.KIVI4,): MeasuredLoss(0.0, kl, 0.0, 0.0)}
    model = ModelLosses(
        model="m", num_layers=LAYERS, width=SHAPE.width, element=SHAPE.element, chunk_tokens=64, forms=forms, texts="",
        text_count=2, release="1",
    )  # fmt: skip
    return LossTable((model,), {"chunks": "m"})


@pytest.mark.parametrize("table", [losses(0.25), LossTable()])
def test_a_loss_above_the_bucket_s_bound_is_not_kept(tmp_path: Path, table: LossTable) -> None:
    """Nor is one that nobody has measured: the exact bytes would be gone."""
    cache = CacheSettings("chunks", CAPACITY_BYTES, Eviction.LRU, replaces=True, max_loss=0.2)
    with serving(tmp_path, cache, losses=table) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(COUNT)
        for key, chunk in zip(keys, chunks, strict=True):
            client.put_chunks([key], [chunk], kv_layout=KV_LAYOUT)
        assert eventually(lambda: local.storage.store.evictor.evictions.evicted_count >= 4)
        assert not forms_of(local, keys)


@pytest.mark.slow
def test_a_label_never_makes_a_loss_less_than_the_calibration_says(tmp_path: Path) -> None:
    """Chunks are encoded by the release before, which told no loss, then by this one, whose label has the loss of its
    time. The calibration of now counts, or the label where it says more; and all of them stay readable.
    """
    seen = {}
    for folder, table in (("before", LossTable()), ("now", losses(0.25))):
        with serving(tmp_path / folder, losses=table) as local, local.client("chunks", "http") as client:
            make_bucket(local)
            keys, _ = fill(client, local)
            seen[folder] = forms_of(local, keys)
        assert {form.loss for form in seen[folder].values()} == {0.0 if folder == "before" else 0.25}
        for kl in (0.125, 0.5):
            told = max(kl, 0.25) if folder == "now" else kl
            with serving(tmp_path / folder, losses=losses(kl)) as local, local.client("chunks", "http") as client:
                first = next(index for index, key in enumerate(keys) if key in seen[folder])
                within, above = (Accept(ACCEPT.codecs, "bfloat16", max_loss=told + more) for more in (0.0, -0.001))
                assert client.lookup(keys, accept=above) == first
                assert client.lookup(keys, accept=within) == COUNT
                buffer = np.zeros(LAYOUT.delivery_bytes(COUNT), dtype=np.uint8)
                forms = client.fetch(keys, LAYOUT, buffer, accept=within).wait(30).forms
                assert forms is not None
                assert (forms.worst_loss, forms.loss_basis) == (told, LossBasis.CALIBRATED)
                with pytest.raises(ChunkUnavailable):
                    client.fetch(keys, LAYOUT, buffer, accept=above).wait(30)


@pytest.mark.slow
def test_the_bound_of_an_access_key_holds_for_what_is_stored(tmp_path: Path) -> None:
    with serving(tmp_path, max_errors={OTHER[0]: 0.001}) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, _ = fill(client, local)
        encoded = forms_of(local, keys)
        first = next(index for index, key in enumerate(keys) if key in encoded)
        with local.client("chunks", "http", OTHER) as bounded:
            assert bounded.lookup(keys, accept=ACCEPT) == first
            buffer = np.zeros(LAYOUT.delivery_bytes(COUNT), dtype=np.uint8)
            with pytest.raises(ChunkUnavailable):
                bounded.fetch(keys, LAYOUT, buffer, accept=ACCEPT).wait(30)


def test_leased_chunks_stay_exact(tmp_path: Path) -> None:
    """A lookup for exact chunks is a promise of exact chunks."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(COUNT + 8)
        client.put_chunks(keys[:4], list(chunks[:4]), kv_layout=KV_LAYOUT)
        assert client.lookup(keys[:4], 60.0) == 4
        put_slowly(client, local, keys[4:], chunks[4:])
        assert eventually(lambda: replaced_count(local) >= 8)
        assert client.lookup(keys[:4]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("are_one_prefix", [False, True])
def test_writers_do_not_wait_for_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_one_prefix: bool
) -> None:
    """Where chunks come faster than they are encoded, those that were to be encoded leave, or their children do."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        encode, may_encode = Recoder.encode, threading.Event()

        def slow(*asked: Any) -> Any:
            may_encode.wait()
            return encode(*asked)

        monkeypatch.setattr(Recoder, "encode", slow)
        keys, chunks = kv_chunks(80)
        try:
            for index, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
                if are_one_prefix:
                    client.lookup(keys[: index + 1])  # whoever looks a prefix up stores what is missing
                client.put_chunks([key], [chunk], kv_layout=KV_LAYOUT)
                page = local.call(local.storage.objects.list_objects("OWNERKEY", ListRequest("chunks")))
                assert sum(info.nbytes for info in page.objects) <= CAPACITY_BYTES
            assert eventually(lambda: local.storage.store.evictor.evictions.evicted_count >= 40)
            assert are_one_prefix or client.lookup(keys[-8:], accept=ACCEPT) == 8
        finally:
            may_encode.set()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (CODEC_HEADER, EncodedForm("kivi4-1", KV_LAYOUT, 0.0, 0.0).text),
        (LAYOUT_HEADER, "layers=0;tokens=1;width=1;element=bfloat16"),
        (LAYOUT_HEADER, "layers=1;tokens=1;width=1;element=int4"),
        (LAYOUT_HEADER, "x" * 400),
    ],
)
def test_only_the_server_says_that_a_chunk_is_encoded(tmp_path: Path, header: str, value: str) -> None:
    with serving(tmp_path) as local:
        make_bucket(local)
        answer = request(local.url, "PUT", "/chunks/key", body=b"bytes", headers={header: value})
        assert answer.status == 400
        assert header.encode() in answer.body
        assert request(local.url, "HEAD", "/chunks/key").status == 404


def test_lossy_needs_codecs() -> None:
    with pytest.raises(ValueError, match="lossy needs"), serving(Path("/nonexistent"), compression=None):
        pass
    with pytest.raises(ValueError, match="max_error goes with lossy"):
        CacheSettings("chunks", max_error=0.1)
    with pytest.raises(ValueError, match="max_loss goes with lossy"):
        CacheSettings("chunks", max_loss=0.1)


def test_a_lookup_that_accepts_nonsense_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as local:
        make_bucket(local)
        for fields, name in (
            ('"accept":[],"element":"bfloat16"', "accept"), ('"accept":["kivi4-1"]', "element"),
            ('"max_error":0.1', "max_error"),
            ('"accept":["kivi4-1"],"element":"int4"', "element"),
            ('"accept":["kivi4-1"],"element":"bfloat16","max_error":-1', "max_error"),
        ):  # fmt: skip
            body = f'{{"chunk_keys":["a"],{fields}}}'.encode()
            answer = request(local.url, "POST", "/chunks?lookup=", body=body)
            assert answer.status == 400
            assert answer.named_field == name


def test_a_server_that_knows_no_codecs_is_asked_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup of an earlier release has no such field, and refuses it."""
    with serving(tmp_path) as local, local.client("chunks", "http") as client:
        make_bucket(local)
        keys, chunks = kv_chunks(2)
        client.put_chunks(keys, list(chunks))
        asked, send = list[bytes](), client.http.request

        def old(method: str, path: str, query: Any, body: bytes, *rest: Any, **named: Any) -> Any:
            asked.append(body)
            if b"accept" in body:
                raise CallerError(ErrorCode.INVALID_ARGUMENT, "accept is not acceptable", field="accept")
            return send(method, path, query, body, *rest, **named)

        monkeypatch.setattr(client.http, "request", old)
        assert client.lookup(keys, accept=ACCEPT) == 2
        assert [b"accept" in body for body in asked] == [True, False]


@pytest.mark.slow
def test_a_gateway_apart_from_the_store_knows_forms_and_decodes(tmp_path: Path) -> None:
    """Lookups, encoded layers and decoded bodies between two processes."""
    config = f"""{CONFIG}
[[buckets]]
name = "chunks"
capacity_bytes = {CAPACITY_BYTES}
eviction = "lru"
lossy = "replace"

[compression]
policy = "adaptive"

[compression.codecs.kivi4-1]
quality = 0.99
decoded_bytes_per_s = "4GB"
"""
    keys, chunks = kv_chunks(COUNT)
    with stack("apart", tmp_path, config) as running:
        assert request(running.url, "PUT", "/chunks").status == 200
        with Client(running.url, "chunks", access_key=OWNER[0], secret_key=OWNER[1], transport="http") as client:
            for key, chunk in zip(keys, chunks, strict=True):
                client.put_chunks([key], [chunk], kv_layout=KV_LAYOUT)

            def encoded() -> list[str]:
                heads = {key: request(running.url, "HEAD", f"/chunks/{key}").headers for key in keys}
                return [key for key, headers in heads.items() if CODEC_HEADER in headers]

            assert eventually(lambda: bool(encoded()))
            key = encoded()[0]
            exact = chunks[keys.index(key)]
            answer = request(running.url, "GET", f"/chunks/{key}", headers={DECODE_HEADER: "true"})
            assert (answer.status, answer.body) == (200, decoded(exact, Codec.KIVI4).tobytes())
            assert (client.lookup([key]), client.lookup([key], accept=ACCEPT)) == (0, 1)
            buffer = client.allocate_buffer(LAYOUT.chunk_bytes)
            forms = client.fetch([key], LAYOUT, buffer, accept=ACCEPT).wait(30).forms
            assert forms is not None
            assert [run.codec for run in forms.runs] == ["kivi4-1"]
            assert np.array_equal(buffer, decoded(exact, Codec.KIVI4))
