"""Streams of completions from an engine, or from an orchestrator in front of engines."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import aiohttp

from bench.beds.processes import BaselineError
from bench.beds.vllm_servers import MODEL


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request: when it is sent, its tokens, how many it puts out, and the session that it belongs to, if any."""

    at_s: float
    tokens: tuple[int, ...]
    output_tokens: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """An answer: times in seconds, the tokens that the engine had cached, and the text."""

    ttft_s: float
    total_s: float
    cached_tokens: int
    prompt_tokens: int
    text: str
    engine: str
    request_id: str


async def ask(http: aiohttp.ClientSession, url: str, request: StreamRequest, salt: str) -> StreamAnswer:
    """One stream. Raises BaselineError."""
    body = {
        "model": MODEL, "prompt": list(request.tokens), "max_tokens": request.output_tokens, "temperature": 0,
        "stream": True, "cache_salt": salt, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    began_s = time.monotonic()
    first_s, text, usage = None, [], None
    headers = {"X-Session-Id": request.session} if request.session else {}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise BaselineError(f"{answer.status} {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            first_s = first_s or time.monotonic()
            document = json.loads(line.removeprefix(b"data: "))
            if "error" in document:
                raise BaselineError(f"the stream broke off: {document['error']}")
            text += [choice["text"] for choice in document["choices"]]
            usage = document.get("usage") or usage
        engine = answer.headers.get("x-objectcache-engine", "")
        request_id = answer.headers.get("x-objectcache-request-id", "")
    end_s = time.monotonic()
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return StreamAnswer(
        (first_s or end_s) - began_s, end_s - began_s, cached, len(request.tokens), "".join(text), engine, request_id
    )
