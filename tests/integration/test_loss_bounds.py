"""Readers with `max_loss`: they get encoded chunks where a calibration of their model and layout keeps the bound, and
the answer says how much was lost, and on which ground.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Accept, Descriptor
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.layer_forms import EXACT, LossBasis, parse_forms
from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.losses import LossTable, MeasuredLoss, ModelLosses
from tests.integration.test_compression import (
    COUNT,
    ENCODED_BYTES,
    FIGURES,
    LAYERS,
    LAYOUT,
    SHAPE,
    decoded,
    decoded_further,
    fetched,
    kv_chunks,
    tier,
    warm,
)
from tests.support.requests import OTHER, OWNER, request
from tests.support.servers import LocalStack, ucx_for
from tests.support.waiting import eventually

MODEL = "tiny"
DIRECT, FURTHER = 0.01, 0.03
"""The losses of 4 bits from the exact chunk, and of 4 bits out of 8."""


def calibration(losses: Mapping[Chain, float], **changes: Any) -> ModelLosses:
    forms = {chain: MeasuredLoss(kl / 2, kl, 0.0, 0.0) for chain, kl in losses.items()}
    values: dict[str, Any] = {"model": MODEL, "num_layers": LAYERS, "width": SHAPE.width, **changes}
    return ModelLosses(
        element=SHAPE.element, chunk_tokens=64, forms=forms, texts="", text_count=2, release="1", **values
    )  # fmt: skip


OURS = calibration(
    {(Codec.KIVI8,): 0.001, (Codec.KIVI4,): DIRECT, (Codec.KIVI8, Codec.KIVI4): FURTHER},
)
NAMED = LossTable((OURS,), {"chunks": MODEL})


def bounded(max_loss: float, *codecs: Codec) -> Accept:
    return Accept(tuple(codec.value for codec in codecs or (Codec.KIVI4,)), "bfloat16", max_loss=max_loss)


@contextmanager
def serving(tmp_path: Path, losses: LossTable, **settings: Any) -> Iterator[LocalStack]:
    """A server whose DRAM tier has room for all chunks at 4 bits."""
    utility = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
    values = {"dram_bytes": COUNT * ENCODED_BYTES + 8_192, "theta_bytes": 0, "compression": utility, **settings}
    with LocalStack(tmp_path, losses=losses, **values) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        yield running


@pytest.mark.parametrize("transport", ["http", "shm", pytest.param("ucx", marks=pytest.mark.slow)])
def test_a_bound_is_kept_and_the_answer_says_the_loss(tmp_path: Path, transport: str) -> None:
    keys, chunks = kv_chunks(COUNT)
    with (
        serving(tmp_path, NAMED, ucx=ucx_for(transport)) as local,
        local.client("chunks", transport) as client,
    ):
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        found, forms, _ = fetched(client, keys, bounded(DIRECT))
        assert np.array_equal(found, np.stack([decoded(chunk, Codec.KIVI4) for chunk in chunks]))
        assert forms is not None
        assert (forms.worst_loss, forms.loss_basis) == (DIRECT, LossBasis.CALIBRATED)
        found, forms, _ = fetched(client, keys, bounded(DIRECT * 0.99))
        assert np.array_equal(found, chunks)
        assert forms is not None
        assert (forms.is_exact, forms.worst_loss, forms.loss_basis) == (True, 0.0, LossBasis.CALIBRATED)
        _, forms, _ = fetched(client, keys, Accept((Codec.KIVI4.value,), "bfloat16"))
        assert forms is None or forms.loss_basis is None, "a reader without a bound may know no losses"
        metrics = local.call(local.storage.status.metrics(OWNER[0]))
        assert 'objectcache_delivery_worst_loss_nats_bucket{basis="calibrated",le="0.01"}' in metrics


WRONG_LAYERS = LossTable((replace(OURS, num_layers=LAYERS + 1),), {"chunks": MODEL})
WRONG_WIDTH = LossTable((replace(OURS, width=2 * SHAPE.width),), {"chunks": MODEL})
OTHER_MODEL = LossTable((OURS,), {"chunks": "huge"})
NO_NAME = LossTable((OURS,))


@pytest.mark.parametrize("losses", [WRONG_LAYERS, WRONG_WIDTH, OTHER_MODEL, NO_NAME, LossTable()])
def test_a_model_that_is_not_calibrated_gets_exact_bytes(
    tmp_path: Path, losses: LossTable, caplog: pytest.LogCaptureFixture
) -> None:
    """Above all with a calibration of another layout under the same name. The log says why, once."""
    keys, chunks = kv_chunks(COUNT)
    with serving(tmp_path, losses) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        found, forms, _ = fetched(client, keys, bounded(10.0))
        assert np.array_equal(found, chunks)
        assert forms is not None
        assert (forms.is_exact, forms.worst_loss, forms.loss_basis) == (True, 0.0, LossBasis.UNCALIBRATED)
        fetched(client, keys, bounded(10.0))
    assert caplog.text.count("readers with max_loss in bucket chunks have no calibration") == 1


def test_or_it_gets_what_keeps_the_bound_on_the_worst_model(tmp_path: Path) -> None:
    worse = calibration({(Codec.KIVI4,): 2 * DIRECT}, model="worse", num_layers=2)
    losses = LossTable((OURS, worse), {"chunks": "worst"})
    keys, chunks = kv_chunks(COUNT)
    with serving(tmp_path, losses) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        _, forms, _ = fetched(client, keys, bounded(2 * DIRECT))
        assert forms is not None
        assert (forms.encoded_count, forms.worst_loss, forms.loss_basis) == (COUNT, 2 * DIRECT, LossBasis.WORST)
        found, forms, _ = fetched(client, keys, bounded(DIRECT))
        assert np.array_equal(found, chunks), "within the bound on one model, and above it on the other"
        assert forms is not None
        assert forms.loss_basis is LossBasis.WORST


def test_the_model_stands_in_the_keys_of_connectors(tmp_path: Path) -> None:
    """Whatever the bucket's model is."""
    keys, chunks = kv_chunks(COUNT)
    keys = [f"kv/{MODEL}/layout/ranks/{key}" for key in keys]
    with serving(tmp_path, OTHER_MODEL) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        _, forms, _ = fetched(client, keys, bounded(DIRECT))
        assert forms is not None
        assert (forms.encoded_count, forms.loss_basis) == (COUNT, LossBasis.CALIBRATED)
        assert client.lookup(keys, accept=bounded(DIRECT)) == COUNT


