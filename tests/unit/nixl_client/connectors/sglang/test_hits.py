"""How much of a prefix can be restored, by the pages of all pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_client.connectors.sglang.rules.hits import HitPolicy, PoolPages, leading_count, page_hits, whole_pages

PAGES = st.lists(st.booleans(), max_size=12)


def pool(policy: HitPolicy, stored: str, trailing_count: int = 1, name: str = "state") -> PoolPages:
    """A pool whose pages are there where the text has an x."""
    return PoolPages(name, policy, [each == "x" for each in stored], trailing_count)


@pytest.mark.parametrize(("stored", "count"), [("", 0), ("x", 1), ("xx.x", 2), (".xx", 0)])
def test_pages_count_from_the_first_to_the_first_gap(stored: str, count: int) -> None:
    assert leading_count([each == "x" for each in stored]) == count


def test_a_page_is_whole_with_all_its_parts() -> None:
    assert whole_pages([True, True, True, False, False, True], 2) == [True, False, False]


def test_a_state_restores_the_prefixes_that_end_at_it() -> None:
    hits = page_hits("kv", 5, [pool(HitPolicy.TRAILING_PAGES, ".x.x..")])
    assert (hits.page_count, hits.by_pool, hits.restorable) == (4, {"kv": 5, "state": 4}, (2, 4))


def test_a_window_needs_its_last_pages_and_a_short_prefix_only_its_own() -> None:
    hits = page_hits("kv", 6, [pool(HitPolicy.TRAILING_PAGES, "x.xxxx", 3)])
    assert hits.restorable == (1, 5, 6)


def test_a_pool_that_needs_all_pages_ends_the_hit_at_its_first_gap() -> None:
    hits = page_hits("kv", 4, [pool(HitPolicy.ALL_PAGES, "xx.x")])
    assert (hits.page_count, hits.by_pool) == (2, {"kv": 4, "state": 2})


def test_a_second_form_of_the_kv_shortens_nothing() -> None:
    assert page_hits("kv", 3, [pool(HitPolicy.BLOCK_GROUPS, "...")]).restorable == (1, 2, 3)


def test_pools_that_agree_on_no_prefix_give_no_hit() -> None:
    pools = [pool(HitPolicy.TRAILING_PAGES, "x.."), pool(HitPolicy.TRAILING_PAGES, ".x.", name="window")]
    assert page_hits("kv", 3, pools).page_count == 0


@given(kv=PAGES, all_pages=PAGES, trailing=PAGES, window=st.integers(0, 4))
def test_every_restorable_prefix_has_what_each_pool_needs_and_no_other_has(
    kv: list[bool], all_pages: list[bool], trailing: list[bool], window: int
) -> None:
    """Told again for each length, as SGLang's own file back-end goes about it."""
    count = leading_count(kv)
    missing = [False] * len(kv)
    states, indexer = (trailing + missing)[: len(kv)], (all_pages + missing)[: len(kv)]
    hits = page_hits(
        "kv",
        count,
        [
            PoolPages("state", HitPolicy.TRAILING_PAGES, states, window),
            PoolPages("indexer", HitPolicy.ALL_PAGES, indexer),
        ],
    )
    wanted = [
        length
        for length in range(1, count + 1)
        if all(states[max(0, length - max(1, window)) : length]) and all(indexer[:length])
    ]
    assert list(hits.restorable) == wanted
    assert hits.page_count == (wanted[-1] if wanted else 0)
