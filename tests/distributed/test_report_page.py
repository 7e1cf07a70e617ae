"""The page of two real runs, in a real browser: its figures are there and react, and nothing is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import start
from toys import copying, write_toys

from flexrlhf.report.pages import write_report
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.timeline import Trace

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

RUNS = {"together": [1, 1, 1], "apart": [0.5] * 5}
STEPS, SECONDS = 6, 90
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE = {"width": 390, "height": 844}
READY = "() => document.documentElement.dataset.ready === 'true'"


@dataclass
class Visit:
    """A page in the browser, with its messages and requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def chart(self, key: str) -> Any:
        return self.page.locator(f"#{key}")

    def legend(self, key: str) -> Any:
        """Buttons of the legend of a figure."""
        return self.page.locator(f"#{key} + .legend button")

    def layout(self, key: str, path: str) -> Any:
        return self.page.evaluate(f"() => document.getElementById('{key}')._fullLayout.{path}")

    def labels(self, key: str) -> list[str]:
        """Labels of the vertical axes of a figure, from top to bottom."""
        ticks = self.chart(key).locator(".ytick text").all()
        return [tick.text_content() for tick in sorted(ticks, key=lambda tick: tick.bounding_box()["y"])]

    def open_all(self) -> None:
        """Open all folders and wait for their figures."""
        self.page.evaluate("() => document.querySelectorAll('details').forEach(each => (each.open = true))")
        # figures follow the event of opening
        self.page.wait_for_timeout(50)
        self.page.wait_for_function(READY)

    def traces(self, key: str) -> list[dict[str, Any]]:
        """Name and visibility of the traces of a figure."""
        script = "key => document.getElementById(key)._fullData.map(t => ({name: t.name, visible: t.visible}))"
        return list(self.page.evaluate(script, key))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of two runs of one command, with different placements."""
    directory = tmp_path_factory.mktemp("report")
    write_toys(directory)
    for name, placement in RUNS.items():
        algorithm = {"name": "ppo", "prompts_per_step": 16, "kl": {"coefficient": 0.02}}
        raw = copying(directory, name, algorithm, placement, STEPS)
        raw |= {"runs": "runs", "samples": {"every": 2}}
        raw["eval"]["every"] = 3
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    process = start(["run", *(f"{name}.yaml" for name in RUNS)], directory)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out[-2000:]
    return [directory / "runs" / name for name in RUNS]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    return write_report(runs, runs[0].parents[1] / "report.html", None).path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # it is nobody's proxy, and no font of the desktop's
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS), env=environment)
        yield started
        started.close()


def visit(browser: Any, report: Path, **context: Any) -> Visit:
    """Open the page; its console and requests are recorded."""
    page = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **context}).new_page()
    opened = Visit(page)
    page.on("console", lambda message: opened.messages.append(message.text))
    page.on("pageerror", lambda error: opened.messages.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_function(READY)
    return opened


@pytest.fixture(scope="module")
def desktop(browser: Any, report: Path) -> Visit:
    return visit(browser, report, color_scheme="light")


def test_the_page_logs_and_loads_nothing(desktop: Visit, report: Path) -> None:
    desktop.open_all()
    assert desktop.messages == []
    assert desktop.requests == [report.as_uri()]


def test_curves_have_the_points_of_both_runs(desktop: Visit, runs: list[Path]) -> None:
    script = "() => document.getElementById('curve-reward_mean').data.map(t => [t.name, t.x, t.y])"
    shown = {name: (x, y) for name, x, y in desktop.page.evaluate(script)}
    for name, directory in zip(RUNS, runs, strict=True):
        rows = RunDirectory(directory).metrics.read()
        assert shown[name] == ([row["step"] for row in rows], [row["reward_mean"] for row in rows])
        evaluated = [row["step"] for row in rows if "eval_reward_mean" in row]
        assert shown[f"{name}, evaluation"][0] == evaluated
    lines = desktop.chart("curve-reward_mean").locator(".scatterlayer .trace path.js-line")
    assert lines.count() == 4
    for key in ("curve-kl", "curve-policy_loss", "curve-value_loss", "curve-response_length"):
        assert desktop.chart(key).locator(".scatterlayer path.js-line").count() >= 2


def test_timelines_have_a_bar_for_each_instruction(desktop: Visit, runs: list[Path]) -> None:
    for number, directory in enumerate(runs):
        ranks = {span.rank for span in Trace.read(directory / "timeline.json").spans}
        assert desktop.labels(f"timeline-{number}") == [f"rank {rank}" for rank in sorted(ranks)]
        names = {trace["name"] for trace in desktop.traces(f"timeline-{number}")}
        assert {"generate", "train_actor", "train_critic"} <= names
        assert ("weight syncs" in names) == (number == 1)
        assert desktop.chart(f"timeline-{number}").locator(".bars .point").count() > 20
        assert desktop.chart(f"timeline-{number}-shares").locator(".bars .point").count() > 6


def test_placements_memory_and_bytes_are_there(desktop: Visit, runs: list[Path]) -> None:
    assert desktop.labels("placement-0") == ["actor", "critic", "ref"]
    assert desktop.labels("placement-1") == ["actor.shadow", "critic.shadow", "actor", "critic", "ref"]
    peaks = RunDirectory(runs[0]).facts()["peak_bytes"]
    script = "() => document.getElementById('memory-0-peak').data.find(t => t.name === 'measured peak').y"
    assert desktop.page.evaluate(script) == [peaks[rank] for rank in sorted(peaks)]
    assert desktop.chart("bytes-1").locator(".bars .point").count() > 4
    assert desktop.page.locator("#samples .response").count() > 4
    configs = desktop.page.locator("#yaml pre").all_text_contents()
    assert [yaml.safe_load(config)["name"] for config in configs] == list(RUNS)


def test_a_drag_zooms_and_buttons_move(desktop: Visit) -> None:
    key = "timeline-0"
    plot = desktop.chart(key).locator(".nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    before = desktop.layout(key, "xaxis.range")
    middle = box["y"] + box["height"] / 2
    desktop.page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    desktop.page.mouse.down()
    desktop.page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    desktop.page.mouse.up()
    desktop.page.wait_for_timeout(300)
    after = desktop.layout(key, "xaxis.range")
    width = before[1] - before[0]
    assert after[1] - after[0] == pytest.approx(0.3 * width, rel=0.1)
    buttons = desktop.page.locator(f".views[data-figure={key}]")
    buttons.get_by_role("button", name="1 step").click()
    one = desktop.layout(key, "xaxis.range")
    buttons.get_by_role("button", name="later").click()
    later = desktop.layout(key, "xaxis.range")
    assert later[0] - one[0] == pytest.approx(0.5 * (one[1] - one[0]), rel=0.01)
    buttons.get_by_role("button", name="zoom in").click()
    closer = desktop.layout(key, "xaxis.range")
    assert closer[1] - closer[0] == pytest.approx(0.5 * (one[1] - one[0]), rel=0.01)


def test_a_click_in_a_legend_hides_its_line(desktop: Visit) -> None:
    key = "curve-kl"
    assert [trace["visible"] for trace in desktop.traces(key)] == [True, True]
    first, second = desktop.legend(key).all()
    assert [first.inner_text(), second.inner_text()] == list(RUNS)
    first.click()
    assert [trace["visible"] for trace in desktop.traces(key)] == ["legendonly", True]
    assert desktop.chart(key).locator(".scatterlayer .trace").count() == 1
    first.click()
    first.dblclick()
    assert [trace["visible"] for trace in desktop.traces(key)] == [True, "legendonly"]
    first.dblclick()
    assert [trace["visible"] for trace in desktop.traces(key)] == [True, True]


def test_an_instruction_is_hidden_on_all_ranks_at_once(desktop: Visit) -> None:
    key = "timeline-0"
    desktop.legend(key).get_by_text("generate", exact=True).click()
    for trace in desktop.traces(key):
        assert trace["visible"] == ("legendonly" if trace["name"] == "generate" else True)
    desktop.legend(key).get_by_text("generate", exact=True).click()


@pytest.fixture(scope="module")
def phone(browser: Any, report: Path) -> Visit:
    return visit(browser, report, viewport=PHONE, is_mobile=True, has_touch=True, color_scheme="dark")


def test_the_dark_scheme_changes_page_and_figures(desktop: Visit, phone: Visit) -> None:
    """Before all figures are open, which would be drawn again."""
    lights, darks = _colours(desktop), _colours(phone)
    assert all(light != dark for light, dark in zip(lights, darks, strict=True))
    phone.page.locator("#theme").click()
    assert _colours(phone) == lights
    assert phone.messages == []


def test_a_phone_scrolls_downwards_alone(phone: Visit) -> None:
    phone.open_all()
    assert phone.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    for chart in phone.page.locator(".chart.js-plotly-plot").all():
        box = chart.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    for entry in phone.page.locator(".legend button").all():
        box = entry.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert phone.messages == []


def _colours(opened: Visit) -> list[Any]:
    paper = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return [paper, *(opened.layout("curve-kl", path) for path in ("font.color", "xaxis.gridcolor"))]


@pytest.mark.full
def test_a_label_at_the_top_of_a_curve_redraws_no_figure_without_end(browser: Any, runs: list[Path]) -> None:
    """Plotly labels these curves by twos, up to their top, if they are 175 pixels high, and by fives below that."""
    directory = shutil.copytree(runs[0], runs[0].parents[1] / "labels" / "runs" / "label")
    rows = RunDirectory(directory).metrics.read()
    for row in rows:
        row["seconds"] = 2.12 if row["step"] % 2 else 11.48
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = visit(browser, write_report([directory], directory / "report.html", None).path)
    assert opened.layout("curve-seconds", "yaxis.dtick") == 2
    assert opened.messages == []


def test_figures_are_json_without_tags(report: Path) -> None:
    text = report.read_text()
    start = text.index('id="figures">') + len('id="figures">')
    figures = text[start : text.index("</script>", start)]
    assert "<" not in figures
    assert {"curve-kl", "placement-1", "timeline-0"} <= set(json.loads(figures))
