"""Fewest devices: cells of docs/sizes.md fit as ``plan`` counts, and on half of the devices nothing does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.advice.sizes import MOST_DEVICES, SizeTable, least_count
from flexrlhf.guideline.costs.profiles import FROM_FIGURES
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.suggestions import check_fits

PAGE = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text()
COMMAND = shlex.split(re.findall(r"^flexrlhf size .*$", PAGE, re.MULTILINE)[-1])
Cell = tuple[str, str, str, str]
"""Model, response length, training and device class."""


def cells(page: str) -> dict[Cell, str]:
    """Return the cells of a page."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head, _, *rows = lines
    return {(row[0], row[1], row[2], name): cell for row in rows for name, cell in zip(head[3:], row[3:], strict=True)}


def numbers(cell: str) -> tuple[int, list[float]]:
    """Return the devices and the samples per second of a cell."""
    devices, _, speeds = cell.partition(":")
    return int(devices.split()[0]), [float(speed) for speed in speeds.split(" / ")]


def option(name: str) -> str:
    return COMMAND[COMMAND.index(name) + 1]


@pytest.mark.parametrize(
    ("model", "response", "training", "gpu_type"),
    [
        ("qwen2.5-7b", "8192", "full", "RTX4090-24G"),
        ("qwen2.5-7b", "1024", "LoRA 16", "RTX4090-24G"),
        ("qwen2.5-14b", "1024", "full", "A100-80G"),
    ],
)
def test_a_cell_fits_and_half_of_its_devices_do_not(
    model: str, response: str, training: str, gpu_type: str, tmp_path: Path
) -> None:
    text = cells(PAGE)[model, response, training, gpu_type]
    devices, speeds = numbers(text)
    lora = None if training == "full" else int(training.split()[-1])
    table = SizeTable([model], 16, [option("--algorithm")], [gpu_type], [int(response)], overrides=(option("--set"),))
    (cell,) = [each for each in table.cells if each.lora == lora]
    ways = table.ways(cell)
    found = table.plan_on(ways, devices)
    assert found is not None
    assert ("transformers" in text) == (found.options.rollout == "transformers")
    low, high = FROM_FIGURES.seconds(found.samples_per_second)
    assert low < speeds[0] < high
    # the plan behind it, by the command that is printed for it
    path = tmp_path / "advised.yaml"
    words = shlex.split(found.command(table.overrides, table.mean))
    for command in ([*words[1:], "-o", str(path)], ["plan", str(path)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    plan = make_plan(load_spec(path))
    check_fits(plan)
    assert len(plan.cluster.devices) == devices
    assert plan.spec.placement == found.chosen.plan.spec.placement
    if devices > 1:
        assert not any(table.fits(way, devices // 2) for way in ways)
        assert table.plan_on(ways, devices // 2) is None


def test_the_fewest_devices_are_found_in_few_tries() -> None:
    for least in (1, 2, 4, 8, 16, 24, 40, 64, 72, 136, MOST_DEVICES, MOST_DEVICES + 8):
        tried: list[int] = []

        def fits(count: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(count)
            return count >= least

        assert least_count(fits) == (least if least <= MOST_DEVICES else None)
        assert len(tried) == len(set(tried)) <= 16
        assert all(count in (1, 2, 4) or count % 8 == 0 for count in tried)


def test_the_table_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--gpu-type", "v100-16", "--gpu-type", "A10-24G", "--response-tokens", "256", "--lora", "8"]
    written = ["-o", "plans", "--markdown", "sizes.md", "--html", "sizes.html"]
    priced = ["--price", "0.5"]
    result = CliRunner().invoke(app, ["size", "qwen2.5-0.5b", "--algorithm", "dpo", *options, *priced, *written])
    assert result.exit_code == 0, result.output
    page, html = Path("sizes.md").read_text(), Path("sizes.html").read_text()
    shown = cells(page)
    assert set(shown) == {
        ("qwen2.5-0.5b", "256", training, name) for training in ("full", "LoRA 8") for name in ("V100-16G", "A10-24G")
    }
    for (_, _, training, name), cell in shown.items():
        devices, speeds = numbers(cell)
        assert 0 < speeds[0] < speeds[1] < speeds[2]
        assert cell in html and len(html) < 1e5
        line, costs = [line for line in result.stdout.splitlines() if f"{training:<8}  {name}" in line]
        assert f"{speeds[0]:g}" in line
        # 1,024 responses a step, 100 steps; speeds are rounded
        *_, hours, price, _ = costs.split()
        assert float(hours) == pytest.approx(100 * 1024 / speeds[0] * devices / 3600, rel=0.01)
        assert float(price) == pytest.approx(0.5 * float(hours), rel=0.01)
        for times in (1, 2, 4):
            plan = make_plan(load_spec(Path("plans", file_name(training, name, times * devices))))
            check_fits(plan)
            assert len(plan.cluster.devices) == times * devices
    assert f"flexrlhf size qwen2.5-0.5b --algorithm dpo --gpu-type v100-16 {' '.join(options[2:])}" in page
    again = CliRunner().invoke(app, ["size", "qwen2.5-0.5b", "qwen2.5-9b", *options, *written])
    assert again.exit_code == 2 and "qwen2.5-9b" in again.stderr
    Path("notes.md").write_text("mine")
    refused = CliRunner().invoke(app, ["size", "qwen2.5-0.5b", "--markdown", "notes.md"])
    assert refused.exit_code == 2 and "was not written by this command" in refused.stderr


def file_name(training: str, gpu_type: str, devices: int) -> str:
    return f"qwen2.5-0.5b-dpo-256-{training.replace(' ', '').lower()}-{gpu_type}-x{devices}.yaml"
