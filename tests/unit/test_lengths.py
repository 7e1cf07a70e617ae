"""Response lengths of a simulation: files, runs and the heavy tail, and the rows of a step."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from small_runs import plan_of

from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.lengths import batch_lengths, heavy_tail, named_lengths


@pytest.mark.parametrize(
    ("name", "content", "lengths"),
    [
        ("list.json", [2, 4.5], (2, 4.5)),
        ("benchmark.json", {"model": "a", "input_lens": [9], "output_lens": [3, 0, 5]}, (3, 1, 5)),
        ("records.json", [{"length": 3}, {"length": 5}], (3, 5)),
        ("lines.txt", "3\n5\n\n", (3, 5)),
        ("rows.jsonl", '{"response_length": 3}\n{"response_length": 5}\n', (3, 5)),
        ("run/metrics.jsonl", '{"response_length": 3}\n{"reward_mean": 1}\n{"response_length": 5}\n', (4,)),
        ("run/samples.jsonl", '{"rows": "training", "length": 3}\n{"rows": "evaluation", "length": 9}\n', (3,)),
    ],
)
def test_lengths_are_read(name: str, content: object, lengths: tuple[float, ...], tmp_path: Path) -> None:
    """Of an evaluation's samples, which are other prompts, none; of metrics their mean, since they are means."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert named_lengths(str(path), 10, "test") == lengths
    if path.parent != tmp_path:
        assert named_lengths(str(path.parent), 10, "test") == lengths


def test_a_heavy_tail_has_its_mean_and_the_published_spread() -> None:
    for mean in (300, 8192, 20000):
        lengths = heavy_tail(mean, 32768, "test")
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=1e-3)
    short = sorted(heavy_tail(300, 32768, "test"))
    # the longest of 2,000 is at the quantile 1 - 1/2000
    assert 15 < short[-1] / median(short) < 25
    assert named_lengths("heavy-tail", 32768, "test") == heavy_tail(8192, 32768, "test")
    assert named_lengths("heavy-tail:300", 32768, "test") == tuple(heavy_tail(300, 32768, "test"))


@pytest.mark.parametrize(("text", "lengths"), [("[2,4.5]", (2, 4.5)), ('[{"length": 3}]', (3,))])
def test_a_list_is_read(text: str, lengths: tuple[float, ...]) -> None:
    assert named_lengths(text, 10, "test") == lengths


def test_the_length_of_a_row_is_a_function_of_seed_step_and_row() -> None:
    lengths = TextLengths(4, heavy_tail(300, 4096, "test"))

    def batches(number: int, prompts: int, seed: int) -> list[list[int]]:
        plan = plan_of(None, 1, f"algorithm.prompts_per_step={prompts}", f"seed={seed}")
        return batch_lengths(plan, lengths, number)

    (few, later), (many,) = batches(2, 8, 7), batches(1, 64, 7)
    assert many[:8] == few and set(many) <= {max(1, round(each)) for each in lengths.responses}
    assert later != few != batches(1, 8, 8)[0]
    seen = [length for rows in batches(100, 100, 0) for length in rows]
    assert sum(seen) / len(seen) == pytest.approx(300, rel=0.05)
