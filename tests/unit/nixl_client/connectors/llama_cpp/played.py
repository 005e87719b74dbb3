"""A llama.cpp server and a store that are played: slots are tokens, files of slots have zeros as KV."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nixl_client.connectors.llama_cpp.llama_server import LlamaFacts, LlamaServerError
from nixl_client.connectors.llama_cpp.rules.prompts import AskedPrompt
from nixl_client.connectors.llama_cpp.rules.slot_file import SlotForm, SlotPart, SlotSection, Tokens, parse

FORM = SlotForm((SlotSection(2, 0, (0, 1, 0, 0), (SlotPart(struct.pack("<iQ", 1, 8), 1, 8),) * 2),))
PROBE = np.arange(40, dtype=np.uint32)


def prompt(count: int) -> AskedPrompt:
    return AskedPrompt(tokens=np.arange(7, 7 + count, dtype=np.uint32))


def slot_bytes(tokens: Tokens) -> bytes:
    """The file of a slot with these tokens."""
    plan = FORM.plan(tokens)
    data = bytearray(plan.nbytes)
    for at, text in plan.literals:
        data[at : at + len(text)] = text
    return bytes(data)


class PlayedServer:
    """`writes` makes the file of a slot with these tokens."""

    def __init__(self, folder: Path, model: Path, slot_count: int = 2) -> None:
        self.folder = folder
        self.told = LlamaFacts(str(model), slot_count, 4096, "1", "a", ())
        self.slots: dict[int, Tokens] = {}
        self.probes = 0
        self.restored: list[int] = []
        self.refuses = False
        self.writes: Callable[[Tokens], bytes] = slot_bytes
        self.loses_bytes = 0

    async def facts(self, _: Mapping[str, str]) -> LlamaFacts:
        return self.told

    async def tokens(self, asked: AskedPrompt, _body: bytes, _headers: Mapping[str, str]) -> Tokens:
        assert asked.tokens is not None
        return asked.tokens

    async def probe(self, _: Mapping[str, str]) -> None:
        self.probes += 1
        self.slots[0] = PROBE

    async def save_slot(self, index: int, name: str, _: Mapping[str, str]) -> int:
        data = self.writes(self.slots[index])
        (self.folder / name).write_bytes(data[: len(data) - self.loses_bytes])
        return len(data)

    async def restore_slot(self, index: int, name: str, _: Mapping[str, str]) -> None:
        if self.refuses:
            raise LlamaServerError("no available space in KV cache")
        self.slots[index] = parse(np.fromfile(self.folder / name, np.uint8)).tokens
        self.restored.append(len(self.slots[index]))


class PlayedClient:
    """A bucket in memory."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.fetching: Callable[[], None] = lambda: None

    def lookup(self, keys: Sequence[str], _lease_s: float, **_: Any) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.chunks), len(keys))

    def present(self, keys: Sequence[str], _lease_s: float, **_: Any) -> tuple[bool, ...]:
        return tuple(key in self.chunks for key in keys)

    def put_chunks(self, keys: Sequence[str], chunks: Sequence[Any], **_: Any) -> None:
        self.chunks |= {key: bytes(chunk) for key, chunk in zip(keys, chunks, strict=True)}

    def allocate_buffer(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    def release_buffer(self, _: Any) -> None:
        pass

    def fetch(self, keys: Sequence[str], _layout: Any, buffer: Any, **_: Any) -> Any:
        self.fetching()
        there = self.lookup(keys, 0.0)
        found = b"".join(self.chunks[key] for key in keys[:there])
        buffer[: len(found)] = np.frombuffer(found, np.uint8)
        return SimpleNamespace(wait=lambda _: SimpleNamespace(chunk_count=there), is_settled=True)
