"""The greedy placement: bounds hold, moves are what they say, and little utility is lost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.paper.compression.optimizer import (
    Move,
    Optimizer,
    TieredEntry,
    TierModel,
    TierPlacement,
    best_form,
    upper_bound,
    utility,
)
from storage_server.cache.policies.utility import Form

KIB = 1024
ALPHA = 1.0
TIERS = (TierModel("dram", 100 * KIB, 10e9), TierModel("disk", 400 * KIB, 1e9))
FORMS = (Form("exact", 16 * KIB), Form("kivi4", 5 * KIB, 0.98), Form("kivi2", 3 * KIB, 0.8))


def entry(key: object, frequency: float, forms: tuple[Form, ...] = FORMS, recompute_s: float = 0.5) -> TieredEntry:
    return TieredEntry(key, frequency, forms, recompute_s)


def entries_of(seed: int, number: int) -> list[TieredEntry]:
    """Entries whose codecs cost them different amounts of quality."""
    random = np.random.default_rng(seed)
    found = []
    for key in range(number):
        size = int(random.integers(4, 32)) * KIB
        sensitivity = float(random.uniform(0, 0.5))
        forms = (
            Form("exact", size),
            Form("kivi8", size * 9 // 16, 1 - sensitivity / 100),
            Form("kivi4", size * 5 // 16, 1 - sensitivity / 10),
            Form("kivi2", size * 3 // 16, 1 - sensitivity),
        )
        found.append(entry(key, float(random.pareto(1.2) + 0.01), forms, float(random.uniform(0.05, 1.0))))
    return found


def test_with_room_everything_is_exact_and_in_the_first_tier() -> None:
    optimizer = Optimizer(TIERS, ALPHA)
    assert optimizer.put(entry("a", 1.0)) == [Move("a", None, TierPlacement(0, 0))]
    assert optimizer.used_bytes == (16 * KIB, 0)


def test_the_move_that_costs_least_for_its_bytes_is_made() -> None:
    """The seventh entry does not fit: one that is hardly used goes to disk, and nothing is compressed that matters."""
    optimizer = Optimizer(TIERS, ALPHA)
    for key in "abcdef":
        optimizer.put(entry(key, 10.0 if key != "c" else 0.1))
    moves = optimizer.put(entry("g", 10.0))
    assert [move.key for move in moves] == ["c", "g"]
    assert moves[0].before == TierPlacement(0, 0)
    assert moves[0].after is not None


def test_an_entry_that_is_sooner_computed_is_not_kept() -> None:
    optimizer = Optimizer(TIERS, ALPHA)
    slow = Form("exact", 90 * KIB, 1.0, decode_s=3.0)
    assert optimizer.put(entry("a", 1.0, (slow,), recompute_s=0.1)) == []
    assert optimizer.placement("a") is None


def test_an_entry_that_is_used_more_comes_back_up() -> None:
    optimizer = Optimizer(TIERS, ALPHA)
    for key in range(30):
        optimizer.put(entry(key, 1.0 + key / 100))
    down = next(key for key in range(30) if optimizer.placement(key) != TierPlacement(0, 0))
    optimizer.use(down, 1000.0)
    assert optimizer.placement(down) == TierPlacement(0, 0)
    assert optimizer.use("nobody", 1.0) == []
    optimizer.remove(down)
    assert optimizer.placement(down) is None


def test_the_utility_follows_the_text_of_the_paper() -> None:
    """An entry that is never used is worth nothing, and costs nothing, wherever it is."""
    unused = entry("a", 0.0)
    for placement in (None, TierPlacement(0, 0), TierPlacement(1, 2)):
        assert utility(unused, placement, TIERS, ALPHA) == 0
    used = entry("a", 2.0)
    assert utility(used, TierPlacement(1, 1), TIERS, ALPHA) == pytest.approx(2 * (0.98 - 5 * KIB / 1e9))
    assert best_form(used, 0, TIERS, ALPHA) == TierPlacement(0, 0)
    assert best_form(used, 0, TIERS, 0.0) == TierPlacement(0, 2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "use", "remove"]), st.integers(0, 20), st.floats(0, 100), st.integers(1, 64)),
        max_size=80,
    )
)
def test_bounds_hold_and_moves_lead_from_where_entries_were_to_where_they_are(
    steps: list[tuple[str, int, float, int]],
) -> None:
    optimizer = Optimizer(TIERS, ALPHA)
    places: dict[object, TierPlacement] = {}
    sizes: dict[object, tuple[Form, ...]] = {}
    for what, key, frequency, size in steps:
        moves: list[Move] = []
        if what == "put":
            forms = (Form("exact", size * KIB), Form("kivi4", max(1, size * KIB // 3), 0.95))
            sizes[key] = forms
            moves = optimizer.put(entry(key, frequency, forms))
        elif what == "use":
            moves = optimizer.use(key, frequency)
        else:
            optimizer.remove(key)
            places.pop(key, None)
        for move in moves:
            assert places.get(move.key) == move.before
            if move.after is None:
                places.pop(move.key, None)
            else:
                places[move.key] = move.after
        for each in range(21):
            assert optimizer.placement(each) == places.get(each)
        for tier, model in enumerate(TIERS):
            used = sum(sizes[name][place.form].nbytes for name, place in places.items() if place.tier == tier)
            assert used == optimizer.used_bytes[tier] <= model.capacity_bytes


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_near_the_bound_of_the_linear_relaxation(seed: int) -> None:
    entries = entries_of(seed, 400)
    tiers = (TierModel("dram", 800 * KIB, 10e9), TierModel("disk", 3200 * KIB, 1e9))
    optimizer = Optimizer(tiers, ALPHA)
    for each in entries:
        optimizer.put(each)
    bound = upper_bound(entries, tiers, ALPHA)
    assert optimizer.total_utility <= bound * (1 + 1e-9)
    assert optimizer.total_utility >= 0.99 * bound


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_above_the_best_placement_of_a_few_entries(seed: int) -> None:
    entries = entries_of(seed, 4)
    tiers = (TierModel("dram", 24 * KIB, 10e9), TierModel("disk", 30 * KIB, 1e9))
    choices = [
        [None, *(TierPlacement(tier, form) for tier in range(2) for form in range(len(each.forms)))] for each in entries
    ]
    best = 0.0
    for placements in product(*choices):
        used = [0, 0]
        total = 0.0
        for each, placement in zip(entries, placements, strict=True):
            if placement is not None:
                used[placement.tier] += each.forms[placement.form].nbytes
            total += utility(each, placement, tiers, ALPHA) - utility(each, None, tiers, ALPHA)
        if all(size <= tier.capacity_bytes for size, tier in zip(used, tiers, strict=True)):
            best = max(best, total)
    assert upper_bound(entries, tiers, ALPHA) >= best - 1e-9
    optimizer = Optimizer(tiers, ALPHA)
    for each in entries:
        optimizer.put(each)
    assert optimizer.total_utility <= best + 1e-9
