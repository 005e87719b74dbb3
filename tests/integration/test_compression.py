"""The DRAM tier that compresses: readers that accept codecs get encoded layers, decoded in their buffers, with the
error that was measured; all others get the exact bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Accept, Delivery, Descriptor
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.headers import CLASS_HEADER
from descriptors.layer_forms import EXACT, FormRun, LayerForms, parse_forms
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.lossy import MAX_ERROR
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode, encode, encode_further
from objectcache.kv_codecs.layer import Codec, LayerShape
from objectcache.kv_codecs.loss import loss
from storage_server.cache.dram import DramTier
from storage_server.cache.encoding_keeper import EncodingKeeper
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from tests.support.requests import OTHER, OWNER, request
from tests.support.servers import LocalStack, ucx_of
from tests.support.waiting import eventually

SHAPE = LayerShape(16, 128, Element.BFLOAT16)
LAYERS, COUNT = 5, 8
LAYOUT = ChunkLayout(LAYERS, 16, SHAPE.nbytes)
ACCEPT = Accept((Codec.KIVI4.value, "not-known-1"), "bfloat16")
FIGURES = {Codec.KIVI4: CodecFigures(0.99, 2e9), Codec.KIVI8: CodecFigures(0.999, 1e9)}
ENCODED_BYTES = 16_384
"""The bytes that a chunk of KIVI4 takes of the DRAM tier."""


def kv_chunks(count: int, seed: int = 1) -> tuple[list[str], np.ndarray]:
    """Keys, and chunks of values as KV has them: uint8 of shape (count, L*S)."""
    random = np.random.default_rng(seed)
    chunks = np.empty((count, LAYOUT.chunk_bytes), dtype=np.uint8)
    for chunk in chunks:
        from_floats(random.standard_normal(LAYOUT.chunk_bytes // 2).astype(np.float32), Element.BFLOAT16, chunk)
    return [f"{seed:08x}{index:056x}" for index in range(count)], chunks


def decoded(chunk: np.ndarray, codec: Codec) -> np.ndarray:
    """The chunk as it comes back."""
    out = np.empty_like(chunk)
    for layer in range(LAYERS):
        places = slice(layer * SHAPE.nbytes, (layer + 1) * SHAPE.nbytes)
        decode(encode(chunk[places], SHAPE, codec), SHAPE, out[places])
    return out


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStack]:
    """A server whose DRAM tier has room for all chunks at 4 bits, and for no more than three exact ones."""
    utility = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
    with LocalStack(
        tmp_path,
        ucx=ucx_of(request),
        dram_bytes=COUNT * ENCODED_BYTES + 8_192,
        theta_bytes=0,
        compression=utility,
        max_errors={OTHER[0]: 0.001},
    ) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        yield running


@pytest.fixture
def stored(local: LocalStack) -> tuple[list[str], np.ndarray]:
    keys, chunks = kv_chunks(COUNT)
    with local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys, chunks


def test_an_access_key_whose_budget_is_spent_gets_exact_chunks(tmp_path: Path) -> None:
    settings = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
    room = COUNT * ENCODED_BYTES + 8_192
    with LocalStack(
        tmp_path, dram_bytes=room, theta_bytes=0, compression=settings, error_budgets={OWNER[0]: 0.002}
    ) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        keys, chunks = kv_chunks(COUNT)
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))

            def is_spent() -> bool:
                found, forms, _ = fetched(client, keys, ACCEPT)
                encoded.append(forms is not None and not forms.is_exact)
                return np.array_equal(found, chunks) and any(encoded)

            encoded: list[bool] = []
            assert eventually(is_spent, 20)
            for _ in range(3):
                found, _, _ = fetched(client, keys, ACCEPT)
                assert np.array_equal(found, chunks)


def test_the_class_of_the_content_comes_with_the_put_and_decides_with(tmp_path: Path) -> None:
    """On code both codecs cost more quality than a load from the home takes time: it is kept exactly, or not at all."""
    settings = UtilitySettings(
        FIGURES, {"code": dict.fromkeys(FIGURES, 0.2)}, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8
    )
    room = COUNT * ENCODED_BYTES + 8_192
    with LocalStack(tmp_path, dram_bytes=room, theta_bytes=0, compression=settings) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        (code, code_chunks), (other, other_chunks) = kv_chunks(COUNT, 1), kv_chunks(COUNT, 2)
        with running.client("chunks", "http") as client:
            client.put_chunks(code, list(code_chunks), content_class="code")
            client.put_chunks(other, list(other_chunks))
            with pytest.raises(CallerError) as refused:
                client.put_chunks(["0" * 64], [code_chunks[0]], content_class="No Class")
            assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, CLASS_HEADER)
        answer = request(running.url, "HEAD", f"/chunks/{code[0]}")
        assert {name.lower(): value for name, value in answer.headers.items()}[CLASS_HEADER] == "code"
        warm(running, other)
        with running.client("chunks", "http") as client:
            for _ in range(4):
                found, forms, _ = fetched(client, code, ACCEPT)
                assert np.array_equal(found, code_chunks)
                assert forms is None or forms.is_exact


def tier(local: LocalStack) -> DramTier:
    found = local.storage.dram
    assert isinstance(found.keeper, EncodingKeeper)
    return found


def warm(local: LocalStack, keys: list[str], codec: str = Codec.KIVI4.value) -> None:
    """Use the chunks until all of them lie in memory in this form."""
    with local.client("chunks", "http") as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(len(keys)), dtype=np.uint8)

        def is_warm() -> bool:
            client.fetch(keys, LAYOUT, buffer, accept=Accept((codec,), "bfloat16")).wait(30)
            return eventually(lambda: tier(local).residency.form_counts == {codec: len(keys)}, 1)

        assert eventually(is_warm), tier(local).residency.form_counts


def decoded_further(exact: np.ndarray, first: Codec, second: Codec) -> np.ndarray:
    """A chunk that was encoded with one codec, and then further with another one."""
    out = np.empty_like(exact)
    for layer, place in zip(exact.reshape(LAYERS, -1), out.reshape(LAYERS, -1), strict=True):
        decode(encode_further(encode(layer, SHAPE, first), SHAPE, second)[0], SHAPE, place)
    return out


def fetched(
    client: Client, keys: list[str], accept: Accept | None, delivery: Delivery = Delivery.LAYER_MAJOR
) -> tuple[np.ndarray, LayerForms | None, int]:
    """The chunks as the buffer has them, the forms, and the bytes that were transferred."""
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(len(keys)))
    buffer[:] = 0xEE
    fetch = client.fetch(keys, LAYOUT, buffer, accept=accept, delivery=delivery)
    found = np.stack([np.array(fetch.wait_layer(layer, 30).data) for layer in range(LAYERS)], axis=1)
    result = fetch.wait(30)
    client.release_buffer(buffer)  # a server takes 256 regions from one client
    return found.reshape(len(keys), -1), result.forms, result.transferred_bytes


@pytest.mark.slow
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_encoded_layers_go_to_readers_that_accept_them(
    local: LocalStack, stored: tuple[list[str], np.ndarray], transport: str, delivery: Delivery
) -> None:
    keys, chunks = stored
    exact_bytes = LAYOUT.delivery_bytes(COUNT)
    with local.client("chunks", transport) as client:
        found, forms, nbytes = fetched(client, keys, ACCEPT, delivery)
        assert np.array_equal(found, chunks), "nothing lies in memory yet"
        assert forms in (None, LayerForms((FormRun(EXACT, COUNT, SHAPE.nbytes),)))
        assert nbytes == exact_bytes
        warm(local, keys)
        found, forms, nbytes = fetched(client, keys, ACCEPT, delivery)
        assert np.array_equal(found, np.stack([decoded(chunk, Codec.KIVI4) for chunk in chunks]))
        assert forms is not None
        assert [(run.codec, run.chunk_count) for run in forms.runs] == [(Codec.KIVI4.value, COUNT)]
        assert nbytes == LAYERS * int(forms.layer_bytes.sum()) < exact_bytes / 2.5
        layers = chunks.reshape(-1, SHAPE.nbytes), found.reshape(-1, SHAPE.nbytes)
        errors = [loss(*pair, SHAPE) for pair in zip(*layers, strict=True)]
        assert forms.worst_error == pytest.approx(max(each.worst for each in errors), rel=1e-4)
        assert forms.mean_error == pytest.approx(np.mean([[each.keys, each.values] for each in errors]), rel=1e-4)
        found, forms, nbytes = fetched(client, keys, None, delivery)
        assert np.array_equal(found, chunks)
        assert (forms, nbytes) == (None, exact_bytes)


@pytest.mark.parametrize(("first", "most", "used"), [(Codec.KIVI8, 7, 8), (Codec.K8V4, 9, 12)])
def test_chunks_are_encoded_further_where_they_lie(tmp_path: Path, first: Codec, most: int, used: int) -> None:
    """Readers come that take 4 bits, too: what was encoded with more bits for others is encoded with 4, and its error
    is bounded, and within the bound that clients have by default.
    """
    figures = {first: CodecFigures(0.9999, 1e12), Codec.KIVI4: CodecFigures(0.995, 1e12)}
    settings = UtilitySettings(figures, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e7)
    accept = Accept(tuple(codec.value for codec in figures), "bfloat16", MAX_ERROR)
    only_first = Accept((first.value,), "bfloat16", MAX_ERROR)
    keys, chunks = kv_chunks(16)
    with LocalStack(tmp_path, dram_bytes=6 * LAYOUT.chunk_bytes, theta_bytes=0, compression=settings) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))

            def holds(codec: Codec, count: int, used: int, accept: Accept) -> bool:
                fetched(client, keys[:used], accept)
                return tier(running).residency.form_counts.get(codec.value, 0) >= count

            assert eventually(lambda: holds(first, most, used, only_first))
            assert eventually(lambda: holds(Codec.KIVI4, 12, 16, accept))
            found, forms, _ = fetched(client, keys, accept)
    assert forms is not None
    names = [run.codec for run in forms.runs for _ in range(run.chunk_count)]
    worst, are_further = [0.0], []
    for chunk, exact, name in zip(found, chunks, names, strict=True):
        layers = zip(exact.reshape(LAYERS, -1), chunk.reshape(LAYERS, -1), strict=True)
        worst += [loss(*pair, SHAPE).worst for pair in layers]
        once = exact if name == EXACT else decoded(exact, Codec(name))
        twice = decoded_further(exact, first, Codec.KIVI4)
        assert np.array_equal(chunk, once) or (name == Codec.KIVI4.value and np.array_equal(chunk, twice))
        are_further.append(not np.array_equal(chunk, once))
    assert any(are_further)
    assert max(worst) <= forms.worst_error * (1 + 1e-6)


@pytest.mark.slow
def test_a_bound_that_nothing_meets_gets_exact_bytes(
    local: LocalStack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    """The reader's own bound, and the one that the server has for an access key."""
    keys, chunks = stored
    warm(local, keys)
    with local.client("chunks", transport) as client:
        strict = Accept(ACCEPT.codecs, "bfloat16", max_error=0.001)
        assert np.array_equal(fetched(client, keys, strict)[0], chunks)
    warm(local, keys)
    with Client(local.url, "chunks", access_key=OTHER[0], secret_key=OTHER[1], transport=transport) as other:
        assert np.array_equal(fetched(other, keys, ACCEPT)[0], chunks)


