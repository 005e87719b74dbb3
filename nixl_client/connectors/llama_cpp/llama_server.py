"""Calls to a llama.cpp server: its model and adapters, the tokens of prompts, and files of its slots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from nixl_client.connectors.llama_cpp.rules.prompts import AskedPrompt, tokens_in
from nixl_client.connectors.llama_cpp.rules.slot_file import Tokens
from objectcache.adapters.caller import CALLER
from objectcache.adapters.careful_session import careful_session
from objectcache.adapters.loop_share import LoopShare
from objectcache.adapters.whole_answers import UNENCODED, read_whole

ANSWER_BYTES_MAX = 3 << 20
"""The tokens of a longer prompt would hold the event loop while they are read: it goes on without a cache."""
ADAPTERS_MAX = 64
SLOTS_MAX = 1024
CALL_S = 30.0
SLOT_S = 120.0
"""A slot's file may have gigabytes, and a call waits for the request that the slot runs."""
PROBE = "A slot of llama.cpp as ObjectCache sees it"
_UNBOUNDED = aiohttp.ClientTimeout(total=None, sock_connect=5.0)


class LlamaServerError(Exception):
    """The server does not answer as llama.cpp's does."""


@dataclass(frozen=True, slots=True)
class LlamaFacts:
    """The server's own word about itself: `adapters` are paths and scales, `start` differs from start to start."""

    model_path: str
    slot_count: int
    slot_tokens: int
    build: str
    start: str
    adapters: tuple[tuple[str, float], ...]


class LlamaServer:
    """One server, at `url`. Every call raises LlamaServerError, aiohttp.ClientError or OSError."""

    def __init__(self, url: str, share: LoopShare | None = None) -> None:
        """Answers are read in turns of `share`: the tokens of a long prompt are megabytes."""
        self._url = url.rstrip("/")
        self._share = share or LoopShare()
        # llama-server ends connections after streams without saying so: none is used twice
        self._session = careful_session(aiohttp.TCPConnector(limit=0, force_close=True), timeout=_UNBOUNDED)

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()

    async def facts(self, headers: Mapping[str, str]) -> LlamaFacts:
        """The model, slots and adapters as they are now."""
        properties = await self._called("GET", "/props", headers)
        adapters = await self._called("GET", "/lora-adapters", headers)
        try:
            facts = LlamaFacts(
                model_path=str(properties["model_path"]),
                slot_count=int(properties["total_slots"]),
                slot_tokens=int(properties["default_generation_settings"]["n_ctx"]),
                build=str(properties.get("build_info", "")),
                start=str(properties.get("media_marker", "")),
                adapters=tuple((str(each["path"]), float(each["scale"])) for each in adapters),
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LlamaServerError(f"/props and /lora-adapters make no sense: {error!r}") from None
        if not 1 <= facts.slot_count <= SLOTS_MAX or facts.slot_tokens < 1:
            raise LlamaServerError(f"/props tells of {facts.slot_count} slots of {facts.slot_tokens} tokens")
        if len(facts.adapters) > ADAPTERS_MAX:
            raise LlamaServerError(f"{len(facts.adapters)} adapters; prompts are cached with at most {ADAPTERS_MAX}")
        return facts

    async def tokens(self, asked: AskedPrompt, body: bytes, headers: Mapping[str, str]) -> Tokens:
        """The tokens of a request's prompt."""
        if asked.tokens is not None:
            return asked.tokens
        text = asked.text
        if asked.has_messages:
            templated = await self._called("POST", "/apply-template", headers, body)
            text = templated.get("prompt") if isinstance(templated, dict) else None
        if not isinstance(text, str):
            raise LlamaServerError("/apply-template answers no prompt")
        wanted = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._called("POST", "/tokenize", headers, json.dumps(wanted).encode())
        async with self._share.turn(CALLER.get()):
            found = tokens_in(answer.get("tokens") if isinstance(answer, dict) else None)
        if found is None:
            raise LlamaServerError("/tokenize answers no tokens")
        return found

    async def probe(self, headers: Mapping[str, str]) -> None:
        """Have slot 0 hold a few tokens."""
        wanted = {"prompt": PROBE, "n_predict": 1, "id_slot": 0, "cache_prompt": False}
        await self._called("POST", "/completion", headers, json.dumps(wanted).encode(), SLOT_S)

    async def save_slot(self, index: int, name: str, headers: Mapping[str, str]) -> int:
        """Have the server write a slot's file. The bytes that it says it has written."""
        body = json.dumps({"filename": name}).encode()
        answer = await self._called("POST", f"/slots/{index}?action=save", headers, body, SLOT_S)
        nbytes = answer.get("n_written") if isinstance(answer, dict) else None
        if not isinstance(nbytes, int):
            raise LlamaServerError("the answer to a save tells no n_written")
        return nbytes

    async def restore_slot(self, index: int, name: str, headers: Mapping[str, str]) -> None:
        """Have the server read a slot from a file."""
        body = json.dumps({"filename": name}).encode()
        await self._called("POST", f"/slots/{index}?action=restore", headers, body, SLOT_S)

    def passed_on(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Any:
        """The answer to a client's request, as an asynchronous context. The path, which begins with "/", goes on as it
        came: what the proxy says of a path must hold for the one that the server sees.
        """
        url = URL(self._url + path, encoded=True)
        return self._session.request(method, url, headers=headers, data=body or None, allow_redirects=False)

    async def _called(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None, total_s: float = CALL_S
    ) -> Any:
        kind = {"Content-Type": "application/json"} if body is not None else {}
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=5.0)
        try:
            async with self._session.request(
                method,
                self._url + path,
                headers={**headers, **UNENCODED, **kind},
                data=body,
                allow_redirects=False,
                timeout=timeout,
            ) as answer:
                text = await read_whole(answer, ANSWER_BYTES_MAX)
        except TimeoutError:
            raise LlamaServerError(f"{method} {path}: no answer in {total_s:.0f} s") from None
        if answer.status != 200:
            raise LlamaServerError(f"{method} {path}: {answer.status} {text[:300].decode(errors='replace')}")
        try:
            async with self._share.turn(CALLER.get()):
                return msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise LlamaServerError(f"{method} {path}: the answer is no JSON") from None
