"""A model waits for its layers on a device, every bit of them is compared, and what cannot be measured is said."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from bench import cli
from bench.paper.device import bed as beds
from bench.paper.device import model as models
from bench.paper.device.bed import (
    SLOT_COUNT,
    DeviceBed,
    DeviceBedSettings,
    Uploader,
    chunks_of,
    filled_bed,
    place_chunks,
    verify_prefix,
)
from bench.paper.device.command import Landing, model_of
from bench.paper.device.copies import COPIES, CopySettings, measure_copies
from bench.paper.device.model import (
    LOGITS_ERROR_MAX,
    Accelerator,
    CudaAccelerator,
    DeviceError,
    Model,
    Subject,
    make_subject,
    opened,
    poison,
    relative_error,
)
from bench.paper.device.recompute import RECOMPUTE, boundary_row, paper_added_s
from bench.paper.device.ttft import judged_logits
from bench.paper.tables import TOKEN_LAYER_BYTES, table_a1_a2
from bench.paper.ttft.results import Case, Scale, System, Task
from bench.paper.ttft.run import TTFT
from descriptors.errors import ChunkUnavailable
from nixl_client.client import Transport
from nixl_client.connectors.transformers import chunks_from_cache
from nixl_client.transports import shared_memory
from objectcache.calibration.compute.layer import Device
from objectcache.calibration.content import Bytes, VerificationError
from objectcache.calibration.servers import LocalServer

SHAPE, VOCABULARY = model_of("llama-3.1-8b", True)
SCALE = Scale(SHAPE.token_layer_bytes / TOKEN_LAYER_BYTES)
CHUNK_TOKENS = 64
CASE = Case("1K", 0.875, CHUNK_TOKENS, 0.1)
SHORT = Case("1K", 0.5, CHUNK_TOKENS, 0.1)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """A tiny model that has read 1024 tokens."""
    with opened(Device.CPU) as accelerator:
        model = Model(SHAPE, VOCABULARY, accelerator, 1, 1024)
        yield make_subject(model, 1024, CASE.cached_tokens, 1)


@pytest.fixture(scope="module")
def bed(subject: Subject) -> Iterator[DeviceBed]:
    """A test leaves the bed as it found it."""
    with open_bed(subject, Transport.SHM) as made:
        yield made


@contextmanager
def open_bed(subject: Subject, transport: Transport, landing: Landing = Landing.HOST) -> Iterator[DeviceBed]:
    """CASE's chunks in a server of their own."""
    with filled_bed(subject, CASE, DeviceBedSettings(SCALE, transport, landing)) as bed:
        yield bed


