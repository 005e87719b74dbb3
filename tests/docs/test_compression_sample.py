"""The guide to compression: its configuration and its client, as written, encode chunks and say what was lost."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from descriptors.layout import ChunkLayout
from objectcache.cli.config import load_config
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.planning.losses import MeasuredLoss, ModelLosses
from storage_server.planning.losses_file import losses_bytes
from tests.support.servers import LocalStack
from tests.support.tree import repository
from tests.support.waiting import eventually

LAYERS, COUNT = 36, 6
SHAPE = LayerShape(256, 1024, Element.BFLOAT16)
LAYOUT = ChunkLayout(LAYERS, SHAPE.tokens, SHAPE.nbytes)
"""Chunks of 36 MiB: with the guide's figures smaller ones are not encoded."""


@pytest.mark.slow
def test_the_sample_encodes_and_says_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (repository() / "docs" / "guides" / "compression.md").read_text()
    config, sample = (
        re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0] for kind in ("toml", "python")
    )
    model = ModelLosses(
        model="tiny", num_layers=LAYERS, width=SHAPE.width, element=SHAPE.element, chunk_tokens=64,
        forms={(Codec.KIVI4,): MeasuredLoss(0.0049, 0.0058, 0.4, 0.5)}, texts="", text_count=16, release="1",
    )  # fmt: skip
    (tmp_path / "losses.json").write_bytes(losses_bytes([model]))
    (tmp_path / "objectcache.toml").write_text(config)
    monkeypatch.chdir(tmp_path)  # the guide names the losses file without a folder
    settings = load_config(tmp_path / "objectcache.toml").storage_settings(tmp_path)
    values = np.random.default_rng(1).standard_normal(LAYOUT.chunk_bytes // 2, dtype=np.float32)
    chunk = np.empty(LAYOUT.chunk_bytes, dtype=np.uint8)
    from_floats(values, SHAPE.element, chunk)
    keys = [f"kv/tiny/layout/ranks/{index:064x}" for index in range(COUNT)]
    with (
        LocalStack(
            tmp_path / "data",
            dram_bytes=3 * LAYOUT.chunk_bytes,
            compression=settings.compression,
            losses=settings.losses,
        ) as local,
        local.client("chunks", "http") as client,
    ):
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        client.put_chunks(keys, [np.roll(chunk, 2 * index) for index in range(COUNT)])
        given = {
            "client": client,
            "keys": keys,
            "layout": LAYOUT,
            "buffer": client.allocate_buffer(COUNT * chunk.nbytes),
        }

        said: list[str] = []

        def has_encoded() -> bool:
            exec(compile(sample, "compression.md", "exec"), dict(given))
            said.append(capsys.readouterr().out)
            return not said[-1].startswith("0 ")

        assert eventually(has_encoded, 60)
    found = re.fullmatch(r"[1-6] encoded; error (0\.\d+) loss (\S+) LossBasis\.CALIBRATED\n", said[-1])
    assert found is not None, said[-1]
    assert 0.05 < float(found[1]) < 0.12
    assert float(found[2]) == 0.0058
