"""What an engine's metrics say."""

from __future__ import annotations

import pytest

from descriptors.descriptor import Accept
from descriptors.layout import ChunkLayout
from descriptors.recompute import DeliveryCosts, PrefillCosts
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm.published import published_costs, published_deployment
from nixl_client.connectors.vllm_tier.rules.published import TierNames
from objectcache.orchestrator.rules.engine_metrics import (
    LINE_BYTES_MAX,
    LINES_BYTES_MAX,
    SEARCHED_BYTES,
    EngineReport,
    read_metrics,
)
from objectcache.orchestrator.rules.openai_requests import OUTPUT_TOKENS_DEFAULT


def read(text: str) -> EngineReport:
    return read_metrics(text.encode())


VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 50.0
vllm:request_generation_tokens_bucket{engine="0",le="20.0",model_name="m"} 1.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 3.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 90.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="1000"} 1.0
"""


@pytest.mark.parametrize(
    "text",
    [
        "vllm:num_requests_running{" + ",".join(f'a{at}="1"' for at in range(2000)) + "} 1.0\n",
        "vllm:num_requests_running{" + ",".join(f'{at:x}=""' for at in range(100)) + "} 1.0\n",
        'vllm:num_requests_running{engine="0"} 1.0\n' * 1001,
    ],
)
def test_metrics_that_would_take_long_to_parse_are_not_read(text: str) -> None:
    """A line of 60,000 labels took 11 s, in which the event loop stood still."""
    with pytest.raises(ValueError, match="that matter"):
        read(text)


def test_lines_that_do_not_matter_may_be_many_and_long() -> None:
    other = "vllm:other{" + ",".join(f'a{at}="1"' for at in range(5000)) + "} 1.0\n"
    assert read(VLLM.lstrip() + other * 100).running == 4


def test_the_queue_and_the_room_of_all_ranks() -> None:
    report = read(VLLM)
    assert (report.running, report.waiting, report.kv_tokens, report.block_tokens) == (4, 2, 16_000, 16)
    assert (report.generated_tokens, report.answer_count) == (150.0, 3.0)
    assert report.published is None
    assert read("").running == 0


def test_an_answer_is_taken_to_be_as_long_as_others_were_and_no_longer_than_it_may_be() -> None:
    """A client's bound says little: one field of a small request made it look as large as an engine."""
    known = EngineReport(0, 0, generated_tokens=32_000.0, answer_count=100.0)
    assert [known.output_tokens(allowed) for allowed in (4, 4096, 1 << 30)] == [4, 320, 320]
    unknown = EngineReport(0, 0, generated_tokens=32_000.0, answer_count=1.0)
    assert [unknown.output_tokens(allowed) for allowed in (4, 4096)] == [4, OUTPUT_TOKENS_DEFAULT]


def test_a_connector_shows_before_it_publishes_and_costs_of_zero_are_none() -> None:
    assert read('vllm:objectcache_lookups_total{engine="0"} 0.0').has_connector
    assert not read(VLLM).has_connector
    info = (
        'vllm:objectcache_deployment_info{deployment="m",dtype="d",block_tokens="16",tp_size="1",pp_size="1",'
        'num_layers="4",chunk_tokens="16",layer_chunk_bytes="64",endpoint="e",bucket="b"} 1'
    )
    found = read(f"{info}\nvllm:objectcache_cost_token_us 0.0").published
    assert found is not None
    assert found.prefill is None


@pytest.mark.parametrize(
    "accept", [None, Accept(("kivi4-1", "fp8-1"), "bfloat16", 0.12), Accept(("kivi2-1",), "float16")]
)
def test_what_the_connector_publishes_comes_back(accept: Accept | None) -> None:
    """The same document that the connector makes of its deployment, in the form that vLLM's metrics give it."""
    deployment = Deployment('weights "x"\\n', "torch.bfloat16 auto", 16, 2, 1)
    layout, prefill = ChunkLayout(32, 64, 131_072), PrefillCosts(812.5, 0.01, 900.0)
    loads = DeliveryCosts(0.001, 0.0002, 0.0003, 2e9)
    document = published_deployment(deployment, layout, "http://store:9000", "kv", accept)
    escaped = {
        name: str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        for name, value in document.items()
    }
    labels = ",".join(f'{name}="{value}"' for name, value in escaped.items())
    lines = [f'vllm:objectcache_deployment_info{{engine="0",{labels}}} 1.0']
    lines += [
        f'vllm:objectcache_cost_{name}{{engine="0"}} {value}' for name, value in published_costs(prefill, loads).items()
    ]
    found = read("\n".join(lines)).published
    assert found is not None
    assert (found.names, found.layout, found.endpoint, found.bucket) == (
        deployment, layout, "http://store:9000", "kv",
    )  # fmt: skip
    assert (found.prefill, found.loads, found.accept) == (prefill, loads, accept)
    assert read(lines[0].replace('tp_size="2"', 'tp_size="two"')).published is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_size", "1000000000"),
        ("num_layers", "0"),
        ("chunk_tokens", "-1"),
        ("block_tokens", "x"),
        ("accept", "kivi4-1,kivi4-1"),
        ("accept", "NO CODEC"),
        ("element", "int8"),
        ("max_error", "much"),
        ("max_error", "nan"),
        ("max_error", "-1"),
        ("max_loss", "nan"),
        ("max_loss", "-1"),
    ],
)
def test_a_deployment_that_cannot_be_is_none(name: str, value: str) -> None:
    """It would decide about the requests of all engines."""
    labels = {
        "deployment": "m", "dtype": "d", "block_tokens": "16", "tp_size": "1", "pp_size": "1", "num_layers": "4",
        "chunk_tokens": "16", "layer_chunk_bytes": "64", "endpoint": "e", "bucket": "b", "accept": "kivi4-1",
        "element": "bfloat16", "max_error": "", name: value,
    }  # fmt: skip
    text = ",".join(f'{label}="{said}"' for label, said in labels.items())
    assert read(f"vllm:objectcache_deployment_info{{{text}}} 1").published is None


