"""The page at /_orchestrator/ in a real Chromium: engines, decisions, and who may see them."""

from __future__ import annotations

import shutil

import pytest

from tests.support.orchestrators import ADMIN_TOKEN, canned, orchestrated

async_api = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium")
OVERFLOW = "document.scrollingElement.scrollWidth - window.innerWidth"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_orchestrators_page_shows_engines_and_decisions(width: int) -> None:
    """By keyboard; it fits its window, complains of nothing, and asks for the token again where that is wrong."""
    complaints: list[str] = []
    async with canned(2) as engines, orchestrated(engines) as bed, async_api.async_playwright() as started:
        answers = [await bed.complete([at, *range(40)]) for at in range(3)]
        chromium = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await chromium.new_page(viewport={"width": width, "height": 900})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{bed.url}/_orchestrator/")
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await page.get_by_role("alert").filter(has_text="admin token").wait_for()
        page.on("console", lambda told: complaints.append(told.text) if told.type == "error" else None)
        await page.keyboard.type(ADMIN_TOKEN)
        await page.keyboard.press("Enter")
        await page.locator("#state", has_text="live").wait_for()
        assert await page.locator("#engines tbody tr", has_text="up").count() == 2
        rows = page.locator("#decisions tbody tr")
        assert await rows.count() == 3
        cells = await rows.first.locator("td").all_inner_texts()
        assert cells[1] == answers[-1].engine
        assert cells[3] == "41"
        assert "ms" in cells[8] + cells[9]
        assert await page.evaluate(OVERFLOW) <= 0
        await page.get_by_role("button", name="Sign out").click()
        assert answers[-1].engine not in await page.content()
        await chromium.close()
        assert complaints == []


async def test_the_orchestrators_page_is_public_and_its_status_is_not() -> None:
    async with canned(1) as engines, orchestrated(engines) as bed:
        for name in ("", "status.js", "view.js", "page.css", "icon.svg"):
            answer = await bed.ask("GET", f"/_orchestrator/{name}", headers={})
            assert answer.status == 200
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert (await bed.ask("GET", "/_orchestrator/status", headers={})).status == 401
        assert (await bed.ask("POST", "/_orchestrator/", headers={})).status == 401
