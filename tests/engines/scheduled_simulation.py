"""A seeded simulation: requests come, are aborted and preempted, loads fail, stores are read late. What each block
holds is followed, so that a token computed on wrong blocks, and a chunk written from them, are noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nixl_client.connectors.vllm.steps import LoadJob, Report, StoreJob
from tests.engines.messages import Json
from tests.engines.scheduled import OUTPUT_TOKEN, PREFIX, Facts, ScheduledEngine, ScheduledStep, scheduled
from tests.engines.scheduled_config import BLOCK_TOKENS, VOCABULARY, Setup

__all__ = ["simulation"]
REQUESTS_MAX = 8
PREFIXES = (PREFIX, PREFIX[::-1], (*PREFIX[:96], *PREFIX[:160]))
Tokens = tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What the workers will say of a step."""

    step: ScheduledStep
    lost: set[int] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    """Requests whose forward pass read blocks that do not hold their tokens."""
    report: Report = field(default_factory=Report)
    freed: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    """Requests that waited for their loads."""


class Simulation:
    """An engine, its memory, its workers and its users."""

    def __init__(self, engine: ScheduledEngine, seed: int, depth: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._depth = depth
        self._held: dict[int, Tokens] = {}
        """For each block the tokens from the prompt's start to the last it holds; none where its bytes are no such."""
        self._unreadable: set[str] = set()
        self._waiting: list[StoreJob] = []
        self._awaited: set[str] = set()
        self._under_way: list[Outcome] = []
        self._arrivals = 0
        self.counts: Counter[str] = Counter()

    def run(self, step_count: int) -> None:
        """Raises AssertionError when a token or a chunk is wrong."""
        for _ in range(step_count):
            self._disturb()
            self._under_way.append(self._execute(self._engine.step()))
            self._abort_one()
            if len(self._under_way) >= self._depth:
                self._deliver(self._under_way.pop(0))
        self.finish()

    def finish(self) -> None:
        """Deliver and read what is left."""
        for job in self._waiting:
            self._engine.connector._ledger.report(Report(read_jobs={job.job_id: 1}), 0.0)
        while self._under_way:
            self._deliver(self._under_way.pop(0))
        for request_id in list(self._engine.scheduler.requests):
            self._engine.abort(request_id)
        step = self._engine.step()
        loads = self._engine.loading.values() if self._engine.connector._is_ahead else step.work.loads
        report = Report({job.job_id: 1 for job in step.work.stores}, {job.job_id: 1 for job in loads})
        self._engine.deliver(step, (), report, self._awaited | step.work.awaited, set(self._engine.loading))

    def _disturb(self) -> None:
        prefix = self._random.choice(PREFIXES)
        for _ in range(self._random.choice((0, 0, 1, 2))):
            if len(self._alive) < REQUESTS_MAX:
                self._arrive(prefix)
        self._abort_one()
        running = self._engine.scheduler.running
        if len(running) > 1 and self._depth == 1 and self._random.random() < 0.1:
            self._engine.preempt(running[-1].request_id)
            self.counts["preempted"] += 1
        if self._random.random() < 0.3:
            pool = self._engine.scheduler.kv_cache_manager.block_pool
            pool.evict_blocks(set(self._random.sample(range(1, pool.num_gpu_blocks), k=pool.num_gpu_blocks // 2)))

    def _arrive(self, prefix: Tokens) -> None:
        cut = self._random.choice((32, 100, 128, 200, 256))
        tail = self._random.choices(range(VOCABULARY), k=self._random.randrange(1, 70))
        self._engine.add(f"R{self._arrivals}", (*prefix[:cut], *tail), self._random.choice((1, 5, 40)))
        self._arrivals += 1

    @property
    def _alive(self) -> list[str]:
        return [each for each, request in self._engine.scheduler.requests.items() if not request.is_finished()]

    def _abort_one(self) -> None:
        if self._random.random() < 0.05 and self._alive:
            self._engine.abort(self._random.choice(self._alive))
            self.counts["aborted"] += 1

    def _execute(self, step: ScheduledStep) -> Outcome:
        outcome = Outcome(step)
        voided = [job for job in self._waiting if not step.work.rewritten.isdisjoint(job.chunk_range.blocks)]
        self._waiting = [job for job in self._waiting if job not in voided]
        for load in step.work.loads:
            if not self._engine.connector._is_ahead:
                self._load(load, outcome)
        for load in self._ahead():
            self._load(load, outcome)
            outcome.arrived.add(load.request_id)
        for request_id, count in step.output.num_scheduled_tokens.items():
            self._compute(request_id, step, step.computed[request_id], count, outcome)
        self._waiting += step.work.stores
        self._awaited |= step.work.awaited
        read = [job for job in self._waiting if self._random.random() < 0.5]
        self._waiting = [job for job in self._waiting if job not in read]
        for job in read:
            self._write(job)
        outcome.report.read_jobs = {job.job_id: 1 for job in (*voided, *read)}
        outcome.freed = self._awaited - {job.request_id for job in self._waiting}
        self._awaited -= outcome.freed
        return outcome

    def _ahead(self) -> list[LoadJob]:
        """Some of the loads that requests wait for, which are over in this step."""
        told = {each for outcome in self._under_way for each in outcome.arrived}
        loading = [job for each, job in self._engine.loading.items() if each not in told]
        return [job for job in loading if self._random.random() < 0.4]

    def _load(self, job: LoadJob, outcome: Outcome) -> None:
        self.counts["loads"] += 1
        keys, span, grid = job.keys[0], job.chunk_range, self._engine.connector._setup.grid
        assert self._engine.store.keys.issuperset(keys)
        if self._random.random() < 0.1:
            self._unreadable.add(self._random.choice(keys))
        good = next((index for index, key in enumerate(keys) if key in self._unreadable), len(keys))
        if self._random.random() < 0.1:
            good, outcome.report.failed_loads = 0, outcome.report.failed_loads + 1
        elif good < len(keys):
            outcome.report.bad_chunks[job.job_id] = span.first_chunk + good
        outcome.report.ended_loads[job.job_id] = 1
        good_blocks = len(span.blocks) if good == len(keys) else grid.first_lost_block(span, good)
        start = span.first_chunk * grid.chunk_tokens + span.chunk_skip
        tokens = self._tokens(job.request_id)
        for index, block_id in enumerate(span.blocks):
            self._held[block_id] = tokens[: start + (index + 1) * BLOCK_TOKENS] if index < good_blocks else ()
        outcome.lost.update(span.blocks[good_blocks:])
        self.counts["lost"] += good_blocks < len(span.blocks)

    def _compute(self, request_id: str, step: ScheduledStep, first: int, count: int, outcome: Outcome) -> None:
        blocks = step.blocks[request_id]
        tokens = self._tokens(request_id)
        is_right = self._holds(blocks, 0, first, tokens)
        if not is_right:
            outcome.wrong.add(request_id)
        for index in range(first // BLOCK_TOKENS, -(-(first + count) // BLOCK_TOKENS)):
            self._held[blocks[index]] = tokens[: min(first + count, (index + 1) * BLOCK_TOKENS)] if is_right else ()

    def _write(self, job: StoreJob) -> None:
        tokens, grid = self._tokens(job.request_id), self._engine.connector._setup.grid
        start, end = job.chunk_range.first_chunk * grid.chunk_tokens, job.chunk_range.end_chunk * grid.chunk_tokens
        first = start // BLOCK_TOKENS * BLOCK_TOKENS
        assert self._holds(job.chunk_range.blocks, first, end, tokens), f"{job}: blocks that hold something else"
        assert list(job.keys[0]) == self._engine.keys(tokens[:end])[job.chunk_range.first_chunk :]
        self._engine.store.keys.update(job.keys[0])
        self.counts["stores"] += 1
        if job.is_repair:
            self._unreadable.difference_update(job.keys[0])
            self.counts["repairs"] += 1

    def _deliver(self, outcome: Outcome) -> None:
        given = self._engine.deliver(outcome.step, outcome.lost, outcome.report, outcome.freed, outcome.arrived)
        tokens = {each.request_id for each in given if each.new_token_ids}
        assert not tokens & outcome.wrong, f"{tokens & outcome.wrong} were given tokens computed on wrong blocks"
        self.counts["tokens"] += len(tokens)
        self.counts["failed"] += sum(str(each.finish_reason) == "error" for each in given)

    def _holds(self, blocks: Sequence[int], start: int, end: int, tokens: Tokens) -> bool:
        """Whether these blocks, of which the first begins at token `start`, hold the tokens up to `end`."""
        for index in range(-(-(end - start) // BLOCK_TOKENS)):
            needed = tokens[: min(end, start + (index + 1) * BLOCK_TOKENS)]
            if self._held.get(blocks[index], ())[: len(needed)] != needed:
                return False
        return True

    def _tokens(self, request_id: str) -> Tokens:
        """How many tokens the request has, with those that are still under way."""
        return (*self._engine.requests[request_id].all_token_ids, *[OUTPUT_TOKEN] * self._depth)


def simulation(folder: Path, seed: int, policy: str, is_async: bool, chunk_tokens: int, step_count: int) -> Facts:
    """How often what happened."""
    options: dict[str, Json] = {"chunk_tokens": chunk_tokens, "retry_s": 0.0}
    setup = Setup(policy, options=options, arguments={"long_prefill_token_threshold": 96}, is_async=is_async)
    with scheduled(folder, setup) as engine:
        simulated = Simulation(engine, seed, 2 if is_async else 1)
        simulated.run(step_count)
        return dict(simulated.counts)
