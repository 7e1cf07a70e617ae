"""Runs in a user's units: model FLOPs by hand, tokens, device hours and money."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small_runs import PPO, plan_of
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.usage import prompt_flops, read_prices, usage_of

A100 = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
MIXED = "cluster={nodes: [{devices: 2, class: A100-80G}, {devices: 2, class: V100-32G}]}"
LAYER, HEAD, PAIRS = 4 * 8 * 8 + 3 * 8 * 16, 8 * 32, 4 * 4 / 2 + 4 * 8 + 8 * 8 / 2
"""Parameters of the matrices of a tiny model, and pairs of tokens of a prompt of 4 and a response of 8."""
FORWARD = 2 * (12 * LAYER + 8 * HEAD) + 4 * 8 * PAIRS
VALUES = 2 * (12 * LAYER + 8 * 8) + 4 * 8 * PAIRS


@pytest.mark.parametrize("placement", [[1, 1, 1, 1], [1, 1, 0.5, 0.5]])
@pytest.mark.parametrize("chunks", [1, 2])
def test_model_flops_are_those_of_the_texts_under_every_placement(placement: list[float], chunks: int) -> None:
    settings = ("algorithm.num_mini_batches=2", f"schedule.num_chunks={chunks}")
    usage = usage_of(simulate(plan_of(placement, 2, A100, *settings)))
    epochs = 1
    assert usage.parts["generation"].flops == pytest.approx(8 * FORWARD)
    assert usage.parts["training"].flops == pytest.approx(epochs * 8 * 3 * (FORWARD + VALUES))
    assert usage.tokens == 8 * 12 and usage.responses == 8 * 8
    assert usage.mfu == pytest.approx(usage.flops / usage.seconds / (2 * 312e12))
    assert usage.tokens_per_device == pytest.approx(8 * 12 / usage.seconds / 2)


def test_samples_share_their_prompt_and_adapters_need_no_gradients_of_frozen_matrices() -> None:
    sizes = {"layers": 1, "hidden": 8, "ffn": 16, "heads": 2, "kv_heads": 2, "head_dim": 4, "vocabulary": 32}
    model, adapted = Transformer(**sizes), Transformer(**sizes, adapters=10)
    lengths = TextLengths(4, (4.0, 12.0))
    # of two responses, whose squares count, not the square of their mean
    pairs = 8 + 2 * (8 * 4) + (16 + 144) / 2
    forward = 2 * (20 * LAYER + 16 * HEAD)
    assert prompt_flops("forward", model, lengths, 2) == pytest.approx(forward + 4 * 8 * pairs)
    assert prompt_flops("train", model, lengths, 2) == pytest.approx(3 * (forward + 4 * 8 * pairs))
    adapters = 3 * (2 * 20 * 10 + 4 * 8 * pairs)
    assert prompt_flops("train", adapted, lengths, 2) == pytest.approx(2 * forward + adapters)


def test_money_and_peak_of_a_mixed_cluster_are_sums_over_its_classes() -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 4, MIXED)
    usage = usage_of(simulate(plan), read_prices("A100-80G=3,V100-32G=1", plan.cluster.classes))
    assert usage.peak == 2 * 312e12 + 2 * 125e12
    assert usage.money(3600) == pytest.approx(usage.seconds * (2 * 3 + 2 * 1))
    assert usage.device_hours == pytest.approx(3 * usage.seconds * 4 / 3600)


def test_plan_simulate_and_advise_print_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(yaml.safe_dump(PPO | {"cluster": {"nodes": [{"devices": 2, "class": "A100-80G"}]}}))
    texts = {}
    for command in ("plan", "simulate"):
        arguments = [command, "a.yaml", "--set", "placement=[1,1,1,1]", "--price", "2.5"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        texts[command] = [line.strip() for line in result.stdout.splitlines()]
    advised = CliRunner().invoke(app, ["advise", "a.yaml", "--seconds", "1", "--price", "2.5"])
    assert advised.exit_code == 0, advised.output
    for line in texts["simulate"][1:7]:
        assert line in texts["plan"], line
    assert " tokens/s of prompts and responses (" in texts["simulate"][4] and "MFU " in texts["simulate"][5]
    assert "GPU-hours, price " in texts["simulate"][6] and texts["simulate"][6].endswith(" per 1,000 steps)")
    assert all(word in advised.stdout for word in ("tokens/s of prompts", "MFU ", "GPU-hours, price "))
