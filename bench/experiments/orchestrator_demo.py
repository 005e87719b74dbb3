"""Two vLLM engines over one store, and an orchestrator: `python -m bench.experiments.orchestrator_demo`.

SmolLM2 answers questions about a document. An engine is registered while it runs, requests go where their prefix is,
and an engine that is killed costs a second attempt.

Exit status 0 when every answer is the one that an engine gives by itself, else 1. Needs `make engines`; three minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.beds.orchestrators import ADMIN, await_engine, orchestrator_process
from bench.beds.ours import Servers, target_of
from bench.beds.processes import BaselineError
from bench.beds.vllm_servers import MODEL, TEXT, VllmServer, vllm_servers
from objectcache.demo.weights import NoWeightsError, models_folder, smollm2

BUCKET = "kv-cache"
DOCUMENT_CHARACTERS = 4000
OUTPUT_TOKENS = 24
ASK_S = 120.0
QUESTIONS = (
    "What is the name of this license?", "Who is the Licensor?", "What is a Contribution?", 'Who is meant by "You"?'
)  # fmt: skip


@dataclass
class Desk:
    """The orchestrator, as a client and an operator see it."""

    url: str

    def ask(self, path: str, document: Any = None) -> tuple[Any, str]:
        """The answer as JSON, and the id of the request."""
        body = None if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json", **(ADMIN if path.startswith("/_orchestrator") else {})}
        asked = urllib.request.Request(f"{self.url}{path}", body, headers)
        with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
            return json.loads(answer.read()), answer.headers.get("x-objectcache-request-id", "")

    def answer(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """The text that a model answers, and the receipt."""
        answer, request_id = self.ask("/v1/chat/completions", chat(prompt))
        receipt, _ = self.ask(f"/_orchestrator/receipts/{request_id}")
        return said(answer), receipt


def chat(prompt: str) -> dict[str, Any]:
    """The request of one answer."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0}


def said(answer: Any) -> str:
    """The text of an answer."""
    return str(answer["choices"][0]["message"]["content"])


def told(receipt: dict[str, Any], names: dict[str, str]) -> str:
    """A line about one request."""
    best = receipt["predictions"][0]
    return (
        f"engine {names[receipt['engine']]} ({receipt['reason']}): {best['held_tokens']} tokens held, "
        f"{best['load_tokens']} to load; first token predicted after {best['ttft_s'] * 1e3:.0f} ms, whole answer "
        f"after {receipt['total_s'] * 1e3:.0f} ms"
        + (f", attempts {len(receipt['attempts'])}" if len(receipt["attempts"]) > 1 else "")
    )


def main() -> int:
    """Run it."""
    document = TEXT.read_text()[:DOCUMENT_CHARACTERS]
    with tempfile.TemporaryDirectory(prefix="objectcache-demo-") as name, ExitStack() as stack:
        folder = Path(name)
        servers = Servers(stack, folder, "demo")
        store = servers.serve()
        store.make_bucket(BUCKET)
        target = target_of(store, BUCKET)
        model = smollm2(models_folder())
        print("starting two vLLM servers: about a minute", flush=True)
        engines = stack.enter_context(vllm_servers(folder, model, 2, target))
        environment = {"AWS_ACCESS_KEY_ID": target.access_key, "AWS_SECRET_ACCESS_KEY": target.secret_key}
        options = ("--store", target.url, "--data", str(folder / "metadata"))
        url, _ = stack.enter_context(orchestrator_process([engines[0].url], *options, environment=environment))
        await_engine(url)
        return shown(Desk(url), engines, document)


def shown(desk: Desk, engines: Sequence[VllmServer], document: str) -> int:
    """The three scenes; 0 where every answer is right."""
    names = {engine.url: letter for engine, letter in zip(engines, "ab", strict=True)}
    prompts = [f"{document}\n\n{question}" for question in QUESTIONS]
    answers: list[tuple[str, str]] = []

    print("\n1. register: the orchestrator knows engine a; engine b joins while it runs")
    text, receipt = desk.answer(prompts[0])
    answers.append((prompts[0], text))
    print(f"   {QUESTIONS[0]} {text}\n   {told(receipt, names)}")
    desk.ask("/_orchestrator/engines", {"url": engines[1].url})
    for _ in range(100):
        states, _ = desk.ask("/_orchestrator/status")
        if all(each["status"] == "up" and each["has_store"] for each in states["engines"]):
            break
        time.sleep(0.1)
    print("   engines: " + ", ".join(f"{names[each['name']]} {each['status']}" for each in states["engines"]))

    print("\n2. route: questions about the same document go where its prefix is")
    for question, prompt in zip(QUESTIONS[1:3], prompts[1:3], strict=True):
        text, receipt = desk.answer(prompt)
        answers.append((prompt, text))
        print(f"   {question} {text}\n   {told(receipt, names)}")
    home = next(engine for engine in engines if engine.url == receipt["engine"])

    print(f"\n3. fail: engine {names[home.url]} is killed; the prefix is in the store")
    home.kill()
    text, receipt = desk.answer(prompts[3])
    answers.append((prompts[3], text))
    print(f"   {QUESTIONS[3]} {text}\n   {told(receipt, names)}")

    other = next(engine for engine in engines if engine is not home)
    wrong = 0
    for prompt, text in answers:
        wrong += said(other.post("/v1/chat/completions", chat(prompt))) != text
    print(f"\n{len(answers) - wrong} of {len(answers)} answers are those of an engine that was asked directly")
    return 1 if wrong or receipt["engine"] != other.url else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BaselineError, NoWeightsError) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
