"""Which files a llama.cpp server has read."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_client.connectors.llama_cpp.llama_server import LlamaFacts, LlamaServerError
from nixl_client.connectors.llama_cpp.model_files import ModelFiles


def facts_of(path: str, *adapters: tuple[str, float]) -> LlamaFacts:
    return LlamaFacts(path, 1, 4096, "1", "a", adapters)


@pytest.mark.parametrize("name", ["plain", "with [brackets]", "a*b?"])
def test_the_files_of_a_split_model_are_all_digested(tmp_path: Path, name: str) -> None:
    """A name that reads as a pattern matched no file, and all such models had the same KV."""
    first, second = (tmp_path / f"{name}-{index:05d}-of-00002.gguf" for index in (1, 2))
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    facts = facts_of(str(first))
    before = ModelFiles().model(facts)
    assert before
    second.write_bytes(b"others")
    assert ModelFiles().model(facts) != before
    second.unlink()
    with pytest.raises(FileNotFoundError):
        ModelFiles().model(facts)
    with pytest.raises(LlamaServerError, match="no files"):
        ModelFiles().model(facts_of(str(tmp_path / "m-00000-of-00000.gguf")))


def test_a_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is relative to the server's folder: another file may lie there in ours."""
    (tmp_path / "model.gguf").write_bytes(b"ours")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LlamaServerError, match="absolute"):
        ModelFiles().model(facts_of("model.gguf"))
    with pytest.raises(LlamaServerError, match="absolute"):
        ModelFiles().adapters(facts_of("/model.gguf", ("model.gguf", 1.0)))


def test_adapters_are_named_with_their_scales_where_they_are_used(tmp_path: Path) -> None:
    file = tmp_path / "adapter.gguf"
    file.write_bytes(b"weights")
    files = ModelFiles()
    whole, half, none = (files.adapters(facts_of("/m.gguf", (str(file), scale))) for scale in (1.0, 0.5, 0.0))
    assert len({whole, half, none}) == 3
    assert none == ""
