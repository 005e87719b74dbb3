"""Costs of computing in the bodies of lookups: round trips and refusals."""

from __future__ import annotations

import json
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
from descriptors.recompute import AdviceRequest, advise
from tests.support.chunks import LAYOUT
from tests.unit.descriptors.test_recompute import MATCHED, RATES, REQUESTS


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
