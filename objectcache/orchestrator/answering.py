"""The story of one of OpenAI's requests, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from aiohttp import web

from objectcache.adapters.response_sink import abort_connection
from objectcache.orchestrator.answers import AttemptFailed, Refusal
from objectcache.orchestrator.bodies import BudgetedBody
from objectcache.orchestrator.dispatch import is_refusal
from objectcache.orchestrator.exchange import ENGINE_HEADER, REQUEST_HEADER, Exchange
from objectcache.orchestrator.gate import TooBusyError
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.relay import BLOCKED_S, TAKEN_BYTES_PER_S, HeldBytes, send_whole
from objectcache.orchestrator.response_cache import Collected, Kept
from objectcache.orchestrator.router import NoEngineError, Routed
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.rules.cross_origin import answer_headers
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind
from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.tokenizer import NoTokensError
from objectcache.orchestrator.under_way import stopping

ATTEMPTS_MAX = 3
TOKEN_CHARACTERS = 4
"""About so many characters of a body are a token."""


class Answering:
    """Answers one request. The methods stand in the order in which they are called."""

    def __init__(self, parts: Orchestrator, http: web.BaseRequest, kind: RequestKind) -> None:
        self._parts = parts
        self._http = http
        self._kind = kind
        self._began_s = time.monotonic()
        self._tried: list[str] = []
        """The engines that have refused the request, or failed."""
        self._refused: list[str] = []
        """Those that have refused what every engine of the model should answer."""
        self._failure: AttemptFailed | None = None
        self._is_begun = False
        """Whether the client may have some of the answer, so that its status is out."""

    async def answer(self) -> web.StreamResponse:
        """The answer, which its client has when this returns. Raises Refusal for whoever may not ask."""
        parts, http = self._parts, self._http
        with parts.under_way.one():
            tenant = parts.access.tenant(http)
            receipt = parts.receipts.open(http.headers.get("X-Request-Id", ""), tenant.name, http.path, time.time())
            try:
                return await self._answered(tenant, receipt)
            except Refusal as refusal:
                receipt.status, receipt.note = refusal.status, str(refusal)
                return refusal.response({REQUEST_HEADER: receipt.request_id})
            except asyncio.CancelledError:
                if not self._is_begun and parts.under_way.caught():
                    receipt.status, receipt.note = 503, "cut off: the orchestrator was told to stop"
                    return stopping().response({REQUEST_HEADER: receipt.request_id})
                receipt.note = receipt.note or "the client went away"
                raise
            except ConnectionResetError:
                receipt.note = receipt.note or "the client went away"
                raise
            finally:
                receipt.total_s = time.monotonic() - self._began_s
                parts.receipts.close(receipt)
                parts.meter.ended(receipt)

    async def _answered(self, tenant: Tenant, receipt: Receipt) -> web.StreamResponse:
        """Read the body, and answer it: as the same request was answered before, or by an engine."""
        parts = self._parts
        async with parts.bodies.of(self._http, parts.access.caller(self._http)) as body:
            read = await parts.bodies.read(self._http, body, self._kind, tenant)
            body.becomes(read.raw, read.asked.nbytes)
            model = read.asked.model
            identity = parts.roster.identity(model)
            key = f"{read.response_key} {identity}" if read.response_key and identity else None
            kept = None if key is None else parts.responses.find(key, time.monotonic())
            held = HeldBytes(parts.answers, body.caller)
            if kept is not None and held.take(kept.nbytes):  # the cache may drop it while its client reads
                receipt.reason = "exact hit"
                body.drop()
                try:
                    return await self._replayed(kept, receipt)
                finally:
                    held.drop()
            exchange = self._exchange(tenant, receipt, body, read.asked, is_kept=key is not None)
            del read  # the exchange gives its parts up when the answer begins
            try:
                response = await self._admitted(exchange, tenant)
                if isinstance(response, web.Response):  # an engine's refusal, which no other engine has bettered
                    response = await send_whole(self._http, response)
                receipt.status = response.status
                if key is not None and parts.roster.identity(model) == identity:
                    self._keep(key, exchange, response)
                return response
            finally:
                self._is_begun = exchange.is_begun
                exchange.drop()

    async def _replayed(self, kept: Kept, receipt: Receipt) -> web.StreamResponse:
        """Send an answer again. A client that does not read ends it, as it would end an engine's."""
        self._is_begun = True
        response = web.StreamResponse(
            headers={
                "Content-Type": kept.content_type,
                ENGINE_HEADER: "response cache",
                REQUEST_HEADER: receipt.request_id,
                **self._cors,
            }
        )
        await response.prepare(self._http)
        try:
            async with asyncio.timeout(BLOCKED_S + kept.nbytes / TAKEN_BYTES_PER_S):
                for piece in kept.pieces:
                    await response.write(piece)
                    await asyncio.sleep(0)  # to write returns at once where the client reads as fast
                await response.write_eof()
        except TimeoutError:
            receipt.note = "cut off: the client reads too slowly"
            abort_connection(self._http)
            raise ConnectionResetError(receipt.note) from None
        return response

    def _exchange(
        self, tenant: Tenant, receipt: Receipt, body: BudgetedBody, asked: Asked, *, is_kept: bool
    ) -> Exchange:
        parts = self._parts
        return Exchange(
            http=self._http,
            path=self._http.path,
            asked=asked,
            body=body,
            tenant=tenant.name,
            headers=parts.access.forwarded(self._http, receipt.request_id),
            receipt=receipt,
            began_s=self._began_s,
            under_way=parts.under_way,
            cors=self._cors,
            held=HeldBytes(parts.answers, body.caller),
            kept=Collected(parts.responses) if is_kept else None,
        )

    async def _admitted(self, exchange: Exchange, tenant: Tenant) -> web.StreamResponse:
        """The answer of an engine. The request has a place only while engines work for it: it waits for an engine, and
        for tokens that are made here, without one.
        """
        parts, receipt = self._parts, exchange.receipt
        if parts.tokens.are_made_here:
            await self._tokenize(exchange)
        until_s = time.monotonic() + parts.settings.admission.deadline_s
        try:
            for _ in range(ATTEMPTS_MAX):
                await self._engine_comes(exchange, tenant, until_s)
                needed = _tokens_about(exchange) + exchange.asked.output_tokens
                only_engine = partial(self._only_engine, exchange)
                admitted = parts.gate.admitted(receipt.request_id, tenant, needed, until_s, only_engine)
                async with admitted as exchange.place:
                    receipt.waited_s += exchange.place.waited_s
                    if not parts.tokens.are_made_here:
                        await self._tokenize(exchange)
                    response = await self._routed(exchange)
                if response is not None:
                    return response
        except TooBusyError as error:
            raise Refusal(error.status, str(error), code="too_busy", retry_after_s=error.retry_after_s) from None
        raise Refusal(503, "every engine has failed, again and again", code="no_engine", retry_after_s=1)

    async def _tokenize(self, exchange: Exchange) -> None:
        """Have the prompt's tokens, unless they are there, or cannot be known."""
        asked, parts = exchange.asked, self._parts
        if asked.tokens is not None or asked.to_tokenize is None:
            return
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(parts.settings.admission.deadline_s):
                able = parts.roster.able(asked.model)
                tokens = await parts.tokens.of(asked, able, exchange.headers, exchange.tenant, exchange.body.caller)
        except (NoTokensError, TimeoutError) as error:
            exchange.receipt.note = f"routed without its tokens: {str(error) or 'they were not made in time'}"
        else:
            exchange.asked = replace(asked, tokens=tokens, is_counted_by_engine=not parts.tokens.are_made_here)
            exchange.body.becomes(exchange.body.raw, exchange.asked.nbytes)
        finally:
            exchange.receipt.tokenize_s = time.monotonic() - began_s

    async def _engine_comes(self, exchange: Exchange, tenant: Tenant, until_s: float) -> None:
        """Wait for an engine where none takes requests, because a restart takes seconds. Raises Refusal where none has
        come, TooBusyError.
        """
        if not await self._may_come(exchange):
            return
        parts, model = self._parts, exchange.asked.model
        with parts.gate.without_engine(tenant):
            while True:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not await parts.fleet.waiting.comes(model, left_s):
                    async with parts.deciding.turn(exchange.body.caller):
                        problem = f"{parts.router.no_engine(model)}, for {parts.settings.admission.deadline_s:g} s"
                    raise Refusal(503, problem, code="no_engine", retry_after_s=1)
                if not await self._may_come(exchange):
                    return

    async def _may_come(self, exchange: Exchange) -> bool:
        """Whether an engine has to be waited for. To look at all engines takes its turn: thousands may ask at once."""
        async with self._parts.deciding.turn(exchange.body.caller):
            return self._parts.roster.may_come(exchange.asked.model)

    async def _routed(self, exchange: Exchange) -> web.StreamResponse | None:
        """Send the request, to another engine where one fails before it has answered. None where it has to wait for a
        place anew: all engines are gone and one may come back, or the only one that is left has its part of the places.
        """
        receipt, parts = exchange.receipt, self._parts
        await self._look_up(exchange)
        while len(self._tried) < ATTEMPTS_MAX:
            try:
                async with parts.deciding.turn(exchange.body.caller):
                    if exchange.place is not None and not exchange.place.may_go_to(self._only_engine(exchange)):
                        return None
                    routed = self._decided(exchange, self._tried)
                    parts.router.sent(routed, exchange.asked, receipt.request_id, exchange.prompt)
                    if exchange.place is not None:
                        exchange.place.sent(routed.engine.name)
            except NoEngineError as error:
                if error.status == 503 and parts.roster.may_come(exchange.asked.model):
                    self._tried, self._refused, self._failure = [], [], None
                    return None
                if self._failure is not None:
                    break
                retry_after_s = 1 if error.status == 503 else 0
                raise Refusal(error.status, str(error), code="no_engine", retry_after_s=retry_after_s) from None
            self._tried.append(routed.engine.name)
            try:
                response = await self._sent(exchange, routed)
            except AttemptFailed as error:
                parts.meter.failed_over()
                receipt.attempts.append({"engine": routed.engine.name, "error": str(error)})
                self._failure = error
                if is_refusal(error, exchange.asked):
                    self._refused.append(routed.engine.name)
            else:
                if response.status == 200:
                    parts.roster.blame(self._refused, exchange.asked.model)
                return response
        if self._failure is not None and self._failure.answer is not None:
            return self._failure.answer
        raise Refusal(502, f"no engine has answered: {self._failure}", code="engine_lost", retry_after_s=1)

    async def _look_up(self, exchange: Exchange) -> None:
        """Have the prompt with the store's answers, computed by a prefill engine where that is wanted."""
        tokens, receipt = exchange.asked.tokens, exchange.receipt
        receipt.prompt_tokens = None if tokens is None else len(tokens)
        exchange.prompt = None
        if tokens is not None and len(tokens):
            exchange.prompt = await self._parts.router.prompt(exchange.asked, tokens, receipt)
            await self._parts.prefill.compute(exchange)

    def _decided(self, exchange: Exchange, tried: list[str]) -> Routed:
        """The engine. Raises NoEngineError."""
        parts, asked, receipt = self._parts, exchange.asked, exchange.receipt
        began_s = time.monotonic()
        home = self._home(exchange)
        if asked.previous and home is None and parts.settings.tenants:
            raise NoEngineError(f"no response {asked.previous!r} is known here", 404)
        routed = parts.router.decide(asked, receipt.request_id, exchange.prompt, without=tried, home=home)
        receipt.decide_s = time.monotonic() - began_s
        receipt.routed(routed.decision)
        parts.meter.decided(routed.decision, receipt.decide_s)
        return routed

    def _only_engine(self, exchange: Exchange) -> str:
        """The only engine that can answer the request now, where others take requests, too; else empty."""
        return self._parts.roster.only_engine(exchange.asked.model, self._home(exchange), self._tried)

    def _home(self, exchange: Exchange) -> str | None:
        """The engine that has the earlier response from which the request goes on; None where none is known."""
        parts, previous = self._parts, exchange.asked.previous
        home = parts.kept_responses.engine(exchange.tenant, previous) if previous else None
        return home if home in parts.engines else None

    async def _sent(self, exchange: Exchange, routed: Routed) -> web.StreamResponse:
        """One attempt; the engine's books have the request until it ends, however it ends. Raises AttemptFailed."""
        parts, engine = self._parts, routed.engine
        first_block = parts.router.first_block(engine, exchange.prompt)
        is_complete = False
        try:
            response = await parts.dispatch.send(exchange, routed)
            is_complete = response.status == 200 and not exchange.is_broken
            if is_complete and exchange.response_id:
                parts.kept_responses.note(exchange.tenant, exchange.response_id, engine.name)
            return response
        finally:
            engine.books.end(exchange.receipt.request_id, time.monotonic(), is_complete=is_complete)
            if is_complete and first_block is not None:
                parts.token_checks.begin(engine, first_block)
            if parts.writing is not None and exchange.asked.session:
                parts.writing.note_session(exchange.asked.session, engine.name)

    def _keep(self, key: str, exchange: Exchange, response: web.StreamResponse) -> None:
        """Keep the answer for the same request, where it came whole and well."""
        is_encoded = "Content-Encoding" in response.headers  # a replay says nothing of it
        if exchange.kept is None or not exchange.is_worth_keeping or response.status != 200 or is_encoded:
            return
        content_type = response.headers.get("Content-Type", "application/json")
        self._parts.responses.keep(key, content_type, exchange.kept, time.monotonic())

    @property
    def _cors(self) -> Mapping[str, str]:
        return answer_headers(self._parts.settings.cors_origins, self._http.headers)


def _tokens_about(exchange: Exchange) -> int:
    """The tokens of the prompt, or about how many it has: fair shares need no more."""
    tokens = exchange.asked.tokens
    return len(exchange.body.raw) // TOKEN_CHARACTERS if tokens is None else len(tokens)
