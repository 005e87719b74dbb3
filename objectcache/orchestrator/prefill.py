"""Prefill by an engine that only does that: its chunks come to the engine that goes on from the store, or directly."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from objectcache.adapters.loop_share import LoopShare
from objectcache.orchestrator.answers import AttemptFailed
from objectcache.orchestrator.dispatch import Dispatch, note_costs, transfer_advice
from objectcache.orchestrator.exchange import Exchange
from objectcache.orchestrator.roster import Roster
from objectcache.orchestrator.router import NoEngineError, Prompt, Routed, Router
from objectcache.orchestrator.rules.openai_requests import RequestKind
from objectcache.orchestrator.rules.policies import LeastTtft
from objectcache.orchestrator.rules.reading import TRANSFER_PARAMS
from objectcache.orchestrator.settings import Role

PREFILL_WAIT_S, PREFILL_STEP_S = 1.0, 0.05
"""A prefill engine writes its chunks behind its answer; so long they are waited for."""
ANSWER_S_MIN, ANSWER_TIMES = 5.0, 3.0
"""A prefill engine is waited for so many seconds, or so many times its prediction, or that of an engine that would
compute the prompt instead, where that is less: its own costs are its own word.
"""
ENGINES_TRIED_MAX = 2
_DROPPED = (
    "stream_options",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "n",
    "best_of",
    "return_token_ids",
)
"""The fields that a prefill engine's request does not have."""


class Prefill:
    """Has prompts of more than `tokens_min` tokens computed by prefill engines, where there are any."""

    def __init__(
        self, roster: Roster, router: Router, dispatch: Dispatch, deciding: LoopShare, tokens_min: int
    ) -> None:
        self._roster = roster
        self._router = router
        self._dispatch = dispatch
        self._deciding = deciding
        self._tokens_min = tokens_min

    async def compute(self, exchange: Exchange) -> None:
        """Where there are prefill engines and the prompt is long, have one compute it first; the decode engine then has
        it from the store, or from the prefill engine itself, whose `kv_transfer_params` go on with the request.
        """
        receipt, prompt = exchange.receipt, exchange.prompt
        # the answer is one token, and comes when the prompt is computed, whatever the client asked for
        asked = replace(exchange.asked, is_stream=True, output_tokens=1, sequence_tokens=1)
        exchange.handed_over = b""  # the blocks of an earlier prefill may be another prompt's now
        if prompt is None or not asked.is_generating or not self._roster.has_prefill():
            return
        if len(prompt.tokens) < self._tokens_min:
            return
        tried: list[str] = []
        while len(tried) < ENGINES_TRIED_MAX:
            async with self._deciding.turn(exchange.body.caller):
                try:
                    routed = self._router.decide(asked, receipt.request_id, prompt, without=tried, role=Role.PREFILL)
                    elsewhere = self._router.decide(asked, "", prompt, policy=LeastTtft()).decision.prediction
                except NoEngineError:
                    return
                engine, prediction = routed.engine, routed.decision.prediction
                answer_s = max(ANSWER_S_MIN, ANSWER_TIMES * min(prediction.ttft_s, elsewhere.ttft_s))
                there = max(prediction.held_tokens, prediction.stored_tokens)
                is_late = prediction.ttft_s > answer_s or engine.books.overdue_s(time.monotonic()) > 0
                if is_late or len(prompt.tokens) - there <= self._tokens_min:
                    return
                self._router.sent(routed, asked, receipt.request_id, prompt)
            tried.append(engine.name)
            try:
                handed_over = await self._answer(exchange, routed, answer_s)
            except AttemptFailed as error:
                receipt.attempts.append({"engine": engine.name, "error": str(error), "role": "prefill"})
                continue
            else:
                ttft_s = engine.books.first_byte(receipt.request_id, time.monotonic())
                note_costs(routed, len(prompt.tokens), ttft_s)
            finally:
                engine.books.end(receipt.request_id, time.monotonic(), is_complete=False)
            receipt.attempts.append({"engine": engine.name, "status": 200, "role": "prefill"})
            exchange.handed_over = handed_over
            if not handed_over:
                exchange.prompt = await self._stored(exchange, prompt)
            return

    async def _answer(self, exchange: Exchange, routed: Routed, answer_s: float) -> bytes:
        """The parameters in a prefill engine's answer to one token within `answer_s`, of no stream, whose KV another
        engine may have. Raises AttemptFailed.
        """
        most = "max_output_tokens" if exchange.asked.kind is RequestKind.RESPONSES else "max_tokens"
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        params = {**transfer_advice(routed), **remote}
        put = {most: 1, "stream": False, TRANSFER_PARAMS: params}
        async with self._dispatch.changed(exchange, _DROPPED, put) as body:
            try:
                async with asyncio.timeout(answer_s):
                    return await self._dispatch.ask(routed.engine, exchange.path, exchange.headers, body)
            except TimeoutError:
                raise AttemptFailed(f"{routed.engine.name} has not answered within {answer_s:.1f} s") from None

    async def _stored(self, exchange: Exchange, prompt: Prompt) -> Prompt:
        """Wait until the store has the prompt, for a short while."""
        until_s = time.monotonic() + PREFILL_WAIT_S
        while True:
            found = await self._router.prompt(exchange.asked, prompt.tokens, exchange.receipt)
            stored = [each for each in found.stored.values() if each is not None]
            is_there = any(each.chunk_count >= (len(prompt.tokens) - 1) // each.layout.chunk_tokens for each in stored)
            if is_there or time.monotonic() >= until_s:
                return found
            await asyncio.sleep(PREFILL_STEP_S)
