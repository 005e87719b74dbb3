"""A layer's prefill is timed for what it says, and its cost model finds what is there to find."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.paper.tables import MODELS, NUM_LAYERS, TOKEN_LAYER_BYTES, GroupedQuery
from descriptors.recompute import PrefillCosts
from objectcache.calibration.compute.cost_model import (
    Fit,
    Observation,
    compute_profile,
    fit_cost_model,
    prefill_s,
    scaled,
)
from objectcache.calibration.compute.layer import DecoderLayer, Device, Dtype
from objectcache.calibration.compute.measure import (
    SMOKE_POINTS,
    ComputePlan,
    compute_plan,
    measure_compute,
)
from objectcache.calibration.compute.shapes import SHAPES, causal_pairs, shape, small

LLAMA = shape("llama-3.1-8b")
PLACES = [(0, 256), (128, 256), (0, 4096), (2048, 4096), (3584, 4096), (32768, 65536), (57344, 65536)]


def _observed(costs: PrefillCosts) -> list[Observation]:
    return [Observation(cached, context, prefill_s(costs, cached, context) * 1e6) for cached, context in PLACES]


@pytest.mark.slow
@given(st.floats(1, 1e6), st.floats(1, 1e5), st.floats(1e-3, 10))
def test_the_fit_recovers_known_coefficients(request_us: float, token_us: float, token_pair_us: float) -> None:
    """Exact times must give back what they were made of, whatever the coefficients' sizes."""
    costs = PrefillCosts(token_us=token_us, token_pair_us=token_pair_us, request_us=request_us)
    fit = fit_cost_model(_observed(costs))
    assert fit.greatest_error < 1e-6
    assert prefill_s(fit.costs, 8192, 16384) == pytest.approx(prefill_s(costs, 8192, 16384), rel=1e-6)


@pytest.mark.parametrize("zero", ["request_us", "token_us", "token_pair_us"])
def test_a_cost_that_is_not_there_is_found_to_be_nothing(zero: str) -> None:
    """The bound at zero must not push the others off."""
    costs = PrefillCosts(**{"token_us": 70.0, "token_pair_us": 0.004, "request_us": 20000.0, zero: 0.0})
    found = fit_cost_model(_observed(costs)).costs
    for name in ("request_us", "token_us", "token_pair_us"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(1, 1e7), min_size=len(PLACES), max_size=len(PLACES)))
def test_no_coefficient_is_ever_negative(times_us: list[float]) -> None:
    """Noise must not make a longer prefill cheaper, nor a prediction negative."""
    observations = [Observation(*place, time_us) for place, time_us in zip(PLACES, times_us, strict=True)]
    costs = fit_cost_model(observations).costs
    assert min(costs.request_us, costs.token_us, costs.token_pair_us) >= 0
    assert prefill_s(costs, 4096, 131072) > 0


def test_too_few_prefills_are_refused() -> None:
    """Two points fit any third coefficient."""
    twice = [Observation(0, 256, 1.0), Observation(0, 256, 2.0), Observation(128, 256, 1.0)]
    with pytest.raises(ValueError, match="2 different prefills"):
        fit_cost_model(twice)


@pytest.mark.parametrize(("cached", "context"), [(256, 256), (257, 256), (-1, 256)])
def test_a_prefill_without_tokens_has_no_cost(cached: int, context: int) -> None:
    """B_req would be infinite or negative."""
    with pytest.raises(ValueError, match="nothing to compute"):
        prefill_s(PrefillCosts(1.0), cached, context)


def test_a_fit_says_where_it_was_not_observed() -> None:
    """What is extrapolated is marked as such."""
    fit = fit_cost_model(_observed(PrefillCosts(70.0, 0.004, 20000.0)))
    assert fit.covers(2048, 4096)
    assert fit.covers(8192, 16384)
    assert not fit.covers(65536, 131072)
    assert not fit.covers(65536 - 64, 65536)


def test_scaling_goes_by_operations_and_layers() -> None:
    """Granite has 40 layers of Llama's attention and a smaller MLP; Mistral is Llama's shape."""
    costs = PrefillCosts(token_us=70.0, token_pair_us=0.004, request_us=20000.0)
    granite = scaled(costs, LLAMA, shape("granite-3.3-8b"))
    assert granite.request_us == pytest.approx(25000.0)
    assert granite.token_pair_us == pytest.approx(0.005)
    assert granite.token_us == pytest.approx(70.0 * (40 * 199.2) / (32 * 218.1), rel=1e-3)
    assert scaled(costs, LLAMA, shape("mistral-7b")) == costs


