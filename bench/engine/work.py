"""What an engine's process is told and what it answers: values that travel as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from bench.engine.cases import BLOCK_TOKENS, Case, Prompts
from bench.engine.shapes import Shape
from bench.engine.ways import Way

OUTPUT_TOKENS = 4
"""Tokens that are compared; all but the first are decoded over the loaded KV."""
SPARE_BLOCKS = 16
OWN_BLOCKS_COPIES = 4
"""A round's base and the suffixes of all its prompts stay in the engine's own blocks."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """One engine: the model's folder, vLLM's options and `kv_transfer_config`."""

    way: Way
    model: str
    options: Mapping[str, object]
    transfer: Mapping[str, object] | None
    prompts: Prompts
    chunk_tokens: int

    def whole_chunks(self, tokens: int) -> int:
        """Chunks of our connector that so many tokens fill."""
        return tokens // self.chunk_tokens

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps({**asdict(self), "way": self.way.value})

    @staticmethod
    def from_json(text: str) -> EngineWork:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return EngineWork(**{**fields, "way": Way(fields["way"]), "prompts": Prompts(**fields["prompts"])})


class Verb(Enum):
    """`STORE`: compute the base up to `tokens` and see that it is stored. `MEASURE`: one request of a case."""

    STORE = "store"
    MEASURE = "measure"


@dataclass(frozen=True, slots=True)
class Command:
    """One line to an engine. `case` goes with MEASURE, `tokens` with STORE."""

    verb: Verb
    round_index: int
    tokens: int = 0
    case: Case | None = None

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "verb": self.verb.value})

    @staticmethod
    def from_line(line: str) -> Command:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        case = fields.pop("case")
        verb = Verb(fields.pop("verb"))
        return Command(verb, **fields, case=None if case is None else Case(**case))


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds are vLLM's own: arrival to first token, and of these in the queue, where lookups are, and in
    the engine's step. `cached_tokens` are those vLLM did not compute; `counters` what the connector counted meanwhile.
    `idle_cpu_share` is the part of a core the process used since its last answer, when it had nothing to do.
    """

    ttft_s: float = 0.0
    queued_s: float = 0.0
    step_s: float = 0.0
    cached_tokens: int = 0
    tokens: tuple[int, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    idle_cpu_share: float = 0.0
    problem: str | None = None

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Answer:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        return Answer(**{**fields, "tokens": tuple(fields["tokens"])})


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine's first line."""

    started_s: float
    vllm: str
    torch: str
    threads: int

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Ready:
        """The inverse of `to_line`."""
        return Ready(**json.loads(line))


def engine_options(shape: Shape, context_tokens_max: int, way: Way) -> dict[str, object]:
    """vLLM's options, the same for all ways but for its own prefix cache. A prompt is computed in one step, which the
    ExampleConnector needs.
    """
    model_tokens = context_tokens_max + 8 * OUTPUT_TOKENS
    return {
        "skip_tokenizer_init": True,
        "block_size": BLOCK_TOKENS,
        "dtype": shape.dtype.value,
        "max_model_len": model_tokens,
        "max_num_batched_tokens": model_tokens,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": kv_tokens(context_tokens_max, way) // BLOCK_TOKENS,
        "seed": 0,
        "enforce_eager": True,
        "disable_log_stats": False,
        "async_scheduling": False,
        "enable_prefix_caching": way is Way.OWN_BLOCKS,
    }


def kv_tokens(context_tokens_max: int, way: Way) -> int:
    """Room in an engine's own blocks."""
    copies = OWN_BLOCKS_COPIES if way is Way.OWN_BLOCKS else 1
    return copies * (context_tokens_max + SPARE_BLOCKS * BLOCK_TOKENS)
