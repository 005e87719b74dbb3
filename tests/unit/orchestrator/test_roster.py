"""The models of all engines, as clients see them."""

from __future__ import annotations

import json
from typing import cast

import aiohttp

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.roster import Roster
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings


def engine(name: str, *models: str) -> Engine:
    made = Engine(EngineSettings(f"http://{name}"), cast(aiohttp.ClientSession, None), PrefixIndex(), 1.0, 1.0)
    made.models = {model: {"id": model} for model in models}
    return made


def test_the_answer_with_all_models_is_made_when_they_change() -> None:
    """It was made anew for each of thousands who asked, and each connection kept its own."""
    engines = {"a": engine("a", "base", "adapter"), "b": engine("b", "base")}
    roster = Roster(engines)
    first = roster.models_body()
    assert json.loads(first) == {"object": "list", "data": [{"id": "base"}, {"id": "adapter"}]}
    assert roster.models_body() is first
    engines["b"].models = {"other": {"id": "other"}}
    assert [each["id"] for each in json.loads(roster.models_body())["data"]] == ["base", "adapter", "other"]
    del engines["a"]
    assert [each["id"] for each in json.loads(roster.models_body())["data"]] == ["other"]
