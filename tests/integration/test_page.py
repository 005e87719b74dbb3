"""The page at /_objectcache/ in a real Chromium: at three widths, light and dark, empty and full, by keyboard.

With OBJECTCACHE_SCREENSHOTS=docs/images the tests write the pictures of the documents there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from descriptors.descriptor import Delivery
from descriptors.headers import CACHE_HEADER
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from tests.support.requests import OWNER, READER
from tests.support.servers import CONFIG, Stack, stack

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
TOKEN = "a-token-of-the-tests-0123"
LAYOUT = ChunkLayout(12, 16, 4096)
MODELS = ("Qwen2.5-7B-Instruct", "SmolLM2-135M-Instruct")
COUNT = 8
PICTURES = ((1280, "light"), (390, "dark"))
SLOW_LINK = f'{CONFIG}\n[gateway]\nmetrics_token = "{TOKEN}"\n[scheduler]\nlink_bytes_per_s = 2_000_000\n'
OVERFLOW = "document.scrollingElement.scrollWidth - window.innerWidth"


@dataclass
class Browser:
    """Chromium, and what it complained about."""

    chromium: Any
    complaints: list[str] = field(default_factory=list)

    @contextmanager
    def page(self, url: str, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
        context = self.chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(f"{url}/_objectcache/")
        try:
            yield page
        finally:
            context.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Browser:
    return Browser(chromium)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack("together", tmp_path_factory.mktemp("empty"), SLOW_LINK) as running:
        yield running


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two models in one cache, one of which is read all the time."""
    with stack("apart", tmp_path_factory.mktemp("full"), SLOW_LINK) as running:
        answer = running.request("PUT", "/kv-cache", headers={CACHE_HEADER: str(64 << 20)})
        assert answer.status == 200
        running.s3().put_object(Bucket="kv-cache", Key="notes/README.md", Body=b"#")
        enough = threading.Event()
        with running.client("kv-cache") as client:
            for model in MODELS:
                space = Namespace(model, "bfloat16", 16)
                keys = chunk_keys(space, range(16 * COUNT), 16)
                chunks = [bytes([index]) * LAYOUT.chunk_bytes for index in range(COUNT)]
                client.put_chunks(keys, chunks, metadata=space.metadata(16))
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
            client.register_buffer(buffer)

            def read() -> None:
                while not enough.is_set():
                    client.lookup(keys)
                    with client.fetch(
                        keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR, layer_compute_us=[5000]
                    ) as fetch:
                        fetch.wait(timeout_s=30)

            reader = threading.Thread(target=read)
            reader.start()
            try:
                yield running
            finally:
                enough.set()
                reader.join()


def sign_in(page: Any, key: tuple[str, str] = OWNER) -> None:
    """By keyboard alone: the first field has the focus."""
    page.keyboard.type(key[0])
    page.keyboard.press("Tab")
    page.keyboard.type(key[1])
    page.keyboard.press("Enter")


def is_live(page: Any) -> None:
    page.get_by_text("live", exact=True).wait_for()


def take_picture(page: Any, width: int, scheme: str) -> None:
    folder = os.environ.get("OBJECTCACHE_SCREENSHOTS")
    if folder and (width, scheme) in PICTURES:
        page.screenshot(path=str(Path(folder) / f"page-{width}-{scheme}.png"), full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390])
def test_the_page_fits_its_window_and_complains_of_nothing(
    browser: Browser, empty: Stack, full: Stack, width: int, scheme: str
) -> None:
    for running in (empty, full):
        with browser.page(running.url, width, scheme) as page:
            assert page.evaluate(OVERFLOW) <= 0
            sign_in(page)
            is_live(page)
            if running is full:
                page.locator("#deliveries tbody tr").nth(3).wait_for()
                page.locator("#cached tbody td", has_text="MiB/s").or_(
                    page.locator("#cached tbody td", has_text="KiB/s")
                ).first.wait_for()
                take_picture(page, width, scheme)
            assert page.evaluate(OVERFLOW) <= 0
            back = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (back == "rgb(18, 22, 28)") == (scheme == "dark")
    assert browser.complaints == []


def test_an_empty_server_says_what_to_do(browser: Browser, empty: Stack) -> None:
    with browser.page(empty.url) as page:
        sign_in(page)
        is_live(page)
        assert "objectcache mb NAME --cache" in page.locator("#cached").inner_text()
        assert "No delivery" in page.locator("#deliveries").inner_text()
        assert "2.0" not in page.locator("#failures").inner_text()


