"""The ways to a first token that are compared, and in which cases: the model's shape, lengths, hit rates, the tokens of
every prompt, how vLLM is told of each way, and what engines are told and answer. Pure.

A round has a base, tokens of its own that are stored up to the longest prefix of all. A prompt is a beginning of that
base and a suffix. Suffixes depend on the case alone: that the same suffix ends in other tokens in another round shows
that the KV of the prefix decides them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bench.beds.connector_extra import extra_config
from bench.core import options
from bench.core.options import ascending, each, number, real
from descriptors.descriptor import CHUNK_TOKENS_MAX, Delivery
from descriptors.units import MIB
from nixl_client.connectors.vllm.options import LoadPolicy
from nixl_client.transports.transport import Transport

WEIGHTS_SEED = 7
GROUP = "the model"
DTYPE_HELP = "in float32 tokens do not hang on the sequence of sums, and it is no slower on most CPUs"
BLOCK_TOKENS = 32
"""What vLLM's blocks hold; on CPUs the least it allows."""
OUTPUT_TOKENS = 4
"""Tokens that are compared; all but the first are decoded over the loaded KV."""


class Dtype(Enum):
    """The type of weights, activations and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with seeded random weights. `initializer_range` is so large that attention decides tokens.

    Few attention heads to the width of the layers: attention over a long prefix, which no cache of KV saves, then has
    the part of the computation that it has in models of eight billion parameters.
    """

    num_layers: int = options.count("--layers", 4, 2, most=256, group=GROUP)
    hidden: int = options.count("--hidden", 1024, 256, 64, 16384, group=GROUP)
    intermediate: int = options.count("--intermediate", 4096, 512, 64, 65536, group=GROUP)
    heads: int = options.count("--heads", 4, most=256, group=GROUP)
    kv_heads: int = options.count("--kv-heads", 4, most=256, group=GROUP)
    head_dim: int = options.count("--head-dim", 64, least=32, most=256, group=GROUP)
    vocabulary: int = 1024
    dtype: Dtype = options.choice("--dtype", Dtype, Dtype.FLOAT32, text=DTYPE_HELP, group=GROUP)
    initializer_range: float = 0.05
    seed: int = options.sized(WEIGHTS_SEED)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} of KV evenly")

    @property
    def token_layer_bytes(self) -> int:
        """One token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * (4 if self.dtype is Dtype.FLOAT32 else 2)

    @property
    def token_bytes(self) -> int:
        """One token's keys and values."""
        return self.num_layers * self.token_layer_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of `context_tokens`, of which the share `hit_rate` is stored. Raises ValueError for a prefix that is no
    whole number of blocks.
    """

    context_tokens: int
    hit_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.hit_rate < 1 or self.context_tokens * self.hit_rate % BLOCK_TOKENS:
            raise ValueError(f"{self.title}: the prefix must be whole blocks of {BLOCK_TOKENS} tokens")

    @property
    def prefix_tokens(self) -> int:
        """Tokens that are stored."""
        return int(self.context_tokens * self.hit_rate)

    @property
    def title(self) -> str:
        """For people."""
        return f"{context_words(self.context_tokens)}, {self.hit_rate:.4g}"


def context_words(tokens: int) -> str:
    """4K for 4096."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def by_case(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a result: those of each case, by way."""
    cases: dict[tuple[int, float], dict[str, Any]] = {}
    for row in measured:
        cases.setdefault((row["context_tokens"], row["hit_rate"]), {})[row["way"]] = row
    return list(cases.values())


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of one run of the bench, all from its seed."""

    seed: int
    vocabulary: int

    def base(self, round_index: int, count: int) -> list[int]:
        """The first tokens of a round's base."""
        return self._tokens(f"base {round_index}", count)

    def prompt(self, case: Case, round_index: int, suffix_index: int = 0) -> list[int]:
        """The prompt of a case in that round, with this one of the case's suffixes."""
        name = f"{case.title} {suffix_index}" if suffix_index else case.title
        suffix = self._tokens(name, case.context_tokens - case.prefix_tokens)
        return self.base(round_index, case.prefix_tokens) + suffix

    def storing(self, round_index: int, count: int) -> list[int]:
        """A prompt that computes the first `count` tokens of the base and two more, without which engines do not
        count the last block as done.
        """
        return self.base(round_index, count) + self._tokens("end", 2)

    def decoding(self, count: int) -> list[list[int]]:
        """Short prompts of requests that decode, the same in all rounds."""
        return [self._tokens(f"decoder {index}", BLOCK_TOKENS) for index in range(count)]

    def _tokens(self, what: str, count: int) -> list[int]:
        generator = random.Random(f"{self.seed} {what}")
        return [generator.randrange(self.vocabulary) for _ in range(count)]


