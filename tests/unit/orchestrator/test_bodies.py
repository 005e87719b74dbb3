"""A client whose body is not read is told why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from descriptors.errors import CallerError, ErrorCode
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.bodies import BudgetedBody
from objectcache.orchestrator.settings import OrchestratorSettings


async def test_a_body_that_is_to_make_place_for_others_has_not_come_in_time() -> None:
    """It was answered 500, and the log had an error of the orchestrator's own for each."""

    async def read(_: int) -> bytes:
        raise CallerError(ErrorCode.REQUEST_TIMEOUT, "the body comes too slowly", field="body")

    http = SimpleNamespace(content_length=None, headers={}, content=SimpleNamespace(read=read))
    budget = DocumentBudget(100, 50)
    with pytest.raises(Refusal) as refused:
        async with BudgetedBody(cast(Any, http), "somebody", OrchestratorSettings(admin_token="t"), budget):
            pass
    assert (refused.value.status, budget.held_bytes) == (408, 0)
