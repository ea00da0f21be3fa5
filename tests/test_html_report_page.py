"""The page in headless Chromium: it renders, its filters and keys work, and it needs no network.

`pytest -s tests/test_html_report_page.py -k first_paint` prints when it is first painted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from html_reports import COSTS, EVIL, H200, KERNEL, SOFTWARE, duelled, fill, poison, searched

from mla_tuner import share
from mla_tuner.evidence import Measurement
from mla_tuner.html import findings, page
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no Chromium was found", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

# Nothing that talks to anybody; as root Chromium has no sandbox.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page; at the end there was no message, no dialog and no request but for the file."""
    heard: list[str] = []
    pages = []

    def open_page(text: str, width: int = 1280, scheme: str = "light") -> Any:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(tab)
        tab.on("console", lambda message: heard.append(message.text))
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("dialog", lambda dialog: (heard.append("a dialog"), dialog.dismiss()))
        tab.on("request", lambda request: heard.append(request.url))
        tab.goto(path.as_uri())
        heard.remove(path.as_uri())
        return tab

    yield open_page
    for tab in pages:
        tab.close()
    assert [text for text in heard if text != "data:,"] == []


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("database") / "t.db")


def render(path: Path) -> str:
    with Store(path, create=False) as store:
        return page.render(findings.of_store(store))


@pytest.fixture(scope="module")
def text(database: Path) -> str:
    return render(database)


def cells(tab: Any) -> list[str]:
    """What a person sees of them."""
    seen = "(all) => all.map((b) => [...b.querySelectorAll('b, small')].map((e) => e.innerText))"
    return [" ".join(each) for each in tab.locator("#heat button").evaluate_all(seen)]


# --- it renders ----------------------------------------------------------------------------------


def test_the_heat_map_has_a_cell_for_each_shape(opened: Open, text: str) -> None:
    tab = opened(text)
    assert tab.locator("#heat thead th").all_inner_texts() == ["Batch", "1K", "4K", "32K"]
    assert cells(tab) == ["1.00x mlx", *["9.80x split x8"] * 5]
    assert tab.locator("#heat button").first.get_attribute("class") == "gain-0"
    name = re.compile("9.80x split x8 ?, context 32K, batch 4")
    assert tab.get_by_role("button", name=name).count() == 1


def test_each_batch_has_its_curves_with_whiskers(opened: Open, text: str) -> None:
    tab = opened(text)
    assert tab.locator("#curves figcaption").all_inner_texts() == ["Batch 1", "Batch 4"]
    panel = tab.locator("#curves figure").first
    assert panel.locator(".curve").count() == 4
    assert panel.locator(".mark").count() == panel.locator(".whisker").count() == 12
    assert "at 32K mlx 512 us, mlx_rows 410 us" in panel.locator("svg").get_attribute("aria-label")
    assert tab.locator("#curves-table tbody tr").count() == 24


def test_a_shape_opens_its_measurements(opened: Open, text: str) -> None:
    tab = opened(text)
    tab.locator("#heat button").last.click()
    found = tab.locator("#bucket").inner_text()
    assert "split x8 r16: 9.80x [9.71, 9.90] over mlx; 209 us, 2.0 % behind the best" in found
    assert "Why: split x8 r16 is 9.8x mlx [9.71, 9.9]." in found
    rows = tab.locator("#bucket tbody tr")
    assert rows.count() == len(COSTS) + 2
    assert rows.first.inner_text().split("\t")[0] == "split x16 r16"
    assert tab.locator("#bucket .won").count() == 2
    assert (
        tab.locator("#bucket figure .mark").count() == 4 + 2
    )  # each tile has a mark in its legend
    assert tab.locator('#heat button[aria-pressed="true"]').count() == 1
    assert "Measurements of 32K b4 h16 bf16" in tab.locator("#opened").inner_text()


def test_failures_are_told_with_their_message(opened: Open, text: str) -> None:
    tab = opened(text)
    tab.get_by_role("radio", name="128").check()
    tab.get_by_role("radio", name="float16", exact=True).check()
    tab.locator("#heat button").last.click()
    assert "search, wrong: in float64 it is 0.3" in tab.locator("#bucket").inner_text()


def test_a_shared_table_renders(opened: Open, database: Path, tmp_path: Path) -> None:
    with Store(database) as store:
        (path,) = share.export(store, tmp_path)
    tab = opened(page.render(findings.of_table(path)))
    assert len(cells(tab)) == 6
    tab.locator("#heat button").last.click()
    assert "behind the best" not in tab.locator("#bucket p").first.inner_text()
    assert tab.locator("#curves .mark").count() > 6


