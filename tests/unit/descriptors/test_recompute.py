"""Recompute or load: the decision by itself, with the paper's numbers and against the scalar model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.recompute import Advice, AdviceRequest, Choice, DeliveryCosts, MeasuredPrefill, PrefillCosts, advise
from descriptors.ttft import ttft_chunkwise_s, ttft_layerwise_s
from descriptors.units import bytes_per_s_from_gbps
from tests.support.tree import paper_tables

TABLES = paper_tables()
CONTEXT_TOKENS = 65_536
LLAMA = ChunkLayout(num_layers=32, chunk_tokens=64, per_layer_chunk_bytes=64 * 4096)
WAYS = {Delivery.CHUNK_MAJOR: "chunk_major", Delivery.LAYER_MAJOR: "layer_major"}


def paper_prefill() -> MeasuredPrefill:
    """Llama 3.1 8B, 64K, on an A100: Table A8 where it has a figure, Table A1 elsewhere, drawn on to no hit at all."""
    points = {
        round(CONTEXT_TOKENS * row["hit_percent"] / 100): round(row["ttft_ms_g16"] * 1000)
        for row in TABLES["table_a1_a2"]
        if (row["model"], row["gpu"], row["context"]) == ("Llama-3.1-8B", "A100", "64K")
    }
    points |= {
        row["cached_tokens"]: round(row["compute_ms_total"] * 1000)
        for row in TABLES["table_a8"]
        if row["context"] == "64K"
    }
    (first, first_us), (second, second_us) = sorted(points.items())[:2]
    points[0] = round(first_us + (first_us - second_us) * first / (second - first))
    return MeasuredPrefill(tuple(sorted(points.items())))


PAPER = AdviceRequest(CONTEXT_TOKENS, LLAMA, paper_prefill())
HIT = 57_344 // LLAMA.chunk_tokens
"""87.5 % of the prompt."""


def paper_advice(rate_gbps: float) -> Advice:
    return advise(HIT, PAPER, bytes_per_s_from_gbps(rate_gbps))


def test_the_papers_64k_hit_is_loaded_layerwise_at_100_gbps() -> None:
    """Its layers need 3.1 GB/s (Table A8): only the first layer's 18.8 ms show."""
    advice = paper_advice(100)
    assert (advice.choice, advice.chunk_count, advice.delivery) == (Choice.LAYERWISE, HIT, Delivery.LAYER_MAJOR)
    assert advice.ttft_s[Choice.LAYERWISE] == pytest.approx(2.4239 + 0.01879, abs=1e-5)
    assert advice.ttft_s[Choice.CHUNKWISE] == pytest.approx(2.4239 + 32 * 0.01879, abs=1e-4)
    assert advice.ttft_s[Choice.RECOMPUTE] == pytest.approx(12.5193)
    assert advice.rate_bytes_per_s == 12.5e9


def test_the_papers_hit_is_recomputed_at_a_tiny_rate() -> None:
    advice = paper_advice(0.1)
    assert (advice.choice, advice.chunk_count, advice.delivery) == (Choice.RECOMPUTE, 0, None)


def test_between_the_two_a_shorter_prefix_wins() -> None:
    """Below the 24.8 Gbps that its layers need it is as long as compute can hide: the slower the link, the shorter."""
    assert paper_advice(25).choice is Choice.LAYERWISE
    advices = [paper_advice(rate_gbps) for rate_gbps in (24, 20, 10, 5, 2, 1, 0.5)]
    for advice in advices:
        assert advice.choice is Choice.PREFIX
        assert advice.delivery is Delivery.LAYER_MAJOR
        assert 0 < advice.chunk_count < HIT
        assert advice.ttft_s[Choice.PREFIX] < min(advice.ttft_s[Choice.LAYERWISE], advice.ttft_s[Choice.RECOMPUTE])
    assert all(slower.chunk_count < faster.chunk_count for faster, slower in pairwise(advices))


def test_the_papers_break_even_lies_at_a_third_of_a_gbps() -> None:
    """Layerwise, 1/L of a chunk's bytes need not be waited for: its tokens' compute time over one layer's bytes."""
    rate = paper_advice(100).break_even_bytes_per_s
    prefill = paper_prefill().points
    token_s = (prefill[0][1] - prefill[1][1]) / prefill[1][0] * 1e-6
    assert rate == pytest.approx(4096 / token_s, rel=1e-3)
    assert advise(HIT, PAPER, rate * 1.001).choice is Choice.PREFIX
    assert advise(HIT, PAPER, rate * 0.999).choice is Choice.RECOMPUTE


