"""The `[compression]` table: whether the DRAM tier keeps chunks encoded, and by which figures it decides."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from descriptors.chunk_flags import CONTENT_CLASS
from descriptors.prefix_keys import MODEL_LABEL
from objectcache.cli.config_values import ConfigError, Model, Rate, shown
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.forms import TIER_CODECS
from storage_server.planning.losses import LossTable, ModelLosses
from storage_server.planning.losses_file import LOSSES_BYTES_MAX, WrongLossesError, parse_losses

DEFAULT_CODECS = {
    Codec.KIVI8: CodecFigures(0.995, 4e9),
    Codec.K8V4: CodecFigures(0.975, 4e9),
    Codec.KIVI4: CodecFigures(0.95, 4e9),
}
"""Used where the table names none. The qualities are below those that `calibrate quality` measures on the models of
docs/design/compression.md, and each codec goes on to the next within the bound that clients have by default.
"""


class CompressionPolicy(Enum):
    """Whether chunks are kept encoded: never, or where that has the greater utility."""

    OFF = "off"
    ADAPTIVE = "adaptive"


class CodecConfig(Model):
    """One `[compression.codecs.NAME]` table, which `objectcache calibrate quality` writes."""

    ABOUT: ClassVar[str] = "any number of codecs; default: kivi8-1, k8v4-1, kivi4-1"
    quality: Annotated[
        float, shown(0.96, "of answers, 1 is that of exact KV; `calibrate quality` measures it", ge=0, le=1)
    ]
    decoded_bytes_per_s: Annotated[Rate, shown(4e9, gt=0)]


Quality = Annotated[float, Field(ge=0, le=1)]
ModelName = Annotated[str, Field(pattern=f"^{MODEL_LABEL.pattern}$")]
ContentClass = Annotated[str, Field(pattern=f"^{CONTENT_CLASS.pattern}$")]


class CompressionConfig(Model):
    """The `[compression]` table. `calibrate theta` writes the rates, `calibrate quality` the codecs, and with
    `--class` the qualities of codecs on content of that class.
    """

    ABOUT: ClassVar[str] = "docs/guides/compression.md"
    policy: Annotated[
        CompressionPolicy, shown("off", '"adaptive": the DRAM tier keeps chunks encoded for readers that accept it')
    ] = CompressionPolicy.OFF
    alpha_s: Annotated[float, shown(1.0, "what quality 1 is worth, in seconds", ge=0, le=1e6)] = 1.0
    memory_bytes_per_s: Annotated[Rate, shown(8e9, "`calibrate theta` measures these two", gt=0)] = 8e9
    home_bytes_per_s: Annotated[Rate, shown(1e9, gt=0)] = 1e9
    losses: Annotated[Path | None, shown("losses.json", "`calibrate quality` writes it")] = None
    codecs: dict[str, CodecConfig] = Field(default_factory=dict)
    classes: Annotated[
        dict[ContentClass, dict[str, Quality]],
        shown({"code": {"kivi4-1": 0.93}}, "any number: qualities of codecs on content of a class"),
    ] = Field(default_factory=dict)
    models: Annotated[
        dict[str, ModelName],
        shown(
            {"kv-cache": "SmolLM2-135M-Instruct"},
            'of buckets whose keys name none; or "worst": the greatest loss of all',
        ),
    ] = Field(default_factory=dict)

    def loss_table(self) -> LossTable:
        """The losses that readers with `max_loss` go by. Raises ConfigError."""
        measured = () if self.losses is None else read_losses(self.losses)
        if self.models and not measured:
            raise ConfigError("[compression]: models: losses names no file that has one")
        return LossTable(measured, self.models)

    def settings(self) -> UtilitySettings | None:
        """The settings; None where nothing is kept encoded. Raises ConfigError."""
        if self.policy is CompressionPolicy.OFF:
            return None
        by_name = {codec.value: codec for codec in TIER_CODECS}
        named = {name for qualities in self.classes.values() for name in qualities}
        if unknown := sorted((set(self.codecs) | named) - set(by_name)):
            raise ConfigError(f"[compression]: codecs: {unknown[0]} is none of {', '.join(by_name)}")
        class_qualities = {
            name: {by_name[codec]: quality for codec, quality in qualities.items()}
            for name, qualities in self.classes.items()
        }
        said = {
            by_name[name]: CodecFigures(each.quality, each.decoded_bytes_per_s) for name, each in self.codecs.items()
        }
        return UtilitySettings(
            codecs=said or DEFAULT_CODECS,
            class_qualities=class_qualities,
            alpha_s=self.alpha_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            home_bytes_per_s=self.home_bytes_per_s,
        )


def read_losses(path: Path) -> tuple[ModelLosses, ...]:
    """The calibrations in a losses file. Raises ConfigError."""
    try:
        with path.open("rb") as opened:
            return parse_losses(opened.read(LOSSES_BYTES_MAX + 1))
    except OSError as error:
        raise ConfigError(f"[compression]: losses: {path}: {error.strerror}") from None
    except WrongLossesError as error:
        raise ConfigError(f"[compression]: losses: {path}: {error}") from None
