"""Operators ask under `/_orchestrator` for the state and receipts, and give orders about engines, pins and quotas."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from objectcache.orchestrator.access import ANYBODY, OPERATORS
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.metadata import NameTakenError
from objectcache.orchestrator.metadata_file import MetadataError
from objectcache.orchestrator.receipts import described
from objectcache.orchestrator.router import NoEngineError
from objectcache.orchestrator.rules.openai_requests import RequestKind, WrongRequestError
from objectcache.orchestrator.rules.policies import LeastTtft, PolicyName, SessionsAsTheyAre
from objectcache.orchestrator.rules.reading import document_of
from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.tokenizer import NoTokensError

ADMIN_BYTES_MAX = 1 << 16
RECEIPTS_TOLD = 32
"""A status has no more receipts; each may be asked for by its id."""


async def administer(parts: Orchestrator, http: web.BaseRequest, path: str) -> web.StreamResponse:
    """Answer an operator. `path` is below `/_orchestrator/`. Raises Refusal."""
    parts.access.require_admin(http)
    kind, _, name = path.partition("/")
    method = "GET" if http.method == "HEAD" else http.method
    handlers = HANDLERS.get((kind, bool(name)))
    if handlers is None:
        raise Refusal(404, f"there is no /_orchestrator/{path}")
    handler = handlers.get(method)
    if handler is None:
        raise Refusal(405, f"{http.method} is not possible here")
    try:
        return await handler(parts, http, name)
    except KeyError:
        raise Refusal(404, f"there is no engine {name.removesuffix('/drain').removesuffix('/undrain')}") from None
    except NameTakenError as error:
        raise Refusal(409, str(error)) from None
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    except MetadataError as error:
        raise Refusal(503, str(error), retry_after_s=1) from None


async def status(parts: Orchestrator, _: web.BaseRequest, __: str) -> web.Response:
    """The state of everything, for people and programs."""
    admission = parts.gate.admission
    document = {
        "policy": parts.settings.policy.value,
        "engines": _engines_state(parts),
        "active": admission.active_count,
        "waiting": admission.waiting_count + parts.gate.without_engine_count,
        "blocks": parts.index.block_count,
        "receipts": [receipt.to_json() for receipt in parts.receipts.last(RECEIPTS_TOLD)],
    }
    return web.json_response(document)


def _engines_state(parts: Orchestrator) -> list[dict[str, Any]]:
    now_s = time.monotonic()
    engines = []
    for engine in parts.engines.values():
        load = engine.books.load(now_s)
        engines.append(
            {
                "name": engine.name,
                "url": engine.url,
                "role": engine.settings.role.value,
                "status": engine.liveness.status(now_s).value,
                "last_error": engine.liveness.last_error,
                "models": list(engine.models),
                "active": load.active_count,
                "waiting": load.waiting_count,
                "queue_s": load.queue_s,
                "requests_max": engine.books.requests_max,
                "kv_tokens": engine.report.kv_tokens,
                "blocks": sum(parts.index.held_count(name) for name in engine.blocks.names),
                "events": {name: feed.status.value for name, feed in engine.blocks.feeds.items()},
                "event_gaps": sum(feed.gap_count for feed in engine.blocks.feeds.values()),
                "token_us": engine.prefill.token_us,
                "has_store": engine.published is not None,
            }
        )
    return engines


async def route(parts: Orchestrator, http: web.BaseRequest, _: str) -> web.Response:
    """The engine that a request would go to, with every engine's terms; nothing is sent."""
    async with parts.bodies.of(http, OPERATORS) as body:
        kind = RequestKind.CHAT if b'"messages"' in body.raw else RequestKind.COMPLETIONS
        asked = (await parts.bodies.read(http, body, kind, ANYBODY)).asked
        body.becomes(b"", asked.nbytes)
        tokens = asked.tokens
        try:
            if tokens is None and asked.to_tokenize is not None:
                headers = parts.access.forwarded(http, uuid.uuid4().hex)
                able = parts.roster.able(asked.model)
                tokens = await parts.tokens.of(asked, able, headers, ANYBODY.name, OPERATORS)
            prompt = None if tokens is None or not len(tokens) else await parts.router.prompt(asked, tokens)
            everything = LeastTtft(SessionsAsTheyAre(parts.sessions), predicts_all=True)
            every = parts.router.decide(asked, "", prompt, policy=everything)
            is_ttft = parts.settings.policy is PolicyName.TTFT
            chosen = every if is_ttft else parts.router.decide(asked, "", prompt, policy=parts.policy)
        except NoEngineError as error:
            raise Refusal(error.status, str(error)) from None
        except NoTokensError as error:
            raise Refusal(502, str(error)) from None
    document = {
        "engine": chosen.engine.name,
        "reason": chosen.decision.reason,
        "policy": parts.settings.policy.value,
        "prompt_tokens": None if tokens is None else len(tokens),
        "prefix": chosen.prefix or None,
        "candidates": [described(each) for each in every.decision.predictions],
    }
    return web.json_response(document)


