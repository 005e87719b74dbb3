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
SAMPLES_MAX = 512
"""Of each file."""
ADAPTERS_MAX = 4096
HEADER_BYTES_MAX = 64 << 20
_log = logging.getLogger(__name__)


class Adapters:
    """Fingerprints of the adapters an engine has used. Which weights it holds for one is not told: so an adapter whose
    files have changed since it was first used has no fingerprint any more.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Path], tuple[object, str | None]] = {}

    def fingerprint(self, adapter_id: int, path: Path) -> str | None:
        """Of the adapter that the engine knows by this number. None once its files have changed. Raises OSError for
        what cannot be read.
        """
        state = [(file, (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in weight_files(path)]
        known = self._known.get((adapter_id, path))
        if known is None or known[0] != state:
            found: str | None = fingerprint(path)
            if known is not None and known[1] != found:
                if known[1] is not None:
                    _log.warning("adapter %s was replaced under the same number: it is not cached any more", path)
                found = None
            known = (state, found)
            self._known[adapter_id, path] = known
            if len(self._known) > ADAPTERS_MAX:
                del self._known[next(iter(self._known))]
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
    """A digest of the weights at `path`: each file's name, size and header, and the start of its tensors, at most
    SAMPLES_MAX of a file. Raises OSError for what cannot be read.
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
            return header, _some([header + start for start in _tensor_starts(file, header)])
    return 0, _some(list(range(0, size, SAMPLE_BYTES)))


def _tensor_starts(file: Path, header: int) -> list[int]:
    with file.open("rb") as stream:
        stream.seek(8)
        try:
            tensors = json.loads(stream.read(header - 8))
            return sorted(int(entry["data_offsets"][0]) for name, entry in tensors.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return []


def _some(offsets: list[int]) -> list[int]:
    """At most SAMPLES_MAX, evenly spread."""
    count = min(len(offsets), SAMPLES_MAX)
    return [offsets[index * len(offsets) // count] for index in range(count)]
