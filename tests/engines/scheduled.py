"""vLLM's own Scheduler over the connector, without a model: the store is a set of keys, and a step ends as a scenario
says. Imported in the engines' environment only.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from descriptors.descriptor import Accept
from descriptors.recompute import Advice, AdviceRequest, advise
from nixl_client.connectors.vllm import connector as connector_module
from nixl_client.connectors.vllm import lookups
from nixl_client.connectors.vllm.metrics import StepMetadata, WorkerReport
from nixl_client.connectors.vllm.naming import KeyChain
from nixl_client.connectors.vllm.steps import LoadJob, Report, Step, StoreJob
from nixl_client.session.check import Checked
from tests.engines.scheduled_config import BLOCK_TOKENS, VOCABULARY, Setup, cache_config, engine_config

OUTPUT_TOKEN = 5
PREFIX_CHUNKS = 8
PREFIX = tuple(random.Random(1).choices(range(VOCABULARY), k=PREFIX_CHUNKS * BLOCK_TOKENS))
"""What requests share; a chunk is a block."""
Facts: TypeAlias = Mapping[str, object] | Sequence[object] | str | bool | None
"""What happened in a scenario, as JSON."""
ANSWER_S = 60.0
"""A bound for waits that end at once unless something hangs."""


class FakeStore:
    """In place of `Client`."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.lookup_count = 0
        self.failure: Exception | None = None
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def check(self) -> Checked:
        """As of a store that is there."""
        return Checked(True, "played")

    def lookup(self, keys: Sequence[str], lease_s: float = 0.0, *, accept: Accept | None = None) -> int:
        """How many of the first keys are stored."""
        self.lookup_count += 1
        self.is_asked.set()
        self.may_answer.wait(ANSWER_S)
        if self.failure is not None:
            raise self.failure
        return sum(1 for _ in itertools.takewhile(self.keys.__contains__, keys))

    def advise(
        self, keys: Sequence[str], compute: AdviceRequest, lease_s: float = 0.0, *, accept: Accept | None = None
    ) -> tuple[int, Advice]:
        """What `lookup` says, of a server that paces nothing."""
        matched = self.lookup(keys, lease_s)
        return matched, advise(matched, compute)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step of the engine that has not ended. `computed` says of each of its requests how many tokens are taken as
    computed before it, loads included, `blocks` where they are; `sampled` are the requests whose next token it gives.
    """

    output: Any
    work: Step
    computed: dict[str, int]
    blocks: dict[str, list[int]]
    sampled: frozenset[str]

    @property
    def found(self) -> dict[str, int]:
        """For each of its requests: the tokens that count as computed and that this step does not load."""
        loaded = {job.request_id: job.chunk_range.token_count for job in self.work.loads}
        return {request_id: count - loaded.get(request_id, 0) for request_id, count in self.computed.items()}

    @property
    def loads(self) -> list[list[int]]:
        """First and end chunk of each load."""
        return _chunks(self.work.loads)

    @property
    def stores(self) -> list[list[int]]:
        """The same of each store that is no repair."""
        return _chunks(job for job in self.work.stores if not job.is_repair)

    @property
    def repairs(self) -> list[list[int]]:
        """The same of each store that is one."""
        return _chunks(job for job in self.work.stores if job.is_repair)

    def loaded_blocks(self, first: int = 0) -> set[int]:
        """Blocks that the step's loads fill, from the `first` of each on."""
        return {block_id for job in self.work.loads for block_id in job.chunk_range.blocks[first:]}


