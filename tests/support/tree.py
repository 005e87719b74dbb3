"""Where the repository and the data of the tests lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def repository() -> Path:
    return Path(__file__).resolve().parents[2]


def paper_tables() -> dict[str, Any]:
    """The paper's tables, by name: `bench/paper/paper_tables.json`."""
    tables: dict[str, Any] = json.loads((repository() / "bench" / "paper" / "paper_tables.json").read_text())
    return tables