HALF_OF = LossTable((replace(OURS, width=2 * SHAPE.width),))


def test_a_rank_s_chunks_have_the_calibration_of_the_whole_model(tmp_path: Path) -> None:
    keys, chunks = kv_chunks(COUNT)
    keys = [f"kv/{MODEL}/layout/tp1of2-pp0of1/{key}" for key in keys]
    with serving(tmp_path, HALF_OF) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        found, forms, _ = fetched(client, keys, bounded(DIRECT))
        assert np.array_equal(found, np.stack([decoded(chunk, Codec.KIVI4) for chunk in chunks]))
        assert forms is not None
        assert (forms.worst_loss, forms.loss_basis) == (DIRECT, LossBasis.CALIBRATED)


def test_the_bound_of_an_access_key_holds_whatever_it_accepts(tmp_path: Path) -> None:
    """Also for a client that sets none, and so is told none; and for lookups of what is stored encoded."""
    keys, chunks = kv_chunks(COUNT)
    accept = Accept((Codec.KIVI4.value,), "bfloat16")
    with (
        serving(tmp_path, NAMED, max_losses={OTHER[0]: 0.99 * DIRECT, OWNER[0]: DIRECT}) as local,
        local.client("chunks", "http") as client,
        local.client("chunks", "http", OTHER) as other,
    ):
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        for bound in (accept, bounded(10.0)):
            found, forms, _ = fetched(other, keys, bound)
            assert np.array_equal(found, chunks)
            assert forms is None or forms.is_exact
        warm(local, keys)
        _, forms, _ = fetched(client, keys, accept)
        assert forms is not None
        assert (forms.encoded_count, forms.loss_basis) == (COUNT, None)


