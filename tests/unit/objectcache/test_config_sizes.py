"""Sizes and rates are written in the same ways, wherever a user writes them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from objectcache.cli import config
from objectcache.cli.config import ConfigError, load_config

SIZED = {
    f"{model.__name__}.{name}": field
    for _, model in inspect.getmembers(config, inspect.isclass)
    if issubclass(model, BaseModel)
    for name, field in model.model_fields.items()
    if "bytes" in name
}


@pytest.mark.parametrize("field", SIZED.values(), ids=SIZED)
def test_each_size_and_rate_of_the_configuration_may_be_written_with_a_unit(field: FieldInfo) -> None:
    """A user who may write disk_bytes = "200GB" expects the same of link_bytes_per_s."""
    annotated = field.rebuild_annotation()
    read = TypeAdapter(annotated).validate_python
    assert read("1GB") == read("1e9") == read(1e9) == read(10**9) == 10**9
    with pytest.raises(ValidationError, match="is no size"):
        read("fast")


def test_rates_of_a_file_are_bytes_in_a_second(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[internals.storage]\ndedup_bytes_per_s = "256MB"\ncompact_bytes_per_s = "64MiB"\n'
        '[scheduler]\nlink_bytes_per_s = "12.5GB"\n[[tenants]]\naccess_key = "A"\nbytes_per_s_max = "0.5 GB"\n'
    )
    loaded = load_config(file)
    settings = loaded.storage_settings(tmp_path)
    assert (settings.dedup_bytes_per_s, settings.compact_bytes_per_s) == (256e6, 64 << 20)
    assert settings.scheduler.link_bytes_per_s == 12.5e9
    assert settings.scheduler.tenants["A"].rate_max_bytes_per_s == 5e8
    file.write_text('[scheduler]\nlink_bytes_per_s = "100Gbps"\n')
    with pytest.raises(ConfigError, match=r"link_bytes_per_s.*counts bits"):
        load_config(file)