def parse(*arguments: str) -> argparse.Namespace:
    """Options as the command line gives them."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for experiment in (TTFT, RECOMPUTE, COPIES):
        experiment.add(commands)
    return parser.parse_args(arguments)


@dataclass
class Recorder:
    """An accelerator that only writes down what lanes are told to do."""

    said: list[str] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    title: str = "recorder"
    lanes: int = 0
    marks: int = 0
    current: str = "main"

    def lane(self) -> Callable[[], AbstractContextManager[None]]:
        """Named in the sequence they are made in; what is said within one is said of it."""
        self.lanes += 1
        name = f"lane{self.lanes}"

        @contextmanager
        def entered() -> Iterator[None]:
            before, self.current = self.current, name
            yield
            self.current = before

        return entered

    def mark(self) -> float:
        """A number."""
        self.marks += 1
        self.said.append(f"{self.current}: mark {self.marks}")
        return float(self.marks)

    def wait(self, mark: float) -> None:
        """That number."""
        self.said.append(f"{self.current}: wait {int(mark)}")

    def elapsed_s(self, first: float, last: float) -> float:
        """In marks."""
        return last - first

    def synchronize(self) -> None:
        """All is done."""
        self.said.append("synchronize")

    def pinned(self, memory: np.ndarray) -> AbstractContextManager[torch.Tensor]:
        """Not asked for here."""
        raise NotImplementedError


@pytest.mark.slow
def test_ttft_smoke_measures_all_systems_and_verifies(tmp_path: Path) -> None:
    """CI has no GPU: the same code on the CPU. Whoever reads the JSON relies on these names."""
    file, charts = tmp_path / "out.json", tmp_path / "charts"
    options = ("--device", "cpu", "--smoke", "--hits", "87.5", "--json", str(file), "--plot", str(charts))
    assert cli.run(["ttft", *options]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["logits"] == {"error_max": pytest.approx(0, abs=LOGITS_ERROR_MAX), "limit": 0.05, "ok": True}
    assert result["machine"]["torch"] == torch.__version__
    assert [cell["system"] for cell in result["cells"]] == [system.value for system in System]
    assert all(len(cell["logits_errors"]) == cell["sample_count"] == 1 for cell in result["cells"])
    assert result["overhead"]["1K"]["87.5"]["64"]["ratio"]["median"] > 0
    assert {each["system"] for each in result["figures"]["13"]} == {s.value for s in System} - {"opt_local_lw"}
    (baseline,) = result["baselines"]
    assert baseline["shows_wrong_values"] is True
    assert len(baseline["recompute_s"]) == 2
    assert [chart.name for chart in charts.iterdir()] == ["figure-13.png"]


@pytest.mark.slow
def test_recompute_smoke_measures_every_boundary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for TTFT."""
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert cli.run(["recompute", "--device", "cpu", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    assert "Table A6" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [each["hit_rate"] for each in result["boundaries"]] == [0.5, 0.875]
    coarse = result["boundaries"][0]["by_chunk_tokens"]["512"]
    assert coarse["reused_tokens"] == 0
    assert coarse["sample_count"] == len(coarse["samples_s"]) == 1
    assert result["table_a6"][0]["added_operations"] > 0
    assert chart.stat().st_size > 0


@pytest.mark.slow
def test_copies_smoke_measures_and_compares_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for TTFT."""
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert cli.run(["copies", "--device", "cpu", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    assert "everything verified" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [each["block_bytes"] for each in result["blocks"]] == [65536, 131072, 262144]
    for each in result["blocks"]:
        assert len(each["copy_s"]) == len(each["call_s"]) == each["sample_count"] == 5
        assert (each["p50_s"], each["p99_s"]) == (sorted(each["call_s"])[2], max(each["call_s"]))
    assert chart.stat().st_size > 0


def test_a_model_is_divided_by_its_scale() -> None:
    """So that a CPU, too, shows what coarse chunks cost beside the rest."""
    model, vocabulary = model_of("llama-3.1-8b", False, 8)
    assert (model.num_layers, model.hidden, model.heads, model.kv_heads, model.head_dim) == (4, 512, 4, 1, 128)
    assert (model.intermediate, vocabulary) == (1792, 16032)
    assert model_of("llama-3.1-8b", False)[0].num_layers == 32


@pytest.mark.parametrize("bench", ["ttft", "recompute", "copies"])
def test_without_a_gpu_one_line_says_so(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs it on the wrong machine learns that, and so does a script."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = parse(bench, "--device", "cuda")
    assert options.command(options) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"objectcache bench: no CUDA device: torch {torch.__version__} sees none here\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ttft", "--device", "cpu"], "pass --smoke"),
        (["ttft", "--device", "cpu", "--smoke", "--landing", "device"], "needs --transport ucx"),
        (["recompute", "--device", "cpu", "--smoke", "--json", "/no/such/folder/out"], "no such folder"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is made."""
    options = parse(*arguments)
    assert options.command(options) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["ttft", "--systems", "none"], ["recompute", "-G", "64"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    """A cost needs two sizes to lie between."""
    with pytest.raises(SystemExit):
        parse(*arguments)


def test_the_baseline_is_measured_whatever_systems_are_chosen() -> None:
    """Every figure is over it."""
    assert parse("ttft", "--systems", "s3_agg_lw").systems == (System.OPT_LOCAL_LW, System.S3_AGG_LW)


def check_every_system(bed: DeviceBed) -> None:
    """For a prefix and for the beginning of one."""
    for case in (CASE, SHORT):
        for system in System:
            run = bed.run(Task(case, system))
            assert run.logits_error <= LOGITS_ERROR_MAX
            assert run.is_first_token_same
            assert len(run.ready_s) == SHAPE.num_layers


@pytest.mark.slow
def test_shared_memory_brings_the_kv(bed: DeviceBed) -> None:
    """Every system's, bit for bit: `run` compares."""
    check_every_system(bed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "landing"), [(Transport.HTTP, Landing.HOST), (Transport.UCX, Landing.DEVICE)], ids=["http", "ucx"]
)
def test_other_transports_bring_the_same(subject: Subject, transport: Transport, landing: Landing) -> None:
    """Into the host's memory, and into what stands for the device's."""
    with open_bed(subject, transport, landing) as bed:
        check_every_system(bed)


def test_a_fetch_that_fails_ends_the_run_and_spoils_no_other(bed: DeviceBed) -> None:
    """The thread that carries layers must not be left waiting, nor write into the next run's cache."""
    wrong = replace(bed, keys=(*bed.keys[:-1], "device/none"))
    with pytest.raises(ChunkUnavailable):
        wrong.run(Task(CASE, System.S3_AGG_LW))
    assert bed.run(Task(CASE, System.S3_AGG_LW)).is_first_token_same


def test_a_model_that_fails_ends_the_fetch(bed: DeviceBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may write into the buffers of a run that is over."""

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    for system in (System.S3_AGG_LW, System.LOCAL_DRAM_LW):
        with monkeypatch.context() as patched:
            patched.setattr(models, "_attended", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                bed.run(Task(CASE, system))
        assert bed.run(Task(CASE, system)).is_first_token_same


@pytest.mark.slow
def test_chunks_of_another_prompt_are_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong KV must not give a figure, whatever the logits look like."""
    store = beds.store_bodies

    def store_rolled(server: LocalServer, keys: Sequence[str], body: Callable[[int], Bytes], *others: Any) -> None:
        store(server, keys, lambda index: body(index - 1), *others)

    monkeypatch.setattr(beds, "store_bodies", store_rolled)
    file = tmp_path / "out.json"
    options = ("--device", "cpu", "--smoke", "--hits", "87.5", "--systems", "s3_agg_lw", "--json", str(file))
    assert cli.run(["ttft", *options]) == 1
    assert "FAILED: layer 0: wrong KV on the device" in capsys.readouterr().out
    assert json.loads(file.read_text())["verified"] is False


def test_wrong_values_show_in_the_logits(subject: Subject) -> None:
    """Else the comparison of logits would prove nothing. The prefix stays as it was."""
    subject.cache.copy_(subject.reference)  # other tests load prefixes there
    assert subject.blind_error > 2 * LOGITS_ERROR_MAX
    assert subject.baseline()["shows_wrong_values"]
    assert torch.equal(subject.cache[:, :, : SHORT.cached_tokens], subject.reference[:, :, : SHORT.cached_tokens])


def test_logits_that_are_not_numbers_are_wrong(subject: Subject) -> None:
    """A comparison with NaN is false both ways."""
    assert not judged_logits([{"logits_errors": [0.0, float("nan")]}, {"logits_errors": [0.01]}])["ok"]
    assert judged_logits([]) == {"error_max": None, "limit": LOGITS_ERROR_MAX, "ok": True}
    assert np.isnan(subject.logits_error(subject.logits * float("nan")))


def test_the_model_is_llama() -> None:
    """Hugging Face's with the same weights gives the same logits, and the same KV."""
    with opened(Device.CPU) as accelerator:
        ours = Model(SHAPE, VOCABULARY, accelerator, 3, 128, torch.float32)
        tokens = ours.random_tokens(128, 4)
        cache = ours.empty_cache(128)
        logits = ours.prefill(tokens, cache, 0, lambda _: None)
        theirs = _as_transformers(ours)
        past = DynamicCache(config=theirs.config)
        with torch.inference_mode():
            expected = theirs(tokens[None], past_key_values=past).logits[0, -1].float()
    assert relative_error(logits, expected) < 1e-3
    expected_chunks = torch.from_numpy(chunks_from_cache(past, 16)).view(torch.float32)
    assert relative_error(chunks_of(cache, 16, 0, 8).view(torch.float32), expected_chunks) < 1e-3


def test_a_loaded_prefix_changes_the_work_and_not_the_result(subject: Subject) -> None:
    """And every layer is waited for once, in turn, before its own attention."""
    cached = SHORT.cached_tokens
    poison(subject.cache)
    asked: list[int] = []

    def load(layer_index: int) -> None:
        asked.append(layer_index)
        subject.cache[layer_index, :, :cached] = subject.reference[layer_index, :, :cached]

    logits = subject.model.prefill(subject.tokens, subject.cache, cached, load)
    assert asked == list(range(SHAPE.num_layers))
    assert subject.logits_error(logits) <= LOGITS_ERROR_MAX
    poison(subject.cache)
    assert torch.isnan(subject.model.prefill(subject.tokens, subject.cache, cached, lambda _: None)).any()


def test_attention_that_sees_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's kernel may take a mask's description for another: top-left for bottom-right, say."""
    upper_left = torch.ones(32, 96, dtype=torch.bool).tril()
    monkeypatch.setattr(Model, "_mask", lambda *_: upper_left)
    with opened(Device.CPU) as accelerator, pytest.raises(DeviceError, match="attention over a prefix"):
        Model(SHAPE, VOCABULARY, accelerator, 1, 128)


def test_chunks_come_back_to_where_they_were() -> None:
    """Whole and by layer; one wrong bit is found."""
    cache = torch.randint(-(1 << 15), 1 << 15, (3, 2, 20, 2, 4), dtype=torch.int16).view(torch.bfloat16)
    chunks = chunks_of(cache, 4, 0, 4)
    assert chunks.shape == (4, 3 * 2 * 4 * 2 * 4 * 2)
    assert torch.equal(chunks[1:3], chunks_of(cache, 4, 1, 2))
    by_chunks, by_layers = torch.empty_like(cache), torch.empty_like(cache)
    for each in (by_chunks, by_layers):
        poison(each)
    place_chunks(by_chunks, 0, 4, chunks[:3].flatten())
    place_chunks(by_chunks, 3, 4, chunks[3:].flatten())
    for layer_index in range(3):
        slices = chunks.view(4, 3, -1)[:, layer_index].contiguous().flatten()
        place_chunks(by_layers[layer_index : layer_index + 1], 0, 4, slices)
    for each in (by_chunks, by_layers):
        verify_prefix(each, cache, 16)
        assert torch.isnan(each[:, :, 16:]).all()
    by_layers[2, 1, 15, 1, 3] = -by_layers[2, 1, 15, 1, 3]
    with pytest.raises(VerificationError, match="layer 2"):
        verify_prefix(by_layers, cache, 16)


def test_a_slot_is_filled_again_only_after_it_was_emptied() -> None:
    """Lane 1 copies up, lane 2 puts in order: copy, order, and for the fourth copy the first slot's order."""
    recorder = Recorder()
    uploader = Uploader(recorder, 8)
    host = torch.arange(8, dtype=torch.uint8)
    placed: list[torch.Tensor] = []
    marks = [uploader.staged(host[:4], placed.append) for _ in range(SLOT_COUNT + 1)]
    first = ["lane1: mark 1", "lane2: wait 1", "lane2: mark 2"]
    assert recorder.said[:3] == first
    assert recorder.said[9:] == ["lane1: wait 2", "lane1: mark 7", "lane2: wait 7", "lane2: mark 8"]
    assert [int(mark) for mark in marks] == [2, 4, 6, 8]
    assert placed[3].data_ptr() == placed[0].data_ptr() != placed[1].data_ptr()
    assert all(torch.equal(each, host[:4]) for each in placed)


def test_copies_without_a_slot_are_marked_in_the_lane_that_makes_them() -> None:
    """What opt-local-LW and device memory do."""
    recorder = Recorder()
    uploader = Uploader(recorder, 8)
    into, host = torch.zeros(4), torch.arange(4.0)
    uploader.straight([(into, host)])
    uploader.placed(lambda: recorder.said.append(f"{recorder.current}: place"))
    assert torch.equal(into, host)
    assert recorder.said == ["lane1: mark 1", "lane2: place", "lane2: mark 2"]


@dataclass
class FakeRuntime:
    """CUDA's functions for pinned memory."""

    said: list[tuple[str, int]] = field(default_factory=list)
    register_status: int = 0
    unregister_status: int = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """As CUDA names it."""
        assert flags == 0
        self.said.append(("register", nbytes))
        return self.register_status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """As CUDA names it."""
        self.said.append(("unregister", address))
        return self.unregister_status


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Instead of a driver."""
    fake = FakeRuntime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: fake)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: fake.said.append(("synchronize", 0)))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "fake")
    monkeypatch.setattr("torch.Tensor.is_pinned", lambda _: True)
    return fake


def test_shared_memory_is_pinned_and_given_back_after_the_device_is_done(runtime: FakeRuntime) -> None:
    """Memory that is unmapped while the driver still has it cannot be trusted; also when the work failed."""
    memory = shared_memory.allocate(100)
    with pytest.raises(ZeroDivisionError), CudaAccelerator().pinned(memory) as tensor:
        assert tensor.data_ptr() / 0
    assert runtime.said == [("register", 100), ("synchronize", 0), ("unregister", memory.ctypes.data)]


@pytest.mark.parametrize(("status", "reason"), [("register_status", "does not pin 100"), ("unregister_status", "back")])
def test_a_driver_that_refuses_is_believed(runtime: FakeRuntime, status: str, reason: str) -> None:
    """Copies from memory that is not pinned would be timed as if it were."""
    setattr(runtime, status, 2)
    with pytest.raises(DeviceError, match=f"{reason}.*error 2"), CudaAccelerator().pinned(shared_memory.allocate(100)):
        pass


def test_memory_that_torch_does_not_see_as_pinned_is_refused(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies would block; what was registered is given back."""
    monkeypatch.setattr("torch.Tensor.is_pinned", lambda _: False)
    with pytest.raises(DeviceError, match="not see"), CudaAccelerator().pinned(shared_memory.allocate(100)):
        pass
    assert [what for what, _ in runtime.said] == ["register", "synchronize", "unregister"]


def test_a_mark_of_the_host_is_no_event(runtime: FakeRuntime) -> None:
    """Waiting for nothing would be a race."""
    with pytest.raises(RuntimeError, match="another accelerator"):
        CudaAccelerator().elapsed_s(1.0, 2.0)


def test_the_cpu_is_used_with_one_thread_and_given_back() -> None:
    """Other tests of the process keep their threads."""
    before = torch.get_num_threads()
    with opened(Device.CPU) as accelerator:
        assert torch.get_num_threads() == 1
        assert not isinstance(accelerator, CudaAccelerator)
    assert torch.get_num_threads() == before


def test_copies_that_come_out_wrong_are_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of wrong bytes is no figure."""
    accelerator = Accelerator()
    monkeypatch.setattr("torch.equal", lambda *_: False)
    result = measure_copies(CopySettings((65536,), 1, 1 << 20, 1 << 17), accelerator, {})
    assert result["problem"] == "blocks of 65536 bytes: wrong bytes on the device"
    assert result["blocks"] == []


def test_the_papers_costs_stand_beside_ours() -> None:
    """G=512 over G=16; Table A6 is their mean: 31.0 ± 5.5 ms on the A100 at 4K."""
    rows = [row for row in table_a1_a2() if (row.model, row.gpu, row.context) == ("Llama-3.1-8B", "A100", "4K")]
    samples_s = {16: (0.1, 0.2), 512: (0.3, 0.5)}
    boundaries = [boundary_row("llama-3.1-8b", "4K", row.hit_rate, samples_s) for row in rows]
    found = [each["paper_added_s"]["A100"] * 1e3 for each in boundaries]
    assert statistics.mean(found) == pytest.approx(31.0, abs=0.05)
    assert statistics.stdev(found) == pytest.approx(5.5, abs=0.05)
    assert boundaries[0]["by_chunk_tokens"]["512"]["added_s"]["median"] == pytest.approx(0.25)
    assert paper_added_s("llama-3.1-8b", "A100", "1K", 0.5) is None


def _as_transformers(ours: Model) -> transformers.LlamaForCausalLM:
    """Hugging Face's Llama with our weights."""
    shape = ours.shape
    config = transformers.LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=models.NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": models.ROTARY_BASE},
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).to(ours.dtype).eval()
    weights = {"model.embed_tokens.weight": ours.embedding, "model.norm.weight": ours.norm, "lm_head.weight": ours.head}
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        for name, tensor in (
            ("self_attn.q_proj", layer["query"]),
            ("self_attn.k_proj", layer["key"]),
            ("self_attn.v_proj", layer["value"]),
            ("self_attn.o_proj", layer["out"]),
            ("mlp.gate_proj", layer["gate"]),
            ("mlp.up_proj", layer["up"]),
            ("mlp.down_proj", layer["down"]),
            ("input_layernorm", layer["norms"][0]),
            ("post_attention_layernorm", layer["norms"][1]),
        ):
            weights[f"{prefix}{name}.weight"] = tensor
    theirs.load_state_dict(weights, strict=True)
    return theirs
