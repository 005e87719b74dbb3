"""Which weights a folder holds, told from samples: KV belongs to weights, not to the path they were read from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER_CONFIG = "adapter_config.json"
SAMPLE_BYTES = 4096
TENSOR_SAMPLES_MAX = 16
"""Each tensor has no more samples: a merged adapter or an edit changes all of a matrix, or whole rows of it."""
SAMPLES_MAX = 2048
"""Each file has no more samples."""
ADAPTERS_MAX = 4096
HEADER_BYTES_MAX = 64 << 20
_log = logging.getLogger(__name__)


class Adapters:
    """The contents of the adapters that an engine has used. Which weights it holds for one is not told, and vLLM tells
    KV of adapters apart by name and path: an adapter whose contents have changed since the engine first used its
    number, or its name and path, is not known any more, for blocks of both may be mixed then; nor is any other that has
    been asked for by one of these.
    """

    def __init__(self, settings: str = "") -> None:
        """`settings` are how the engine applies adapters."""
        self._settings = settings
        self._files: dict[Path, tuple[object, str]] = {}
        self._first: dict[object, str | None] = {}

    def contents(self, adapter_id: int, name: str, path: str) -> str | None:
        """A digest that adapters share whose weights are equal and applied alike. None where the weights cannot be
        read, and once they have changed. Files are read again only where their state is another.
        """
        try:
            found: str | None = self._fingerprint(Path(path).expanduser())
        except OSError:
            found = None
        keys = (adapter_id, (name, path))
        known = [self._known(key, found, path) for key in keys]
        if any(key in self._first and self._first[key] is None for key in keys):
            self._first.update((key, None) for key in keys if key in self._first)
        if found is None or None in known:
            return None
        return hashlib.sha256(f"{self._settings}\n{found}".encode()).hexdigest()

    def _known(self, key: object, found: str | None, path: str) -> str | None:
        if key not in self._first:
            if len(self._first) >= ADAPTERS_MAX:
                return None
            self._first[key] = found
            if found is None:
                _log.warning("adapter %s is not cached: its weights are no files of this host", path)
        elif self._first[key] not in (None, found):
            _log.warning("adapter %s is not cached any more: its files were replaced or removed", path)
            self._first[key] = None
        return self._first[key]

    def _fingerprint(self, path: Path) -> str:
        state = [(file, (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in weight_files(path)]
        known = self._files.get(path)
        if known is None or known[0] != state:
            known = self._files[path] = state, fingerprint(path)
            if len(self._files) > ADAPTERS_MAX:
                del self._files[next(iter(self._files))]
        return known[1]


def weight_files(path: Path) -> list[Path]:
    """The files of weights at `path`, a folder or a file, in order, and what says how an adapter's are applied. Raises
    FileNotFoundError when there is none.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no weights in {path}")
    return files + [file for file in [path / ADAPTER_CONFIG] if file.exists()]


def fingerprint(path: Path) -> str:
    """A digest of the weights at `path`: each file's name, size and header, and TENSOR_SAMPLES_MAX samples of each
    tensor, at most SAMPLES_MAX of a file. Raises OSError for what cannot be read.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        with file.open("rb") as stream:
            header, offsets = _plan(file, size, stream.read(8))
            digest.update(f"{file.name} {size} {header}\n".encode())
            stream.seek(0)
            digest.update(stream.read(min(header, HEADER_BYTES_MAX)))
            for offset in offsets:
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _plan(file: Path, size: int, first: bytes) -> tuple[int, Iterable[int]]:
    """Bytes of the header, and where to take samples."""
    if file.suffix == ".safetensors":
        header = 8 + int.from_bytes(first, "little")
        if header <= min(size, HEADER_BYTES_MAX):
            tensors = [(header + start, header + end) for start, end in _tensor_spans(file, header)]
            each = max(1, min(TENSOR_SAMPLES_MAX, SAMPLES_MAX // max(1, len(tensors))))
            return header, _some([offset for tensor in tensors for offset in _spread(*tensor, each)])
    return 0, _spread(0, size, SAMPLES_MAX)


def _tensor_spans(file: Path, header: int) -> list[tuple[int, int]]:
    with file.open("rb") as stream:
        stream.seek(8)
        try:
            tensors = json.loads(stream.read(header - 8))
            spans = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
            return sorted((int(start), int(end)) for start, end in spans)
        except (ValueError, KeyError, TypeError, AttributeError):
            return []


def _spread(start: int, end: int, count: int) -> list[int]:
    """Where to begin samples of [start, end): at most `count`, evenly, from its start to its end."""
    last = max(start, end - SAMPLE_BYTES)
    count = min(count, 1 + -(-(last - start) // SAMPLE_BYTES))
    return [start + (last - start) * index // max(1, count - 1) for index in range(count)]


def _some(offsets: list[int]) -> list[int]:
    """At most SAMPLES_MAX, evenly spread."""
    count = min(len(offsets), SAMPLES_MAX)
    return [offsets[index * len(offsets) // count] for index in range(count)]