def test_any_http_client_is_told_the_loss(tmp_path: Path) -> None:
    """In both codings of the descriptor; a release before version 3 refuses the version, and exact bytes are asked."""
    keys, chunks = kv_chunks(COUNT)
    with serving(tmp_path, NAMED) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        warm(local, keys)
        descriptor = Descriptor(tuple(keys), LAYERS, 16, SHAPE.nbytes, accept=bounded(DIRECT), version=3)
        for body in (encode_json(descriptor), encode_binary(descriptor)):
            reply = request(local.url, "POST", "/chunks?layerwise", body=body)
            text = reply.headers["x-amz-objectcache-forms"]
            assert text.endswith(f",loss;{DIRECT};calibrated")
            assert parse_forms(text).encoded_count == COUNT


def test_encoding_further_never_passes_the_bound(tmp_path: Path) -> None:
    """4 bits out of 8 lose more than the bound, 4 bits at once do not: what comes in 4 bits was made from the exact
    chunk, whatever the memory has made for others.
    """
    figures = {Codec.KIVI8: CodecFigures(0.9999, 1e12), Codec.KIVI4: CodecFigures(0.995, 1e12)}
    utility = UtilitySettings(figures, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e7)
    keys, chunks = kv_chunks(16)
    both = (Codec.KIVI8, Codec.KIVI4)
    unbounded = Accept(tuple(codec.value for codec in both), "bfloat16")
    eight = Accept((Codec.KIVI8.value,), "bfloat16")
    room = 6 * LAYOUT.chunk_bytes
    with (
        serving(tmp_path, NAMED, dram_bytes=room, compression=utility) as local,
        local.client("chunks", "http") as client,
    ):
        client.put_chunks(keys, list(chunks))

        def holds(codec: Codec, count: int, used: int, accept: Accept) -> bool:
            fetched(client, keys[:used], accept)
            return tier(local).residency.form_counts.get(codec.value, 0) >= count

        assert eventually(lambda: holds(Codec.KIVI8, 7, 8, eight))
        assert eventually(lambda: holds(Codec.KIVI4, 12, 16, unbounded))
        further = [decoded_further(chunk, Codec.KIVI8, Codec.KIVI4) for chunk in chunks]
        known = {codec.value: [decoded(chunk, codec) for chunk in chunks] for codec in both}
        found, _, _ = fetched(client, keys, unbounded)
        assert any(np.array_equal(*pair) for pair in zip(found, further, strict=True))
        for _ in range(30):
            found, forms, _ = fetched(client, keys, bounded(DIRECT, *both))
            assert forms is not None
            assert forms.worst_loss <= DIRECT
            names = [run.codec for run in forms.runs for _ in range(run.chunk_count)]
            for at, (chunk, name) in enumerate(zip(found, names, strict=True)):
                assert np.array_equal(chunk, chunks[at] if name == EXACT else known[name][at])
        _, forms, _ = fetched(client, keys, bounded(FURTHER, *both))
        assert forms is not None
        assert forms.worst_loss <= FURTHER


@pytest.mark.parametrize("wrong", [0x7FC0, 0x7F80, 0xFF80])
def test_values_that_are_no_numbers_stay_exact_for_readers_with_a_bound(tmp_path: Path, wrong: int) -> None:
    """NaN and both infinities as bfloat16: nothing was calibrated on such KV."""
    keys, chunks = kv_chunks(4, seed=11)
    chunks.view(np.uint16)[:, 5] = wrong
    with serving(tmp_path, NAMED) as local, local.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        for _ in range(4):
            found, forms, _ = fetched(client, keys, bounded(10.0))
            assert np.array_equal(found, chunks)
            assert forms is not None
            assert forms.is_exact
            eventually(lambda: tier(local).residency.resident_count > 0, 0.5)
        assert set(tier(local).residency.form_counts) <= {EXACT}
