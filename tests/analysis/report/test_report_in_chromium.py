"""The page as a reader meets it: drawn by a headless Chromium, driven by mouse and keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_parallel.analysis.report.report import page_of, report_of
from moe_parallel.analysis.report.run_entry import run_entry
from moe_parallel.analysis.report.text_entry import text_entry
from tests.analysis.report.folders import analysis_folder, run_folder, scaling_folder
from tests.analysis.synthetic import synthetic_run
from tests.browser import Browser, require_chromium

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
WARNINGS = "[...document.querySelectorAll('#warnings li')].map(item => item.innerText)"
LOSS = "document.querySelector('#curves figure')"
MAP = "document.querySelector('#experts figure')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, one with a hostile name, NaN and a dead expert; a scaling study."""
    folder = tmp_path_factory.mktemp("report")
    bad = synthetic_run(logged=60, layers=3)
    bad[20]["lm_loss"] = None
    for record in bad:
        record["layers"][2]["tokens_per_expert"][5] = 0
        for layer in record["layers"]:
            layer["drawn_loss"] = 0.5  # of a system that the page does not know
    starts = [{"time": "t", "command": f"python x.py --save {HOSTILE}", "versions": {"torch": "9"}}]
    sources = [
        run_folder(folder / "topk", synthetic_run(60, 3, norms=False), {"lr": 1e-3}),
        with_analysis(run_folder(folder / "aoe", synthetic_run(60, 4), {"lr": 2e-3})),
        run_folder(folder / HOSTILE.replace("/", "|"), bad, {"lr": 3e-3}, starts),
        scaling_folder(folder / "scaling"),
    ]
    file = folder / "report.html"
    file.write_text(report_of(sources, command=["python", "tools/report.py"]), encoding="utf-8")
    return file


def with_analysis(run: Path) -> Path:
    analysis_folder(run / "analysis")
    return run


@pytest.fixture(scope="module")
def shown(page: Path) -> Iterator[Browser]:
    require_chromium()
    with Browser(page, width=1280, height=900) as browser:
        browser.wait_for("document.documentElement.dataset.ready")
        yield browser


