"""The models of all engines, as clients see them."""

from __future__ import annotations

import json
import time
from typing import cast

import aiohttp
import pytest

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.roster import Roster, is_needed, named
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings, Role


def engine(name: str, *models: str, role: Role = Role.BOTH) -> Engine:
    settings = EngineSettings(f"http://{name}", name, role)
    made = Engine(settings, cast(aiohttp.ClientSession, None), PrefixIndex(), 1.0, 1.0)
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


def test_an_engine_is_needed_where_no_other_one_takes_requests_for_its_models() -> None:
    engines = {
        "a": engine("a", "base", "adapter"), "b": engine("b", "base"), "c": engine("c", "other"),
        "p": engine("p", "base", role=Role.PREFILL),
    }  # fmt: skip
    for each in engines.values():
        each.liveness.succeeded(time.monotonic())
    assert [name for name in engines if is_needed(engines, name)] == ["c"]
    engines["b"].liveness.failed(time.monotonic(), "refused", is_certain=True)
    assert [name for name in engines if is_needed(engines, name)] == ["a", "c"]
    assert not is_needed(engines, "gone")


def test_models_that_an_engine_names_cost_others_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each failure of an engine that named a thousand, every other engine was asked for each of them: 512 requests
    at which it hung up stopped the event loop for 5 s.
    """
    engines = {"a": engine("a", *map(str, range(1000))), "b": engine("b", "base"), "c": engine("c", "5", "base")}
    asked: list[str] = []
    serves = Engine.serves
    monkeypatch.setattr(Engine, "serves", lambda each, model: (asked.append(model), serves(each, model))[1])
    for each in engines.values():
        each.liveness.succeeded(time.monotonic())
    assert not is_needed(engines, "a")
    assert not is_needed(engines, "b")
    engines["c"].models = {"base": {}}
    assert is_needed(engines, "a")
    assert set(asked) == {"5", "base"}
    engines["b"].models = {}
    assert not is_needed(engines, "a"), "an engine that has not said yet is taken to have them"


def test_a_request_has_an_only_engine_where_others_take_requests_for_other_models() -> None:
    engines = {"a": engine("a", "base"), "b": engine("b", "base"), "c": engine("c", "other")}
    roster = Roster(engines)
    for each in engines.values():
        each.liveness.succeeded(time.monotonic())
    assert [roster.only_engine(model, None) for model in ("base", "other", "none")] == ["", "c", ""]
    assert roster.only_engine("base", "a") == "a"
    assert [roster.only_engine("base", None, without) for without in (["a"], ["a", "b"])] == ["b", ""]
    assert roster.only_engine("base", "a", ["a"]) == ""
    del engines["a"], engines["b"]
    assert roster.only_engine("other", None) == roster.only_engine("other", "c") == ""


def test_engines_that_name_no_models_do_not_stand_before_one_that_names_the_model() -> None:
    """Three that refused every chat, as embedding servers do, were least busy: the fourth was never asked."""
    others = [engine(name) for name in "abc"]
    ours = engine("d", "base")
    assert named([*others, ours], "base") == [ours]
    assert named([*others, ours], "") == [*others, ours]
    assert named(others, "base") == others
