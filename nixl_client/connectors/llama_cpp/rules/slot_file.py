"""The file that llama.cpp's server writes of a slot: tokens, and the KV of each (`llama_state_seq_save_file`). Pure.

Numbers are little-endian; `u` and `i` are unsigned and signed, with their bits:

    u32 magic, u32 version, u32 word count, then so many words: i32 -1, 1, token count, the tokens, 0 media
    a section for each KV cache of the model (one; two where some layers have windows):
        u32 stream count; for each stream u32 cell count, and where that is not 0:
            cell count times: i32 position, u32 1, i32 slot
            u32 whether values are transposed, u32 layer count, u32 rotation of keys, u32 rotation of values
            for each layer's keys, then for each layer's values (none where keys are latents):
                i32 type, u64 row bytes; cell count rows
                or, transposed: i32 type, u32 element bytes, u32 row count; row count rows of cell count elements

A file is cut into the KV of runs of tokens, and a file of any number of tokens is made of such runs. A run's bytes are
those of its tokens in each part of the file: (rows, tokens, bytes), where keys have one row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAGIC = 0x67677371
VERSION = 4
TOKENS_MAX = 1 << 22
STREAMS_MAX = 256
LAYERS_MAX = 1024
ROW_BYTES_MAX = 1 << 24
TOKEN_BYTES_MAX = 4 << 20
"""Llama 3.1 405B has 516,096 bytes for each token."""
SECTIONS_MAX = 2
HOLDS_MORE = "its slots are more than the keys and values of all tokens, as with windows, recurrent states or drafts"
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]
_WORD = np.dtype("<u4")


class SlotBytes(Protocol):
    """The bytes of a file, which is read and written piece by piece: somebody else may make it shorter at any time."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, place: slice) -> Bytes:
        """Those of a place."""
        ...

    def __setitem__(self, place: slice, data: Bytes) -> None:
        """Write those of a place."""
        ...


class SlotFileError(ValueError):
    """The file is not of this form, or its KV cannot be cut by tokens. The text says why."""


class OtherSlotError(SlotFileError):
    """The slot held no prompt of text when it was written: that says nothing about the server's other slots."""


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One layer's keys or values: `header` as in the file, then `row_count` rows with `cell_bytes` for each token."""

    header: bytes
    row_count: int
    cell_bytes: int

    @property
    def token_bytes(self) -> int:
        """The bytes of one token."""
        return self.row_count * self.cell_bytes


@dataclass(frozen=True, slots=True)
class SlotSection:
    """One KV cache: `stream_index` is the stream whose cells the file has, `words` the four before its parts."""

    stream_count: int
    stream_index: int
    words: tuple[int, int, int, int]
    parts: tuple[SlotPart, ...]


@dataclass(frozen=True, slots=True)
class SlotForm:
    """The part of a file that does not depend on its tokens."""

    sections: tuple[SlotSection, ...]

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """The parts of all sections, in the order of the file."""
        return tuple(part for section in self.sections for part in section.parts)

    @property
    def token_bytes(self) -> int:
        """The bytes of one token in all parts."""
        return sum(part.token_bytes for part in self.parts)

    @property
    def digest(self) -> str:
        """A digest of the forms of keys and values: slots of servers that have the same hold the same bytes."""
        told = [(section.words, section.parts) for section in self.sections]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def plan(self, tokens: Tokens) -> SlotPlan:
        """The layout of a file with these tokens."""
        count = len(tokens)
        head = (
            struct.pack("<IIIiII", MAGIC, VERSION, count + 4, -1, 1, count) + tokens.astype(_WORD).tobytes() + b"\0" * 4
        )
        literals, starts, at = [(0, head)], [], len(head)
        for section in self.sections:
            cells = np.empty((count, 3), _WORD)
            cells[:, 0], cells[:, 1], cells[:, 2] = np.arange(count), 1, 0
            counts = [count if index == section.stream_index else 0 for index in range(section.stream_count)]
            before = struct.pack(
                f"<{section.stream_index + 2}I", section.stream_count, *counts[: section.stream_index + 1]
            )
            text = before + cells.tobytes() + struct.pack("<4I", *section.words)
            for part in section.parts:
                literals.append((at, text + part.header))
                at += len(text) + len(part.header)
                starts.append(at)
                at += count * part.token_bytes
                text = b""
            text = struct.pack(
                f"<{section.stream_count - section.stream_index - 1}I", *counts[section.stream_index + 1 :]
            )
            literals.append((at, text))
            at += len(text)
        return SlotPlan(at, tuple(literals), tuple(starts), count)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """A file of `nbytes`: the bytes that are no KV, by their offsets, and where each part's KV begins."""

    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    starts: tuple[int, ...]
    token_count: int