LMCACHE_CHUNK_TOKENS = 256
"""Its default."""
WAIT_S = 120.0
STORE_QUEUE_CHUNKS = 1 << 16
CONNECTORS_MODULE = "bench.experiments.engine.connectors"
TIER_MODULE = "nixl_client.connectors.vllm_tier"
SPARE_BLOCKS = 16
OWN_BLOCKS_COPIES = 4
"""A round's base and the suffixes of all its prompts stay in the engine's own blocks."""


class Way(Enum):
    """Names in the results."""

    RECOMPUTE = "recompute"
    OWN_BLOCKS = "own_blocks"
    LAYERWISE = "objectcache_layerwise"
    CHUNKWISE = "objectcache_chunkwise"
    ADVISED = "objectcache_advised"
    STATED = "objectcache_stated"
    AHEAD = "objectcache_ahead"
    EXAMPLE = "example_connector"
    EXAMPLE_TOLD = "example_connector_told"
    LMCACHE_CPU = "lmcache_cpu"
    LMCACHE_S3 = "lmcache_s3"
    TIER = "objectcache_tier"
    TIER_HTTP = "objectcache_tier_http"
    FS_TIER = "vllm_fs_tier"
    OBJ_TIER = "vllm_obj_tier"

    @property
    def title(self) -> str:
        """For people."""
        return self.value.replace("_", " ")

    @property
    def bucket(self) -> str:
        """The bucket that this way has to itself; STATED alone shares one, because it loads what LAYERWISE stores."""
        storing = Way.LAYERWISE if self is Way.STATED else self
        return storing.title.replace(" ", "-")


