"""Engines that answer OpenAI's requests without a model: for tests of the orchestrator, and for its costs.

A prompt takes `token_us` for each token that the engine does not hold, prompts one after the other, as a real engine's
do; the answer is made from the prompt alone, so that every engine gives the same. The engine holds blocks, publishes
KV events as vLLM does, and replays them. It can be told to fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

MODEL = "canned"
REPLAY_MAX = 10_000
_END = (1 << 64) - 1


@dataclass
class CannedSettings:
    """`blocks_max` bounds what it holds. `output_s` is the time of each token that it puts out."""

    token_us: float = 50.0
    output_s: float = 0.001
    block_tokens: int = 16
    blocks_max: int = 100_000
    model: str = MODEL
    publishes: bool = True
    tokenize_shift: int = 0
    """Added to each token that `/tokenize` gives, and not to those that are computed."""
    tokenize_hangs: bool = False
    deployment: dict[str, str] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    transfer_params: dict[str, Any] = field(default_factory=dict)
    """The `kv_transfer_params` of answers that are no streams, as a prefill engine gives them."""


class CannedEngine:
    """One engine on the running event loop. `url` is its address, `events` and `replay` are its ZMQ endpoints."""

    def __init__(self, settings: CannedSettings | None = None) -> None:
        self.settings = settings or CannedSettings()
        self.url = self.events = self.replay = ""
        self.requests: list[dict[str, Any]] = []
        self.forms: list[bytes] = []
        """The bodies of forms."""
        self.responses: set[str] = set()
        """The ids of the responses that it keeps, for requests that go on from them."""
        self.headers: list[dict[str, str]] = []
        self.tokenize_headers: list[dict[str, str]] = []
        self.held: OrderedDict[int, None] = OrderedDict()
        self.sent_batches: list[bytes] = []
        self.cancelled_count = self.tokenize_count = 0
        self.fails_with: int | None = None
        self.extra_headers: dict[str, str] = {}
        """Further headers of its answers."""
        """The status of every answer, that to probes included."""
        self.answers_with: int | None = None
        """The status of every answer but that to probes."""
        self.cuts_after: int | None = None
        """Streams are cut after so many pieces."""
        self.is_hung = asyncio.Event()
        self._computing = asyncio.Lock()
        self._running = self._waiting = 0
        self._runner: web.AppRunner | None = None
        self._context: zmq.asyncio.Context | None = None
        self._publisher: Any = None
        self._replays: asyncio.Task[None] | None = None

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen for HTTP at `host`; KV events are published on loopback."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_post("/tokenize", self._tokenize)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        for path in ("/v1/score", "/rerank", "/v1/messages", "/detokenize"):
            app.router.add_post(path, self._echo)
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        assert self._runner.addresses
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        if self.settings.publishes:
            self._context = zmq.asyncio.Context()
            self._publisher = self._context.socket(zmq.PUB)
            self.events = f"tcp://127.0.0.1:{self._publisher.bind_to_random_port('tcp://127.0.0.1')}"
            self._replays = asyncio.create_task(self._serve_replays(self._context))
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End, as a killed engine does: streams break off."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def publish(self, events: Sequence[dict[str, Any]], number: int | None = None) -> None:
        """Send a batch; one without a number is the next one, and is kept for replays."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        if number is None:
            number = len(self.sent_batches)
            self.sent_batches.append(payload)
        await self._publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def send(self, frames: Sequence[bytes]) -> None:
        """Publish these frames, whatever they are."""
        await self._publisher.send_multipart(frames)

    def clear(self) -> None:
        """Hold nothing, and say nothing of it."""
        self.held.clear()

    async def _serve_replays(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.ROUTER)
        self.replay = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        try:
            while True:
                client, _, first = await socket.recv_multipart()
                for number in range(int.from_bytes(first, "big"), len(self.sent_batches)):
                    await socket.send_multipart(
                        [client, b"", b"", number.to_bytes(8, "big"), self.sent_batches[number]]
                    )
                await socket.send_multipart([client, b"", b"", _END.to_bytes(8, "big"), b""])
        finally:
            socket.close(linger=0)

    async def _health(self, request: web.Request) -> web.Response:
        if self.is_hung.is_set():
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.fails_with is None else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.settings.model, "object": "model"}]})

    async def _sources(self, request: web.Request) -> web.Response:
        if not self.events:
            return web.json_response({})
        source = {"enable_kv_cache_events": True, "endpoint": self.events, "replay_endpoint": self.replay, "topic": ""}
        return web.json_response({"0": source})

    async def _metrics(self, request: web.Request) -> web.Response:
        settings = self.settings
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {self._running}',
            f'vllm:num_requests_waiting{{engine="0"}} {self._waiting}',
            f'vllm:cache_config_info{{block_size="{settings.block_tokens}",num_gpu_blocks="{settings.blocks_max}"}} 1',
        ]
        if settings.deployment:
            labels = ",".join(f'{name}="{value}"' for name, value in settings.deployment.items())
            lines.append(f"vllm:objectcache_deployment_info{{{labels}}} 1")
        lines += [f"vllm:objectcache_cost_{name} {value}" for name, value in settings.costs.items()]
        return web.Response(text="\n".join(lines) + "\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenize_count += 1
        self.tokenize_headers.append(dict(request.headers))
        if self.settings.tokenize_hangs:
            await asyncio.Event().wait()
        document = await request.json()
        shift = self.settings.tokenize_shift
        return web.json_response({"tokens": [token + shift for token in tokens_of(document)]})

    async def _echo(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "said": await request.json()})

    async def _transcribe(self, request: web.Request) -> web.Response:
        self.forms.append(await request.read())
        return web.json_response({"text": "words"})

    async def _embed(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"embedding": [0.5], "index": 0}], "model": MODEL})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if (status := self.fails_with or self.answers_with) is not None:
            return web.json_response({"error": {"message": "canned"}}, status=status)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.is_hung.is_set():
            await asyncio.sleep(3600)
        tokens = tokens_of(body)
        await self.compute(tokens, str(body.get("cache_salt") or ""))
        name = "canned"
        if request.path == "/v1/responses":
            previous = body.get("previous_response_id")
            if previous is not None and previous not in self.responses:
                return web.json_response({"error": {"message": "there is no such response"}}, status=404)
            name = f"resp_{secrets.token_hex(8)}"
            self.responses.add(name)
        count = int(body.get("max_tokens") or body.get("max_completion_tokens") or 8)
        seed = sha256(json.dumps(tokens).encode()).hexdigest()
        words = [f" {seed[at % 60 : at % 60 + 4]}" for at in range(count)]
        is_chat = "messages" in body
        if not body.get("stream"):
            await asyncio.sleep(self.settings.output_s * count)
            text = "".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            usage = {"prompt_tokens": len(tokens), "completion_tokens": count, "total_tokens": len(tokens) + count}
            return web.json_response(
                {
                    "id": name, "object": "chat.completion" if is_chat else "text_completion", "created": 1,
                    "model": MODEL, "usage": usage,
                    "choices": [{"index": 0, "finish_reason": "length", **choice}],
                    **({"kv_transfer_params": self.settings.transfer_params} if self.settings.transfer_params else {}),
                },
                headers=self.extra_headers,
            )  # fmt: skip
        headers = {**self.extra_headers, "Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for at, word in enumerate(words):
            if self.cuts_after is not None and at >= self.cuts_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            delta = {"delta": {"content": word}} if is_chat else {"text": word}
            kind = "chat.completion.chunk" if is_chat else "text_completion"
            event = {"id": name, "object": kind, "created": 1, "model": MODEL,
                     "choices": [{"index": 0, "finish_reason": None, **delta}]}  # fmt: skip
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.settings.output_s:
                await asyncio.sleep(self.settings.output_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def compute(self, tokens: Sequence[int], salt: str) -> None:
        """Wait for one's turn and compute what is not held; then hold it, and say so."""
        self._waiting += 1
        try:
            async with self._computing:
                self._waiting -= 1
                self._running += 1
                try:
                    await self._compute_now(tokens, salt)
                finally:
                    self._running -= 1
                    self._waiting += 1
        finally:
            self._waiting -= 1

    async def _compute_now(self, tokens: Sequence[int], salt: str) -> None:
        step = self.settings.block_tokens
        names, parent = [], f"canned {salt}".encode()
        for start in range(0, len(tokens) - step + 1, step):
            parent = sha256(parent + json.dumps(tokens[start : start + step]).encode()).digest()
            names.append(int.from_bytes(parent[:8], "big"))
        held = next((at for at, name in enumerate(names) if name not in self.held), len(names))
        await asyncio.sleep((len(tokens) - held * step) * self.settings.token_us * 1e-6)
        events: list[dict[str, Any]] = []
        for name in names:
            self.held[name] = None
            self.held.move_to_end(name)
        if held < len(names):
            event: dict[str, Any] = {
                "type": "BlockStored", "block_hashes": names[held:], "block_size": step, "medium": "GPU",
                "token_ids": list(tokens[held * step : len(names) * step]),
                "parent_block_hash": names[held - 1] if held else None,
            }  # fmt: skip
            if salt and not held:
                event["extra_keys"] = [[salt], *([None] * (len(names) - 1))]
            events.append(event)
        while len(self.held) > self.settings.blocks_max:
            gone, _ = self.held.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU"})
        if events and self._publisher is not None:
            await self.publish(events)


def tokens_of(document: dict[str, Any]) -> list[int]:
    """The tokens of a prompt: its ids, or one for each byte of its text."""
    prompt = document.get("prompt")
    if isinstance(prompt, list):
        return [int(each) for each in prompt]
    if prompt is None:
        messages = document.get("messages") or document.get("input") or []
        prompt = json.dumps(messages, sort_keys=True)
    return list(str(prompt).encode())


async def serve(port: int, settings: CannedSettings, host: str = "127.0.0.1") -> None:
    """Serve until the standard input ends, and say where."""
    engine = CannedEngine(settings)
    await engine.start(port, host)
    print(engine.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.stop()


def main() -> None:
    """`python -m bench.beds.canned_engines`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-us", type=float, default=0.0)
    parser.add_argument("--output-s", type=float, default=0.0)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--no-events", action="store_true")
    options = parser.parse_args()
    settings = CannedSettings(options.token_us, options.output_s, options.block_tokens, publishes=not options.no_events)
    asyncio.run(serve(options.port, settings, options.host))


if __name__ == "__main__":
    main()