@dataclass(frozen=True, slots=True)
class ParsedSlot:
    """A file that was read. `orders` are the cells of each section by their positions, None where they lie so."""

    form: SlotForm
    tokens: Tokens
    starts: tuple[int, ...]
    cell_counts: tuple[int, ...]
    orders: tuple[npt.NDArray[np.int64] | None, ...]


def parse(data: SlotBytes) -> ParsedSlot:
    """Read a file. Raises SlotFileError."""
    reader = _Reader(data, 0)
    magic, version, count = reader.words(3)
    if magic != MAGIC:
        raise SlotFileError("this is no file of a slot")
    if version != VERSION:
        raise SlotFileError(f"slot files of llama.cpp's version {version} are unknown; this release knows {VERSION}")
    if not 4 <= count <= TOKENS_MAX:
        raise SlotFileError(f"a slot of {count} words")
    words = reader.words(count)
    if tuple(words[:3]) != (0xFFFFFFFF, 1, count - 4) or words[-1] != 0:
        raise OtherSlotError("the slot holds more than the tokens of a text")
    if count == 4:
        raise OtherSlotError("the slot is empty")
    tokens = words[3:-1].copy()
    found = _sections(data, reader.at, SECTIONS_MAX)
    for section in found:
        if len(section.positions) < len(tokens) or section.first_position > 0:
            raise SlotFileError(HOLDS_MORE)
    orders = []
    for section in found:
        order = np.argsort(section.positions, kind="stable")
        if not np.array_equal(section.positions[order], np.arange(len(order))):
            raise SlotFileError("the slot's tokens have no positions from 0 on")
        orders.append(None if np.array_equal(order, np.arange(len(order))) else order)
    form = SlotForm(tuple(section.form for section in found))
    if form.token_bytes > TOKEN_BYTES_MAX:
        raise SlotFileError(f"{form.token_bytes} bytes for each token; at most {TOKEN_BYTES_MAX} are cached")
    return ParsedSlot(
        form,
        tokens,
        tuple(start for section in found for start in section.starts),
        tuple(len(section.positions) for section in found),
        tuple(orders),
    )


def cut(data: SlotBytes, slot: ParsedSlot, first: int, run_tokens: int, run_count: int = 1) -> list[Bytes]:
    """The KV of runs of a file that was parsed, one behind the other, the first of which begins with token `first`."""
    runs = [np.empty(run_tokens * slot.form.token_bytes, np.uint8) for _ in range(run_count)]
    end = first + run_tokens * run_count
    at = index = 0
    for section, cell_count, order in zip(slot.form.sections, slot.cell_counts, slot.orders, strict=True):
        for part in section.parts:
            cells = _read_cells(data, slot.starts[index], part, cell_count, _spans(order, first, end))
            for count, run in enumerate(runs):
                place = _shaped(run[at : at + run_tokens * part.token_bytes], part)
                place[...] = cells[:, count * run_tokens : (count + 1) * run_tokens]
            at += run_tokens * part.token_bytes
            index += 1
    return runs