OURS = (Way.LAYERWISE, Way.CHUNKWISE)
"""Our connector as the peers are compared with it: loading all that is stored."""
CONNECTED = (*OURS, Way.ADVISED, Way.STATED, Way.AHEAD)
"""Those with our connector."""
LOADING_ALL = (*OURS, Way.STATED, Way.AHEAD)
"""Those of them that load all that is stored."""
EXAMPLES = (Way.EXAMPLE, Way.EXAMPLE_TOLD)
LMCACHES = (Way.LMCACHE_CPU, Way.LMCACHE_S3)
TIERS = (Way.TIER, Way.TIER_HTTP, Way.FS_TIER, Way.OBJ_TIER)
"""vLLM's OffloadingConnector over ours and over its own tiers; its host memory is emptied before every request."""
BESIDE = (Way.RECOMPUTE, Way.OWN_BLOCKS, Way.TIER, Way.FS_TIER, Way.LAYERWISE, Way.AHEAD)
"""Those whose loads others decode beside. Their steps overlap, as on GPUs, but for LAYERWISE, which then would not load
layer by layer.
"""
DECODERS = 7
SETTLING_STEPS, ALONE_STEPS = 4, 24
"""Steps that are not counted, and those without a load."""
DECODED_MAX = 512
"""Tokens of one decoder in a session, at most."""
COMPUTING = (Way.RECOMPUTE, Way.EXAMPLE)
"""Those that compute a prompt of which a beginning is stored."""
CONNECTORS: Mapping[Way, tuple[str, str | None]] = {
    Way.LAYERWISE: ("ObjectCacheConnector", "nixl_client.connectors.vllm"),
    Way.STATED: ("StatingConnector", CONNECTORS_MODULE),
    Way.EXAMPLE: ("ExampleConnector", None),
    Way.EXAMPLE_TOLD: ("PrefixExampleConnector", CONNECTORS_MODULE),
    **dict.fromkeys(LMCACHES, ("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector")),
    **dict.fromkeys(TIERS, ("OffloadingConnector", None)),
}
"""vLLM's name and the module, where it is not vLLM's own; others of ours have that of LAYERWISE."""
NOTES: Mapping[Way, str] = {
    Way.RECOMPUTE: "vLLM alone, prefix caching off",
    Way.OWN_BLOCKS: "the prefix is in the engine's own blocks: what is left when loading costs nothing",
    Way.LAYERWISE: "our connector, delivery layer-major",
    Way.CHUNKWISE: "our connector, delivery chunk-major",
    Way.ADVISED: "our connector as it comes: it loads what is sooner loaded than computed, layer-major",
    Way.STATED: "our connector, layer-major; it stores nothing, and the bench decides what compute time it states",
    Way.AHEAD: "our connector where steps overlap: a prefix is loaded while others decode, and its request runs then",
    Way.EXAMPLE: "vLLM's ExampleConnector as it comes: it finds whole prompts only, so that it recomputes these, and "
    "stores them before the first token",
    Way.EXAMPLE_TOLD: "the same, told the lengths of the prefixes that are stored; files in the page cache, mapped",
    Way.LMCACHE_CPU: "LMCache's own server, which engines on CPUs need, chunks of 256 tokens in its memory, which the "
    "engine maps",
    Way.LMCACHE_S3: "the same, chunks in our gateway as its S3 server, its own memory emptied before every request",
    Way.TIER: "vLLM's OffloadingConnector over our tier, which the server fills over shared memory",
    Way.TIER_HTTP: "the same over http",
    Way.FS_TIER: "vLLM's OffloadingConnector over its own tier of files, which lie in the page cache",
    Way.OBJ_TIER: "vLLM's OffloadingConnector over its own tier of S3 objects, by NIXL, in our gateway",
}


WAYS = tuple(way for way in Way if way not in (Way.ADVISED, Way.STATED, Way.AHEAD, *TIERS))
KNOWN = (*WAYS, Way.ADVISED, *TIERS)
TIER_HELP = "instead: vLLM's OffloadingConnector over our tier and over its own, its host memory emptied between"
ADVISED_HELP = "instead: loading what is advised, all and nothing, over links paced to 4, 1 and 0.25 of the break-even"
STATED_HELP = "instead: two and four engines on one paced link, by what they state of their compute times, one a liar"
BESIDE_HELP = "instead: the times between tokens of seven requests that decode, beside one whose prefix is loaded"
CONTEXTS, CONTEXT_TOKENS_MAX = (2048, 4096, 8192, 16384), 1 << 16
LENGTHS_HELP, HITS_HELP = "tokens of prompts, 2K for 2048", "stored share in percent; default: 50,87.5"
GRAIN_HELP = "tokens of our chunks; the default is a block of the engine"


def _length(text: str) -> int:
    one = number(2 * BLOCK_TOKENS, CONTEXT_TOKENS_MAX)
    return one(f"{text[:-1]}KiB" if text[-1:] in ("K", "k") else text)


