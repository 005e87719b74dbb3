"""The names of a prompt's blocks, of which a decision needs some."""

from __future__ import annotations

import numpy as np

from objectcache.orchestrator.router import Prompt


def test_each_size_of_blocks_has_its_part_of_the_names() -> None:
    """An engine with blocks of one token used all of them up, and nothing was seen of what the others held."""
    prompt = Prompt(np.arange(20_000, dtype=np.uint32), "", "", {}, {}, blocks_max=1000)
    assert len(prompt.chain(1)) == 1000
    assert len(prompt.chain(16)) == 1000
    assert len(prompt.chain(64)) == 20_000 // 64
