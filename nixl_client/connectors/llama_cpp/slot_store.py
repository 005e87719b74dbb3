"""KV of slots in a bucket: runs of tokens, each an object that is named by all tokens up to its end. Blocking."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from descriptors.descriptor import CHUNK_COUNT_MAX, Delivery, OnMissing
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.connectors.llama_cpp.rules.slot_file import (
    Bytes,
    ParsedSlot,
    SlotBytes,
    SlotForm,
    SlotPlan,
    Tokens,
    cut,
    fill,
)
from nixl_client.connectors.llama_cpp.slot_folder import SlotFolder
from nixl_client.connectors.load_staging import LoadStaging

RUN_TOKENS = 128
"""An object holds the KV of so many tokens."""
LEASE_S = 60.0
LOOKUP_S = 2.0
LOAD_S = 15.0
LOADS_MAX = 2
STORE_S = 60.0
_T = TypeVar("_T")


class SlotStore:
    """Each of LOADS_MAX loads, and a save, has at most `staging_bytes` in memory, or one run where that is larger."""

    def __init__(self, client: Client, staging_bytes: int) -> None:
        self._client = client
        self._staging_bytes = staging_bytes
        self._staging = LoadStaging(client, staging_bytes, LOADS_MAX)

    def close(self) -> None:
        """Return when nothing is under way."""
        self._staging.close()

    def matched(self, keys: Sequence[str]) -> int:
        """How many runs are stored, from the first. Raises ObjectCacheError, OSError."""
        return self._client.lookup(keys[:CHUNK_COUNT_MAX], LEASE_S, timeout_s=LOOKUP_S) if keys else 0

    def load(self, keys: Sequence[str], form: SlotForm, tokens: Tokens, folder: SlotFolder, name: str) -> int:
        """Write the file of a slot with the KV of these runs, whose tokens are `tokens`. Returns how many came, whose
        file it is where these are fewer. Raises ObjectCacheError, OSError, TimeoutError.
        """
        deadline_s = time.monotonic() + LOAD_S
        plan = form.plan(tokens)
        came = 0
        with folder.made(name) as file:
            file.reserve(plan.nbytes)
            for batch in self._batches(keys, form):
                count = self._load_batch(batch, form, plan=plan, data=file, first=came, deadline_s=deadline_s)
                came += count
                if count < len(batch):
                    break
            if came == len(keys):
                for at, text in plan.literals:
                    file[at : at + len(text)] = np.frombuffer(text, np.uint8)
                return came
        folder.remove(name)  # some have left since the lookup
        return self.load(keys[:came], form, tokens[: came * RUN_TOKENS], folder, name) if came else 0

    def save(self, keys: Sequence[str], slot: ParsedSlot, data: SlotBytes, model: dict[str, str]) -> int:
        """Store the runs of a slot's file that are missing; how many. Raises ObjectCacheError, OSError."""
        stored = 0
        present: list[bool] = []
        for first in range(0, len(keys), CHUNK_COUNT_MAX):
            present += self._client.present(keys[first : first + CHUNK_COUNT_MAX], LEASE_S, timeout_s=LOOKUP_S)
        missing = [index for index, is_there in enumerate(present) if not is_there]
        for batch in self._batches(missing, slot.form):
            runs: list[Bytes] = []
            for first, count in _together(batch):
                runs += cut(data, slot, first * RUN_TOKENS, RUN_TOKENS, count)
            self._client.put_chunks([keys[index] for index in batch], runs, metadata=model, timeout_s=STORE_S)
            stored += len(batch)
        return stored

    def _load_batch(
        self, keys: Sequence[str], form: SlotForm, plan: SlotPlan, data: SlotBytes, first: int, deadline_s: float
    ) -> int:
        run_bytes = form.token_bytes * RUN_TOKENS
        layout = ChunkLayout(1, RUN_TOKENS, run_bytes)
        buffer = self._staging.take(layout.delivery_bytes(len(keys)), deadline_s)
        try:
            fetch = self._client.fetch(
                keys, layout, buffer, delivery=Delivery.CHUNK_MAJOR, on_missing=OnMissing.PREFIX, timeout_s=LOAD_S
            )
        except BaseException:
            self._staging.give(buffer)
            raise
        try:
            count = fetch.wait(max(0.0, deadline_s - time.monotonic())).chunk_count
            runs = [buffer[index * run_bytes : (index + 1) * run_bytes] for index in range(count)]
            if runs:
                fill(data, form, plan, first * RUN_TOKENS, runs)
        finally:
            self._staging.end(buffer, fetch)
        return count

    def _batches(self, items: Sequence[_T], form: SlotForm) -> list[Sequence[_T]]:
        each = max(1, min(CHUNK_COUNT_MAX, self._staging_bytes // (form.token_bytes * RUN_TOKENS)))
        return [items[first : first + each] for first in range(0, len(items), each)]


def _together(indices: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the count of indices that follow each other. They are in order."""
    found: list[tuple[int, int]] = []
    for index in indices:
        first, count = found[-1] if found else (index, 0)
        if first + count == index and found:
            found[-1] = first, count + 1
        else:
            found.append((index, 1))
    return found
