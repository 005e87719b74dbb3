"""The rules are in modules of their own, whose assertions pytest must explain as those of a test module."""

from __future__ import annotations

import pytest

RULES = ("rules", "bucket_rules", "chunk_rules", "object_rules", "upload_rules")
pytest.register_assert_rewrite(*(f"tests.contract.store.{name}" for name in RULES))
