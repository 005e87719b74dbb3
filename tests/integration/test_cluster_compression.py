"""Encoded chunks from several storage servers, as one delivery."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Accept, Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layer_forms import EXACT, LayerForms, LossBasis
from nixl_client.client import Client
from objectcache.kv_codecs.layer import Codec
from tests.integration.test_compression import LAYERS, LAYOUT, SHAPE, decoded, kv_chunks
from tests.support.clusters import Cluster, cluster
from tests.support.requests import s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs_server
WAIT_S = 30.0
COUNT = 24
BUCKET = "chunks"
ACCEPT = Accept((Codec.KIVI4.value,), "bfloat16")
KEYS, CHUNKS = kv_chunks(COUNT)
ONCE = np.stack([decoded(chunk, Codec.KIVI4) for chunk in CHUNKS])
COMPRESSION = f"""
[storage]
dram_bytes = {COUNT * LAYOUT.chunk_bytes // 5}
[compression]
policy = "adaptive"
alpha_s = 0.001
memory_bytes_per_s = 8e9
home_bytes_per_s = 1e8
[compression.codecs.kivi4-1]
quality = 0.99
decoded_bytes_per_s = 2e9
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        s3_client(running.url).create_bucket(Bucket=BUCKET)
        yield running


@pytest.fixture
def kv(tmp_path: Path, home: LocalStack) -> Iterator[Cluster]:
    with cluster(tmp_path, home.url, config=COMPRESSION) as running:
        with running.client(BUCKET) as client:
            client.put_chunks(KEYS, list(CHUNKS))
        yield running


def fetched(
    client: Client, accept: Accept | None = ACCEPT, delivery: Delivery = Delivery.LAYER_MAJOR
) -> tuple[np.ndarray, LayerForms | None]:
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
    with client.fetch(KEYS, LAYOUT, buffer, accept=accept, delivery=delivery) as fetch:
        layers = [np.array(fetch.wait_layer(layer, WAIT_S).data) for layer in range(LAYERS)]
        forms = fetch.wait(WAIT_S).forms
    return np.stack(layers, axis=1).reshape(COUNT, -1), forms


def codecs_of(forms: LayerForms | None) -> list[str]:
    return [EXACT] * COUNT if forms is None else [run.codec for run in forms.runs for _ in range(run.chunk_count)]


def check(found: np.ndarray, forms: LayerForms | None) -> int:
    """Every chunk is the exact one, or the encoded one, as the forms say. Returns how many are encoded."""
    for chunk, exact, once, codec in zip(found, CHUNKS, ONCE, codecs_of(forms), strict=True):
        assert np.array_equal(chunk, exact if codec == EXACT else once)
    return COUNT - codecs_of(forms).count(EXACT)


def warm(running: Cluster, least: int) -> None:
    """Use the chunks until so many come encoded."""
    with running.client(BUCKET) as client:
        assert eventually(lambda: check(*fetched(client)) >= least, WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_what_members_have_encoded_comes_so_through_any_gateway(kv: Cluster, delivery: Delivery) -> None:
    warm(kv, COUNT // 2)
    for gateway in (0, 1):
        with kv.client(BUCKET, gateway) as client:
            found, forms = fetched(client, delivery=delivery)
            assert check(found, forms) >= COUNT // 2
            assert forms is not None
            assert 0 < forms.mean_error < forms.worst_error
            assert forms.worst_error == pytest.approx(0.09, abs=0.03)
    with kv.client(BUCKET) as client:
        found, forms = fetched(client, None, delivery)
        assert forms is None
        assert np.array_equal(found, CHUNKS)


@pytest.mark.slow
def test_a_bound_of_the_loss_goes_through_gateways_to_members(tmp_path: Path, home: LocalStack) -> None:
    """Each member goes by its own table; the answer tells the greatest loss."""
    shape = {"layers": LAYERS, "width": SHAPE.width, "element": "bfloat16", "chunk_tokens": 64}
    forms = {"kivi4-1": {"kl": 0.125, "kl_high": 0.25, "recall_loss": 0.0, "recall_loss_high": 0.0}}
    model = {"model": "m", "texts": "", "text_count": 2, "release": "1", "forms": forms, **shape}
    file = tmp_path / "losses.json"
    file.write_text(json.dumps({"version": 1, "models": [model]}))
    losses = f'losses = "{file}"\nmodels = {{ {BUCKET} = "m" }}\n[compression.codecs.kivi4-1]'
    config = COMPRESSION.replace("[compression.codecs.kivi4-1]", losses)
    with cluster(tmp_path / "cluster", home.url, config=config) as running:
        with running.client(BUCKET) as client:
            client.put_chunks(KEYS, list(CHUNKS))
        warm(running, COUNT // 2)
        with running.client(BUCKET, 1) as client:
            found, told = fetched(client, Accept(ACCEPT.codecs, "bfloat16", max_loss=0.25))
            assert check(found, told) >= COUNT // 2
            assert told is not None
            assert (told.worst_loss, told.loss_basis) == (0.25, LossBasis.CALIBRATED)
            found, told = fetched(client, Accept(ACCEPT.codecs, "bfloat16", max_loss=0.2))
            assert np.array_equal(found, CHUNKS)
            assert told is None or told.is_exact


@pytest.mark.slow
def test_into_memory_all_chunks_come_exactly(kv: Cluster) -> None:
    warm(kv, 1)
    with kv.client(BUCKET, transport="shm") as client:
        found, _ = fetched(client)
        assert np.array_equal(found, CHUNKS)


@pytest.mark.slow
def test_a_bound_that_nothing_meets_gets_exact_chunks(kv: Cluster) -> None:
    warm(kv, 1)
    with kv.client(BUCKET) as client:
        found, forms = fetched(client, Accept(ACCEPT.codecs, ACCEPT.element, max_error=0.001))
        assert check(found, forms) == 0


@pytest.mark.slow
def test_after_a_kill_the_chunks_of_that_member_come_from_others(kv: Cluster) -> None:
    warm(kv, COUNT // 2)
    kv.members["b"].kill()
    with kv.client(BUCKET) as client:
        check(*fetched(client))
        assert np.array_equal(fetched(client, None)[0], CHUNKS)


@pytest.mark.slow
def test_kills_under_way_never_bring_a_wrong_byte(kv: Cluster) -> None:
    """A delivery that had begun with encoded chunks of the killed member fails, and the next one is whole."""
    warm(kv, COUNT // 2)
    stop, outcomes = threading.Event(), []

    def read() -> None:
        with kv.client(BUCKET) as client:
            while not stop.is_set():
                try:
                    outcomes.append(check(*fetched(client)))
                except ObjectCacheError as error:
                    outcomes.append(error.code.value)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(2):
            assert eventually(lambda: len(outcomes) > 20, WAIT_S)
            kv.members["c"].kill()
            outcomes.clear()
            assert eventually(lambda: len(outcomes) > 20, WAIT_S)
            kv.members["c"].start()
            outcomes.clear()
    finally:
        stop.set()
        for reader in readers:
            reader.join(WAIT_S)
    with kv.client(BUCKET) as client:
        check(*fetched(client))