def _share(text: str) -> float:
    return real(0.001, 99.999)(text) / 100


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`chunk_tokens` is G of our connector; `folder` is for stores and the model."""

    shape: Shape = options.nested(Shape)
    ways: tuple[Way, ...] = options.choice("--ways", KNOWN, WAYS, (Way.RECOMPUTE, Way.LAYERWISE))
    advised: bool = options.flag("--advised", ADVISED_HELP)
    stated: bool = options.flag("--stated", STATED_HELP)
    tier: bool = options.flag("--tier", TIER_HELP)
    beside: bool = options.flag("--beside", BESIDE_HELP)
    contexts: tuple[int, ...] = options.setting("--contexts", CONTEXTS, (1024,), ascending(each(_length)), LENGTHS_HELP)
    hit_rates: tuple[float, ...] = options.setting("--hits", (0.5, 0.875), (0.875,), ascending(each(_share)), HITS_HELP)
    runs: int = options.runs(5)
    chunk_tokens: int = options.count("-G --chunk-tokens", BLOCK_TOKENS, most=CHUNK_TOKENS_MAX, text=GRAIN_HELP)
    transport: Transport = options.choice("--transport", Transport, Transport.AUTO)
    seed: int = options.seed()
    serve_options: tuple[str, ...] = options.serve_options()
    folder: Path | None = options.folder("for stores and model")

    @property
    def cases(self) -> tuple[Case, ...]:
        """All combinations. Raises ValueError for a prefix that is no whole number of blocks."""
        return tuple(Case(context, rate) for context in self.contexts for rate in self.hit_rates)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """The lengths of prefixes, ascending."""
        return tuple(sorted({case.prefix_tokens for case in self.cases}))

    @property
    def payload_bytes(self) -> int:
        """KV of the longest prefix."""
        return self.shape.token_bytes * self.prefixes[-1]

    def grain_tokens(self, way: Way) -> int:
        """A hit is a multiple of so many tokens."""
        if way in LMCACHES:
            return LMCACHE_CHUNK_TOKENS
        if way in TIERS:
            return BLOCK_TOKENS
        return self.chunk_tokens if way in CONNECTED else 1

    def kv_tokens(self, way: Way) -> int:
        """Room in an engine's own blocks."""
        copies = OWN_BLOCKS_COPIES if way is Way.OWN_BLOCKS else 1
        decoded = DECODERS * (BLOCK_TOKENS + DECODED_MAX) if self.beside else 0
        return decoded + copies * (max(self.contexts) + SPARE_BLOCKS * BLOCK_TOKENS)

    def overlaps(self, way: Way) -> bool:
        """Whether the steps of this way's engine overlap."""
        return self.beside and way is not Way.LAYERWISE


def engine_options(settings: EngineSettings, way: Way) -> dict[str, object]:
    """vLLM's options, the same for all ways but for its own prefix cache. A prompt is computed in one step, which the
    ExampleConnector needs.
    """
    model_tokens = max(settings.contexts) + 8 * OUTPUT_TOKENS
    return {
        "skip_tokenizer_init": True,
        "block_size": BLOCK_TOKENS,
        "dtype": settings.shape.dtype.value,
        "max_model_len": model_tokens,
        "max_num_batched_tokens": model_tokens,
        "max_num_seqs": DECODERS + 1 if settings.beside else 4,
        "num_gpu_blocks_override": settings.kv_tokens(way) // BLOCK_TOKENS,
        "seed": 0,
        "enforce_eager": True,
        "disable_log_stats": False,
        "async_scheduling": settings.overlaps(way),
        "enable_prefix_caching": way is Way.OWN_BLOCKS,
    }


def transfer_config(
    way: Way, settings: EngineSettings, endpoint: str, folder: Path, lmcache_port: int = 0
) -> dict[str, object] | None:
    """vLLM's `kv_transfer_config`; None for no connector. `endpoint` is our server; the folder is of this way alone.
    Times and room are so large that everything is stored before the next request; the rest is the default.
    """
    if way in (Way.RECOMPUTE, Way.OWN_BLOCKS):
        return None
    name, module = CONNECTORS.get(way, CONNECTORS[Way.LAYERWISE])
    options: dict[str, object]
    if way in EXAMPLES:
        told = {"prefix_tokens": list(settings.prefixes)} if way is Way.EXAMPLE_TOLD else {}
        options = {"shared_storage_path": str(folder), **told}
    elif way in TIERS:
        options = tier_options(way, settings, endpoint, folder)
    elif way in LMCACHES:
        options = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": lmcache_port}
    else:
        ours = {
            "endpoint": endpoint,
            "bucket": way.bucket,
            "transport": settings.transport.value,
            "delivery": (Delivery.CHUNK_MAJOR if way is Way.CHUNKWISE else Delivery.LAYER_MAJOR).value,
            "load": (LoadPolicy.ADVISED if way is Way.ADVISED else LoadPolicy.ALL).value,
            "chunk_tokens": settings.chunk_tokens,
            "staging_bytes": max(256 * MIB, settings.payload_bytes),
            **dict.fromkeys(("load_timeout_s", "store_wait_s", "store_timeout_s"), WAIT_S),
            "store_queue_chunks": STORE_QUEUE_CHUNKS,
            "store": way is not Way.STATED,
        }
        options = extra_config(ours)
    return {
        "kv_connector": name,
        **({} if module is None else {"kv_connector_module_path": module}),
        "kv_role": "kv_both",
        **({"kv_load_failure_policy": "recompute"} if way in CONNECTED else {}),
        "kv_connector_extra_config": options,
    }