def test_a_measurement_without_a_time_renders(opened: Open, tmp_path: Path) -> None:
    """Imported runs have such: they tell the speed-up alone."""
    path, shape = tmp_path / "t.db", Shape(32768, 1, 16)
    known = Measurement(shape, Plan("split", 24, "r16"), ratio=2.0)
    with Store(path) as store:
        run = store.start_run(H200, kernel=KERNEL, software=SOFTWARE)
        store.record(run, shape.bucket, [*searched(shape), known], duelled(shape))
    tab = opened(render(path))
    tab.locator("#heat button").click()
    assert "split x24 r16\tsearch\t-\t-\t-\t2.00x" in tab.locator("#bucket tbody").inner_text()
    assert tab.locator("#bucket figure .mark").count() == 4 + 2


def test_evidence_without_a_verdict_renders(opened: Open, database: Path, tmp_path: Path) -> None:
    path = fill(tmp_path / "t.db", [1024], [1], [16], ["bfloat16"])
    with Store(path) as store:
        store._db.execute("DELETE FROM plan")
        store._db.commit()
    tab = opened(render(path))
    assert cells(tab) == ["? undecided"]
    tab.locator("#heat button").click()
    assert "No verdict yet." in tab.locator("#bucket").inner_text()


# --- filters and keys ----------------------------------------------------------------------------


def test_filters_change_both_charts(opened: Open, text: str) -> None:
    tab = opened(text)
    status = tab.locator("#status")
    assert status.inner_text().startswith("6 shapes: heads 16, data type bfloat16")
    tab.get_by_role("radio", name="128").check()
    assert status.inner_text().startswith("6 shapes: heads 128, data type bfloat16")
    assert cells(tab)[0] == "9.80x split x8"
    assert "1K b1 h128 bf16" in tab.locator("#curves-table").text_content()
    tab.get_by_role("radio", name="float16", exact=True).check()
    assert "1K b1 h128 fp16" in tab.locator("#curves-table").text_content()


def test_a_filter_without_shapes_says_so(opened: Open, tmp_path: Path) -> None:
    path = fill(tmp_path / "t.db", [1024, 4096], [1], [16], ["bfloat16"])
    fill(path, [1024], [1], [128], ["float16"])
    tab = opened(render(path))
    tab.get_by_role("radio", name="128").check()
    assert tab.locator("#status").inner_text().startswith("Nothing was tuned with heads 128")
    assert tab.locator("#curves figure").count() == 0
    tab.get_by_role("radio", name="float16", exact=True).check()
    assert len(cells(tab)) == 1


def focused(tab: Any) -> str:
    return str(
        tab.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
    )


def test_the_keyboard_reaches_everything_in_order(opened: Open, text: str) -> None:
    tab = opened(text)
    stops: list[str] = []
    while len(stops) < 60 and "" not in stops and stops.count("skip") < 2:  # once around
        tab.keyboard.press("Tab")
        stops.append(tab.evaluate(SECTION))
    order = list(dict.fromkeys(stops))
    assert order[:4] == ["skip", "theme", "nav", "shapes"]
    assert order[4:8] == ["latency", "regret", "refused", "thresholds"]
    assert stops.count("theme") == 1
    assert stops.count("shapes") == 2 + 2  # two filters; the heat map's box, and one of its cells


SECTION = """(() => {
  const at = document.activeElement;
  return at.className === 'skip' ? 'skip' : at.closest('nav') ? 'nav' : at.closest('section, [id]')
    ? (at.closest('section') ?? at.closest('[id]')).id : '';
})()"""


def test_arrow_keys_move_between_shapes_and_enter_opens(opened: Open, text: str) -> None:
    tab = opened(text)
    assert tab.locator('#heat button[tabindex="0"]').count() == 1
    tab.locator("#heat button").first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert focused(tab) == "9.80x split x8, context 4K, batch 4"
    tab.keyboard.press("ArrowDown")  # there is nothing below
    assert focused(tab) == "9.80x split x8, context 4K, batch 4"
    tab.keyboard.press("Enter")
    assert tab.locator("#bucket h3").inner_text() == "4K b4 h16 bf16"
    assert focused(tab) == "9.80x split x8, context 4K, batch 4"


def test_arrow_keys_change_a_filter(opened: Open, text: str) -> None:
    tab = opened(text)
    tab.get_by_role("radio", name="16", exact=True).focus()
    tab.keyboard.press("ArrowRight")
    assert "heads 128" in tab.locator("#status").inner_text()
    assert tab.evaluate("document.activeElement.value") == "128"


