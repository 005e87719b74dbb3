"""Classes of chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage_server.cache.policies.reuse_classes import Use, class_path

USE = Use(position=3, chunk_count=10, known_count=6, use_count=2, continuation_count=1)


def test_a_class_goes_from_the_coarsest_feature_to_the_finest() -> None:
    assert class_path(USE) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("other", "is_other_class"),
    [
        (replace(USE, position=9), True),
        (replace(USE, position=8), False),
        (replace(USE, continuation_count=2), True),
        (replace(USE, continuation_count=0), True),
        (replace(USE, use_count=3), False),
        (replace(USE, use_count=4), True),
        (replace(USE, chunk_count=11, known_count=7), False),
        (replace(USE, chunk_count=16, known_count=12), True),
        (replace(USE, known_count=9), True),
    ],
)
def test_chunks_of_one_class_differ_little(other: Use, is_other_class: bool) -> None:
    assert (class_path(other) != class_path(USE)) is is_other_class
    assert class_path(replace(USE, continuation_count=9)) == class_path(replace(USE, continuation_count=2))
