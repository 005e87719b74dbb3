"""`objectcache lookup`: an engine that names its chunks, and a store that has some of them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import chunk_keys
from nixl_client.connectors.vllm.naming import Deployment
from objectcache.cli.main import run
from tests.support.chunks import make_chunks
from tests.support.requests import OWNER
from tests.support.servers import Stack

LAYOUT = ChunkLayout(num_layers=2, chunk_tokens=4, per_layer_chunk_bytes=4096)
DEPLOYMENT = Deployment("m", "bfloat16", 4)
TOKENS = list(range(14))


class Engine:
    """Answers as vLLM does, from `documents` by path."""

    def __init__(self, store: str) -> None:
        labels = {
            "deployment": "m", "dtype": "bfloat16", "block_tokens": 4, "tp_size": 1, "pp_size": 1, "num_layers": 2,
            "chunk_tokens": 4, "layer_chunk_bytes": 4096, "endpoint": store, "bucket": "chunks", "accept": "",
            "element": "", "max_error": "",
        }  # fmt: skip
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        self.documents: dict[str, bytes] = {
            "/metrics": f"vllm:objectcache_deployment_info{{{text}}} 1.0\n".encode(),
            "/v1/models": json.dumps({"data": [{"id": "m"}]}).encode(),
            "/tokenize": json.dumps({"tokens": TOKENS}).encode(),
        }
        self.asked: list[dict[str, object]] = []
        self.url = ""


@contextmanager
def playing(engine: Engine) -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            engine.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            body = engine.documents.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def engine(servers: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    for name in ("OBJECTCACHE_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    with playing(Engine(servers.url)) as running:
        yield running


def looked_up(engine: Engine, tmp_path: Path, prompt: str = "a prompt", *words: str) -> dict[str, object]:
    (tmp_path / "prompt.txt").write_text(prompt)
    report = tmp_path / "report.json"
    command = ["lookup", "--engine", engine.url, "--prompt-file", str(tmp_path / "prompt.txt")]
    assert run([*command, "--json", str(report), *words]) == 0
    found: dict[str, object] = json.loads(report.read_text())
    return found


def test_what_is_stored_of_a_prompt_is_told(
    engine: Engine, servers: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    salt = tmp_path.name
    keys = chunk_keys(DEPLOYMENT.namespace(0, "", salt), TOKENS, 4)
    _, chunks = make_chunks(3, LAYOUT)
    asked = json.dumps({"model": "m", "prompt": "a prompt", "cache_salt": salt, "max_tokens": 5})
    found = looked_up(engine, tmp_path, asked)
    assert (found["tokens"], found["chunks"], found["stored_chunks"]) == (14, 3, 0)
    with servers.client("chunks", "http") as client:
        client.put_chunks(keys[:2], list(chunks[:2]))
    found = looked_up(engine, tmp_path, asked)
    assert (found["stored_chunks"], found["stored_tokens"], found["stored_bytes"]) == (2, 8, 2 * LAYOUT.chunk_bytes)
    assert sum(found["tiers"].values()) == 2  # type: ignore[attr-defined]
    assert (found["bucket"], found["endpoint"]) == ("chunks", servers.url)
    assert run(["lookup", "--engine", engine.url, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    said = capsys.readouterr().out
    assert "14 tokens, 3 whole chunks of 4" in said
    assert "2 chunks from the first: 8 tokens (57%), 16 KiB, in chunks at" in said
    places = re.findall(r"([0-9]+) in (?:memory|the data directory)", said)  # equal bytes of others may be in memory
    assert sum(map(int, places)) == 2


MESSAGES = [{"role": "user", "content": "a prompt"}]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (json.dumps({"messages": MESSAGES, "model": "other", "stream": True}), {"messages": MESSAGES}),
        (json.dumps({"prompt": "a prompt", "cache_salt": "s", "n": 2}), {"prompt": "a prompt"}),
        ('{"a": 1}', {"prompt": '{"a": 1}'}),
        ("{not json", {"prompt": "{not json"}),
        ("", {"prompt": ""}),
    ],
)
def test_a_prompt_is_a_text_or_the_body_of_a_request(
    engine: Engine, tmp_path: Path, text: str, asked: dict[str, object]
) -> None:
    looked_up(engine, tmp_path, text)
    assert engine.asked == [{**asked, "model": "m"}]


def test_the_tokens_of_a_request_are_not_asked_for(engine: Engine, tmp_path: Path) -> None:
    assert looked_up(engine, tmp_path, json.dumps({"prompt": list(range(9))}))["tokens"] == 9
    assert engine.asked == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "x", "cache_salt": 5}', "cache_salt must be a text"),
        ('{"prompt": ["x", "y"]}', "prompt must be one text"),
        ('{"prompt": [1, -2]}', "prompt must be one text"),
    ],
)
def test_a_request_that_has_no_one_prompt_is_refused(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (tmp_path / "prompt.txt").write_text(text)
    assert run(["lookup", "--engine", engine.url, "--prompt-file", str(tmp_path / "prompt.txt")]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/metrics", b"", "publishes no names of chunks"),
        ("/metrics", b"vllm:objectcache_deployment_info{" * 10**5, "publishes no names of chunks"),
        ("/metrics", bytes(9 << 20), "answers more than 8 MiB"),
        ("/v1/models", b"[" * 10**6, "not as an engine does"),
        ("/v1/models", b"\xff", "not as an engine does"),
        ("/tokenize", b"{}", "not as an engine does"),
        ("/tokenize", b'{"tokens": [1, -1]}', "answers no tokens"),
        ("/tokenize", b'{"tokens": [true, 1e400]}', "answers no tokens"),
        ("/tokenize", None, "/tokenize answers 404"),
    ],
)
def test_an_engine_that_answers_anything_is_told_in_a_line(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, body: bytes | None, told: str
) -> None:
    (tmp_path / "prompt.txt").write_text("a prompt")
    if body is None:
        del engine.documents[path]
    else:
        engine.documents[path] = body
    assert run(["lookup", "--engine", engine.url, "--prompt-file", str(tmp_path / "prompt.txt")]) == 1
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1


def test_an_engine_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("a prompt")
    assert run(["lookup", "--engine", "http://127.0.0.1:1", "--prompt-file", str(tmp_path / "prompt.txt")]) == 1
    assert "no engine at http://127.0.0.1:1: Connection refused" in capsys.readouterr().err
    assert run(["lookup", "--engine", "nonsense", "--prompt-file", str(tmp_path / "prompt.txt")]) == 1
    assert run(["lookup", "--engine", "http://127.0.0.1:1", "--prompt-file", str(tmp_path / "none")]) == 2
