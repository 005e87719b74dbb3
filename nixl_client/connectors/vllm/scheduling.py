"""The scheduler's side: looks prefixes up, offers what to load, and says what to write."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from descriptors.descriptor import LAYER_COMPUTE_US_MAX, PER_LAYER_CHUNK_BYTES_MAX, Accept
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, DeliveryCosts, PrefillCosts, advise, loadable_chunks
from nixl_client.client import Client
from nixl_client.connectors.compute_fit import Work, step_s
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.ledger import SchedulerLedger, Tracked
from nixl_client.connectors.vllm.limits import transfer_limits
from nixl_client.connectors.vllm.lookups import Lookups
from nixl_client.connectors.vllm.naming import Deployment, Feature, Prefix
from nixl_client.connectors.vllm.options import LoadPolicy, VllmOptions
from nixl_client.connectors.vllm.published import (
    COSTS_KEY,
    DEPLOYMENT_KEY,
    TIER_KEY,
    published_costs,
    published_deployment,
    told_chunks,
)
from nixl_client.connectors.vllm.steps import Report, Step
from nixl_client.connectors.vllm.weights import Adapters
from nixl_client.connectors.vllm_tier.rules.adapters import AdapterHashes

_log = logging.getLogger(__name__)


class Lora(Protocol):
    """The part of vLLM's LoRARequest that decides what KV bytes mean."""

    lora_int_id: int
    lora_name: str
    lora_path: str


class PlaceholderRange(Protocol):
    """The part of vLLM's class of that name used here."""

    offset: int
    length: int


class MultiModalFeature(Protocol):
    """The part of vLLM's MultiModalFeatureSpec that decides what KV bytes mean."""

    identifier: str
    mm_position: PlaceholderRange


class EngineRequest(Protocol):
    """The part of vLLM's Request used here."""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    lora_request: Lora | None
    cache_salt: str | None
    mm_features: Sequence[MultiModalFeature]
    prompt_embeds: object | None
    prompt_token_ids: Sequence[int] | None
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, object] | None


