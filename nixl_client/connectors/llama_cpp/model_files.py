"""The files that a llama.cpp server has read: KV is named by their weights, not by their paths."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from nixl_client.connectors.llama_cpp.llama_server import ADAPTERS_MAX, LlamaFacts, LlamaServerError
from nixl_client.connectors.vllm.weights import fingerprint

HEAD_BYTES = 1 << 20
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf$")


class ModelFiles:
    """Digests of files on this host, which are read again when they change."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[object, str]] = {}

    def model(self, facts: LlamaFacts) -> str:
        """A digest of the model's weights. Raises LlamaServerError, OSError."""
        return self._fingerprint(facts.model_path)

    def adapters(self, facts: LlamaFacts) -> str:
        """Digests of the adapters in use, with their scales. Raises LlamaServerError, OSError."""
        return " ".join(f"{self._fingerprint(path)}*{scale}" for path, scale in facts.adapters if scale)

    def _fingerprint(self, path: str) -> str:
        files = files_of(path)
        state = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in files]
        known = self._weights.get(path)
        if known is None or known[0] != state:
            known = (state, " ".join(f"{fingerprint(file)} {_head(file)}" for file in files))
            self._weights = {path: known} if len(self._weights) > ADAPTERS_MAX else {**self._weights, path: known}
        return known[1]


def files_of(path: str) -> list[Path]:
    """The file at `path`, or all files where a model is split. Raises LlamaServerError where that is not told."""
    first = Path(path)
    if not first.is_absolute():  # it is relative to the server's folder, which nobody tells
        raise LlamaServerError(f"llama-server names a file {path!r}: start it with absolute paths (-m, --lora)")
    shard = _SHARD.match(first.name)
    if shard is None:
        return [first]
    count = int(shard[2])
    if count == 0:
        raise LlamaServerError(f"{path} is split into no files")
    return [first.with_name(f"{shard[1]}-{index:05d}-of-{shard[2]}.gguf") for index in range(1, count + 1)]


def _head(path: Path) -> str:
    """A digest of a file's first bytes, which have the model's settings."""
    with path.open("rb") as stream:
        return hashlib.sha256(stream.read(HEAD_BYTES)).hexdigest()
