"""Requests that decode in an engine, and one that comes beside them: the times between tokens, as clients see them.

Runs where vLLM is installed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from bench.experiments.engine.ways import ALONE_STEPS, DECODED_MAX, OUTPUT_TOKENS, SETTLING_STEPS, Answer

NEITHER: dict[str, object] = {"kv_transfer_params": {"max_load_tokens": 0, "max_offload_tokens": 0}}
LOAD_ONLY: dict[str, object] = {"kv_transfer_params": {"max_offload_tokens": 0}}
"""The stores of a session would be in the way of its load."""
COMER = "comer"


def overlap_steps() -> None:
    """Have vLLM schedule asynchronously, as on GPUs: its platform for CPUs alone switches that off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(checked)


class Decoding:
    """Requests of these prompts decode in one engine, in this process."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]]) -> None:
        self._engine = engine
        self._names = [f"decoder-{index}" for index in range(len(prompts))]
        self._outputs: dict[str, Any] = {}
        self._stepped_s: list[float] = []
        for name, tokens in zip(self._names, prompts, strict=True):
            self._add(name, tokens, DECODED_MAX, NEITHER)

    def beside(self, prompt: list[int]) -> Answer:
        """All decode alone for some steps; then this prompt comes, and is answered. Raises RuntimeError where a decoder
        has said all it may before.
        """
        while len(self._stepped_s) <= SETTLING_STEPS + ALONE_STEPS:
            self._step()
        alone_s = self._between(SETTLING_STEPS, len(self._stepped_s))
        came, came_s = len(self._stepped_s), time.perf_counter()
        self._add(COMER, prompt, OUTPUT_TOKENS, LOAD_ONLY)
        while COMER not in self._outputs:
            self._step()
        seen, ttft_s = len(self._stepped_s), time.perf_counter() - came_s
        while not self._outputs[COMER].finished:
            self._step()
        decoded = tuple(tuple(self._outputs[name].outputs[0].token_ids) for name in self._names)
        if any(self._outputs[name].finished for name in self._names):
            raise RuntimeError(f"a decoder had its {DECODED_MAX} tokens before the prompt beside it was answered")
        comer = self._outputs[COMER]
        return Answer(
            ttft_s=ttft_s,
            cached_tokens=comer.num_cached_tokens or 0,
            tokens=tuple(comer.outputs[0].token_ids),
            alone_s=alone_s,
            beside_s=self._between(came - 1, seen),
            decoded=decoded,
        )

    def end(self) -> None:
        """Abort what still runs."""
        self._engine.abort_request([*self._names, COMER])
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, name: str, tokens: list[int], count: int, extra: dict[str, object]) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=dict(extra)
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)

    def _step(self) -> None:
        """One step of the engine; it counts where all decoders have a token of it."""
        outputs = {output.request_id: output for output in self._engine.step()}
        self._outputs.update(outputs)
        if all(name in outputs for name in self._names):
            self._stepped_s.append(time.perf_counter())

    def _between(self, first: int, end: int) -> tuple[float, ...]:
        """Seconds between these steps."""
        return tuple(later_s - sooner_s for sooner_s, later_s in itertools.pairwise(self._stepped_s[first:end]))
