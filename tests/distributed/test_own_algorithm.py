"""A user's graph, with its own loss, combine, model and training loop, trains alike under three placements."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import start
from safetensors.torch import load_file
from toys import SHAPE, write_toys

from flexrlhf.comm.rows import RowStore
from flexrlhf.config.axes import ParallelDims
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.training_loop import Experiences

GRAPH = Path(__file__).with_name("own_graph.py")
PLACEMENTS = {"co-located": [1, 1, 1, 1], "interleaving": [1, 1, 0.5, 0.5], "disaggregated": [0.5] * 5}
"""Vectors of actor, ref, reward and a second reward model; five with the actor's shadow."""


def config(directory: Path, name: str, placement: list[float], **algorithm: Any) -> Path:
    second = deepcopy(SHAPE) | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    raw = {
        "name": name,
        "algorithm": {
            "name": "grpo",
            "graph": f"{GRAPH}:make_graph",
            "settings": {"scale": 2.0},
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            **algorithm,
        },
        "models": {
            "actor": {"init": SHAPE, "optimizer": {"learning_rate": 1e-2}},
            "reward": {"init": SHAPE},
            "reward_second": {"init": second},
        },
        "data": {
            **{"path": str(directory / "prompts.jsonl"), "tokenizer": str(directory / "tokenizer")},
            **{"max_prompt_tokens": 3, "max_response_tokens": 3},
        },
        "steps": 3,
        "cluster": {"devices": 2, "device": "cpu"},
        "placement": placement,
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    write_toys(directory)
    paths = [config(directory, name, placement) for name, placement in PLACEMENTS.items()]
    loop = {"settings": {"scale": 1.0}, "loop": f"{GRAPH}:doubled"}
    paths.append(config(directory, "loop", PLACEMENTS["interleaving"], **loop))
    process = start(["run", *(path.name for path in paths)], directory)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out[-3000:]
    return directory / "runs"


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["interleaving", "disaggregated", "loop"])
def test_placements_give_the_same_results(runs: Path, name: str) -> None:
    """The same for a loop of the same file that doubles advantages of half the size."""
    for expected, found in zip(metrics(runs, "co-located"), metrics(runs, name), strict=True):
        for key in (
            "reward_mean",
            "actor_grad_norm",
            "advantages/disagreement",
            "train_actor/policy_ratio",
            "rows_trained",
        ):
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    expected, found = (load_file(runs / each / "actor" / "model.safetensors") for each in ("co-located", name))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-4)


def test_it_trains_by_its_own_functions(runs: Path) -> None:
    rows = metrics(runs, "co-located")
    assert all(row["advantages/disagreement"] > 0 for row in rows), "the second model scores otherwise"
    assert [row["train_actor/policy_ratio"] for row in rows] == pytest.approx([1.0] * 3, abs=1e-4)
    assert rows[0]["actor_grad_norm"] > 0
    assert [row["rows_trained"] for row in rows] == [16] * 3


def test_a_column_of_a_loop_has_the_rows_of_the_trainings_that_read_it() -> None:
    """A rank with half of the rows of a policy, and all of a critic that is split by tensors."""
    shape, store = BatchShape(4, 1), RowStore(Lengths(prompt=2, response=3), torch.device("cpu"))
    layouts = {"advantages": Layout((0, 1)), "returns": Layout((0, 1), ParallelDims(tp=2))}
    works = [
        OperatorRun(Operator(f"train_{name}", "train", name, (name,)), None, layout, shape, shape.mini_batches, 1)
        for name, layout in layouts.items()
    ]
    for name, rows in (("advantages", (2, 3)), ("returns", (0, 1, 2, 3))):
        store.put(name, rows, torch.tensor(rows).float()[:, None].expand(-1, 3))
    experiences = Experiences(0, store, works)
    assert [experiences.rows(name) for name in experiences] == [(2, 3), (0, 1, 2, 3)]
    for name in experiences:
        experiences[name] = experiences[name] * 2
    assert experiences["advantages"][:, 0].tolist() == [4, 6] and experiences["returns"][:, 0].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        pytest.param("skipping", "algorithm.loop: no train_rlhf of batch 0; call both", marks=pytest.mark.full),
        pytest.param("leaving", "own_graph.py:leaving has ended before its batches have", marks=pytest.mark.full),
    ],
)
def test_a_loop_that_leaves_batches_out_is_refused(loop: str, sentence: str, tmp_path: Path) -> None:
    write_toys(tmp_path)
    path = config(tmp_path, "short", [1, 1, 1, 1], loop=f"{GRAPH}:{loop}")
    process = start(["run", path.name, "--devices", "1"], tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert sentence in out