async def receipt(parts: Orchestrator, _: web.BaseRequest, name: str) -> web.Response:
    """The receipt of a request."""
    found = parts.receipts.find(name)
    if found is None:
        raise Refusal(404, f"there is no receipt of {name}")
    return web.json_response(found.to_json())


async def engines(parts: Orchestrator, _: web.BaseRequest, __: str) -> web.Response:
    """The state of all engines."""
    return web.json_response(_engines_state(parts))


async def register_engine(parts: Orchestrator, http: web.BaseRequest, _: str) -> web.Response:
    """Join an engine."""
    return web.json_response(await parts.fleet.register(await _document(parts, http)), status=201)


async def drain_engine(parts: Orchestrator, http: web.BaseRequest, name: str) -> web.Response:
    """Send an engine no new requests, or send them again."""
    engine, _, action = name.rpartition("/")
    if action not in ("drain", "undrain") or not engine:
        raise Refusal(405, f"{http.method} is not possible here")
    await parts.fleet.drain(engine, is_wanted=action == "drain")
    return web.json_response({"name": engine, "is_draining": action == "drain"})


async def remove_engine(parts: Orchestrator, _: web.BaseRequest, name: str) -> web.Response:
    """Forget an engine."""
    await parts.fleet.remove(name)
    return web.json_response({"name": name})


async def pin(parts: Orchestrator, http: web.BaseRequest, name: str) -> web.Response:
    """Send prompts that begin in some way to one engine."""
    await parts.orders.pin(name, await _document(parts, http))
    return web.json_response({"prefix": name})


async def unpin(parts: Orchestrator, _: web.BaseRequest, name: str) -> web.Response:
    """Do so no more."""
    await parts.orders.pin(name, None)
    return web.json_response({"prefix": name})


async def set_quota(parts: Orchestrator, http: web.BaseRequest, name: str) -> web.Response:
    """Give a tenant another share."""
    await parts.orders.set_quota(name, await _document(parts, http))
    return web.json_response({"tenant": name})


async def _document(parts: Orchestrator, http: web.BaseRequest) -> Mapping[str, Any]:
    async with parts.bodies.of(http, OPERATORS) as body:
        if len(body.raw) > ADMIN_BYTES_MAX:
            raise Refusal(413, f"the body is larger than {ADMIN_BYTES_MAX} bytes")
        try:
            return document_of(body.raw)
        except WrongRequestError as error:
            raise Refusal(400, str(error)) from None


Handler = Callable[[Orchestrator, web.BaseRequest, str], Awaitable[web.StreamResponse]]
HANDLERS: Mapping[tuple[str, bool], Mapping[str, Handler]] = {
    ("status", False): {"GET": status},
    ("route", False): {"POST": route},
    ("receipts", True): {"GET": receipt},
    ("engines", False): {"GET": engines, "POST": register_engine},
    ("engines", True): {"POST": drain_engine, "DELETE": remove_engine},
    ("pins", True): {"PUT": pin, "DELETE": unpin},
    ("quotas", True): {"PUT": set_quota},
}
"""The functions by the first name of a path, whether another name follows it, and the method."""
