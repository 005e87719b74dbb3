"""The contents of an engine's own `/metrics`: its queue, its KV blocks, and the names that its connector or its tier
publishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from prometheus_client.parser import text_string_to_metric_families

from descriptors.descriptor import Accept
from descriptors.errors import CallerError
from descriptors.layout import ChunkLayout
from descriptors.recompute import NO_COSTS, DeliveryCosts, PrefillCosts
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm_tier.rules.published import TIER_INFO, TierNames, parse_names
from objectcache.orchestrator.rules.openai_requests import OUTPUT_TOKENS_DEFAULT

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
ANSWERS = ("vllm:request_generation_tokens_count", "sglang:num_requests_total")
"""Answers that have ended."""
CACHE_CONFIG = "vllm:cache_config_info"
DEPLOYMENT = "vllm:objectcache_deployment_info"
COSTS = "vllm:objectcache_cost_"
CONNECTOR = "vllm:objectcache_lookups_total"
"""An engine has this metric from its start if it has our connector, and the deployment after its first step."""
METRICS_BYTES_MAX = 8 << 20
SEARCHED_BYTES = 1 << 16
LINE_BYTES_MAX = 2048
LABELS_MAX = 64
"""The parser takes time that grows with the square of a line's labels. vLLM's longest line has some thirty."""
LINES_MAX = 500
"""The metrics that matter have no more lines: a few for each data-parallel rank."""
LINES_BYTES_MAX = 256 << 10
"""And no more bytes in all: the parser takes half a millisecond for each KiB of quotes, and engines take turns."""
RANKS_MAX = 1024
REQUESTS_MAX, TOKENS_MAX = 1e6, 1e15
"""One line counts no more; no engine has more."""
COST_MAX = 1e9
TEXT_MAX = 1024
STARTED = "process_start_time_seconds"
RATE = "load_bytes_per_s"
COUNTS = {
    **dict.fromkeys((*RUNNING, *WAITING), REQUESTS_MAX),
    **dict.fromkeys((*GENERATED, *ANSWERS), TOKENS_MAX),
}
"""The most that each counts."""
ANSWERS_MIN = 16
"""Fewer answers say nothing of the mean."""
_WANTED = (STARTED, *RUNNING, *WAITING, *GENERATED, *ANSWERS, CACHE_CONFIG, DEPLOYMENT, TIER_INFO, COSTS, CONNECTOR)
_LINES = re.compile(rf"^(?:{'|'.join(map(re.escape, _WANTED))})[^\n]*".encode(), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Published:
    """The chunks of an engine as its connector or its tier publishes them: where they are, their names, their shape,
    the costs it fitted, and which encoded ones it takes.
    """

    names: Deployment | TierNames
    layout: ChunkLayout
    endpoint: str
    bucket: str
    prefill: PrefillCosts | None = None
    loads: DeliveryCosts = NO_COSTS
    accept: Accept | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The engine's own numbers. `kv_tokens` is the room of its KV blocks; None where it does not say."""

    running: int
    waiting: int
    kv_tokens: int | None = None
    block_tokens: int | None = None
    published: Published | None = None
    has_connector: bool = False
    started_at: float | None = None
    """When its process was started, in Unix seconds; None where it does not say."""
    generated_tokens: float = 0.0
    """Tokens that it has put out since its start."""
    answer_count: float = 0.0
    """Answers that have ended since its start."""

    def output_tokens(self, allowed_tokens: int) -> int:
        """The tokens that an answer is taken to have: as many as this engine's answers have had, and no more than its
        request allows. A client may allow any number.
        """
        is_known = self.answer_count >= ANSWERS_MIN
        mean_tokens = self.generated_tokens / self.answer_count if is_known else OUTPUT_TOKENS_DEFAULT
        return min(allowed_tokens, round(mean_tokens))


def read_metrics(said: bytes) -> EngineReport:
    """Read the few metrics that matter. Raises ValueError for a text that is none of Prometheus', or too large."""
    lines = list(islice(_lines_of(said), LINES_MAX + 1))
    if len(lines) > LINES_MAX or max(map(len, lines), default=0) > LINE_BYTES_MAX:
        raise ValueError(f"over {LINES_MAX} lines that matter, or one of over {LINE_BYTES_MAX} bytes")
    if sum(map(len, lines)) > LINES_BYTES_MAX:
        raise ValueError(f"the lines that matter have over {LINES_BYTES_MAX} bytes")
    if max((line.count(b"=") for line in lines), default=0) > LABELS_MAX:
        raise ValueError(f"a line that matters has over {LABELS_MAX} labels")
    wanted = (b"\n".join(lines) + b"\n").decode(errors="replace")
    running = waiting = generated_tokens = answer_count = 0.0
    kv_tokens = block_tokens = None
    info: Mapping[str, str] | None = None
    tier: Mapping[str, str] | None = None
    costs: dict[str, float] = {}
    has_connector = False
    started_at: float | None = None
    for name, labels, value in _samples(wanted):
        if name in COUNTS and not 0 <= value <= COUNTS[name]:
            raise ValueError(f"{name} is {value}")
        if name in RUNNING:
            running += value
        elif name in WAITING:
            waiting += value
        elif name in GENERATED:
            generated_tokens += value
        elif name in ANSWERS:
            answer_count += value
        elif name == STARTED:
            started_at = value
        elif name == CACHE_CONFIG:
            blocks, block_tokens = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
            if blocks and block_tokens:
                kv_tokens = (kv_tokens or 0) + blocks * block_tokens
        elif name == CONNECTOR:
            has_connector = True
        elif name == DEPLOYMENT:
            info = labels
        elif name == TIER_INFO and value:  # 0: it had them before a reset
            tier = labels
        elif name.startswith(COSTS):
            costs[name.removeprefix(COSTS)] = value
    published = None
    if info is not None:
        published = _published(info, costs)
    elif tier is not None:
        published = _published_by_tier(tier, costs)
    return EngineReport(
        running=round(running),
        waiting=round(waiting),
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
        published=published,
        has_connector=has_connector,
        started_at=started_at,
        generated_tokens=generated_tokens,
        answer_count=answer_count,
    )


