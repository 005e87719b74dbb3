"""The device of `bench ttft --device`, `recompute` and `copies` on the command line.

Imports torch only where a device is asked for: the other benches do without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from bench.beds.processes import BaselineError
from bench.core import options
from bench.core.experiment import WrongUse
from objectcache.calibration.compute.shapes import ModelShape, shape

if TYPE_CHECKING:
    from bench.paper.device.model import Accelerator

CONTEXT_SMOKE = ("1K",)
VOCABULARIES = {"llama-3.1-8b": 128256, "deepseek-r1-7b": 152064}
"""The vocabularies of the models that Tables A1 and A2 have: vocab_size of the same files as
calibration.compute.shapes.
"""
VOCABULARY_SMALL = 512
Origin = Mapping[str, Any]


class Landing(Enum):
    """What the server writes into: pinned host memory, from where layers are copied up, or the device's memory."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """The option of a bench that needs a device."""

    device: str = options.setting("--device", "cuda", choices=("cuda", "cpu"), text="cpu: --smoke only")
    smoke: bool = options.sized(False, True)


def need_torch(asked: str, device: str) -> None:
    """Raises WrongUse where torch is not installed, or does not see the device that was asked for."""
    if importlib.util.find_spec("torch") is None:
        raise WrongUse(f"{asked} needs torch: pip install torch transformers")
    import torch

    from objectcache.calibration.compute.layer import Device, is_present

    if not is_present(Device(device)):
        raise WrongUse(f"no CUDA device: torch {torch.__version__} sees none here")


@contextmanager
def opened_device(device: str, is_small: bool, origin: Origin) -> Iterator[tuple[Accelerator, Origin]]:
    """The device, and the origin with its software. What torch and CUDA raise is a baseline's failure here. Raises
    WrongUse where the device cannot be had.
    """
    if device == "cpu" and not is_small:
        raise WrongUse("--device cpu only tries the code out: pass --smoke, or --device cuda")
    need_torch(f"--device {device}", device)
    import torch

    from bench.paper.device.model import DeviceError, opened
    from objectcache.calibration.compute.layer import Device

    machine = {**origin["machine"], "torch": str(torch.__version__), "cuda": torch.version.cuda}
    try:
        with opened(Device(device)) as accelerator:
            yield accelerator, {**origin, "machine": machine}
    except (DeviceError, RuntimeError) as error:
        raise BaselineError(str(error)) from error


def model_of(name: str, is_smoke: bool, scale: int = 1) -> tuple[ModelShape, int]:
    """The model's shape and vocabulary; for smoke runs as many layers, everything else tiny. With `scale` the layers,
    the heads, the width and the vocabulary are divided by it.
    """
    model = shape(name)
    if scale > 1 and not is_smoke:
        sizes = ("num_layers", "hidden", "heads", "kv_heads", "intermediate")
        smaller = {size: max(1, getattr(model, size) // scale) for size in sizes}
        return replace(model, **smaller), VOCABULARIES[name] // scale
    if not is_smoke:
        return model, VOCABULARIES[name]
    return replace(model, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128), VOCABULARY_SMALL
