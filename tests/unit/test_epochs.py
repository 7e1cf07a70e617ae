"""``epochs``: planning puts the steps in their place, and ranks see a run whose YAML has these steps."""

from __future__ import annotations

from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import apply_override
from flexrlhf.config.yaml_io import write_yaml
from flexrlhf.data.quickstart import CORPUS
from flexrlhf.data.quickstart.corpus import write_corpus
from flexrlhf.errors import UserError
from flexrlhf.plan.choice import planned

RAW = {
    "name": "passes",
    "algorithm": {"name": "sft", "prompts_per_step": 64, "num_mini_batches": 2},
    "models": {"actor": {"init": TINY | {"vocab_size": 400}}},
    "data": {
        "path": f"{CORPUS}/sft.jsonl",
        "tokenizer": f"{CORPUS}/tokenizer",
        "max_prompt_tokens": 16,
        "max_response_tokens": 20,
    },
    "cluster": {"devices": 2},
}
GRPO = (
    "algorithm={name: grpo, prompts_per_step: 64, samples_per_prompt: 4, num_mini_batches: 1}",
    "reward={rule: length, target_tokens: 9}",
)
SOURCES = "[{path: runs/quickstart-corpus/sft.jsonl, weight: 3}, {path: runs/quickstart-corpus/prompts.jsonl}]"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("epochs")
    write_corpus(made / CORPUS)
    rows = (made / CORPUS / "sft.jsonl").read_text().splitlines()
    (made / "bad.jsonl").write_text("\n".join(["no JSON", *rows[:700], '{"prompt": 3}', *rows[700:]]))
    return made


@pytest.fixture(autouse=True)
def in_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)


def raw_with(*settings: str) -> dict[str, Any]:
    raw = deepcopy(RAW)
    for setting in settings:
        apply_override(raw, setting)
    return raw


@pytest.mark.parametrize(
    ("epochs", "settings", "steps"),
    [
        ("2", (), 47),  # 3000 of 1500 rows, 64 a step
        ("1/3", (), 8),
        ("3", ("data.max_prompt_tokens=9", "data.long_prompts=drop"), 42),  # 881 rows are left
        ("2", ("data.path=bad.jsonl", "data.bad_rows=drop"), 47),
        ("1", (*GRPO, "algorithm.prompts_per_step=4"), 375),
        ("1.5", ("algorithm.like=openrlhf",), 36),  # a share of the run is warm-up
        ("1", (*GRPO, "data.path=null", f"data.sources={SOURCES}"), 32),  # 1500 + 512 rows
    ],
    ids=["whole", "part", "dropped", "bad", "samples", "preset", "sources"],
)
def test_a_run_has_the_steps_of_its_passes(epochs: str, settings: tuple[str, ...], steps: int) -> None:
    (found, text), (same, without) = (
        planned([Spec.parse(raw_with(*settings, length))])[0] for length in (f"epochs={epochs}", f"steps={steps}")
    )
    assert found.spec == same.spec and found.spec.dump() == same.spec.dump()
    assert f"passes: epochs {float(Fraction(epochs)):g} over" in text and f": {steps} steps of" in text
    assert "epochs" not in without


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("steps=4",), "steps 4 and epochs 2 exclude each other: remove one, such as by --set epochs=null"),
        (("epochs=0",), "expected a number above 0, found 0"),
        (("data.path=gone.jsonl",), "epochs are counted in rows: there is no data file gone.jsonl"),
        (("data.long_prompts=drop", "data.tokenizer=gone"), "a tokenizer that is not there yet; give steps"),
        (("data.path=bad.jsonl",), "epochs are counted in rows: bad.jsonl, line 1: not JSON"),
        (("epochs=1e12",), "epochs 1e+12 are 23437500000000 steps: use at most 1000000000"),
    ],
)
def test_passes_that_cannot_be_counted_are_one_sentence(settings: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        planned([Spec.parse(raw_with("epochs=2", *settings))])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_data_says_how_many_passes_the_steps_are() -> None:
    Path("passes.yaml").write_text(write_yaml(raw_with("steps=50")))
    done = CliRunner().invoke(app, ["data", "passes.yaml"])
    assert "passes: data: 50 steps of 64 prompts are 2.13 passes over 1500 rows" in done.output
    by_limit = ["--set", "data.max_prompt_tokens=9", "--set", "data.long_prompts=drop"]
    done = CliRunner().invoke(app, ["data", "passes.yaml", *by_limit])
    assert "passes: data: 50 steps of 64 prompts are 3.63 passes over 881 rows" in done.output
    done = CliRunner().invoke(
        app, ["data", "passes.yaml", "--set", "data.path=bad.jsonl", "--set", "data.bad_rows=drop"]
    )
    assert "passes: data: 50 steps of 64 prompts are 2.13 passes over 1500 rows" in done.output