def test_a_full_server_shows_models_layers_stalls_and_errors(browser: Browser, full: Stack) -> None:
    assert full.request("GET", "/kv-cache/no-such-key").status == 404
    with browser.page(full.url) as page:
        sign_in(page)
        is_live(page)
        rows = [row.locator("td").all_inner_texts() for row in page.locator("#cached tbody tr").all()]
        counts = {(row[0] + row[1]).strip(): row[2] for row in rows}
        assert counts == {"kv-cache": str(2 * COUNT + 1), **dict.fromkeys(MODELS, str(COUNT)), "other objects": "1"}
        done = page.locator("#deliveries tbody tr", has_text="done").first
        assert done.locator(".layers > span").count() == LAYOUT.num_layers
        assert done.locator(".layers > .late").count() > 0  # at 2 MB/s a layer takes three times as long as its compute
        assert "ms" in done.locator("td").nth(3).inner_text()
        assert "NoSuchKey" in page.locator("#failures").inner_text()
        assert "shared by slack" in page.locator("#link").inner_text()


def test_a_wrong_key_and_one_without_the_right_are_told_so(browser: Browser, empty: Stack) -> None:
    with browser.page(empty.url) as page:
        page.get_by_role("button", name="Sign in").click()
        assert "Type an access key" in page.get_by_role("alert").inner_text()
        page.get_by_label("Access key").focus()
        sign_in(page, (OWNER[0], "wrong"))
        page.get_by_role("alert").filter(has_text="signature").wait_for()
        page.get_by_label("Access key").fill("")
        page.get_by_label("Access key").focus()
        sign_in(page, READER)
        page.get_by_role("alert").filter(has_text="may not").wait_for()
        assert page.locator("#content").is_hidden()


def test_the_token_opens_the_page_and_signing_out_empties_it(browser: Browser, full: Stack) -> None:
    with browser.page(full.url) as page:
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_label("Token").press("Enter")
        is_live(page)
        page.get_by_role("button", name="Sign out").click()
        assert page.locator("#content").is_hidden()
        assert MODELS[0] not in page.content()
        assert page.get_by_label("Token").input_value() == ""


def test_a_server_that_goes_away_is_told_and_its_figures_stay(browser: Browser, tmp_path: Path) -> None:
    with stack("together", tmp_path, SLOW_LINK) as running, browser.page(running.url) as page:
        sign_in(page)
        is_live(page)
        running.processes[0].terminate()
        running.processes[0].wait()
        page.get_by_text("these are the last figures").wait_for()
        assert page.locator("#servers").get_by_text("this server").is_visible()


def test_what_a_member_says_is_text_and_never_markup(browser: Browser, full: Stack) -> None:
    told = json.loads(full.request("GET", "/_objectcache/status").body)
    hostile = "<img src=x onerror=alert(1)>"
    server = told["storage_servers"][0]
    server["name"] = server["version"] = server["upstream"] = hostile
    server["caches"] = [{**server["caches"][0], "bucket": hostile, "models": {hostile: [1, 1]}}]
    told["gateway"]["failures"] = [
        {"at": 0, "request_id": hostile, "operation": hostile, "bucket": hostile, "status": 500, "code": hostile}
    ]
    with browser.page(full.url) as page:
        page.route("**/_objectcache/status", lambda route: route.fulfill(json=told))
        sign_in(page)
        is_live(page)
        assert page.locator("img").count() == 0
        assert page.locator("#failures tbody td").filter(has_text=hostile).count() == 4


def test_the_pages_own_signature_is_botos(browser: Browser, full: Stack) -> None:
    """The page signs by itself, since browsers have no crypto for pages of plain http."""
    with browser.page(full.url) as page:
        digests = page.evaluate(
            "import('/_objectcache/sigv4.js').then(({ sha256, hmac, hex }) => ["
            "...[0, 1, 55, 56, 63, 64, 65, 119, 120, 1000].map((n) => hex(sha256(new Uint8Array(n).fill(97)))),"
            "hex(hmac(new Uint8Array(100).fill(98), 'text'))])"
        )
    lengths = (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000)
    wanted = [hashlib.sha256(b"a" * length).hexdigest() for length in lengths]
    assert digests == [*wanted, hmac.digest(b"b" * 100, b"text", "sha256").hex()]


def test_the_page_is_public_and_nothing_else_is(full: Stack) -> None:
    for name in ("", "status.js", "sigv4.js", "view.js", "page.css", "icon.svg"):
        answer = full.request("GET", f"/_objectcache/{name}", key=None)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("status", "metrics", "status.html", "../pages/status.js", "__init__.py"):
        assert full.request("GET", f"/_objectcache/{name}", key=None).status == 403
    assert full.request("PUT", "/_objectcache/status.js", key=None).status == 403