def _lines_of(said: bytes) -> Iterator[bytes]:
    """The lines that matter. The search goes piece by piece, since it holds the interpreter while it looks. A line
    that is larger than a piece is none of an engine's, and is passed over.
    """
    start = 0
    while start < len(said):
        end = said.rfind(b"\n", start, start + SEARCHED_BYTES) + 1
        if end:
            yield from _LINES.findall(said[start:end])
        elif start + SEARCHED_BYTES >= len(said):
            yield from _LINES.findall(said[start:])
            return
        else:
            end = said.find(b"\n", start) + 1 or len(said)
        start = end


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _published(info: Mapping[str, str], costs: Mapping[str, float]) -> Published | None:
    """None for what no connector would publish: sizes and costs of an engine decide about the requests of all."""
    try:
        deployment = Deployment(
            model=info["deployment"],
            dtype=info["dtype"],
            block_tokens=int(info["block_tokens"]),
            tp_size=int(info["tp_size"]),
            pp_size=int(info["pp_size"]),
            name=info.get("name", ""),
        )
        layout = ChunkLayout(int(info["num_layers"]), int(info["chunk_tokens"]), int(info["layer_chunk_bytes"]))
        endpoint, bucket = info["endpoint"], info["bucket"]
        accept = _accepted(info)
    except (KeyError, ValueError, CallerError):
        return None
    if max(map(len, (deployment.model, deployment.dtype, deployment.name, endpoint, bucket))) > TEXT_MAX:
        return None
    sizes = (layout.num_layers, layout.chunk_tokens, layout.per_layer_chunk_bytes, deployment.block_tokens)
    if min(*sizes, deployment.tp_size, deployment.pp_size) < 1 or max(sizes) > 1 << 40:
        return None
    if deployment.rank_count > RANKS_MAX or not _are_possible(costs):
        return None
    prefill, loads = _fitted(costs)
    return Published(
        names=deployment,
        layout=layout,
        endpoint=endpoint,
        bucket=bucket,
        prefill=prefill,
        loads=loads,
        accept=accept,
    )


def _are_possible(costs: Mapping[str, float]) -> bool:
    limits = {RATE: TOKENS_MAX}
    return all(0 <= cost <= limits.get(name, COST_MAX) for name, cost in costs.items())


def _fitted(costs: Mapping[str, float]) -> tuple[PrefillCosts | None, DeliveryCosts]:
    """The costs of steps, None until enough of them have been timed, and of loads."""
    prefill = None
    if costs.get("token_us", 0.0) > 0:
        prefill = PrefillCosts(costs["token_us"], costs.get("token_pair_us", 0.0), costs.get("request_us", 0.0))
    loads = DeliveryCosts(
        costs.get("load_request_s", 0.0),
        costs.get("load_chunk_s", 0.0),
        costs.get("load_layer_s", 0.0),
        costs.get(RATE, 0.0),
    )
    return prefill, loads


def _published_by_tier(labels: Mapping[str, str], costs: Mapping[str, float]) -> Published | None:
    """None for what no tier would publish. Its loads are over before their requests run: chunks have one layer. A
    connector that shares the tier's objects tells costs, too.
    """
    try:
        names = parse_names(labels)
        layout = ChunkLayout(1, int(labels["chunk_tokens"]), int(labels["chunk_bytes"]))
        endpoint, bucket = labels["endpoint"], labels["bucket"]
    except (KeyError, ValueError, CallerError):
        return None
    sizes = (layout.chunk_tokens, layout.per_layer_chunk_bytes, names.hash_tokens)
    if min(sizes) < 1 or max(sizes) > 1 << 40 or max(len(endpoint), len(bucket)) > TEXT_MAX:
        return None
    if not _are_possible(costs):
        return None
    prefill, loads = _fitted(costs)
    return Published(names=names, layout=layout, endpoint=endpoint, bucket=bucket, prefill=prefill, loads=loads)


def _accepted(info: Mapping[str, str]) -> Accept | None:
    """None for an engine that takes exact chunks only, or is of a release that did not say. Raises ValueError,
    CallerError for what nobody can accept.
    """
    codecs = info.get("accept")
    if not codecs:
        return None
    bounds = (float(bound) if (bound := info.get(name)) else None for name in ("max_error", "max_loss"))
    return Accept(tuple(codecs.split(",")), info.get("element", ""), *bounds)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else None