def scroll_to(browser: Browser, element: str) -> None:
    browser.value(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.wait_for(f"{element}.querySelector('.plot svg[viewBox], canvas[aria-label]') !== null")


def test_nothing_failed_and_nothing_was_fetched(shown: Browser) -> None:
    assert shown.value("document.getElementById('failure').hidden")
    assert shown.messages == [] and shown.requests == []
    assert shown.value("document.title").startswith("topk, aoe, <|script>")
    assert shown.value("document.images.length") == 0
    assert shown.value("document.scripts.length") == 2
    assert shown.value("smoothed([4, 4, null, 4], 0.5)") == [4, 4, None, 4]


def test_the_parts_of_the_page(shown: Browser) -> None:
    headings = shown.value("[...document.querySelectorAll('h2')].map(each => each.textContent)")
    assert headings == [
        "Warnings", "Runs", "Curves", "Experts", "On given text", "Scaling",
        "Commands and options",
    ]  # fmt: skip
    links = "[...document.querySelectorAll('nav a')].map(link => document.querySelector(link.hash))"
    assert shown.value(f"{links}.every(Boolean)")
    charts = shown.value("[...document.querySelectorAll('#curves h3')].map(e => e.textContent)")
    assert charts[:3] == ["Training loss", "Held-out loss: code", "Held-out loss: prose"]
    assert "drawn loss" in charts
    about = shown.value("document.querySelector('#warnings').innerText")
    # No run has the loads of an evaluation.
    assert "Looked at: losses, gradient norms, ranks, and the load of each expert" in about
    assert "of each layer at the end of training." in about
    nan, dead = shown.value(WARNINGS)[:2]
    assert "Problem: NaN" in nan and "onerror" in nan and "iteration 210" in nan
    assert "dead experts" in dead and "layer 3: 5." in dead
    text = shown.value("document.getElementById('commands').innerText")
    assert f"python x.py --save {HOSTILE}" in text and "torch 9" in text
    assert "--lr" in text and "0.002" in text


def test_everything_has_a_name(shown: Browser) -> None:
    """Each control and each drawn figure has a text for those who do not see it."""
    nameless = shown.value(
        "[...document.querySelectorAll('button, input, select')].filter(each => "
        "!(each.innerText || each.getAttribute('aria-label') || each.closest('label')?.innerText))"
        ".map(each => each.outerHTML)"
    )
    assert nameless == []
    scroll_to(shown, LOSS)
    label = shown.value(f"{LOSS}.querySelector('svg').getAttribute('aria-label')")
    assert label.startswith("Training loss. Line chart over iteration. topk: from 7.")
    scroll_to(shown, MAP)
    label = shown.value(f"{MAP}.querySelector('canvas').getAttribute('aria-label')")
    assert "Map of 3 by 8 cells" in label and "Highest: layer" in label


def test_a_table_sorts_by_the_keyboard(shown: Browser) -> None:
    head = "[...document.querySelectorAll('#runs th')].find(e => e.innerText.includes('training'))"
    names = "[...document.querySelectorAll('#runs tbody th')].map(each => each.innerText.trim())"
    losses = (
        f"(() => {{ const at = [...{head}.parentNode.children].indexOf({head}); return "
        "[...document.querySelectorAll('#runs tbody tr')].map(row => parseFloat(row.children[at]"
        ".innerText)) })()"
    )
    before = shown.value(names)
    shown.value(f"{head}.querySelector('button').focus()")
    shown.press("Enter")
    assert shown.value(f"{head}.getAttribute('aria-sort')") == "ascending"
    assert shown.value(losses) == sorted(shown.value(losses))
    shown.press("Enter")
    assert shown.value(f"{head}.getAttribute('aria-sort')") == "descending"
    assert sorted(shown.value(names)) == sorted(before)


def test_curves_zoom_and_read(shown: Browser) -> None:
    scroll_to(shown, LOSS)
    ticks = f"[...{LOSS}.querySelectorAll('svg text')].map(each => each.textContent)"
    spoken = f"{LOSS}.querySelector('[aria-live]').textContent"
    assert shown.value(f"{LOSS}.querySelectorAll('path.gap').length") == 1  # the loss that is NaN
    before = shown.value(ticks)
    box = shown.value(f"{LOSS}.querySelector('svg').getBoundingClientRect().toJSON()")
    middle = box["y"] + box["height"] / 2
    shown.drag((box["x"] + 0.5 * box["width"], middle), (box["x"] + 0.7 * box["width"], middle))
    assert "200" in before
    shown.wait_for(f"!{ticks}.includes('200')")
    assert "400" in shown.value(ticks)
    shown.value(f"{LOSS}.querySelector('svg').focus()")
    shown.press("End")
    at_end = shown.value(spoken)
    assert at_end.startswith("iteration 4") and "aoe 3." in at_end
    shown.press("ArrowLeft")
    assert shown.value(spoken) != at_end
    other = "document.querySelectorAll('#curves figure')[1]"  # all charts zoom together
    assert "200" not in shown.value(ticks.replace(LOSS, other))
    shown.press("0")
    shown.wait_for(f"{ticks}.includes('200')")
    assert shown.value(ticks) == before
    curves = f"{LOSS}.querySelectorAll('path.curve').length"
    for number in (2, 3):  # the first run is hidden, then shown
        shown.value("document.querySelector('.chips input').click()")
        shown.wait_for(f"{curves} === {number}")


def test_maps_have_a_layer_slider_and_a_cursor(shown: Browser) -> None:
    over_time = (
        "[...document.querySelectorAll('#experts figure')].find(figure => "
        "figure.querySelector('canvas')?.getAttribute('aria-label')?.includes('by 60 cells'))"
    )
    slider = "[...document.querySelectorAll('#experts input[type=range]')].at(-1)"
    shown.value(f"{slider}.scrollIntoView({{block: 'start', behavior: 'instant'}})")
    shown.wait_for(f"{over_time} !== undefined")
    shown.value(f"{slider}.focus()")
    shown.press("ArrowRight")
    shown.wait_for(f"{over_time}.querySelector('.about').textContent === 'layer 2'")
    shown.value(f"{over_time}.querySelector('canvas').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        shown.press(key)
    reading = shown.value(f"{over_time}.querySelector('.reading').textContent")
    assert reading.startswith("expert 1, iteration 20: ") and reading.endswith("an even share")
    shown.value(f"{over_time}.querySelector('summary').click()")
    shown.wait_for(f"{over_time}.querySelectorAll('tbody tr').length === 480")


def test_the_token_view_by_the_keyboard(shown: Browser) -> None:
    box = "document.querySelector('.tokens')"
    shown.value(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    shown.wait_for(f"{box}.childElementCount > 0")
    assert shown.value(f"{box}.querySelectorAll('span').length") == 30
    assert shown.value(f"{box}.innerText").startswith("<i>")  # a piece of text, not an element
    choose = "[...document.querySelectorAll('#texts select')].find(e => e.value === 'used')"
    assert shown.value(f"{choose}.labels[0].innerText").startswith("Color")
    colors = f"[...{box}.querySelectorAll('span')].map(span => span.style.background)"
    by_number = shown.value(colors)
    shown.value(f"{choose}.value = 'best'; 0")
    shown.value("document.querySelectorAll('#texts select')[3].dispatchEvent(new Event('change'))")
    shown.wait_for(f"{colors}[0] !== {by_number[0]!r}")
    shown.value(f"{box}.focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        shown.press(key)
    reading = shown.value(f"{box}.parentNode.querySelector('[aria-live]').textContent")
    assert reading.startswith("Token 12 of 30, <i>") and "best expert" in reading
    assert shown.value(f"{box}.querySelectorAll('span.here').length") == 1


@pytest.mark.full
@pytest.mark.parametrize(("width", "dark"), [(360, True), (800, False), (1920, True)])
def test_no_width_overflows_and_text_has_contrast(page: Path, width: int, dark: bool) -> None:
    require_chromium()
    with Browser(page, width=width, dark=dark) as browser:
        browser.wait_for("document.documentElement.dataset.ready")
        theme = "document.documentElement.dataset.theme"
        assert browser.value("document.documentElement.scrollWidth") == width
        for of_button in (not dark, dark):
            browser.value("document.getElementById('theme').click()")
            assert browser.value(theme) == ("light", "dark")[of_button]
        colors = browser.value(
            "(() => { const style = getComputedStyle(document.documentElement); const names = "
            "['--page', '--surface', '--raised', '--text', '--quiet', '--accent', '--problem', "
            "'--problem-soft', '--warning', '--warning-soft', '--note', '--note-soft', '--s0', "
            "'--s1', '--s2', '--s3', '--s4', '--s5', '--s6']; return Object.fromEntries("
            "names.map(name => [name, style.getPropertyValue(name).trim()])) })()"
        )
    for text in ("--text", "--quiet", "--accent"):
        for ground in ("--page", "--surface", "--raised"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    for level in ("--problem", "--warning", "--note"):
        assert contrast(colors[level], colors[f"{level}-soft"]) >= 4.5, level
    for series in range(7):
        assert contrast(colors[f"--s{series}"], colors["--surface"]) >= 3, series


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, #rrggbb, as WCAG 2 defines it."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.full
def test_twenty_long_runs_are_one_small_page(tmp_path: Path) -> None:
    """Each has the longest curves of one run, and the largest maps of another."""
    require_chromium()
    long = run_folder(tmp_path / "long", synthetic_run(logged=2000, layers=2))
    wide = run_folder(tmp_path / "wide", synthetic_run(logged=70, layers=24, experts=64))
    entry = run_entry(long, "long") | {"routing": run_entry(wide, "wide")["routing"]}
    assert len(entry["curves"]["train"]["x"]) > 500
    assert entry["routing"]["load"]["shape"] == [60, 24, 64]
    entry["text"] = text_entry(analysis_folder(tmp_path / "analysis", layers=24, experts=64))
    assert entry["text"]["pairs"]["shape"] == [24, 64, 64]
    runs = [entry | {"name": f"run {number}"} for number in range(20)]
    file = tmp_path / "report.html"
    content = {"runs": runs, "scaling": [], "command": ""}
    file.write_text(page_of(content, "twenty"), encoding="utf-8")
    assert file.stat().st_size < 15 * 2**20
    with Browser(file) as browser:
        browser.wait_for("document.documentElement.dataset.ready")
        assert browser.value("document.querySelectorAll('#runs tbody tr').length") == 20
        scroll_to(browser, LOSS)
        assert browser.value(f"{LOSS}.querySelectorAll('path.curve').length") == 20
        assert browser.messages == [] and browser.requests == []


def test_a_study_of_a_flag_has_the_flag_on_its_axis(tmp_path):
    require_chromium()
    study = tmp_path / "ep"
    study.mkdir()
    head = (
        "nodes,ranks,ep,tokens_per_second,efficiency,step_seconds,compute_seconds,plan_error,axis"
    )
    cells = "".join(f"2,4,{ep},{900 + 10 * ep}.0,1.0,0.5,0.5,{ep / 10},ep\n" for ep in (1, 2, 4))
    (study / "scaling.csv").write_text(f"{head}\n{cells}")
    file = tmp_path / "report.html"
    file.write_text(report_of([study], command=["python"]), encoding="utf-8")
    with Browser(file) as browser:
        browser.wait_for("document.documentElement.dataset.ready")
        speed = "document.querySelector('#scaling figure')"
        scroll_to(browser, speed)
        words = browser.value(f"[...{speed}.querySelectorAll('svg text')].map(t => t.textContent)")
        assert {"1", "2", "4", "ep"} <= set(words)
        assert browser.value(f"{speed}.querySelectorAll('path.curve').length") == 1  # no ideal
        error = "[...document.querySelectorAll('#scaling figure')].at(-1)"
        scroll_to(browser, error)
        spoken = browser.value(f"{error}.querySelector('svg').getAttribute('aria-label')")
        assert "nodes 2: from 10.0% to 40.0%" in spoken
        split = browser.value("document.querySelector('#scaling .wide-card').innerText")
        assert "nodes 2, ep 4: 500 ms a step" in split and "compute 100.0% (500 ms)" in split
