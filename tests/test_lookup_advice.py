"""Recompute or load over the wire: `?lookup` with compute costs, refused or answered, over real servers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError
from descriptors.messages import (
    LookupAnswer,
    LookupRequest,
    lookup_answer_body,
    lookup_body,
    parse_lookup,
    parse_lookup_answer,
)
from descriptors.recompute import AdviceRequest, Choice, MeasuredPrefill, PrefillCosts, advise
from tests.support import LAYOUT, LocalStack, N, Stack, make_chunks
from tests.test_recompute import MATCHED, RATES, REQUESTS


@given(MATCHED, REQUESTS, RATES)
def test_request_and_answer_pass_unchanged_over_the_wire(matched: int, request: AdviceRequest, offered: float) -> None:
    asked = LookupRequest(("a", "b"), 1.5, request)
    assert parse_lookup(lookup_body(asked)) == asked
    answer = LookupAnswer(matched, advise(matched, request, offered))
    assert parse_lookup_answer(lookup_answer_body(answer)) == answer
    assert parse_lookup_answer(b'{"matched": 3, "new": 1}') == LookupAnswer(3)


COMPUTE: dict[str, Any] = {
    "context_tokens": 1000,
    "num_layers": LAYOUT.num_layers,
    "chunk_tokens": LAYOUT.chunk_tokens,
    "per_layer_chunk_bytes": LAYOUT.per_layer_chunk_bytes,
    "token_us": 1000,
}
MEASURED = {name: value for name, value in COMPUTE.items() if name != "token_us"}
WRONG: list[tuple[object, str]] = [
    (5, "compute"),
    ([], "compute"),
    ({}, "compute.context_tokens"),
    (COMPUTE | {"context_tokens": 0}, "compute.context_tokens"),
    (COMPUTE | {"context_tokens": 1 << 29}, "compute.context_tokens"),
    (COMPUTE | {"context_tokens": 12.5}, "compute.context_tokens"),
    (COMPUTE | {"num_layers": 1025}, "compute.num_layers"),
    (COMPUTE | {"chunk_tokens": True}, "compute.chunk_tokens"),
    (COMPUTE | {"per_layer_chunk_bytes": (1 << 30) + 1}, "compute.per_layer_chunk_bytes"),
    (COMPUTE | {"token_us": -1}, "compute.token_us"),
    (COMPUTE | {"token_us": "1"}, "compute.token_us"),
    (COMPUTE | {"token_us": 10**400}, "compute.token_us"),
    (COMPUTE | {"token_us": float("nan")}, "compute.token_us"),
    (COMPUTE | {"token_pair_us": float("inf")}, "compute.token_pair_us"),
    (COMPUTE | {"request_us": 3.7e9}, "compute.request_us"),
    (COMPUTE | {"bytes_per_s": 0}, "compute.bytes_per_s"),
    (COMPUTE | {"bytes_per_s": 1e16}, "compute.bytes_per_s"),
    (COMPUTE | {"more": 1}, "compute.more"),
    (COMPUTE | {"costs": 1}, "compute.costs"),
    (COMPUTE | {"costs": {"layer_majors": {}}}, "compute.costs.layer_majors"),
    (COMPUTE | {"costs": {"layer_major": {"chunk_us": 1}}}, "compute.costs.layer_major.chunk_us"),
    (COMPUTE | {"costs": {"chunk_major": {"chunk_s": 3601}}}, "compute.costs.chunk_major.chunk_s"),
    (COMPUTE | {"costs": {"chunk_major": {"bytes_per_s": -1}}}, "compute.costs.chunk_major.bytes_per_s"),
    (COMPUTE | {"measured": [[0, 5]]}, "compute.token_us"),
    (MEASURED, "compute.token_us"),
    (MEASURED | {"measured": []}, "compute.measured"),
    (MEASURED | {"measured": [[0, 5], [1]]}, "compute.measured.1"),
    (MEASURED | {"measured": [[0, 5.5]]}, "compute.measured.0.1"),
    (MEASURED | {"measured": [[1, 5]]}, "compute.measured"),
    (MEASURED | {"measured": [[0, 5], [9, 4], [9, 3]]}, "compute.measured"),
    (MEASURED | {"measured": [[index, 5] for index in range(1025)]}, "compute.measured"),
]


@pytest.mark.parametrize(("compute", "field"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_compute_costs_out_of_bounds_are_refused_by_name(compute: object, field: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_lookup(json.dumps({"chunk_keys": ["a"], "compute": compute}).encode())
    assert refused.value.field == field


def test_a_shape_whose_descriptor_would_be_refused_is_refused_here() -> None:
    compute = COMPUTE | {"num_layers": 1024, "per_layer_chunk_bytes": 1 << 30}
    body = json.dumps({"chunk_keys": [str(index) for index in range(65)], "compute": compute}).encode()
    with pytest.raises(CallerError, match=r"N\*L\*S"):
        parse_lookup(body)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(
                st.sampled_from(["costs", "measured", "layer_major", "chunk_s", *COMPUTE, "\ud800x"]), inner, max_size=9
            ),
        ),
        max_leaves=12,
    )
)
def test_whatever_stands_in_compute_is_refused_or_answered(compute: object) -> None:
    """A refusal names a field below `compute`; nothing else is raised."""
    if isinstance(compute, dict):
        compute = COMPUTE | compute
    request, field = None, "compute"
    try:
        request = parse_lookup(json.dumps({"chunk_keys": ["a"], "compute": compute}).encode()).compute
    except CallerError as error:
        field = error.field or ""
    assert field.startswith(("compute", "body"))
    if request is not None:
        for offered in (0.0, 1.0, 1e15):
            assert np.isfinite(list(advise(1, request, offered).ttft_s.values())).all()


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
