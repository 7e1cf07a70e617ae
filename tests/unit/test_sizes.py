"""Fewest devices on which models train."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.advice.sizes import MOST_DEVICES, least_count
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.suggestions import check_fits

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
    return int(devices.removesuffix(" (host)")), [float(speed) for speed in speeds.split(" / ")]


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
    result = CliRunner().invoke(app, ["size", "qwen2.5-0.5b", "--algorithm", "dpo", *options, *written])
    assert result.exit_code == 0, result.output
    page, html = Path("sizes.md").read_text(), Path("sizes.html").read_text()
    shown = cells(page)
    assert set(shown) == {
        ("qwen2.5-0.5b", "256", training, name) for training in ("full", "LoRA 8") for name in ("V100-16G", "A10-24G")
    }
    for (_, _, training, name), cell in shown.items():
        devices, speeds = numbers(cell)
        assert 0 < speeds[0] < speeds[1] < speeds[2]
        assert cell in html
        (line,) = [line for line in result.stdout.splitlines() if f"{training:<8}  {name}" in line]
        assert f"{speeds[0]:g}" in line
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