def tier_options(way: Way, settings: EngineSettings, endpoint: str, folder: Path) -> dict[str, object]:
    """What OffloadingConnector is told: room for a round's base and suffixes, and the tier. vLLM's own spec has no
    worker for CPUs, so that ours makes the copies for all.
    """
    memory = {"cpu_bytes_to_use": 2 * settings.payload_bytes + 256 * MIB}
    if way in (Way.TIER, Way.TIER_HTTP):
        waits: dict[str, object] = {"store_wait_s": WAIT_S, "store_queue_chunks": STORE_QUEUE_CHUNKS}
        transport = Transport.HTTP if way is Way.TIER_HTTP else settings.transport
        ours = {"endpoint": endpoint, "bucket": way.bucket, "transport": transport.value, "internals": waits}
        return {"spec_name": "ObjectCacheTieringSpec", "spec_module_path": TIER_MODULE, **memory, **ours}
    tier: dict[str, object] = {"type": "fs", "root_dir": str(folder)}
    if way is Way.OBJ_TIER:
        store = {"bucket": way.bucket, "endpoint_override": endpoint.removeprefix("http://"), "region": "us-east-1"}
        tier = {"type": "obj", "store_config": store}
    return {"spec_name": "HostTieringSpec", "spec_module_path": CONNECTORS_MODULE, **memory, "secondary_tiers": [tier]}


@dataclass(frozen=True, slots=True)
class EngineWork:
    """One engine: what vLLM is made with; `chunk_tokens` is G of our connector, `block_bytes` a block. With `overlaps`
    a step begins before it is known how the last one ended.
    """

    way: Way
    llm: Mapping[str, object]
    prompts: Prompts
    chunk_tokens: int
    block_bytes: int
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One line to an engine: answer the prompt of `case`; or without a case compute the round's base up to `tokens` and
    see that it is stored. `stated` is for Way.STATED alone: how much of its compute time a layer it states, 0 for none.
    `suffix` is the number of the prompt's suffix, and `decoders` that of the requests that decode when it comes.
    """

    round_index: int
    tokens: int = 0
    case: Case | None = None
    stated: float = 1.0
    suffix: int = 0
    decoders: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds are vLLM's own: arrival to first token, and of these in the queue, where lookups are, and in
    the engine's step. `cached_tokens` are those vLLM did not compute; `counters` what the connector counted meanwhile.
    `idle_cpu_share` is the part of a core that the process used since its last answer. What STATED's engine measured
    for the step that loaded is `layer_compute_us`; `costs` are the fields of PrefillCosts, none as long as unknown.
    Where others decode, `alone_s` and `beside_s` are the seconds between their tokens before the request comes, and
    from then until its first token; `decoded` has the tokens of each.
    """

    ttft_s: float = 0.0
    queued_s: float = 0.0
    step_s: float = 0.0
    cached_tokens: int = 0
    tokens: tuple[int, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    idle_cpu_share: float = 0.0
    layer_compute_us: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)
    alone_s: tuple[float, ...] = ()
    beside_s: tuple[float, ...] = ()
    decoded: tuple[tuple[int, ...], ...] = ()
    problem: str | None = None
