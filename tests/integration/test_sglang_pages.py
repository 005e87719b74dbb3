"""The pages of a host pool go to the store and come back, without SGLang: a pool of tensors stands in for its own
(tests/engines/test_sglang.py has those).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nixl_client.connectors.sglang.options import HiCacheOptions
from nixl_client.connectors.sglang.pages import HostPages, counts_only
from nixl_client.connectors.sglang.traffic import PageTraffic
from tests.support.requests import OWNER
from tests.support.servers import LocalStack

PAGES, TOKENS, WIDTH = 12, 4, 64
HASHES = [f"{number:064x}" for number in range(5)]


class TensorPool:
    """Keys and values apart, page after page, as SGLang's page-first layouts have them."""

    page_size = TOKENS

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros((2, PAGES * TOKENS, WIDTH), dtype=torch.bfloat16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = WIDTH * self.kv_buffer.element_size()
        starts = [int(each) * row for each in indices[::TOKENS].tolist()]
        base, half = self.kv_buffer.data_ptr(), PAGES * TOKENS * row
        addresses = [base + start + side * half for start in starts for side in range(2)]
        return addresses, [TOKENS * row] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index : index + TOKENS].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[:, index : index + TOKENS] = page.reshape(2, TOKENS, WIDTH)


class LayeredPool(TensorPool):
    """One whose pages have no addresses."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError("layers lie apart")


@pytest.fixture(params=["http", "shm"])
def traffic(
    request: pytest.FixtureRequest, local: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PageTraffic]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    given = {"interface_v1": 1, "endpoint": local.url, "bucket": "pages", "transport": request.param}
    made = PageTraffic(HiCacheOptions.of(given))
    try:
        yield made
    finally:
        made.close()


def tokens(*pages: int) -> torch.Tensor:
    """The tokens of these pages."""
    return torch.tensor([page * TOKENS + token for page in pages for token in range(TOKENS)])


@pytest.mark.parametrize("kind", [TensorPool, LayeredPool])
def test_pages_come_back_to_other_places_and_nothing_else_changes(traffic: PageTraffic, kind: type[TensorPool]) -> None:
    traffic.introduce("")
    pool = kind()
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    pages = HostPages(pool, "kv", "model", {})
    assert pages.is_direct is (kind is TensorPool)
    stored = pool.kv_buffer.clone()
    assert pages.store(traffic, HASHES[:4], tokens(3, 0, 7, 5)) == [True] * 4
    assert traffic.leading(pages.space.object_names(HASHES)) == 4 * pages.space.part_count
    pool.kv_buffer.fill_(7)
    wanted = pool.kv_buffer.clone()
    for source, target in ((3, 9), (0, 1), (7, 2), (5, 11)):
        wanted[:, tokens(target)] = stored[:, tokens(source)]
    assert pages.load(traffic, HASHES, tokens(9, 1, 2, 11, 4)) == [True] * 4 + [False]
    assert torch.equal(pool.kv_buffer, wanted)
    assert traffic.counters.totals["fetches"] == 1


def test_a_pool_that_is_not_known_to_be_empty_has_pages() -> None:
    """Pages of a pool that only counts them are said to be there: of any other pool that would be wrong KV."""

    class LogicalHostPool:
        kv_buffer = None

    class OtherPool:
        kv_buffer = None

    class DummyPool(OtherPool):
        _is_dummy = True

    assert [counts_only(pool()) for pool in (LogicalHostPool, OtherPool, DummyPool, TensorPool)] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("indices", [None, tokens(1), tokens(PAGES, 1)])
def test_places_that_are_no_pages_of_the_pool_are_refused(traffic: PageTraffic, indices: torch.Tensor | None) -> None:
    pages = HostPages(TensorPool(), "kv", "model", {})
    with pytest.raises(ValueError, match=r"places|memory"):
        pages.load(traffic, HASHES[:2], indices)
