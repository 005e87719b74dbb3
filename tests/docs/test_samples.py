"""The samples of the documents: configurations load, options and commands exist, Python imports what there is."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_client.connectors.lmcache.options import LMCacheOptions
from nixl_client.connectors.sglang.options import HiCacheOptions
from objectcache.cli.config import load_config
from objectcache.cli.main import make_parser
from tests.support.tree import repository

ROOT = repository()
PAGES = [
    ROOT / "README.md",
    *(page for folder in ("start", "guides", "reference") for page in (ROOT / "docs" / folder).glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[;&|(] *)(?:\.venv/bin/)?(objectcache [^;&|)#>]*)")


def blocks(language: str) -> list[Any]:
    """Each block of this language, with its page and number as the test's name."""
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in sorted(PAGES)
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()))
        if found == language
    ]


def code_lines(text: str) -> Iterator[str]:
    """The lines of code blocks and indented code, joined where they go on."""
    is_code, whole = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
            continue
        if is_code or line.startswith("    "):
            whole += line.strip()
            if whole.endswith("\\"):
                whole = whole[:-1]
            else:
                yield whole
                whole = ""


def commands() -> list[Any]:
    """Each call of `objectcache` in code."""
    return [
        pytest.param(command.strip(), id=f"{page.relative_to(ROOT)}-{command.strip()[:60]}")
        for page in sorted(PAGES)
        for line in code_lines(page.read_text())
        for command in COMMAND.findall(line)
    ]


@pytest.mark.parametrize("text", blocks("toml"))
def test_a_configuration_loads(tmp_path: Path, text: str) -> None:
    file = tmp_path / "objectcache.toml"
    file.write_text(text)
    assert load_config(file).model_fields_set == set(tomllib.loads(text))


@pytest.mark.parametrize("text", blocks("json"))
def test_the_connector_takes_these_options(text: str) -> None:
    found = json.loads(text)
    if found.get("class_name") == "ObjectCacheHiCache":
        assert HiCacheOptions.of(found).endpoint == found["endpoint"]
    elif "endpoint" in found:
        assert LMCacheOptions.of(found).endpoint == found["endpoint"]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_file_of_lmcache_or_prometheus_is_one(text: str) -> None:
    found = yaml.safe_load(text)
    prefix = "remote_storage_plugin.objectcache."
    given = {
        name.removeprefix(prefix): value for name, value in found.get("extra_config", {}).items() if prefix in name
    }
    if given:
        source = Path(importlib.import_module(given.pop("module_path")).__file__ or "").read_text()
        assert f'"{given.pop("class_name")}"' in source  # it is imported where LMCache is
        assert LMCacheOptions.of(given).bucket == "kv-cache"


@pytest.mark.slow
@pytest.mark.parametrize("text", blocks("python"))
def test_python_imports_what_there_is(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] in ("vllm", "llvmlite"):
                continue
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("command", commands())
def test_a_command_has_these_options(command: str) -> None:
    words = shlex.split(command)[1:]
    if words == ["--version"]:
        return
    options = make_parser().parse_args(words)
    assert callable(options.command)
