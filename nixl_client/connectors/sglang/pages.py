"""The pages of one of SGLang's host pools: where they lie, and their objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nixl_client.connectors.sglang.rules.hits import whole_pages
from nixl_client.connectors.sglang.rules.naming import PageSpace
from nixl_client.connectors.sglang.rules.parts import Addresses, HostAllocation, PartGroup, part_groups, places
from nixl_client.connectors.sglang.traffic import PUT_OBJECTS, Bodies, Bytes, PageTraffic

COPIES_BYTES = 64 << 20
"""The most memory that is kept for copies of pages; a single page may be larger."""
_log = logging.getLogger(__name__)


class HostPages:
    """Pages of a pool that has memory. A page whose parts have addresses is one object for each part, and loads go
    straight there; any other page is one object, and goes through SGLang's own copies.
    """

    def __init__(self, pool: Any, pool_name: str, model_name: str, fields: Mapping[str, object]) -> None:
        """Raises what the pool raises where it has no pages at all."""
        self._pool = pool
        self._page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self._memories: list[Bytes] = []
        self._allocations: list[HostAllocation] = []
        self._groups: tuple[PartGroup, ...] = ()
        self._part_bytes: tuple[int, ...] = ()
        self._page_dtype: torch.dtype = torch.uint8
        self._copying = threading.Lock()
        """Held while the copies of pages are used."""
        self._copies: Bytes = np.empty(0, dtype=np.uint8)
        try:
            self._find_parts()
        except (ValueError, NotImplementedError, AttributeError, AssertionError, TypeError) as error:
            page = pool.get_data_page(0, flat=True)
            self._page_dtype = page.dtype
            self._part_bytes, self._groups = (int(page.numel() * page.element_size()),), ()
            _log.info("pages of the pool %s are copied by SGLang: %s", pool_name, error)
        self.space = PageSpace(
            model_name,
            pool_name,
            {**fields, "form": "parts" if self._groups else "page", "part_bytes": list(self._part_bytes)},
            len(self._part_bytes),
        )

    @property
    def page_bytes(self) -> int:
        """The size of a page."""
        return sum(self._part_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether loads may go straight into the pool's memory."""
        return bool(self._groups)

    def load(self, traffic: PageTraffic, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Load these pages to the tokens of the pool that `indices` has, page after page. For each page whether it is
        there whole; after one that is not, none is.
        """
        count = len(hashes)
        if not self._groups:
            starts = self._starts(indices, count)

            def write(first: int, rows: Bytes) -> None:
                for start, row in zip(starts[first : first + len(rows)], rows, strict=True):
                    self._pool.set_from_flat_data_page(start, torch.from_numpy(row).view(self._page_dtype))

            loaded = traffic.load_rows(self.space.object_names(hashes), self.page_bytes, write)
            return [number < loaded for number in range(count)]
        addresses = self._addresses(indices, count)
        for group in self._groups:
            index = group.allocation_index
            targets = places(group, addresses[:count], self._allocations[index])
            names = self.space.object_names(hashes[:count], group.parts)
            loaded = traffic.load_into(names, group.nbytes, self._memories[index], targets)
            count = min(count, loaded // len(group.parts))
            if not count:
                break
        return [number < count for number in range(len(hashes))]

    def store(self, traffic: PageTraffic, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Store those of these pages that are missing. For each whether all of it is stored."""
        names, metadata = self.space.object_names(hashes), self.space.metadata()
        if self._groups:
            is_stored = traffic.store(names, self._part_bodies(hashes, indices), metadata)
        else:
            starts = self._starts(indices, len(hashes))
            at_once = max(1, min(PUT_OBJECTS, COPIES_BYTES // self.page_bytes))
            with self._copying:
                is_stored = traffic.store(names, lambda numbers: self._copied(starts, numbers), metadata, at_once)
        return whole_pages(is_stored, len(self._part_bytes))

    def _part_bodies(self, hashes: Sequence[str], indices: Any) -> Bodies:
        """The parts where they lie."""
        addresses, part_count = self._addresses(indices, len(hashes)), len(self._part_bytes)
        bodies: dict[int, Bytes] = {}
        for group in self._groups:
            memory = self._memories[group.allocation_index]
            found = iter(places(group, addresses, self._allocations[group.allocation_index]))
            for page in range(len(hashes)):
                for part in group.parts:
                    start = next(found)
                    bodies[page * part_count + part] = memory[start : start + group.nbytes]
        return lambda numbers: [bodies[number] for number in numbers]

    def _copied(self, starts: Sequence[int], numbers: Sequence[int]) -> list[Bytes]:
        """Copies of pages, in memory that is kept: the kernel would have to give new memory page by page each time."""
        nbytes = self.page_bytes
        if self._copies.nbytes < len(numbers) * nbytes:
            self._copies = np.empty(len(numbers) * nbytes, dtype=np.uint8)
        rows = self._copies[: len(numbers) * nbytes].reshape(len(numbers), nbytes)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = _bytes_of(self._pool.get_data_page(starts[number], flat=True).contiguous())
        return list(rows)

    def _find_parts(self) -> None:
        """Learn from the first page how pages lie. Raises ValueError and others where its parts have no addresses."""
        memories = [_bytes_of(tensor) for tensor in _tensors(self._pool)]
        allocations = [HostAllocation(int(each.ctypes.data), each.nbytes) for each in memories]
        found, sizes = self._meta(torch.arange(self._page_tokens, dtype=torch.int64))
        self._groups = part_groups(found, sizes, allocations)
        self._part_bytes = tuple(sizes)
        self._memories, self._allocations = memories, allocations

    def _addresses(self, indices: Any, count: int) -> Addresses:
        """The addresses of the pages' parts: int64 of shape (pages, parts). Raises ValueError where the pool has others
        than at the start.
        """
        self._starts(indices, count)
        found, sizes = self._meta(indices)
        if tuple(sizes) != self._part_bytes * count:
            raise ValueError(f"{count} pages have {len(sizes)} parts, {len(self._part_bytes)} each were expected")
        return np.array(found, dtype=np.int64).reshape(count, len(self._part_bytes))

    def _starts(self, indices: Any, count: int) -> list[int]:
        """The first token of each page. Raises ValueError where there are other tokens than the pages have."""
        if indices is None or int(indices.numel()) != count * self._page_tokens:
            given = 0 if indices is None else int(indices.numel())
            raise ValueError(f"{count} pages of {self._page_tokens} tokens were given {given} places")
        return [int(index) for index in indices[:: self._page_tokens].tolist()]

    def _meta(self, indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        return [int(address) for address in addresses], [int(size) for size in sizes]


def counts_only(pool: Any) -> bool:
    """Whether a pool counts pages and holds none: its KV is in the pools beside it (SGLang's LogicalHostPool), or in
    the memory of another rank (a dummy). Any other pool has pages of its own, whatever it calls its memory.
    """
    is_empty = getattr(pool, "kv_buffer", None) is None
    return is_empty and (type(pool).__name__ == "LogicalHostPool" or bool(getattr(pool, "_is_dummy", False)))


def _tensors(pool: Any) -> list[torch.Tensor]:
    """The pool's own memory: the contiguous tensors that it refers to."""
    found: list[torch.Tensor] = []
    for value in vars(pool).values():
        several = value if isinstance(value, list | tuple) else (value,)
        found += [each for each in several if isinstance(each, torch.Tensor)]
    return [each for each in found if each.device.type == "cpu" and each.numel() and each.is_contiguous()]


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor, without a copy."""
    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
