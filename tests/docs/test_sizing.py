"""docs/guides/sizing.md: its command as written, and what its table says of models whose shapes are public."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from descriptors.units import format_bytes
from tests.support.tree import repository

PAGE = (repository() / "docs" / "guides" / "sizing.md").read_text()
SHAPES = {
    "SmolLM2 135M": {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
    "Llama 3.1 8B": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "Llama 3.1 70B": {
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192
    },
}  # fmt: skip


@pytest.mark.parametrize("model", SHAPES)
def test_the_command_and_the_table_say_the_same(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[model]))
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    said = subprocess.run(["bash", "-c", block], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
    token_bytes = int(said.stdout.split()[0])
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {model} |"))
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == [
        f"{token_bytes:,}", format_bytes(8192 * token_bytes), format_bytes(16 * token_bytes)
    ]  # fmt: skip


def test_every_model_of_the_table_is_tried() -> None:
    rows = re.findall(r"^\| (.*?) \| [\d,]+ \|", PAGE, re.MULTILINE)
    assert rows == list(SHAPES)
