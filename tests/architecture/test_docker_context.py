"""`.dockerignore`: the build gets no folder that the image does not use."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from tests.support.tree import repository


def patterns(name: str) -> list[str]:
    """The lines of an ignore file."""
    return [line.strip("/") for line in (repository() / name).read_text().splitlines() if line]


def matches(folder: str, ignored: list[str]) -> bool:
    return any(fnmatch(folder, pattern.removeprefix("**/")) for pattern in ignored)


def copied() -> set[str]:
    """The folders that the Dockerfile copies."""
    dockerfile = (repository() / "docker" / "Dockerfile").read_text()
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
    return {name for source in sources for name in source.split() if (repository() / name).is_dir()}


def test_each_folder_is_either_copied_into_the_image_or_ignored() -> None:
    """Results, traces and images of pages would go to the builder with each build, and change its cache."""
    ours = {path.name for path in repository().iterdir() if path.is_dir() and path.name != ".git"}
    folders = {name for name in ours if not matches(name, patterns(".gitignore"))}
    ignored = {name for name in folders if matches(name, patterns(".dockerignore"))}
    assert {"bench", "tests", "docs"} <= ignored
    assert copied() & ignored == set()
    assert folders - ignored == copied()


def test_environments_and_history_are_ignored() -> None:
    for name in (".git", ".venv", ".venv-peers", ".venv-clients"):
        assert matches(name, patterns(".dockerignore")), name
