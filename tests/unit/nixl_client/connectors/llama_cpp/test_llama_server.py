"""The server's word about itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from nixl_client.connectors.llama_cpp.llama_server import ADAPTERS_MAX, SLOTS_MAX, LlamaServer, LlamaServerError


class ToldServer(LlamaServer):
    """Answers without a connection."""

    def __init__(self, slots: int = 1, tokens: int = 4096, adapters: int = 0) -> None:
        self._answers: dict[str, Any] = {
            "/props": {
                "model_path": "/m.gguf", "total_slots": slots, "default_generation_settings": {"n_ctx": tokens},
            },
            "/lora-adapters": [{"path": f"/{index}.gguf", "scale": 1.0} for index in range(adapters)],
        }  # fmt: skip

    async def _called(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        return self._answers[path]


async def test_every_adapter_counts() -> None:
    """KV of one that is left out would have the name of KV without it."""
    assert len((await ToldServer(adapters=ADAPTERS_MAX).facts({})).adapters) == ADAPTERS_MAX
    with pytest.raises(LlamaServerError, match="65 adapters"):
        await ToldServer(adapters=ADAPTERS_MAX + 1).facts({})


@pytest.mark.parametrize(("slots", "tokens"), [(0, 1), (-1, 1), (SLOTS_MAX + 1, 1), (10**9, 1), (1, 0)])
async def test_slots_that_no_server_has_are_refused(slots: int, tokens: int) -> None:
    with pytest.raises(LlamaServerError, match="slots of"):
        await ToldServer(slots, tokens).facts({})
    assert (await ToldServer(SLOTS_MAX).facts({})).slot_count == SLOTS_MAX


@pytest.mark.parametrize("slots", [float("inf"), float("nan"), [1], None])
async def test_a_count_that_is_none_is_an_answer_without_sense(slots: Any) -> None:
    with pytest.raises(LlamaServerError, match="no sense"):
        await ToldServer(slots).facts({})


@pytest.mark.parametrize("path", ["//y/%2e%2E?a=%31", "/x/../slots/0?action=restore", "/"])
def test_a_path_goes_on_as_it_was_looked_at(path: str) -> None:
    """A path that is made shorter on its way would be another one than was allowed."""
    server = ToldServer()
    server._url = "http://a:1"
    server._session = Mock()
    server.passed_on("POST", path, {}, b"")
    assert str(server._session.request.call_args.args[1]) == f"http://a:1{path}"
