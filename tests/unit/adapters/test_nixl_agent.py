"""Which NIXL wheel is taken, and what is said where it does not know the GPU."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from objectcache.adapters import nixl_agent
from objectcache.adapters.nixl_agent import Agent, NixlFailure
from objectcache.adapters.nixl_memory import Memory


class Refusing:
    """NIXL's agent, which registers nothing."""

    def register_memory(self, region: object, kind: str) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(cuda: str | None) -> None:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))

    return load


@pytest.mark.parametrize(
    ("cuda", "taken"), [("13.0", "nixl_cu13._api"), ("12.8", "nixl_cu12._api"), (None, "nixl_cu12._api")]
)
def test_the_wheel_of_torchs_cuda_is_taken(
    monkeypatch: pytest.MonkeyPatch, torch_of: Any, cuda: str | None, taken: str
) -> None:
    torch_of(cuda)
    for name in nixl_agent._MODULES.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: ModuleType(name))
    assert nixl_agent._load().__name__ == taken
    torch_of("13.0" if taken == "nixl_cu12._api" else "12.8")
    monkeypatch.setitem(sys.modules, taken, ModuleType("the one that is loaded"))
    assert nixl_agent._load().__name__ == "the one that is loaded"


def test_a_gpu_that_nixl_does_not_know_names_the_wheel(torch_of: Any) -> None:
    torch_of("13.0")
    agent = Agent.__new__(Agent)
    agent._agent = Refusing()
    with pytest.raises(NixlFailure, match=r"GPU's memory \(NIXL_ERR_BACKEND\).*nixl-cu13"):
        agent.register(Memory(0, 4096, "cuda:0"))
    with pytest.raises(NixlFailure, match=r"^NIXL_ERR_BACKEND$"):
        agent.register(Memory(0, 4096))