# --- to be read by anybody -----------------------------------------------------------------------

NAMELESS = """() => [
  ...[...document.querySelectorAll('table')].filter((t) => !t.caption?.textContent),
  ...[...document.querySelectorAll('svg')].filter((s) => !s.ariaLabel && !s.ariaHidden),
  ...[...document.querySelectorAll('[role=region], nav, dl')].filter((r) => !r.ariaLabel),
  ...[...document.querySelectorAll('section')].filter((s) =>
    !document.getElementById(s.getAttribute('aria-labelledby'))),
  ...[...document.querySelectorAll('fieldset')].filter((f) => !f.querySelector('legend')),
  ...[...document.querySelectorAll('a[href^="#"]')].filter((a) => !document.querySelector(a.hash)),
].map((each) => each.outerHTML.slice(0, 100))"""

# Of every visible text over the colour behind it, as WCAG computes it.
CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('title')) continue;
    const style = getComputedStyle(e);
    const a = light(rgb(e.closest('svg') ? style.fill : style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${walker.currentNode.data.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_everything_has_a_name(opened: Open, text: str) -> None:
    tab = opened(text)
    tab.locator("#heat button").last.click()
    assert tab.evaluate(NAMELESS) == []
    levels = [int(tag[1]) for tag in tab.evaluate(HEADINGS)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))


HEADINGS = "[...document.querySelectorAll('h1, h2, h3')].map((each) => each.tagName)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(opened: Open, text: str, scheme: str) -> None:
    tab = opened(text, scheme=scheme)
    tab.locator("#heat button").last.click()
    tab.locator("details summary").click()
    for at in range(7):  # each colour of the heat map
        tab.locator("#heat button").nth(1).evaluate(f"(each) => {{ each.className = 'gain-{at}' }}")
        assert tab.evaluate(CONTRASTS) == []


def test_the_switch_of_colours_wins_over_the_system(opened: Open, text: str) -> None:
    tab = opened(text, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    tab.get_by_role("radio", name="Light").check()
    light = tab.evaluate(background)
    assert light != dark
    tab.get_by_role("radio", name="System").check()
    assert tab.evaluate(background) == dark
    assert opened(text, scheme="light").evaluate(background) == light


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_page_does_not_scroll_sideways(opened: Open, text: str, width: int) -> None:
    tab = opened(text, width=width)
    tab.locator("#heat button").last.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


# --- foreign text, and time ----------------------------------------------------------------------


def test_foreign_text_is_shown_and_never_run(opened: Open, tmp_path: Path) -> None:
    path = fill(tmp_path / "t.db", [1024, 4096], [1], [16], ["bfloat16"])
    poison(path)
    tab = opened(render(path))
    assert tab.locator("h1").inner_text() == EVIL
    tab.locator("#heat button").last.click()
    assert EVIL in tab.locator("#bucket").inner_text()
    assert EVIL in tab.locator("#refused").inner_text()
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 2


def test_a_script_or_picture_that_slipped_in_would_do_nothing(
    browser: Any, text: str, tmp_path: Path
) -> None:
    more = "<script>document.title = 'run'</script><img src='https://example.invalid/x.png'>"
    path = tmp_path / "changed.html"
    path.write_text(text.replace("</main>", f"{more}</main>"))
    heard: list[str] = []
    tab = browser.new_page()
    tab.on("console", lambda message: heard.append(message.text))
    tab.goto(path.as_uri())
    assert tab.title() == "NVIDIA H200: MLA decode plans"
    assert len(heard) == 2
    assert all("Content Security Policy" in message for message in heard)
    tab.close()


def test_first_paint(opened: Open, tmp_path: Path) -> None:
    contexts = [1 << power for power in range(10, 20)]
    path = fill(tmp_path / "t.db", contexts, [1, 2, 4, 8, 16, 32], [8, 16, 20, 32, 64, 128])
    with Store(path, create=False) as store:
        read = findings.of_store(store)
    text = page.render(read)
    tab = opened(text)
    assert len(cells(tab)) == 60
    # Not by wait_for_function: where it has to wait it polls by `eval`, which the page forbids.
    painted = tab.evaluate("""() => new Promise((done) => new PerformanceObserver(
        (seen) => done(seen.getEntries()[0].startTime)
    ).observe({type: "paint", buffered: true}))""")
    print(f"{read.measurements} measurements, {len(text)} bytes: painted after {painted:.0f} ms")
