"""An environment that is laid over another one has its package's Python code, and the compiled modules of the other."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from bench.beds.kv_peers import install
from bench.beds.kv_peers.install import Environment


def test_what_is_not_compiled_is_taken_from_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "HERE", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("lender", "over"):
        (tmp_path / "requirements" / f"{name}.txt").write_text("vllm==1\n")

    def fetched(*arguments: str) -> None:
        """In place of pip."""
        if "download" in arguments:
            folder = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(folder / "vllm-1-py3-none-any.whl", "w") as wheel:
                for name in ("vllm/a.py", "vllm/_C.so", "vllm/deep/b.json", "vllm-1.dist-info/METADATA"):
                    wheel.writestr(name, "theirs")

    monkeypatch.setattr(install, "_python", fetched)
    lender = Environment("lender")
    lender.install()
    compiled = lender._packages / "vllm" / "deep" / "_D.so"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("ours")
    (lender._packages / "vllm" / "old.py").write_text("ours")
    over = Environment("over", lender=lender, is_laid_over=True)
    assert over.install()
    assert not over.install()
    found = {str(path.relative_to(over._packages)) for path in over._packages.rglob("*") if path.is_file()}
    assert found == {"vllm/a.py", "vllm/deep/b.json", "vllm/deep/_D.so", "lent.pth"}
    assert (over._packages / "vllm" / "deep" / "_D.so").read_text() == "ours"
    assert (over._packages / "lent.pth").read_text() == f"{lender._packages}\n"