def test_the_compute_model_goes_through_the_points_it_was_solved_for() -> None:
    """Two points of Table A8 give token_us and token_pair_us."""
    known = np.array([32_768.0, 57_344.0])
    times_us = np.array([8_672_790.0, 2_423_900.0])
    rest = CONTEXT_TOKENS - known
    pairs = (CONTEXT_TOKENS**2 - known**2) / 2
    token_us, token_pair_us = np.linalg.solve(np.stack([rest, pairs], axis=1), times_us).tolist()
    prefill = PrefillCosts(token_us, token_pair_us)
    assert prefill.prefill_s(CONTEXT_TOKENS, known) == pytest.approx(times_us * 1e-6)
    assert advise(HIT, replace(PAPER, prefill=prefill), 12.5e9).choice is Choice.LAYERWISE


def test_measured_times_are_interpolated_and_never_drawn_on() -> None:
    prefill = MeasuredPrefill(((0, 1000), (100, 600), (200, 500)))
    times_s = prefill.prefill_s(1000, np.array([0.0, 50.0, 150.0, 200.0, 900.0]))
    assert times_s == pytest.approx([1e-3, 0.8e-3, 0.55e-3, 0.5e-3, 0.5e-3])


@pytest.mark.parametrize("points", [(), ((1, 5),), ((0, 5), (0, 4)), ((0, 5), (9, 4), (3, 2))])
def test_a_table_without_a_time_for_recomputing_or_out_of_order_is_refused(points: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        MeasuredPrefill(points)


def test_equal_times_are_settled_in_favour_of_what_is_simpler() -> None:
    """Where computing costs nothing nothing is loaded; where bytes cost nothing nothing is overlapped."""
    free = advise(8, AdviceRequest(1000, LLAMA, PrefillCosts(0.0)))
    assert (free.choice, free.break_even_bytes_per_s) == (Choice.RECOMPUTE, None)
    assert set(free.ttft_s.values()) == {0.0}
    assert list(free.ttft_s) == list(Choice)
    assert advise(8, AdviceRequest(1000, LLAMA, PrefillCosts(1.0))).choice is Choice.CHUNKWISE
    fixed = advise(8, AdviceRequest(1000, LLAMA, PrefillCosts(0.0, 0.0, 5e6)))
    assert fixed.choice is Choice.RECOMPUTE


def test_a_token_is_left_to_compute_even_when_the_whole_prompt_is_stored() -> None:
    request = AdviceRequest(4 * 64, LLAMA, PrefillCosts(100.0))
    assert advise(4, request).chunk_count == 3
    assert advise(4, replace(request, context_tokens=4 * 64 + 1)).chunk_count == 4
    assert advise(9, replace(request, context_tokens=64)).ttft_s.keys() == {Choice.RECOMPUTE}
    assert advise(0, request).ttft_s.keys() == {Choice.RECOMPUTE}
    assert advise(1, request).ttft_s.keys() == {Choice.RECOMPUTE, Choice.CHUNKWISE, Choice.LAYERWISE}


def test_the_lower_of_the_offered_rate_and_the_callers_own_is_assumed() -> None:
    own = replace(PAPER, bytes_per_s=2e9)
    assert advise(HIT, PAPER).rate_bytes_per_s is None
    assert advise(HIT, own).rate_bytes_per_s == 2e9
    assert advise(HIT, own, 5e9).rate_bytes_per_s == 2e9
    assert advise(HIT, own, 1e9).rate_bytes_per_s == 1e9


def test_a_ways_own_limit_holds_at_any_offered_rate() -> None:
    slow = DeliveryCosts(bytes_per_s=1e6)
    request = replace(PAPER, layer_major=slow, chunk_major=slow)
    advice = advise(HIT, request)
    assert (advice.choice, advice.break_even_bytes_per_s) == (Choice.RECOMPUTE, None)
    assert advise(HIT, replace(request, layer_major=DeliveryCosts())).choice is Choice.LAYERWISE


def test_costs_of_layers_make_chunkwise_the_better_way_for_small_loads() -> None:
    """What Eq. 2's threshold stands for: with little to overlap, layers only cost."""
    request = AdviceRequest(200, LLAMA, PrefillCosts(50.0), layer_major=DeliveryCosts(layer_s=1e-3))
    assert advise(2, request, 12.5e9).choice is Choice.CHUNKWISE
    assert advise(HIT, replace(PAPER, layer_major=DeliveryCosts(layer_s=1e-3)), 12.5e9).choice is Choice.LAYERWISE


def test_a_request_that_costs_more_than_it_saves_is_not_made() -> None:
    costs = DeliveryCosts(request_s=1.0)
    request = AdviceRequest(1000, LLAMA, PrefillCosts(100.0), layer_major=costs, chunk_major=costs)
    advice = advise(8, request)
    assert (advice.choice, advice.break_even_bytes_per_s) == (Choice.RECOMPUTE, None)


COSTS = st.builds(
    DeliveryCosts,
    request_s=st.floats(0, 1e-2),
    chunk_s=st.floats(0, 1e-4),
    layer_s=st.floats(0, 1e-3),
    bytes_per_s=st.one_of(st.just(0.0), st.floats(1e6, 1e11)),
)
PREFILLS = st.one_of(
    st.builds(PrefillCosts, token_us=st.floats(0, 1e4), token_pair_us=st.floats(0, 1.0), request_us=st.floats(0, 1e5)),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=5).map(
        lambda times_us: MeasuredPrefill(tuple((100 * index, time_us) for index, time_us in enumerate(times_us)))
    ),
)
REQUESTS = st.builds(
    AdviceRequest,
    context_tokens=st.integers(1, 4000),
    layout=st.builds(ChunkLayout, st.integers(1, 40), st.integers(1, 300), st.integers(1, 1 << 22)),
    prefill=PREFILLS,
    bytes_per_s=st.one_of(st.just(0.0), st.floats(1e6, 1e11)),
    layer_major=COSTS,
    chunk_major=COSTS,
)
MATCHED = st.integers(0, 100)
RATES = st.one_of(st.just(0.0), st.floats(1e3, 1e12))