def fill(data: SlotBytes, form: SlotForm, plan: SlotPlan, first: int, runs: Sequence[Bytes]) -> None:
    """Write the KV of runs, the first of which begins with token `first`, into a file of this plan."""
    at = 0
    for part, start in zip(form.parts, plan.starts, strict=True):
        counts = [len(run) // form.token_bytes for run in runs]
        places = [
            _shaped(run[at * count : (at + part.token_bytes) * count], part)
            for run, count in zip(runs, counts, strict=True)
        ]
        cells = np.concatenate(places, axis=1)
        for row in range(part.row_count):
            begin = start + (row * plan.token_count + first) * part.cell_bytes
            data[begin : begin + sum(counts) * part.cell_bytes] = cells[row].reshape(-1)
        at += part.token_bytes


def _read_cells(
    data: SlotBytes, start: int, part: SlotPart, cell_count: int, spans: Sequence[tuple[int, int]]
) -> Bytes:
    """The bytes of these spans of cells of a part: (rows, cells, bytes)."""
    found = np.empty((part.row_count, sum(count for _, count in spans), part.cell_bytes), np.uint8)
    at = 0
    for cell, count in spans:
        for row in range(part.row_count):
            begin = start + (row * cell_count + cell) * part.cell_bytes
            found[row, at : at + count] = data[begin : begin + count * part.cell_bytes].reshape(count, part.cell_bytes)
        at += count
    return found


def _spans(order: npt.NDArray[np.int64] | None, first: int, end: int) -> list[tuple[int, int]]:
    """The first cell and the count of cells that lie together, of those that have the positions [first, end)."""
    if order is None:
        return [(first, end - first)]
    cells = order[first:end]
    breaks = np.flatnonzero(np.diff(cells) != 1) + 1
    return [(int(some[0]), len(some)) for some in np.split(cells, breaks)]


def _shaped(kv: Bytes, part: SlotPart) -> Bytes:
    """The KV of some tokens in one part: (rows, tokens, bytes)."""
    return kv.reshape(part.row_count, len(kv) // part.token_bytes, part.cell_bytes)


@dataclass(frozen=True, slots=True)
class _FoundSection:
    form: SlotSection
    positions: npt.NDArray[np.int64]
    starts: tuple[int, ...]

    @property
    def first_position(self) -> int:
        return int(self.positions.min())


class _Reader:
    """Reads numbers from `at` on. Raises SlotFileError past the end."""

    def __init__(self, data: SlotBytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, nbytes: int) -> Bytes:
        """The next bytes."""
        self.skip(nbytes)
        return self._data[self.at - nbytes : self.at]

    def skip(self, nbytes: int) -> None:
        """Pass the next bytes over, unread."""
        if nbytes > len(self._data) - self.at:
            raise SlotFileError(HOLDS_MORE)
        self.at += nbytes

    def words(self, count: int) -> Tokens:
        """The next numbers of 32 bits."""
        return self.take(4 * count).view(_WORD)


def _sections(data: SlotBytes, at: int, sections_max: int) -> list[_FoundSection]:
    """The sections from `at` to the end of the file. Models with latents as keys have no values, which nothing in the
    file tells: a reading is right when it ends where the file does.
    """
    if at == len(data):
        return []
    if sections_max == 0:
        raise SlotFileError(HOLDS_MORE)
    failure: SlotFileError | None = None
    for has_values in (True, False):
        try:
            reader = _Reader(data, at)
            section = _section(reader, has_values=has_values)
            return [section, *_sections(data, reader.at, sections_max - 1)]
        except SlotFileError as error:
            failure = failure or (error if sections_max == SECTIONS_MAX else SlotFileError(HOLDS_MORE))
    raise failure or SlotFileError(HOLDS_MORE)


def _section(reader: _Reader, *, has_values: bool) -> _FoundSection:
    (stream_count,) = (int(word) for word in reader.words(1))
    if not 1 <= stream_count <= STREAMS_MAX:
        raise SlotFileError(f"a KV cache with {stream_count} streams")
    found: _FoundSection | None = None
    for index in range(stream_count):
        cell_count = int(reader.words(1)[0])
        if cell_count == 0:
            continue
        if found is not None or cell_count > TOKENS_MAX:
            raise SlotFileError("the slot's tokens lie in several streams")
        cells = reader.words(3 * cell_count).reshape(cell_count, 3)
        if not np.all(cells[:, 1] == 1):
            raise SlotFileError("the slot's tokens have positions of several kinds, as images have")
        positions = cells[:, 0].astype(np.int32).astype(np.int64)
        transposed, layer_count, key_rotation, value_rotation = (int(word) for word in reader.words(4))
        if transposed > 1 or not 1 <= layer_count <= LAYERS_MAX:
            raise SlotFileError(f"a KV cache with {layer_count} layers")
        parts, starts = [], []
        for part, start in _parts(
            reader, cell_count, [False] * layer_count + [bool(transposed)] * layer_count * has_values
        ):
            parts.append(part)
            starts.append(start)
        words = (transposed, layer_count, key_rotation, value_rotation)
        found = _FoundSection(SlotSection(stream_count, index, words, tuple(parts)), positions, tuple(starts))
    if found is None:
        raise SlotFileError("the slot is empty")
    return found


def _parts(reader: _Reader, cell_count: int, transposed: Sequence[bool]) -> Iterator[tuple[SlotPart, int]]:
    """Each part and where its KV begins."""
    for is_transposed in transposed:
        header = reader.take(12).tobytes()
        if is_transposed:
            _, cell_bytes, row_count = struct.unpack("<iII", header)
        else:
            _, cell_bytes = struct.unpack("<iQ", header)
            row_count = 1
        if not (0 < cell_bytes <= ROW_BYTES_MAX and 0 < row_count <= ROW_BYTES_MAX):
            raise SlotFileError("a row of no length, or of more than any model has")
        part = SlotPart(header, row_count, cell_bytes)
        yield part, reader.at
        reader.skip(cell_count * part.token_bytes)
