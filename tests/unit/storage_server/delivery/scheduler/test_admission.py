"""How many deliveries there may be: in all, and of one access key."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from descriptors.errors import ErrorCode, ServerError
from storage_server.delivery.scheduler.admission import (
    RETRY_AFTER_S,
    RETRY_AFTER_S_MAX,
    DeliveryAdmission,
    refuse_backlog,
)


async def refusal_of(
    admission: DeliveryAdmission, tenant_name: str = "", retry_after_s: int = RETRY_AFTER_S
) -> ServerError:
    with pytest.raises(ServerError) as refused:
        async with admission.admit(tenant_name, retry_after_s):
            pass
    assert refused.value.code is ErrorCode.SLOW_DOWN
    assert refused.value.retryable
    return refused.value


async def test_one_access_key_holds_at_most_half_of_all_places() -> None:
    """The others find the rest, and what it gives back it may take again."""
    admission = DeliveryAdmission(8)
    async with AsyncExitStack() as stack, AsyncExitStack() as others:
        for _ in range(4):
            await stack.enter_async_context(admission.admit("ONE"))
        refused = await refusal_of(admission, "ONE", 7)
        assert "4 deliveries of this access key" in refused.message
        assert refused.retry_after_s == 7
        for _ in range(4):
            await others.enter_async_context(admission.admit("OTHER"))
        refused = await refusal_of(admission, "THIRD")
        assert "8 deliveries are active" in refused.message
        assert refused.retry_after_s == RETRY_AFTER_S
        assert admission.active_count == 8
        await stack.aclose()
        async with admission.admit("ONE"):
            assert admission.active_count == 5
    assert admission.active_count == 0


@pytest.mark.parametrize("deliveries_max", [1, 2, 3])
async def test_where_there_are_few_places_one_access_key_may_hold_all(deliveries_max: int) -> None:
    admission = DeliveryAdmission(deliveries_max)
    async with AsyncExitStack() as stack:
        for _ in range(deliveries_max):
            await stack.enter_async_context(admission.admit("ONE"))
        assert admission.active_count == deliveries_max
        await refusal_of(admission, "ONE")
    assert admission.active_count == 0


async def test_without_a_name_only_the_bound_for_all_holds() -> None:
    admission = DeliveryAdmission(8)
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(admission.admit())
        await refusal_of(admission)
    assert admission.active_count == 0


async def test_a_delivery_that_fails_gives_its_place_back() -> None:
    admission = DeliveryAdmission(4)
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            async with admission.admit("ONE"):
                raise ZeroDivisionError
    assert admission.active_count == 0


@pytest.mark.parametrize(("rate", "wait_s"), [(1e9, 1), (100.0, 10), (1.0, RETRY_AFTER_S_MAX)])
def test_a_backlog_is_refused_with_when_it_will_be_short_enough(rate: float, wait_s: int) -> None:
    """By the rate of whose it is."""
    assert refuse_backlog(9_000, 1_000, 10_000, rate) is None
    refused = refuse_backlog(10_000, 1_000, 10_000, rate, whose="of this access key")
    assert refused is not None
    assert "10000 bytes of this access key wait" in refused.message
    assert refused.retry_after_s == wait_s