TIER = {
    "space": "vllm/Llama/0123/", "none_hash": "ab" * 32, "group": "1", "hash_tokens": "16", "chunk_tokens": "32",
    "chunk_bytes": "6096", "endpoint": "http://store:9000", "bucket": "kv",
}  # fmt: skip


def tier_line(**changed: str) -> str:
    text = ",".join(f'{name}="{said}"' for name, said in {**TIER, **changed}.items())
    return f"vllm:objectcache_tier_info{{{text}}} 1"


def test_a_tier_publishes_names_and_its_loads_are_over_before_requests_run() -> None:
    former = tier_line(space="vllm/Llama/before/").removesuffix(" 1") + " 0"
    found = read(f"{former}\n{tier_line()}\n{former}").published
    assert found is not None
    assert found.names == TierNames(TIER["space"], bytes.fromhex(TIER["none_hash"]), 1, 16)
    assert found.layout == ChunkLayout(1, 32, 6096)
    assert (found.endpoint, found.bucket, found.prefill, found.accept) == ("http://store:9000", "kv", None, None)


def test_a_connector_that_shares_the_tiers_objects_tells_its_costs() -> None:
    costs = ["vllm:objectcache_cost_token_us 812.5", "vllm:objectcache_cost_load_bytes_per_s 1e9"]
    found = read("\n".join([tier_line(), *costs])).published
    assert found is not None
    assert found.prefill == PrefillCosts(812.5, 0.0, 0.0)
    assert found.loads.bytes_per_s == 1e9
    assert read(f"{tier_line()}\nvllm:objectcache_cost_token_us -1").published is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("space", "kv/Llama/"), ("none_hash", "ab"), ("chunk_tokens", "0"), ("chunk_bytes", "-1"), ("bucket", "b" * 1100)],
)
def test_a_tier_that_cannot_be_is_none(name: str, value: str) -> None:
    assert read(tier_line(**{name: value})).published is None


@pytest.mark.parametrize("cost", ["NaN", "+Inf", "-1", "1e300"])
def test_costs_that_are_no_numbers_are_not_believed(cost: str) -> None:
    info = (
        'vllm:objectcache_deployment_info{deployment="m",dtype="d",block_tokens="16",tp_size="1",pp_size="1",'
        'num_layers="4",chunk_tokens="16",layer_chunk_bytes="64",endpoint="e",bucket="b"} 1'
    )
    assert read(f"{info}\nvllm:objectcache_cost_token_us {cost}").published is None
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:request_generation_tokens_count"):
        for count in (cost, "1e308"):
            with pytest.raises(ValueError, match=name):
                read(f"{name} {count}")


def test_lines_that_matter_are_bounded_in_bytes_together() -> None:
    """A megabyte of quotes took the parser 0.6 s a second, and metrics and events of other engines stood behind it."""
    lines = [f'vllm:cache_config_info{{a="{"x" * (LINE_BYTES_MAX - 40)}"}} 1'] * (LINES_BYTES_MAX // LINE_BYTES_MAX + 5)
    with pytest.raises(ValueError, match=f"over {LINES_BYTES_MAX} bytes"):
        read("\n".join(lines))
    assert read("\n".join([*lines[:8], VLLM])).running == 4


def test_a_line_without_an_end_is_passed_over_and_not_searched() -> None:
    """8 MiB without a line's end held the interpreter for a tenth of a second, each second."""
    filler = b"\xff" * (3 * SEARCHED_BYTES)
    report = read_metrics(b"# " + filler + b"\n" + VLLM.encode() + filler)
    assert (report.running, report.waiting) == (4, 2)
    assert read_metrics(filler) == read("")


def test_lines_are_found_wherever_a_piece_of_the_search_ends() -> None:
    for lines in range(1, 200, 7):
        filler = ("# " + "x" * (SEARCHED_BYTES // 100) + "\n") * lines
        assert read(filler + VLLM + filler + VLLM).running == 8
