"""The `compute` object of a lookup and the `advice` in its answer, as JSON (docs/reference/protocol.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from descriptors.descriptor import (
    CHUNK_COUNT_MAX,
    CHUNK_TOKENS_MAX,
    LAYER_COMPUTE_US_MAX,
    NUM_LAYERS_MAX,
    PER_LAYER_CHUNK_BYTES_MAX,
    Delivery,
)
from descriptors.json_body import FIELD_NAME_CHARACTERS_MAX, Refuse
from descriptors.layout import ChunkLayout
from descriptors.recompute import (
    Advice,
    AdviceRequest,
    Choice,
    DeliveryCosts,
    MeasuredPrefill,
    PrefillCosts,
    measured_problem,
)

CONTEXT_TOKENS_MAX = CHUNK_COUNT_MAX * CHUNK_TOKENS_MAX
MEASURED_POINTS_MAX = 1_024
PREFILL_US_MAX = NUM_LAYERS_MAX * LAYER_COMPUTE_US_MAX
COST_S_MAX = 3_600
RATE_MIN, RATE_MAX = 1, 1e15
"""The least and the greatest rate, in bytes/s."""

_Seconds = Annotated[float, Field(ge=0, le=COST_S_MAX, allow_inf_nan=False)]
_Microseconds = Annotated[float, Field(ge=0, le=LAYER_COMPUTE_US_MAX, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=RATE_MIN, le=RATE_MAX, allow_inf_nan=False)]
_Point = Annotated[list[Annotated[int, Field(ge=0, le=PREFILL_US_MAX)]], Field(min_length=2, max_length=2)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _CostsModel(_Model):
    request_s: _Seconds = 0.0
    chunk_s: _Seconds = 0.0
    layer_s: _Seconds = 0.0
    bytes_per_s: _Rate | None = None


class _BothCostsModel(_Model):
    layer_major: _CostsModel = _CostsModel()
    chunk_major: _CostsModel = _CostsModel()


class _ComputeModel(_Model):
    context_tokens: Annotated[int, Field(ge=1, le=CONTEXT_TOKENS_MAX)]
    num_layers: Annotated[int, Field(ge=1, le=NUM_LAYERS_MAX)]
    chunk_tokens: Annotated[int, Field(ge=1, le=CHUNK_TOKENS_MAX)]
    per_layer_chunk_bytes: Annotated[int, Field(ge=1, le=PER_LAYER_CHUNK_BYTES_MAX)]
    request_us: _Microseconds | None = None
    token_us: _Microseconds | None = None
    token_pair_us: _Microseconds | None = None
    measured: Annotated[list[_Point], Field(min_length=1, max_length=MEASURED_POINTS_MAX, fail_fast=True)] | None = None
    bytes_per_s: _Rate | None = None
    costs: _BothCostsModel = _BothCostsModel()


def parse_compute(fields: dict[str, object], refuse: Refuse) -> AdviceRequest:
    """The request in a `compute` object. Raises the error that `refuse` makes for the first problem."""
    _refuse_unknown(fields, refuse)
    try:
        model = _ComputeModel.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in ("compute", *first["loc"]))
        problem = "is not a JSON object" if first["type"] == "model_type" else f"is not acceptable: {first['msg']}"
        raise refuse(field, problem) from None
    return AdviceRequest(
        context_tokens=model.context_tokens,
        layout=ChunkLayout(model.num_layers, model.chunk_tokens, model.per_layer_chunk_bytes),
        prefill=_prefill(model, refuse),
        bytes_per_s=model.bytes_per_s or 0.0,
        layer_major=_costs(model.costs.layer_major),
        chunk_major=_costs(model.costs.chunk_major),
    )


def compute_fields(request: AdviceRequest) -> dict[str, object]:
    """The object `parse_compute` reads."""
    layout, prefill = request.layout, request.prefill
    fields: dict[str, object] = {
        "context_tokens": request.context_tokens,
        "num_layers": layout.num_layers,
        "chunk_tokens": layout.chunk_tokens,
        "per_layer_chunk_bytes": layout.per_layer_chunk_bytes,
    }
    if isinstance(prefill, MeasuredPrefill):
        fields["measured"] = prefill.points
    else:
        fields |= {
            "request_us": prefill.request_us,
            "token_us": prefill.token_us,
            "token_pair_us": prefill.token_pair_us,
        }
    if request.bytes_per_s:
        fields["bytes_per_s"] = request.bytes_per_s
    fields["costs"] = {
        "layer_major": _costs_fields(request.layer_major),
        "chunk_major": _costs_fields(request.chunk_major),
    }
    return fields


def advice_fields(advice: Advice) -> dict[str, object]:
    """The `advice` object."""
    return {
        "choice": advice.choice.value,
        "chunks": advice.chunk_count,
        "delivery": None if advice.delivery is None else advice.delivery.value,
        "ttft_s": {choice.value: seconds for choice, seconds in advice.ttft_s.items()},
        "break_even_bytes_per_s": advice.break_even_bytes_per_s,
        "rate_bytes_per_s": advice.rate_bytes_per_s,
    }


def advice_from_fields(fields: Mapping[str, Any]) -> Advice:
    """The inverse of `advice_fields`. Raises KeyError and ValueError for anything else."""
    delivery = fields["delivery"]
    return Advice(
        choice=Choice(fields["choice"]),
        chunk_count=int(fields["chunks"]),
        delivery=None if delivery is None else Delivery(delivery),
        ttft_s={Choice(name): float(seconds) for name, seconds in fields["ttft_s"].items()},
        break_even_bytes_per_s=fields["break_even_bytes_per_s"],
        rate_bytes_per_s=fields["rate_bytes_per_s"],
    )


def _refuse_unknown(fields: object, refuse: Refuse) -> None:
    """Refuse unknown fields here and not by pydantic, which would describe every one of a million (json_body.py)."""
    _refuse_others(_ComputeModel, fields, "compute", refuse)
    costs = fields.get("costs") if isinstance(fields, dict) else None
    _refuse_others(_BothCostsModel, costs, "compute.costs", refuse)
    for name in _BothCostsModel.model_fields:
        one = costs.get(name) if isinstance(costs, dict) else None
        _refuse_others(_CostsModel, one, f"compute.costs.{name}", refuse)


def _refuse_others(model: type[BaseModel], fields: object, path: str, refuse: Refuse) -> None:
    unknown = (
        next((name for name in fields if name not in model.model_fields), None) if isinstance(fields, dict) else None
    )
    if unknown is not None:
        raise refuse(f"{path}.{unknown[:FIELD_NAME_CHARACTERS_MAX]}", "is not a field of version 1")


def _prefill(model: _ComputeModel, refuse: Refuse) -> PrefillCosts | MeasuredPrefill:
    given = [name for name in ("request_us", "token_us", "token_pair_us") if getattr(model, name) is not None]
    if model.measured is None:
        if model.token_us is None:
            raise refuse("compute.token_us", "is needed, or measured")
        return PrefillCosts(model.token_us, model.token_pair_us or 0.0, model.request_us or 0.0)
    if given:
        raise refuse(f"compute.{given[0]}", "does not go with measured")
    points = tuple((cached, prefill_us) for cached, prefill_us in model.measured)
    problem = measured_problem(points)
    if problem is not None:
        raise refuse("compute.measured", problem)
    return MeasuredPrefill(points)


def _costs(model: _CostsModel) -> DeliveryCosts:
    return DeliveryCosts(model.request_s, model.chunk_s, model.layer_s, model.bytes_per_s or 0.0)


def _costs_fields(costs: DeliveryCosts) -> dict[str, float]:
    fields = {"request_s": costs.request_s, "chunk_s": costs.chunk_s, "layer_s": costs.layer_s}
    return fields | ({"bytes_per_s": costs.bytes_per_s} if costs.bytes_per_s else {})
