"""The quick start as a newcomer types it: from an empty directory, without a config, under another placement."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from commands import start
from forked import RANK_ENVIRONMENT, Forked
from nbclient import NotebookClient
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.data.quickstart import config_paths

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
KL_BOUND = 8.0
"""Nats per response. The KL penalty (coefficient 0.2) keeps the policy this near to the SFT policy."""


STEPS = {"sft": 80, "reward": 20, "ppo": 24}
"""Fewer than a newcomer runs, who has them all in `make run`."""
FEWER = tuple(f"quickstart-{name}:steps={steps}" for name, steps in STEPS.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("empty")
    # a file of the current directory is no library
    files = [directory / f"{name}.py" for name in ("yaml", "random", "numpy", "torch")]
    for file in files:
        file.write_text(f"raise SystemExit('{file} is executed')")
    trained(directory, *FEWER, placement="[1,1,0.5,0.5]")
    for file in files:
        file.unlink()
    return directory / "runs"


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_policy_imitates_the_evaluation_set(runs: Path) -> None:
    rows = metrics(runs, "quickstart-sft")
    assert rows[-1]["eval_nll"] < 0.5 * rows[0]["nll"]


def test_the_reward_model_ranks_evaluation_pairs(runs: Path) -> None:
    assert metrics(runs, "quickstart-reward")[-1]["eval_accuracy"] >= 0.8


@pytest.mark.full
def test_all_steps_are_as_good(tmp_path: Path) -> None:
    trained(tmp_path)
    test_the_policy_imitates_the_evaluation_set(tmp_path / "runs")
    test_the_reward_model_ranks_evaluation_pairs(tmp_path / "runs")
    test_the_policy_learns_within_the_kl_bound(tmp_path / "runs")
    test_the_policy_does_not_repeat_one_good_word(tmp_path / "runs")


def test_the_policy_learns_within_the_kl_bound(runs: Path) -> None:
    rows = metrics(runs, "quickstart-ppo")
    rewards = [row["reward_mean"] for row in rows]
    assert mean(rewards[-3:]) - mean(rewards[:3]) >= rows[0]["reward_std"]
    assert max(row["kl"] for row in rows) < KL_BOUND


def test_the_policy_does_not_repeat_one_good_word(runs: Path) -> None:
    before = metrics(runs, "quickstart-sft")[-1]["eval_distinct_2"]
    assert metrics(runs, "quickstart-ppo")[-1]["eval_distinct_2"] >= before / 2


def test_ppo_was_interleaved_and_left_its_files(runs: Path) -> None:
    assert "interleaving on 2 devices" in (runs / "quickstart-ppo" / "plan.txt").read_text()
    left = {path.name for path in (runs / "quickstart-ppo").iterdir()}
    files = {"config.yaml", "plan.txt", "status.json", "metrics.jsonl", "timeline.json", "samples.jsonl", "rows.jsonl"}
    assert left == files | {"actor", "critic", ".lock"}
    assert (runs / "quickstart-ppo" / "actor" / "tokenizer.json").exists()


def test_another_run_trains_ppo_alone(runs: Path, tmp_path: Path) -> None:
    """SFT and the reward model are kept while their configs are unchanged."""
    shutil.copytree(runs, tmp_path / "runs")
    out = trained(tmp_path, *FEWER[:2], "quickstart-ppo:steps=2")
    for name in ("sft", "reward"):
        assert f"quickstart-{name}: finished, kept; its config is unchanged" in out
        assert not (tmp_path / f"runs/quickstart-{name}.1").exists()
    assert "quickstart-ppo  step 2/2" in out and "quickstart-sft  step" not in out
    assert len(metrics(tmp_path / "runs", "quickstart-ppo.1")) == STEPS["ppo"]
    # the first one was interleaved
    found = CliRunner().invoke(app, ["compare", *(str(tmp_path / f"runs/quickstart-ppo{end}") for end in (".1", ""))])
    assert f"interleaving on 2 devices, {STEPS['ppo']} steps" in found.output
    assert "co-located on 2 devices, 2 steps" in found.output
    assert "numbers of A and B over 2 steps: the same" in found.output and "differs" not in found.output
    assert "generation" in found.output and "bytes of columns moved" in found.output


def test_the_policy_is_talked_to_next_to_the_one_before(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    monkeypatch.setenv("COLUMNS", "120")
    question = "Can I try the soup?"
    after = CliRunner().invoke(app, ["chat", "runs/quickstart-ppo"], input=f"{question}\n\n{question}\n")
    assert after.exit_code == 0 and after.output.count(f"> {question}\n") == 2, after.output
    reply = after.output.splitlines()[1]
    assert reply and after.output == f"> {question}\n{reply}\n" * 2
    both = CliRunner().invoke(app, ["chat", "runs/quickstart-ppo", "--before"], input=question).output.splitlines()
    assert both[:2] == [f"> {question}", f"{'before':<58} | after"] and both[2].partition(" | ")[2] in reply
    before = CliRunner().invoke(app, ["chat", "runs/quickstart-sft/actor"], input=question)
    assert both[2].partition(" | ")[0].strip() in before.output.splitlines()[1]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("runs", "runs: neither a run nor a model in it"),
        ("runs/quickstart-reward", "runs/quickstart-reward: no actor is saved in it; nothing in it to talk to"),
    ],
)
def test_a_directory_without_a_policy_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    monkeypatch.chdir(runs.parent)
    found = CliRunner().invoke(app, ["chat", place])
    assert found.exit_code == 2 and words in found.output


def test_a_chat_template_without_end_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "quickstart-sft/actor", tmp_path / "actor")
    (tmp_path / "actor/chat_template.jinja").write_text("{{ 'a' * 10000000000 }}")
    found = CliRunner().invoke(app, ["chat", str(tmp_path / "actor")], input="soup")
    assert found.exit_code == 2 and "flexrlhf: the chat template takes more than 1.07 GB" in found.output


# tests/unit/test_command_line.py shows it of commands
@pytest.mark.full
def test_output_that_cannot_be_written_ends_no_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    words = [word for setting in (*FEWER[:2], "quickstart-ppo:steps=2") for word in ("--set", setting)]
    with Path("/dev/full").open("w") as full:
        command = ["flexrlhf", "run", "--placement-ratio", "[1,1,1,1]", *words]
        process = Forked(command, tmp_path, {**os.environ, **RANK_ENVIRONMENT}, stderr=full)
        assert process.stdout is not None and process.stdout.readline()
        # as `head -1` does
        process.stdout.close()
        assert process.wait(timeout=200) == 0
    assert len(metrics(tmp_path / "runs", "quickstart-ppo")) == 2


# tests/unit/test_kept_runs.py shows that a change is found
@pytest.mark.full
def test_a_changed_run_and_its_successors_train_again(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    out = trained(tmp_path, "quickstart-sft:steps=2", "quickstart-reward:eval=null", "quickstart-ppo:steps=1")
    assert "finished, kept" not in out and "quickstart-sft  step 2/2" in out and "quickstart-reward  step 80/80" in out
    assert len(metrics(tmp_path / "runs", "quickstart-sft.1")) == STEPS["sft"]


def trained(directory: Path, *settings: str, placement: str = "[1,1,1,1]") -> str:
    """Output of a run of the quick start in ``directory``."""
    words = [word for setting in settings for word in ("--set", setting)]
    process = start(["run", "--placement-ratio", placement, *words], directory)
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-2000:]
    return out


def printed_by(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def test_the_notebook_runs(runs: Path) -> None:
    """In its own kernel, in the directory of the quick start."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": runs.parent}})
    client.execute()
    printed = [printed_by(cell) for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert printed[0].startswith("interleaving ['generate on actor'")
    assert float(printed[1].split()[0]) > 0
    rewards = [row["reward_mean"] for row in metrics(runs, "notebook")]
    assert str(rewards) in "".join(printed), "the rows of metrics.jsonl"
    assert float(printed[-1].splitlines()[-1]) < 1e-5, "another placement, the same results"


STRATEGIES = {"co-located": "[1,1,1,1]", "interleaving": "[1,1,0.5,0.5]", "disaggregated": "[0.5,0.5,0.5,0.5,0.5,0.5]"}
SHARDED = [f"models.{role}.{setting}" for role in ("actor", "critic") for setting in ("engine=deepspeed", "zero=3")]


# by default the equality suite has ZeRO-3 by DeepSpeed under every strategy
@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_3_by_deepspeed_earns_the_same_rewards(runs: Path, strategy: str) -> None:
    """The first steps of the same PPO. Over all fifty a tie between two words may fall another way."""
    few = ["name=sharded-ppo", "steps=6", f"runs={runs.name}", *SHARDED]
    config = str(config_paths()[-1])
    sets = [word for setting in few for word in ("--set", setting)]
    process = start(["run", config, "--placement-ratio", STRATEGIES[strategy], *sets], runs.parent)
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-2000:]
    assert f"{strategy} on 2 devices" in (runs / "sharded-ppo" / "plan.txt").read_text()
    rewards = [row["reward_mean"] for row in metrics(runs, "sharded-ppo")]
    expected = [row["reward_mean"] for row in metrics(runs, "quickstart-ppo")[:6]]
    assert rewards == pytest.approx(expected, rel=1e-5)
