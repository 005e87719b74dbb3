"""Questions about the engines that there are: who takes requests for a model, and which models there are."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import is_not
from typing import Any

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.settings import Role


class Roster:
    """Questions about `engines`, which the fleet changes."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._told: list[Mapping[str, Mapping[str, Any]]] = []
        """The models of each engine that `_models_body` tells of."""
        self._models_body = _body_of({})

    def is_serving(self, model: str = "") -> bool:
        """Whether some engine takes requests, for this model where one is named."""
        now_s = time.monotonic()
        return any(each.liveness.takes_requests(now_s) for each in self._decoding(model))

    def may_come(self, model: str) -> bool:
        """Whether no engine takes requests for the model now, and one may do so soon."""
        engines = self._decoding(model)
        return not self.is_serving(model) and any(not engine.liveness.is_draining for engine in engines)

    def only_engine(self, model: str, home: str | None, without: Collection[str] = ()) -> str:
        """The name of the engine that alone can answer a request now, where others take requests, too: the one that
        takes requests for the model, or `home`, which has the earlier response. `without` are those that have refused
        it, or failed. Empty where there is no such engine.
        """
        now_s = time.monotonic()
        serving = [each for each in self._decoding("") if each.liveness.takes_requests(now_s)]
        able = [each.name for each in serving if each.serves(model)] if home is None else [home]
        able = [name for name in able if name not in without]
        return able[0] if len(able) == 1 and any(each.name != able[0] for each in serving) else ""

    def able(self, model: str) -> list[Engine]:
        """The engines of every role that take requests for the model, and may be asked about it."""
        now_s = time.monotonic()
        engines = self._engines.values()
        return named([each for each in engines if each.liveness.takes_requests(now_s) and each.serves(model)], model)

    def has_prefill(self) -> bool:
        """Whether some prefill engine takes requests."""
        now_s = time.monotonic()
        return any(
            engine.settings.role is Role.PREFILL and engine.liveness.takes_requests(now_s)
            for engine in self._engines.values()
        )

    def models_body(self) -> bytes:
        """The answer with the models of all engines, each once. All who ask share it until the models change."""
        models = [engine.models for engine in self._engines.values()]
        if len(models) != len(self._told) or any(map(is_not, models, self._told)):
            found: dict[str, Mapping[str, Any]] = {}
            for name, card in chain.from_iterable(each.items() for each in models):
                found.setdefault(name, card)
            self._told, self._models_body = models, _body_of(found)
        return self._models_body

    def identity(self, model: str) -> str:
        """The weights behind a model's name, as its engines say; empty where no engine is known to have the model. An
        answer that is kept is of this identity only.
        """
        cards = [engine.models[model] for engine in self._engines.values() if model in engine.models]
        return "\n".join(sorted({f"{each.get('root')} {each.get('parent')}" for each in cards}))

    def blame(self, names: Sequence[str], model: str) -> None:
        """These engines have refused a request that another one has answered. One that does not say that it has the
        model is not to blame.
        """
        for name in names:
            if name in self._engines and model in self._engines[name].models:
                self._engines[name].refused(model)

    def _decoding(self, model: str) -> list[Engine]:
        engines = self._engines.values()
        return [each for each in engines if each.settings.role is not Role.PREFILL and each.serves(model)]


def is_needed(engines: Mapping[str, Engine], name: str) -> bool:
    """Whether no other engine takes requests now for any model of this one. Of a single model that it names an engine
    would else be needed whatever it does. A prefill engine is never needed: other engines compute prompts, too.
    """
    engine = engines.get(name)
    if engine is None or engine.settings.role is Role.PREFILL:
        return False
    now_s = time.monotonic()
    others = [
        each
        for each in engines.values()
        if each is not engine and each.settings.role is not Role.PREFILL and each.liveness.takes_requests(now_s)
    ]
    return not any(_serves_some(other, engine.models) for other in others)


def named(engines: list[Engine], model: str) -> list[Engine]:
    """Those that say that they have the model; all of them where none does. An engine of another kind, which says
    nothing of its models, would refuse the requests of all, and is least busy then.
    """
    return [each for each in engines if model in each.models] or engines


def _serves_some(engine: Engine, models: Mapping[str, object]) -> bool:
    """Whether an engine has one of these models; of no models one that nobody has named. Engines choose how many models
    they name, and this is asked at each failure: so the fewer ones are looked up among the others.
    """
    if not models or not engine.models:
        return not models or any(map(engine.serves, models))
    return any(map(engine.serves, engine.models.keys() & models.keys()))


def _body_of(models: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"object": "list", "data": list(models.values())}).encode()
