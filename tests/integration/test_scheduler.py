"""The scheduler on running servers: what clients are told, what operators can change, what faults give back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_json
from descriptors.errors import ErrorCode, ServerError
from nixl_client.client import Client
from nixl_client.session.retries import Retries
from nixl_client.transports.shared_memory import allocate
from objectcache.cli.config import ConfigError, load_config
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import PoolSettings
from storage_server.delivery.scheduler.settings import SchedulerSettings
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OTHER, OWNER
from tests.support.servers import CONFIG, LocalStack, Stack, stack, ucx_for, ucx_of
from tests.support.waiting import eventually

RATE = 1e7
PAYLOAD_BYTES = LAYOUT.delivery_bytes(N)
SMALL = {"aggregation_bytes": 8192, "window_bytes": 32768, "staging_bytes": 131072, "direct_payload_bytes": 65536}


@pytest.fixture(params=[None, Policy.CALIBRATED_STALL_OPT], ids=["slack", "calibrated"])
def paced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStack]:
    settings = SchedulerSettings(link_bytes_per_s=RATE, pool=PoolSettings(request.param, gather_s=0.0))
    with LocalStack(tmp_path / "data", ucx=ucx_of(request), scheduler=settings, **SMALL) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


def put(client: Client, seed: int = 1) -> tuple[list[str], np.ndarray]:
    keys, chunks = make_chunks(N, LAYOUT, seed)
    client.put_chunks(keys, list(chunks))
    return keys, chunks


def layer_major(chunks: np.ndarray) -> np.ndarray:
    split = chunks.reshape(N, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
    return np.ascontiguousarray(split.transpose(1, 0, 2)).ravel()


def status(servers: Stack) -> dict[str, Any]:
    reply = servers.request("GET", "/_objectcache/scheduler", key=OWNER)
    assert reply.status == 200
    found: dict[str, Any] = json.loads(reply.body)
    return found


@pytest.mark.slow
def test_the_client_knows_rate_and_epoch_before_layer_0(paced: LocalStack, transport: str) -> None:
    """Over every transport, and every byte is right."""
    buffer = allocate(PAYLOAD_BYTES)
    with paced.client("chunks", transport) as client:
        keys, chunks = put(client)
        began_s = time.monotonic()
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR, layer_compute_us=[10_000])
        fetch.wait_layer(0, 30)
        assert 0 < fetch.grant.rate_bytes_per_s <= RATE
        assert fetch.grant.epoch == 1
        fetch.wait(30)
        assert time.monotonic() - began_s >= PAYLOAD_BYTES / RATE - 0.01
    assert np.array_equal(buffer, layer_major(chunks))
    assert eventually(lambda: paced.storage.pipeline.link.status().queued_bytes == 0)


@pytest.mark.slow
def test_many_deliveries_share_the_link_and_all_bytes_are_right(paced: LocalStack, transport: str) -> None:
    """Both orders at once, more of them than memory to stage them in; nothing is left behind."""
    buffers = [allocate(PAYLOAD_BYTES) for _ in range(10)]
    with paced.client("chunks", transport) as client:
        keys, chunks = put(client)
        fetches = [
            client.fetch(
                keys,
                LAYOUT,
                buffer,
                delivery=Delivery.LAYER_MAJOR if index % 3 else Delivery.CHUNK_MAJOR,
                layer_compute_us=[index * 1000],
            )
            for index, buffer in enumerate(buffers)
        ]
        for index, (fetch, buffer) in enumerate(zip(fetches, buffers, strict=True)):
            fetch.wait(60)
            assert np.array_equal(buffer, layer_major(chunks) if index % 3 else chunks.ravel())
    link = paced.storage.pipeline.link
    assert eventually(lambda: link.delivery_count == 0)
    assert link.early_left == 131072 // 8192 // 2


@pytest.mark.slow
def test_a_cancelled_fetch_gives_its_rate_back(tmp_path: Path, transport: str) -> None:
    """A link too slow to end it, and another request that gets the link at once."""
    settings = SchedulerSettings(link_bytes_per_s=1000.0, pool=PoolSettings(gather_s=0.0))
    with LocalStack(tmp_path / "data", ucx=ucx_for(transport), scheduler=settings, **SMALL) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        with local.client("chunks", transport) as client:
            keys, _ = put(client)
            fetch = client.fetch(keys, LAYOUT, allocate(PAYLOAD_BYTES), delivery=Delivery.LAYER_MAJOR)
            assert eventually(lambda: local.storage.pipeline.link.status().layerwise_active == 1)
            fetch.cancel()
            assert eventually(lambda: local.storage.pipeline.link.status().layerwise_active == 0)
            assert eventually(lambda: local.storage.staging.free_count == local.storage.staging.slot_count)


def test_a_backlog_is_refused_with_503_and_when_to_come_back(tmp_path: Path) -> None:
    settings = SchedulerSettings(link_bytes_per_s=50_000.0, queued_bytes_max=1, pool=PoolSettings(gather_s=0.0))
    with LocalStack(tmp_path / "data", scheduler=settings, **SMALL) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        with local.client("chunks", "http", retries=Retries(1)) as client:
            keys, _ = put(client)
            first = client.fetch(keys, LAYOUT, allocate(PAYLOAD_BYTES), delivery=Delivery.LAYER_MAJOR)
            assert eventually(lambda: local.storage.pipeline.link.status().queued_bytes > 0)
            with pytest.raises(ServerError) as slow:
                client.fetch(keys, LAYOUT, allocate(PAYLOAD_BYTES)).wait(30)
            assert slow.value.code is ErrorCode.SLOW_DOWN
            assert slow.value.retry_after_s is not None
            assert 1 < slow.value.retry_after_s <= 60
            first.cancel()


@pytest.mark.slow
def test_an_operator_changes_the_link_without_a_restart(tmp_path: Path) -> None:
    """SIGHUP reads the file anew, for what is under way too; a file that is wrong changes nothing."""
    slow = CONFIG + "[scheduler]\nlink_bytes_per_s = 1000\n[internals.scheduler]\ngather_s = 0\n"
    file = tmp_path / "config.toml"
    with stack("together", tmp_path, slow) as servers:
        servers.s3().create_bucket(Bucket="chunks")
        with servers.client("chunks", "http") as client:
            keys, chunks = put(client)
            buffer = allocate(PAYLOAD_BYTES)
            fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            assert eventually(lambda: status(servers)["layerwise_active"] == 1)
            file.write_text(CONFIG + "[scheduler\n")
            os.kill(servers.storage_pid, signal.SIGHUP)
            equal = '[internals.scheduler]\npolicy = "equal"\n'
            file.write_text(f"{CONFIG}[scheduler]\nlink_bytes_per_s = 1e9\n{equal}")
            os.kill(servers.storage_pid, signal.SIGHUP)
            assert eventually(lambda: status(servers)["policy"] == "equal")
            fetch.wait(30)
            assert np.array_equal(buffer, layer_major(chunks))


def test_the_status_needs_a_signature_and_says_the_same_through_a_gateway_apart(servers: Stack) -> None:
    found = status(servers)
    assert found["policy"] == "slack"
    assert found["link_bytes_per_s"] is None
    assert servers.request("GET", "/_objectcache/scheduler", key=None).status == 403
    assert servers.request("POST", "/_objectcache/scheduler", key=OWNER).status == 405


def test_the_answer_says_rate_and_epoch_in_its_headers(paced: LocalStack) -> None:
    """For clients that know no notices."""
    with paced.client("chunks", "http") as client:
        keys, _ = put(client)
        shape = (LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.per_layer_chunk_bytes)
        body = encode_json(Descriptor(tuple(keys), *shape, delivery=Delivery.LAYER_MAJOR))
        reply = Stack(paced.url, Path(), os.getpid()).request("POST", "/chunks?layerwise", body=body, key=OWNER)
        assert reply.status == 200
        assert 0 < int(reply.headers["x-amz-objectcache-rate"]) <= RATE
        assert int(reply.headers["x-amz-objectcache-epoch"]) >= 1


@pytest.mark.slow
def test_a_tenant_with_many_requests_leaves_another_its_share(tmp_path: Path) -> None:
    """Eight requests of one access key, and one of another that comes last: it does not wait for them to end."""
    settings = SchedulerSettings(link_bytes_per_s=1e6, pool=PoolSettings(gather_s=0.0))
    with LocalStack(tmp_path / "data", scheduler=settings, **SMALL) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        with local.client("chunks", "shm") as many, local.client("chunks", "shm", OTHER) as one:
            keys, _ = put(many)
            fetches = [
                many.fetch(keys, LAYOUT, allocate(PAYLOAD_BYTES), delivery=Delivery.LAYER_MAJOR) for _ in range(8)
            ]
            assert eventually(lambda: local.storage.pipeline.link.delivery_count == 8)
            one.fetch(keys, LAYOUT, allocate(PAYLOAD_BYTES), delivery=Delivery.LAYER_MAJOR).wait(60)
            assert sum(not fetch.is_complete for fetch in fetches) >= 4
            for fetch in fetches:
                fetch.cancel()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[scheduler]\nlink_bytes_per_s = 0", "link_bytes_per_s"),
        ("[scheduler]\nlink_bytes_per_s = nan", "link_bytes_per_s"),
        ('[internals.scheduler]\npolicy = "fair"', "policy"),
        ('[internals.scheduler]\nrates = "sometimes"', "rates"),
        ("[internals.scheduler]\nchunkwise_fraction = 0.0", "chunkwise_fraction"),
        ("[internals.scheduler]\nchunkwise_fraction = 5e-324", "chunkwise_fraction"),
        ("[internals.scheduler]\nchunkwise_deliveries_max = 0", "chunkwise_deliveries_max"),
        ("[internals.scheduler]\nqueued_bytes_max = 0", "queued_bytes_max"),
        ("[scheduler]\nmargin_bytes_per_s = -1", "margin_bytes_per_s"),
        ("[internals.scheduler]\nepoch_s_max = 0", "epoch_s_max"),
        ('[[tenants]]\naccess_key = "A"\nweight = 0', "weight"),
        ('[[tenants]]\naccess_key = "A"\npriority = 9', "priority"),
        ('[[tenants]]\naccess_key = "A"\n[[tenants]]\naccess_key = "A"', "tenants"),
        ('[[compute_profiles]]\nname = "m"', "num_layers"),
        ("[scheduler]\nunknown = 1", "unknown"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(file).storage_settings(tmp_path)


def test_a_compute_profile_stands_in_for_what_a_descriptor_does_not_say(tmp_path: Path) -> None:
    """Found by the model's shape; what the descriptor says goes first."""
    from storage_server.delivery.scheduler.profiles import compute_s

    file = tmp_path / "config.toml"
    file.write_text(
        '[[compute_profiles]]\nname = "m"\nnum_layers = 32\ntoken_layer_bytes = 4096\nrequest_us = 3200\n'
        "token_us = 32\ntoken_pair_us = 0.0\nhit_rate = 0.5\n"
    )
    profiles = load_config(file).scheduler_settings().profiles
    known = Descriptor(("a", "b"), 32, 64, 64 * 4096)
    assert compute_s(known, 2, profiles) == pytest.approx((3200 + 32 * 128) / 32 / 1e6)
    assert compute_s(Descriptor(("a",), 32, 64, 64 * 2048), 1, profiles) is None
    assert compute_s(Descriptor(("a",), 32, 64, 64 * 4096, layer_compute_us=(500,)), 1, profiles) == 500e-6


@pytest.mark.slow
def test_a_server_without_a_scheduler_survives_sighup(tmp_path: Path) -> None:
    """A gateway apart has nothing to read anew, and a reload of all processes must not end it."""
    with stack("apart", tmp_path) as servers:
        for process in servers.processes:
            os.kill(process.pid, signal.SIGHUP)
        assert status(servers)["policy"] == "slack"
        assert all(process.poll() is None for process in servers.processes)