class ScheduledEngine:
    """The scheduler's half of an engine; steps are made and ended by hand."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.store = FakeStore()
        self._setup = setup
        config = engine_config(folder, setup)
        init_none_hash(sha256)
        with mock.patch.object(connector_module, "Client", return_value=self.store):
            kind = AsyncScheduler if setup.is_async else Scheduler
            self.scheduler = kind(
                config, cache_config(config), StructuredOutputManager(config), block_size=BLOCK_TOKENS
            )
        whole = self.scheduler.connector
        self.connector = whole if setup.peer is None else whole._connectors[1]
        self.requests: dict[str, Any] = {}
        self.loading: dict[str, LoadJob] = {}
        """The load of each request that waits for one."""
        self._open_steps: list[ScheduledStep] = []

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """The keys of the whole chunks, as the connector names them from now on."""
        deployment = self.connector._ledger.deployment
        chunk_tokens = self.connector._setup.grid.chunk_tokens
        chain = KeyChain(deployment.namespace(0, "", ""), chunk_tokens)
        return list(chain.keys(tokens, len(tokens) // chunk_tokens))

    def fill_store(self, tokens: Sequence[int] = PREFIX) -> None:
        """Have the chunks of these tokens stored."""
        self.store.keys.update(self.keys(tokens))

    def add(self, request_id: str, tokens: Sequence[int], output_tokens: int = 50) -> None:
        """A request arrives."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request_id: str) -> None:
        """The engine wants its blocks for another request."""
        request = self.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def step(self) -> ScheduledStep:
        """Make the next step."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        parts = [metadata] if self._setup.peer is None else metadata.metadata
        work = next(part.step for part in parts if isinstance(part, StepMetadata))
        computed = {
            request_id: self.scheduler.requests[request_id].num_computed_tokens - count
            for request_id, count in output.num_scheduled_tokens.items()
        }
        blocks = {each: self.scheduler.kv_cache_manager.get_block_ids(each)[0] for each in computed}
        requests = (self.scheduler.requests[request_id] for request_id in computed)
        sampled = {each.request_id for each in requests if each.num_computed_tokens >= each.num_tokens}
        step = ScheduledStep(output, work, computed, blocks, frozenset(sampled))
        if self.connector._is_ahead:
            self.loading.update((job.request_id, job) for job in work.loads)
        self._open_steps.append(step)
        return step

    def end(
        self,
        step: ScheduledStep,
        lost: Collection[int] = (),
        *,
        bad_chunks: Mapping[int, int] | None = None,
        failed_loads: int = 0,
        arrived: Collection[str] | None = None,
    ) -> dict[str, str]:
        """Its forward pass is over: all that was to be read has been read, all but the `lost` blocks loaded. Loads that
        requests wait for are over for those that have `arrived` (None: all). Returns why requests ended.
        """
        work = step.work
        arrived = list(self.loading) if arrived is None else arrived
        over = [self.loading[each] for each in arrived] if self.connector._is_ahead else work.loads
        report = Report(
            read_jobs={job.job_id: 1 for job in work.stores},
            ended_loads={job.job_id: 1 for job in over},
            bad_chunks=dict(bad_chunks or {}),
            failed_loads=failed_loads,
        )
        outputs = self.deliver(step, lost, report, work.awaited, arrived)
        return {each.request_id: str(each.finish_reason) for each in outputs if each.finish_reason is not None}

    def deliver(
        self,
        step: ScheduledStep,
        lost: Collection[int],
        report: Report,
        freed: Collection[str],
        arrived: Collection[str] = (),
    ) -> list[EngineCoreOutput]:
        """Give the scheduler what the workers say of a step. `freed` are ended requests of which all has been read,
        `arrived` requests whose loads are over.
        """
        self._open_steps.remove(step)
        for request_id in arrived:
            del self.loading[request_id]
        ids = list(step.output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[OUTPUT_TOKEN] if request_id in step.sampled else [] for request_id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                invalid_block_ids=set(lost),
                kv_connector_worker_meta=None if report.is_empty else self._metadata(report),
                finished_sending=set(freed) or None,
                finished_recving=set(arrived) or None,
            ),
        )
        outputs = self.scheduler.update_from_output(step.output, output)
        return [each for of_client in outputs.values() for each in of_client.outputs]

    def run(self) -> ScheduledStep:
        """A step in which nothing goes wrong."""
        step = self.step()
        self.end(step)
        return step

    def settle(self) -> None:
        """End everything, and check that neither the connector's books nor the engine's blocks keep a trace of it."""
        for step in list(self._open_steps):
            self.end(step)
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        for _ in range(3):
            self.run()
        ledger, side, pool = (
            self.connector._ledger,
            self.connector._scheduler,
            self.scheduler.kv_cache_manager.block_pool,
        )
        books = {
            "requests": side._requests,
            "lookups": side._lookups._pending,
            "tracked": ledger._requests,
            "loads": ledger._loading,
            "stores": ledger._owners,
            "acknowledged": ledger._acks,
        }
        left = {name: list(book) for name, book in books.items() if book}
        assert not left, left
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert self._setup.peer is not None or not held, f"{held} blocks are held"

    def close(self) -> None:
        """End the lookups' threads."""
        self.store.may_answer.set()
        self.scheduler.shutdown()

    def _metadata(self, report: Report) -> Any:
        mine = WorkerReport(report)
        return mine if self._setup.peer is None else MultiKVConnectorWorkerMetadata(metadata=(None, mine))


@contextmanager
def scheduled(folder: Path, setup: Setup | None = None) -> Iterator[ScheduledEngine]:
    """An engine whose model's configuration is in the folder. Raises AssertionError where it leaves traces."""
    setup = setup or Setup()
    wait_s = ANSWER_S if setup.has_quick_store else lookups.FIRST_WAIT_S
    with mock.patch.object(lookups, "FIRST_WAIT_S", wait_s):
        engine = ScheduledEngine(folder, setup)
        try:
            yield engine
            engine.store.may_answer.set()
            engine.settle()
        finally:
            engine.close()


def _chunks(jobs: Iterator[StoreJob] | Sequence[LoadJob]) -> list[list[int]]:
    return [[job.chunk_range.first_chunk, job.chunk_range.end_chunk] for job in jobs]
