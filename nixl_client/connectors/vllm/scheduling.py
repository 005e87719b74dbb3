"""The scheduler's side: looks prefixes up, offers what to load, and says what to write."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from descriptors.errors import ObjectCacheError
from nixl_client.client import ObjectCacheClient
from nixl_client.connectors.vllm.ledger import Ledger, Tracked
from nixl_client.connectors.vllm.options import Options
from nixl_client.connectors.vllm.plan import Grid
from nixl_client.connectors.vllm.stats import Counters

LOOKUP_KEYS_MAX = 65_536
_log = logging.getLogger(__name__)


class Lora(Protocol):
    """The part of vLLM's LoRARequest that decides what KV bytes mean."""

    lora_name: str
    lora_path: str


class EngineRequest(Protocol):
    """The part of vLLM's Request used here."""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    lora_request: Lora | None
    cache_salt: str | None
    mm_features: Sequence[object]
    prompt_embeds: object | None
    prompt_token_ids: Sequence[int] | None


class SchedulerSide:
    """All of one scheduler's requests."""

    def __init__(
        self, client: ObjectCacheClient, options: Options, grid: Grid, ledger: Ledger, counters: Counters
    ) -> None:
        self._client = client
        self._options = options
        self._grid = grid
        self._ledger = ledger
        self._counters = counters
        self._silent_until_s = 0.0
        self._requests: dict[str, EngineRequest] = {}

    def match(self, request: EngineRequest, computed_tokens: int) -> int:
        """Tokens that can be loaded after the `computed_tokens` in the engine's own blocks."""
        if not _is_text(request):
            return 0
        lora = request.lora_request
        name = "" if lora is None else f"{lora.lora_name}\n{lora.lora_path}"
        tracked = self._ledger.track(request.request_id, name, request.cache_salt or "")
        self._requests[request.request_id] = request
        self._look_up(tracked, request)
        count = self._ledger.loadable(tracked, request.num_tokens, computed_tokens)
        return count if count >= self._options.min_load_tokens else 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], token_count: int) -> None:
        """The engine has blocks for the request, and loads so many tokens."""
        if request.request_id not in self._requests:
            return
        self._counters.add(
            prompt_tokens=request.num_tokens,
            hbm_hit_tokens=self._ledger.track(request.request_id, "", "").computed_tokens,
            store_hit_tokens=token_count,
        )
        self._ledger.load(request.request_id, request.all_token_ids, token_count, block_ids)

    def scheduled(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request runs in the coming step; what earlier steps computed can be written."""
        request = self._requests.get(request_id)
        if request is not None:
            self._write(request, block_ids)

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> bool:
        """The request has ended; whether its blocks must be kept for now."""
        if self._requests.pop(request.request_id, None) is None:
            return False
        self._write(request, block_ids)
        return self._ledger.finish(request.request_id)

    def _write(self, request: EngineRequest, block_ids: Sequence[int]) -> None:
        sure_tokens = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        held_tokens = min(sure_tokens, len(block_ids) * self._grid.block_tokens)
        self._ledger.computed(request.request_id, request.all_token_ids, held_tokens, block_ids)

    def _look_up(self, tracked: Tracked, request: EngineRequest) -> None:
        now_s = time.monotonic()
        if tracked.matched_chunks is not None and now_s - tracked.looked_up_s <= self._options.lease_s / 2:
            return
        if now_s < self._silent_until_s:
            return
        keys_of_ranks = self._ledger.lookup_keys(tracked, request.all_token_ids)
        if not keys_of_ranks[0]:
            self._ledger.matched(tracked, 0, now_s)
            return
        try:
            self._counters.add(lookups=1)
            counts = [self._client.lookup(keys[:LOOKUP_KEYS_MAX], self._options.lease_s) for keys in keys_of_ranks]
        except (ObjectCacheError, OSError) as error:
            _log.warning("request %s: the lookup failed, taken as a miss: %s", request.request_id, error)
            self._counters.add(lookup_failures=1)
            self._silent_until_s = time.monotonic() + self._options.retry_s
            return
        self._counters.add(lookup_s=time.monotonic() - now_s)
        self._ledger.matched(tracked, min(counts), now_s)


def _is_text(request: EngineRequest) -> bool:
    """Whether the tokens alone decide the KV: no images, no embeddings in place of tokens."""
    return bool(request.prompt_token_ids) and not request.mm_features and request.prompt_embeds is None
