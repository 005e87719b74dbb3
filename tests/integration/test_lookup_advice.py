"""Recompute or load: `?lookup` with compute costs over real servers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from descriptors.recompute import AdviceRequest, Choice, MeasuredPrefill, PrefillCosts, advise
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.servers import LocalStack, Stack

COMPUTE: dict[str, Any] = {
    "context_tokens": 1000,
    "num_layers": LAYOUT.num_layers,
    "chunk_tokens": LAYOUT.chunk_tokens,
    "per_layer_chunk_bytes": LAYOUT.per_layer_chunk_bytes,
    "token_us": 1000,
}


@pytest.fixture(scope="module")
def stored(servers: Stack) -> list[str]:
    """Keys of N stored chunks of LAYOUT."""
    keys, chunks = make_chunks(N, LAYOUT, seed=31)
    with servers.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys


def asked(servers: Stack, keys: list[str], **more: object) -> dict[str, Any]:
    reply = servers.request("POST", "/chunks?lookup", body=json.dumps({"chunk_keys": keys, **more}).encode())
    assert reply.status == 200, reply.body
    return dict(json.loads(reply.body))


def test_a_lookup_without_compute_costs_is_answered_as_ever(servers: Stack, stored: list[str]) -> None:
    assert asked(servers, [*stored, "absent"]) == {"matched": N}


def test_a_lookup_with_compute_costs_is_answered_with_advice(servers: Stack, stored: list[str]) -> None:
    """Over the wire it is what the function gives: 9 chunks of 16 tokens at 1 ms each, 2 GB/s."""
    answer = asked(servers, [*stored, "absent"], compute=COMPUTE | {"bytes_per_s": 2e9})
    request = AdviceRequest(1000, LAYOUT, PrefillCosts(1000.0), bytes_per_s=2e9)
    expected = advise(N, request)
    assert answer["matched"] == N
    assert answer["advice"] == {
        "choice": "layerwise",
        "chunks": N,
        "delivery": "layer-major",
        "ttft_s": {choice.value: expected.ttft_s[choice] for choice in Choice},
        "break_even_bytes_per_s": expected.break_even_bytes_per_s,
        "rate_bytes_per_s": 2e9,
    }
    nothing = asked(servers, ["absent"], compute=COMPUTE)
    assert nothing["matched"] == 0
    assert nothing["advice"]["choice"] == "recompute"
    assert nothing["advice"]["ttft_s"] == {"recompute": pytest.approx(1.0)}
    assert nothing["advice"]["break_even_bytes_per_s"] is None
    assert nothing["advice"]["rate_bytes_per_s"] is None


def test_the_server_refuses_wrong_compute_costs_by_name(servers: Stack, stored: list[str]) -> None:
    for compute, field in [(COMPUTE | {"token_us": -1}, "compute.token_us"), (COMPUTE | {"x": 1}, "compute.x")]:
        body = json.dumps({"chunk_keys": stored, "compute": compute}).encode()
        reply = servers.request("POST", "/chunks?lookup", body=body)
        assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", field)


def test_the_client_asks_for_advice(servers: Stack, stored: list[str]) -> None:
    request = AdviceRequest(1000, LAYOUT, MeasuredPrefill(((0, 1_000_000), (144, 856_000))), bytes_per_s=1e5)
    with servers.client("chunks", "http") as client:
        assert client.advise(stored, request, lease_s=5) == (N, advise(N, request))
        assert client.advise([], request) == (0, advise(0, request))
        matched, advice = client.advise(stored, replace(request, bytes_per_s=100.0))
        assert (matched, advice.choice) == (N, Choice.RECOMPUTE)


async def test_the_client_asks_for_advice_from_an_event_loop(servers: Stack, stored: list[str]) -> None:
    request = AdviceRequest(1000, LAYOUT, PrefillCosts(1000.0))
    with servers.client("chunks", "http") as client:
        assert await client.advise_async(stored, request) == (N, advise(N, request))


def test_advice_assumes_the_rate_the_server_offers_the_access_key(
    local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limited key is told to load less; what another is offered does not matter."""
    rates = {"OWNERKEY": 5e6}
    monkeypatch.setattr(
        local.storage.pipeline.link, "offered_rate_bytes_per_s", lambda access_key: rates.get(access_key, 0.0)
    )
    request = AdviceRequest(200, LAYOUT, PrefillCosts(1000.0))
    with local.client("chunks", "http") as client:
        _, advice = client.advise(keys, request)
        assert advice == advise(N, request, 5e6)
        assert (advice.choice, advice.rate_bytes_per_s) == (Choice.PREFIX, 5e6)
        rates["OWNERKEY"] = 10.0
        assert client.advise(keys, request)[1].choice is Choice.RECOMPUTE