class SchedulerSide:
    """All of one scheduler's requests."""

    def __init__(
        self,
        client: Client,
        options: VllmOptions,
        grid: Grid,
        ledger: SchedulerLedger,
        counters: Counters,
        layout: ChunkLayout,
        accept: Accept | None = None,
        *,
        lora_settings: str = "",
        is_ahead: bool = False,
        shares_blocks: bool = False,
    ) -> None:
        """`lora_settings` say how the engine applies adapters, and `is_ahead` that requests wait for their loads. With
        `shares_blocks` one may find what another loads.
        """
        self._is_ahead = is_ahead
        self._shares_blocks = shares_blocks
        self._lookups = Lookups(client, options, counters, accept, ledger.deployment.copies)
        self._accept = accept
        self._options = options
        self._grid = grid
        self._ledger = ledger
        self._counters = counters
        self._requests: dict[str, EngineRequest] = {}
        self._adapters = Adapters(lora_settings)
        self._layout = self._advised_layout = layout
        if is_ahead and layout.chunk_bytes <= PER_LAYER_CHUNK_BYTES_MAX:  # computing hides nothing of a load
            self._advised_layout = ChunkLayout(1, layout.chunk_tokens, layout.chunk_bytes)
        self._costs: PrefillCosts | None = None
        self._load_costs = DeliveryCosts()

    @property
    def costs(self) -> PrefillCosts | None:
        """The costs of the engine's steps, fitted from steps it ran; None until enough steps have been timed."""
        return self._costs

    def published(self) -> dict[str, Any]:
        """The document that the engine publishes."""
        options, names = self._options, self._ledger.deployment
        costs = {COSTS_KEY: published_costs(self._costs, self._load_costs)}
        if not isinstance(names, Deployment):
            return {TIER_KEY: names.published(), **costs}
        found = published_deployment(names, self._advised_layout, options.endpoint, options.bucket, self._accept)
        return {DEPLOYMENT_KEY: found, **costs}

    def match(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """Tokens that can be loaded after the `computed_tokens` in the engine's own blocks. None while that is not
        known, and while some of those blocks are being loaded for another request: should that fail, vLLM has only one
        of the two compute them again. Ahead of requests those blocks are the ones that the request needs next: once
        they are there it finds them.
        """
        found_blocks = computed_tokens // self._grid.block_tokens
        if self._is_ahead:
            awaited = request.block_hashes[found_blocks : found_blocks + 1] if self._shares_blocks else ()
        else:
            awaited = request.block_hashes[:found_blocks]
        if self._ledger.is_loading(awaited):
            return None
        adapter = self._adapter(request.lora_request)
        if adapter is None or not _has_names(request):
            return 0
        features = [
            Feature(each.identifier, each.mm_position.offset, each.mm_position.length) for each in request.mm_features
        ]
        prefix = Prefix(adapter, request.cache_salt or "", features, _block_hashes(request, adapter))
        tracked = self._ledger.track(request.request_id, prefix)
        if tracked.feature_count != len(features):
            return 0  # a later turn has brought an image
        self._requests[request.request_id] = request
        if self._is_ahead and tracked.loaded_after == request.num_preemptions:
            return 0  # it was loaded, and nothing came: not again
        if not self._is_looked_up(tracked, request):
            return None
        worth_chunks = told_chunks(request.kv_transfer_params, computed_tokens)
        if worth_chunks is None:
            worth_chunks = self._worth_chunks(tracked, request.num_tokens, computed_tokens)
        load_tokens = transfer_limits(request.kv_transfer_params).load_tokens
        if load_tokens is not None:
            most_chunks = (computed_tokens + load_tokens) // self._grid.chunk_tokens
            worth_chunks = most_chunks if worth_chunks is None else min(most_chunks, worth_chunks)
        count = self._ledger.loadable(tracked, request.num_tokens, computed_tokens, worth_chunks)
        return count if count >= self._options.min_load_tokens else 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], token_count: int) -> None:
        """The engine has blocks for the request, and loads so many tokens. It counts those of a load that is over."""
        self._ledger.allocated(request.request_id, block_ids, request.num_computed_tokens)
        if request.request_id not in self._requests:
            return
        self._counters.add(store_hit_tokens=token_count)
        first = self._ledger.found_tokens(request.request_id) // self._grid.block_tokens
        hashes = request.block_hashes[first : first + token_count // self._grid.block_tokens]
        self._ledger.load(
            request.request_id,
            request.all_token_ids,
            token_count=token_count,
            block_ids=block_ids,
            hashes=hashes,
            preemptions=request.num_preemptions,
        )

    def scheduled(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request runs in the coming step; what earlier steps computed can be written."""
        self._ledger.scheduled(block_ids)
        request = self._requests.get(request_id)
        if request is not None:
            if self._ledger.admit(request_id, request.num_computed_tokens):
                found_tokens = self._ledger.found_tokens(request_id)
                self._counters.add(prompt_tokens=request.num_tokens, hbm_hit_tokens=found_tokens)
            self._write(request, block_ids)

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> bool:
        """The request has ended; whether its blocks must be kept for now."""
        if self._requests.pop(request.request_id, None) is None:
            return False
        self._lookups.forget(request.request_id)
        self._write(request, block_ids)
        return self._ledger.finish(request.request_id)

    def report(self, report: Report) -> None:
        """Take over the workers' report."""
        self._ledger.report(report, time.monotonic())
        if report.costs is not None and self._costs is None:
            _log.info("steps cost %s, loads %s: what is sooner computed is not loaded", report.costs, report.load_costs)
        self._costs = report.costs or self._costs
        self._load_costs = report.load_costs or self._load_costs
        if report.failed_loads:
            self._lookups.silence()
        elif report.ended_loads:
            self._lookups.end_silence()

    def given_out(self, block_ids: Iterable[int]) -> None:
        """The bytes of these blocks may change in the coming step."""
        self._ledger.given_out(block_ids)

    def stale_blocks(self, lost_blocks: set[int]) -> set[int]:
        """Blocks that were not loaded, and those that were computed on top of them."""
        return self._ledger.stale_blocks(lost_blocks)

    def take_step(self, work: Work) -> Step:
        """The instructions for workers in the coming step, in which the engine computes `work`."""
        layer_s = 0.0 if self._costs is None else step_s(self._costs, work) / self._layout.num_layers
        step = self._ledger.take_step(work, min(round(layer_s * 1e6), LAYER_COMPUTE_US_MAX))
        return replace(step, costs=self._costs) if self._options.load is LoadPolicy.ADVISED else step

    def close(self) -> None:
        """Ask nothing more."""
        self._lookups.close()

    def reset(self) -> None:
        """The weights may be others from now on: have nothing stored, and store under names nobody had before. Running
        requests go on without the store.
        """
        for request_id in self._requests:
            self._lookups.forget(request_id)
        self._requests.clear()
        self._ledger.reset(uuid.uuid4().hex)

    def _adapter(self, lora: Lora | None) -> str | None:
        """Tells adapters apart by their contents; None: cannot be told."""
        return "" if lora is None else self._adapters.contents(lora.lora_int_id, lora.lora_name, lora.lora_path)

    def _write(self, request: EngineRequest, block_ids: Sequence[int]) -> None:
        if not _has_names(request) or self._ledger.feature_count(request.request_id) != len(request.mm_features):
            return
        sure_tokens = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        held_tokens = min(sure_tokens, len(block_ids) * self._grid.block_tokens)
        store_tokens = transfer_limits(request.kv_transfer_params).store_tokens
        if store_tokens is not None:
            held_tokens = min(held_tokens, store_tokens)
        self._ledger.computed(
            request.request_id,
            request.all_token_ids,
            held_tokens,
            block_ids,
            is_sure=lambda: self._adapter(request.lora_request) is not None,
        )

    def _is_looked_up(self, tracked: Tracked, request: EngineRequest) -> bool:
        now_s = time.monotonic()
        if self._lookups.is_silent:
            self._lookups.forget(request.request_id)
            self._ledger.unmatched(tracked)
            return True
        if tracked.matched_chunks is not None and now_s - tracked.looked_up_s <= self._options.lease_s / 2:
            return True
        tokens = request.all_token_ids
        compute = self._compute(request.num_tokens, 0)
        found = self._lookups.ask(request.request_id, lambda: self._ledger.lookup_keys(tracked, tokens), compute)
        if found is not None and not self._lookups.is_silent:
            self._ledger.matched(tracked, found.chunk_count, now_s, found.rate_bytes_per_s)
        return found is not None

    def _compute(self, context_tokens: int, held_tokens: int) -> AdviceRequest | None:
        """The facts that the server needs to advise; None where it is not asked, or nothing is known yet."""
        if self._costs is None or self._options.load is not LoadPolicy.ADVISED:
            return None
        loads = self._load_costs
        return AdviceRequest(
            context_tokens=context_tokens,
            layout=self._advised_layout,
            prefill=self._costs,
            bytes_per_s=0.0,
            layer_major=loads,
            chunk_major=loads,
            held_tokens=held_tokens,
        )

    def _worth_chunks(self, tracked: Tracked, context_tokens: int, computed_tokens: int) -> int | None:
        """Chunks of the prefix that are sooner loaded than computed, at the rate the server offered and by what loads
        that it did not pace have taken; None: all.
        """
        compute = self._compute(context_tokens, computed_tokens)
        if compute is None or not tracked.matched_chunks:
            return None
        advice = advise(tracked.matched_chunks, compute, tracked.rate_bytes_per_s)
        stored_chunks = computed_tokens // self._grid.chunk_tokens + loadable_chunks(tracked.matched_chunks, compute)
        if advice.chunk_count < stored_chunks:
            self._counters.add(advised_against_tokens=(stored_chunks - advice.chunk_count) * self._grid.chunk_tokens)
        return advice.chunk_count


def _has_names(request: EngineRequest) -> bool:
    """Whether the tokens decide the KV, and the identifiers of images: no embeddings in place of tokens."""
    return bool(request.prompt_token_ids) and request.prompt_embeds is None


def _block_hashes(request: EngineRequest, adapter: str) -> Callable[[], Sequence[bytes]]:
    """vLLM's hashes of the request's whole blocks so far, with the adapter's contents in place of its name and path."""
    hasher = getattr(request, "_block_hasher", None)  # the engine's own, which no public name has
    if not adapter:
        return lambda: request.block_hashes
    names = AdapterHashes(request, hasher, adapter) if hasher is not None else lambda block_hash: None

    def hashes() -> Sequence[bytes]:
        found = [names(each) for each in request.block_hashes]
        return [each for each in found if each is not None] if None not in found else ()

    return hashes