def slow_ttft_s(request: AdviceRequest, chunk_count: int, delivery: Delivery, rate: float | None) -> float:
    """One load by the scalar model of descriptors/ttft.py, layer by layer."""
    layout, costs = request.layout, getattr(request, WAYS[delivery])
    limits = [limit for limit in (rate, costs.bytes_per_s) if limit]
    layer_s = chunk_count * layout.per_layer_chunk_bytes / min(limits) if limits else 0.0
    begun_s = costs.request_s + chunk_count * costs.chunk_s
    cached = np.array([float(chunk_count * layout.chunk_tokens)])
    compute_s = [float(request.prefill.prefill_s(request.context_tokens, cached)[0]) / layout.num_layers]
    if delivery is Delivery.CHUNK_MAJOR:
        return ttft_chunkwise_s(
            [begun_s + layer_s] + [layer_s] * (layout.num_layers - 1), compute_s * layout.num_layers
        )
    layer_s += costs.layer_s
    return ttft_layerwise_s([begun_s + layer_s] + [layer_s] * (layout.num_layers - 1), compute_s * layout.num_layers)


@given(MATCHED, REQUESTS, RATES)
def test_every_load_is_that_of_equation_3_and_the_least_of_all_is_chosen(
    matched: int, request: AdviceRequest, offered: float
) -> None:
    """Against the scalar model, over every prefix there is."""
    advice = advise(matched, request, offered)
    rate = advice.rate_bytes_per_s
    loadable = max(0, min(matched, (request.context_tokens - 1) // request.layout.chunk_tokens))
    cold_s = float(request.prefill.prefill_s(request.context_tokens, np.zeros(1))[0])
    loads_s = {(count, way): slow_ttft_s(request, count, way, rate) for count in range(1, loadable + 1) for way in WAYS}
    assert advice.ttft_s[Choice.RECOMPUTE] == cold_s
    assert advice.ttft_s[advice.choice] == min(advice.ttft_s.values())
    assert advice.ttft_s[advice.choice] == pytest.approx(min([cold_s, *loads_s.values()]), rel=1e-9, abs=1e-12)
    if loadable:
        assert advice.ttft_s[Choice.CHUNKWISE] == pytest.approx(loads_s[loadable, Delivery.CHUNK_MAJOR], rel=1e-9)
        assert advice.ttft_s[Choice.LAYERWISE] == pytest.approx(loads_s[loadable, Delivery.LAYER_MAJOR], rel=1e-9)
    if advice.delivery is not None:
        assert advice.ttft_s[advice.choice] == pytest.approx(loads_s[advice.chunk_count, advice.delivery], rel=1e-9)


@given(MATCHED, REQUESTS, RATES)
def test_no_more_is_loaded_than_is_stored_and_leaves_a_token(
    matched: int, request: AdviceRequest, offered: float
) -> None:
    advice = advise(matched, request, offered)
    assert 0 <= advice.chunk_count <= matched
    assert advice.chunk_count * request.layout.chunk_tokens < request.context_tokens
    assert (advice.chunk_count == 0) == (advice.delivery is None) == (advice.choice is Choice.RECOMPUTE)


@given(MATCHED, REQUESTS, st.floats(1e3, 1e12), st.floats(1.0, 1e3))
def test_a_higher_rate_makes_nothing_slower(
    matched: int, request: AdviceRequest, offered: float, factor: float
) -> None:
    slow, fast = advise(matched, request, offered), advise(matched, request, offered * factor)
    unlimited = advise(matched, request)
    for choice, seconds in slow.ttft_s.items():
        assert unlimited.ttft_s[choice] <= fast.ttft_s[choice] <= seconds


@given(MATCHED, REQUESTS)
def test_the_break_even_parts_the_rates_at_which_loading_pays(matched: int, request: AdviceRequest) -> None:
    """A little above it some load is faster than recomputing, a little below it none is; without one none ever is."""
    request = replace(request, bytes_per_s=0.0)
    rate = advise(matched, request).break_even_bytes_per_s
    if rate is None:
        advice = advise(matched, request)
        best_s = min((s for choice, s in advice.ttft_s.items() if choice is not Choice.RECOMPUTE), default=None)
        assert best_s is None or best_s >= advice.ttft_s[Choice.RECOMPUTE] * (1 - 1e-12)
        return
    above, below = advise(matched, request, rate * 1.001), advise(matched, request, rate * 0.999)
    recompute_s = above.ttft_s[Choice.RECOMPUTE]
    assert min(above.ttft_s.values()) <= recompute_s
    assert below.ttft_s[below.choice] >= recompute_s * (1 - 1e-12)
    at = [s for choice, s in advise(matched, request, rate).ttft_s.items() if choice is not Choice.RECOMPUTE]
    assert min(at) == pytest.approx(recompute_s, rel=1e-9)


@given(MATCHED, REQUESTS, st.floats(1e3, 1e12), st.integers(-8, 8))
def test_more_bytes_at_as_much_higher_a_rate_change_nothing(
    matched: int, request: AdviceRequest, offered: float, power: int
) -> None:
    """Powers of two, so that the arithmetic is exact and the choice the very same."""
    factor = 2.0**power

    def scaled_way(costs: DeliveryCosts) -> DeliveryCosts:
        return replace(costs, bytes_per_s=costs.bytes_per_s * factor)

    layout = replace(request.layout, per_layer_chunk_bytes=request.layout.per_layer_chunk_bytes << 8)
    before = replace(request, layout=layout)
    after = replace(
        before,
        layout=replace(layout, per_layer_chunk_bytes=int(layout.per_layer_chunk_bytes * factor)),
        bytes_per_s=request.bytes_per_s * factor,
        layer_major=scaled_way(request.layer_major),
        chunk_major=scaled_way(request.chunk_major),
    )
    one, other = advise(matched, before, offered), advise(matched, after, offered * factor)
    assert (other.choice, other.chunk_count, other.ttft_s) == (one.choice, one.chunk_count, one.ttft_s)
    if one.break_even_bytes_per_s is None:
        assert other.break_even_bytes_per_s is None
    else:
        assert other.break_even_bytes_per_s == one.break_even_bytes_per_s * factor


@given(MATCHED, REQUESTS, st.floats(1e3, 1e12), st.integers(-6, 6))
def test_longer_times_at_as_much_lower_a_rate_scale_the_answer(
    matched: int, request: AdviceRequest, offered: float, power: int
) -> None:
    factor = 2.0**power

    def scaled_way(costs: DeliveryCosts) -> DeliveryCosts:
        return DeliveryCosts(
            costs.request_s * factor, costs.chunk_s * factor, costs.layer_s * factor, costs.bytes_per_s / factor
        )

    prefill = request.prefill
    if isinstance(prefill, MeasuredPrefill):
        prefill = PrefillCosts(float(prefill.points[0][1]))
    request = replace(request, prefill=prefill)
    after = replace(
        request,
        prefill=PrefillCosts(prefill.token_us * factor, prefill.token_pair_us * factor, prefill.request_us * factor),
        bytes_per_s=request.bytes_per_s / factor,
        layer_major=scaled_way(request.layer_major),
        chunk_major=scaled_way(request.chunk_major),
    )
    one, other = advise(matched, request, offered), advise(matched, after, offered / factor)
    for choice, seconds in one.ttft_s.items():
        assert other.ttft_s[choice] == pytest.approx(seconds * factor, rel=1e-12)
    assert other.ttft_s[other.choice] == pytest.approx(one.ttft_s[one.choice] * factor, rel=1e-12)