@pytest.mark.slow
def test_another_shape_or_unknown_codecs_get_exact_bytes(
    local: LocalStack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    keys, chunks = stored
    warm(local, keys)
    with local.client("chunks", transport) as client:
        for accept in (Accept(("zfp-9",), "bfloat16"), Accept((Codec.KIVI4.value,), "float32")):
            found, forms, _ = fetched(client, keys, accept)
            assert np.array_equal(found, chunks)
            assert forms is None or forms.is_exact


@pytest.mark.slow
def test_a_mixture_of_forms_is_one_delivery(
    local: LocalStack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    """Encoded chunks, new ones that are exact, and encoded ones behind them."""
    keys, chunks = stored
    warm(local, keys)
    more, of_more = kv_chunks(2, seed=9)
    with local.client("chunks", transport) as client:
        client.put_chunks(more, list(of_more))
        keys, chunks = [*keys, *more], np.concatenate([chunks, of_more])
        mixed = [keys[0], *more, keys[1], keys[2]]
        found, forms, _ = fetched(client, mixed, ACCEPT)
        assert forms is not None
        codecs = [run.codec for run in forms.runs for _ in range(run.chunk_count)]
        assert codecs == [Codec.KIVI4.value, EXACT, EXACT, Codec.KIVI4.value, Codec.KIVI4.value]
        for key, codec, chunk in zip(mixed, codecs, found, strict=True):
            exact = chunks[keys.index(key)]
            assert np.array_equal(chunk, exact if codec == EXACT else decoded(exact, Codec(codec)))


def test_any_http_client_can_have_the_encoded_bytes(local: LocalStack, stored: tuple[list[str], np.ndarray]) -> None:
    """In both codings of the descriptor. The answer tells the form of each chunk."""
    keys, chunks = stored
    warm(local, keys)
    descriptor = Descriptor(tuple(keys), LAYERS, 16, SHAPE.nbytes, Delivery.LAYER_MAJOR, accept=ACCEPT, version=2)
    for body in (encode_json(descriptor), encode_binary(descriptor)):
        reply = request(local.url, "POST", "/chunks?layerwise", body=body)
        assert reply.status == 200
        forms = parse_forms(reply.headers["x-amz-objectcache-forms"])
        layers = chunks.reshape(COUNT, LAYERS, -1).transpose(1, 0, 2)
        assert reply.body == b"".join(encode(part, SHAPE, Codec.KIVI4) for layer in layers for part in layer)
        assert len(reply.body) == LAYERS * int(forms.layer_bytes.sum())


@pytest.mark.slow
def test_damage_in_an_encoded_chunk_is_never_announced(
    local: LocalStack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    """The checksum of the layer finds a flipped bit: the chunk counts as damaged, and those before it stay good."""
    keys, _ = stored
    warm(local, keys)
    dram = tier(local)
    used = len(encode(stored[1][0][: SHAPE.nbytes], SHAPE, Codec.KIVI4)) * LAYERS
    memory = (ctypes.c_ubyte * dram.nbytes).from_address(dram.address)
    victim = bytes(memory).find(encode(stored[1][4][: SHAPE.nbytes], SHAPE, Codec.KIVI4))
    assert victim >= 0
    memory[victim + used // LAYERS * 2 + 40] ^= 4
    with local.client("chunks", transport) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
        fetch = client.fetch(keys, LAYOUT, buffer, accept=ACCEPT, delivery=Delivery.LAYER_MAJOR)
        for layer in range(2):
            fetch.wait_layer(layer, 30)
        with pytest.raises(ChunkUnavailable) as error:
            fetch.wait_layer(2, 30)
        assert (error.value.code, error.value.index, error.value.layer) == (ErrorCode.CHUNK_CORRUPT, 4, 2)
        with pytest.raises(ChunkUnavailable):
            fetch.wait(30)
        fetch.cancel()


@pytest.mark.slow
def test_deliveries_while_chunks_change_their_form(local: LocalStack) -> None:
    """Readers have several wishes in turn, over more chunks than fit: every byte is the exact or the decoded one."""
    keys, chunks = kv_chunks(24, seed=3)
    back = {Codec.KIVI4.value: np.stack([decoded(chunk, Codec.KIVI4) for chunk in chunks]),
            Codec.KIVI8.value: np.stack([decoded(chunk, Codec.KIVI8) for chunk in chunks]), EXACT: chunks}  # fmt: skip
    further = [decoded(chunk, Codec.KIVI4) for chunk in back[Codec.KIVI8.value]]
    wishes = [
        None,
        ACCEPT,
        Accept((Codec.KIVI8.value, Codec.KIVI4.value), "bfloat16"),
        Accept((Codec.KIVI8.value,), "bfloat16"),
    ]
    random = np.random.default_rng(5)
    seen: set[str] = set()
    with local.client("chunks", "shm") as shm, local.client("chunks", "http") as http:
        shm.put_chunks(keys, list(chunks))
        for number in range(5000):
            if number >= 120 and len(seen) == 3:
                break
            first = int(random.integers(0, 16))
            mine = list(range(first, min(20, first + int(random.integers(1, 8)))))
            accept = wishes[number // 10 % 4 if number % 3 else int(random.integers(0, 4))]
            if number % 5 == 0:  # others want 4 bits or exact chunks too often for these to lie there at 8 bits
                mine, accept = list(range(20, 24)), wishes[3]
            found, forms, _ = fetched(shm if number % 2 else http, [keys[at] for at in mine], accept)
            runs = (FormRun(EXACT, len(mine), SHAPE.nbytes),) if forms is None else forms.runs
            codecs = [run.codec for run in runs for _ in range(run.chunk_count)]
            seen |= set(codecs)
            for at, codec, chunk in zip(mine, codecs, found, strict=True):
                is_further = codec == Codec.KIVI4.value and np.array_equal(chunk, further[at])
                assert is_further or np.array_equal(chunk, back[codec][at])
    assert len(seen) == 3
    dram = tier(local)
    assert eventually(lambda: dram.keeper.decided_bytes == dram.residency.used_bytes <= dram.nbytes)


def test_readers_with_and_without_accept_in_turn_change_no_form(
    local: LocalStack, stored: tuple[list[str], np.ndarray]
) -> None:
    """Two of three take 4 bits. Each gets what it takes, and the tier neither loads nor encodes at each turn."""
    keys, chunks = stored
    dram = tier(local)
    with local.client("chunks", "http") as client:

        def turn() -> bool:
            exact, _, _ = fetched(client, keys, None)
            assert np.array_equal(exact, chunks)
            for _ in range(2):
                fetched(client, keys, ACCEPT)
            return dram.residency.resident_count == COUNT

        def state() -> tuple[int, int, dict[str, int]]:
            return dram.residency.evicted_count, dram.keeper.encoded_bytes, dram.residency.form_counts

        def is_steady() -> bool:
            """The tier carries out behind a turn what it has decided."""
            before = state()
            return (
                all(turn() for _ in range(3))
                and dram.keeper.decided_bytes == dram.residency.used_bytes
                and state() == before
            )

        assert eventually(is_steady)
        before = state()
        for _ in range(20):
            turn()
    assert state() == before
    assert before[2][Codec.KIVI4.value] >= COUNT // 2


@pytest.mark.slow
def test_chunks_that_are_no_numbers_stay_exact(local: LocalStack, transport: str) -> None:
    """No error can be told of them, so they are never encoded; they are served as they are."""
    keys, chunks = kv_chunks(COUNT, seed=11)
    chunks.view(np.uint16)[:, 5] = 0x7FC0  # NaN as bfloat16
    with local.client("chunks", transport) as client:
        client.put_chunks(keys, list(chunks))
        for _ in range(4):
            found, forms, _ = fetched(client, keys, ACCEPT)
            assert np.array_equal(found, chunks)
            assert forms is None or forms.is_exact
            eventually(lambda: tier(local).residency.resident_count > 0, 0.5)
        assert set(tier(local).residency.form_counts) <= {EXACT}