def test_shapes_keep_what_their_models_keep() -> None:
    """The ladder's table of models and the paper (L = 32, 4096 bytes) name the same constants."""
    assert (LLAMA.num_layers, LLAMA.token_layer_bytes) == (NUM_LAYERS, TOKEN_LAYER_BYTES)
    known = {model.source: model for model in MODELS}
    shared = [each for each in SHAPES if each.source in known]
    assert len(shared) >= 3
    for each in shared:
        attention = known[each.source].attention
        assert isinstance(attention, GroupedQuery)
        assert (each.kv_heads, each.head_dim) == (attention.kv_heads, attention.head_dim)
        assert each.num_layers == known[each.source].kv_layers


def test_operations_of_a_layer_are_those_of_its_weights() -> None:
    """6.98 thousand million weights in Llama's layers, two operations each."""
    assert LLAMA.token_operations == 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert LLAMA.prefill_operations(0, 2) == 2 * LLAMA.token_operations + 2 * LLAMA.pair_operations
    assert causal_pairs(2048, 4096) == pytest.approx(sum(range(2048, 4096)), rel=1e-3)


def test_a_cached_prefix_changes_the_work_and_not_the_result() -> None:
    """Else the clock would have timed something that is no prefill."""
    layer = DecoderLayer(small(LLAMA), Device.CPU, Dtype.FLOAT32, 64, seed=1)
    hidden = torch.randn(1, 64, small(LLAMA).hidden, generator=torch.Generator().manual_seed(2))
    whole = layer.forward(hidden, layer.mask(0, 64), 0)
    layer.forward(hidden[:, :48], layer.mask(0, 48), 0)
    rest = layer.forward(hidden[:, 48:], layer.mask(48, 64), 48)
    torch.testing.assert_close(rest, whole[:, 48:])
    later = hidden.clone()
    later[:, 60:] = 0
    torch.testing.assert_close(layer.forward(later, layer.mask(0, 64), 0)[:, :60], whole[:, :60])


@pytest.mark.parametrize("dtype", list(Dtype))
def test_every_point_is_measured_and_fitted(dtype: Dtype) -> None:
    """The raw samples stay with the fit that came of them."""
    plan = ComputePlan(Device.CPU, dtype, SMOKE_POINTS, runs=2, seed=1, is_smoke=True)
    measured = measure_compute(LLAMA, plan)
    assert len(measured.cells) == len(SMOKE_POINTS) == len(measured.fit.observations)
    assert all(len(cell.samples_s) == 2 for cell in measured.cells)
    for cell, observed in zip(measured.cells, measured.fit.observations, strict=True):
        assert observed.prefill_us == pytest.approx(cell.median_s() * LLAMA.num_layers * 1e6)
    assert measured.spread >= 0


def test_plans_leave_tokens_to_compute_and_tell_the_coefficients_apart() -> None:
    """A point without missing tokens cannot be timed, and three coefficients need three points."""
    for device in Device:
        points = compute_plan(device, Dtype.BFLOAT16, 3, 1).points
        assert all(0 <= point.cached_tokens < point.context_tokens for point in points)
        assert len({point.context_tokens for point in points}) >= 3
        assert len({point.context_tokens - point.cached_tokens for point in points}) >= 3


def test_a_profile_is_what_the_configuration_takes() -> None:
    """Field by field: `objectcache calibrate` writes it, the storage server reads it."""
    fit = Fit(PrefillCosts(token_us=70.123456789, token_pair_us=0.004, request_us=20000.0), ())
    assert compute_profile(LLAMA, fit, 0.875) == {
        "name": "llama-3.1-8b",
        "num_layers": 32,
        "token_layer_bytes": 4096,
        "request_us": 20000.0,
        "token_us": 70.1235,
        "token_pair_us": 0.004,
        "hit_rate": 0.875,
    }


@pytest.mark.parametrize("hit_rate", [0.0, 1.0, -0.5, float("nan")])
def test_a_profile_needs_a_hit_rate_that_is_one(hit_rate: float) -> None:
    """With 0 the context is infinite, with 1 nothing is left to compute."""
    with pytest.raises(ValueError, match="hit rate"):
        compute_profile(LLAMA, Fit(PrefillCosts(1.0), ()), hit_rate)
