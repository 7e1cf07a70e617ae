"""Rollouts by vLLM, or by torch with a copy of the actor, apart from the equality of their runs with the reference:
that it is this engine, and that the gate stops.

Two libraries add up the same values in another order, so their log-probs differ by rounding: 4e-6 was measured.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from assets import SIZES
from cases import DEFAULT, KILLED, Assets, Case
from comparison import reference_of
from killed_decoders import STEP
from launcher import Launches, Outcome, params
from safetensors.torch import load_file

from flexrlhf.strategies.instructions import Sync

pytestmark = pytest.mark.timeout(3600)
ROUNDING = 1e-4
"""Nats: between vLLM's log-prob of a token and the trainer's."""
IN_TURNS = [case for case in DEFAULT if case.has_rollout_engine and "episodes" in case.setting]
ENGINES = [
    case
    for case in DEFAULT
    if case.has_rollout_engine and "segments" not in case.setting and "episodes" not in case.setting
]
"""Whole responses: in segments a step has requests, and tokens of weights, of several others; each turn is a request.
"""
UNCUT = [case for case in (*ENGINES, *IN_TURNS) if case.setting != "ends"]
"""Cases that sample from the whole distribution, like the trainer's log-probs."""
PADDED, PADDED_VLLM = (Case("padded", "halves", 2, rollout=rollout) for rollout in ("transformers", "vllm"))
OWN_NOISE = Case("two", "halves", 2, rollout="vllm-engine")
"""In the whole product; by default one engine is tried (tests/engines/test_vllm_engine.py)."""


def logprobs_of_both(outcome: Outcome, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a step's tokens: the engine's and the trained copy's."""
    columns = outcome.columns(step)
    engine = "rollout_logprobs" if "rollout_logprobs" in columns else "logprobs"
    trainer = "trainer_logprobs" if "trainer_logprobs" in columns else "logprobs"
    return columns[engine], columns[trainer]


def fresh_steps(outcome: Outcome) -> list[int]:
    """Cases whose responses are sampled with the weights at the start of the step's training."""
    return [row["step"] for row in outcome.metrics if row.get("staleness_max", 0) == 0]


@pytest.mark.parametrize("case", params([*ENGINES, OWN_NOISE], [OWN_NOISE]))
def test_the_engine_samples_every_row(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    for row in outcome.metrics:
        assert row["rollout_engine"] == ("vllm" if case.has_vllm else "torch"), (case.name, row)
        assert row["rollout_requests"] == outcome.plan.batch.num_rows, (case.name, row)


@pytest.mark.parametrize("case", params([KILLED]))
def test_a_killed_process_is_replaced_once(launches: Launches, case: Case) -> None:
    """The reference has its run's tokens, metrics and weights (test_equality.py), as if nothing had happened."""
    restarts = [row["rollout_restarts"] for row in launches.outcome(case).metrics]
    assert restarts == [float(step == restarts.index(1.0)) for step in range(8)] and restarts.index(1.0) >= STEP


@pytest.mark.parametrize("case", params([*UNCUT, OWN_NOISE], [OWN_NOISE]))
def test_engine_and_trainer_tell_the_same_logprobs(launches: Launches, case: Case) -> None:
    """Both have the same weights in these steps; the gate compares in these, and in no others."""
    outcome = launches.outcome(case)
    fresh = fresh_steps(outcome)
    assert fresh and fresh[0] == 0
    for step in fresh:
        engine, trainer = logprobs_of_both(outcome, step)
        largest = float((engine - trainer).abs().max())
        assert 0 < largest < ROUNDING, (case.name, step)
        assert outcome.metrics[step]["parity_max"] == pytest.approx(largest, rel=1e-3), (case.name, step)
        assert 0 < outcome.metrics[step]["parity_mean"] < outcome.metrics[step]["parity_max"]
    assert [row["step"] for row in outcome.metrics if "parity_max" in row] == fresh, case.name


@pytest.mark.parametrize("case", params([case for case in ENGINES if case.setting == "still"]))
def test_syncs_change_nothing_at_learning_rate_zero(launches: Launches, case: Case) -> None:
    """All weights of the engine are overwritten three times; its log-probs still equal the trainer's."""
    outcome = launches.outcome(case)
    syncs = [i for i in outcome.plan.schedule.instructions if isinstance(i, Sync) and i.destination == "actor.rollout"]
    assert len(syncs) == 1 and syncs[0].every == 1 and outcome.plan.spec.steps == 3
    first = load_file(f"{outcome.plan.model('actor').path}/model.safetensors")
    assert all(torch.equal(tensor, first[name]) for name, tensor in outcome.weights("actor").items())
    for step, expected in enumerate(reference_of(outcome.plan.spec).steps):
        for column in logprobs_of_both(outcome, step):
            assert float((column - expected.columns["logprobs"]).abs().max()) < ROUNDING, (case.name, step)


@pytest.mark.parametrize("case", params([case for case in ENGINES if case.setting == "one"]))
def test_the_ratio_is_one_at_the_first_update_after_vllm(launches: Launches, case: Case) -> None:
    """At temperature 0.7, one mini-batch a step: vLLM's log-probs belong to the sampled distribution."""
    outcome = launches.outcome(case)
    assert outcome.plan.spec.algorithm.temperature == 0.7
    for step, row in enumerate(outcome.metrics):
        engine, trainer = logprobs_of_both(outcome, step)
        assert float((engine - trainer).exp().sub(1).abs().max()) < 1e-3, (case.name, step)
        assert abs(row["update_kl"]) < 1e-6 and row["ratio_clipped"] == 0, (case.name, row)


@pytest.mark.parametrize("case", params([case for case in ENGINES if case.setting == "four-samples"]))
def test_samples_of_a_prompt_differ(launches: Launches, case: Case) -> None:
    """vLLM keeps the keys and values of their prompt; the responses are four."""
    outcome = launches.outcome(case)
    columns = outcome.columns(0)
    responses = columns["tokens"].view(-1, 4, columns["tokens"].shape[1])
    width = outcome.plan.lengths.prompt
    assert responses[:, :, :width].eq(responses[:, :1, :width]).all()
    assert all(len({tuple(response) for response in of_prompt.tolist()}) > 1 for of_prompt in responses)


@pytest.mark.parametrize("case", params(ENGINES))
def test_an_engine_next_to_training_sleeps_while_others_work(launches: Launches, case: Case) -> None:
    """The engine sleeps from its last response in a step to the next weights; an engine on separate ranks never
    sleeps."""
    outcome = launches.outcome(case)
    model, trained = outcome.plan.placement["actor.rollout"], outcome.plan.placement["actor"]
    for rank in model.ranks:
        spans = sorted((span for span in outcome.spans if span["tid"] == rank), key=lambda span: span["ts"])
        kinds = ("run", "sync", "release") if model.is_transient else ("run", "offload", "reload")
        # the weights of a copy that was released come by its sync
        names = [span["name"].removeprefix("weights actor -> ") for span in spans if span["cat"] in kinds]
        changes = [name for name in names if name == model.name]
        if not set(model.ranks) & set(trained.ranks):
            assert not changes, (case.name, rank)
            continue
        assert len(changes) == 2 * outcome.plan.spec.steps, (case.name, rank)
        for name, following in pairwise(names):
            is_generated = name == f"generate on {model.name}"
            assert not is_generated or following == model.name, (case.name, rank, following)
            assert not following.startswith("generate") or name == model.name, (case.name, rank, name)


@pytest.mark.parametrize("case", params([OWN_NOISE], [OWN_NOISE]))
def test_vllm_may_sample_with_its_own_noise(launches: Launches, case: Case) -> None:
    """Other tokens than with the program's noise; the trainer's log-probs of them equal vLLM's."""
    outcome = launches.outcome(case)
    sampled = reference_of(outcome.plan.spec).steps[0].columns["tokens"]
    assert (outcome.columns(0)["tokens"] != sampled).any()


# --- the gate


@pytest.mark.full
@pytest.mark.skipif(find_spec("vllm") is None, reason="the gate compares with vllm, which is not installed")
def test_the_gate_stops_a_run_whose_trainer_has_another_weight(assets: Assets, tmp_path: Path) -> None:
    spec = assets.spec(Case("two", "co-located", 1, rollout="vllm"))
    limits = {"max_difference": 1e-3, "mean_difference": 1e-4}  # the default of float32
    rollout = spec.rollout.model_copy(update={"parity": spec.rollout.parity.model_copy(update=limits)})
    config = tmp_path / "config.yaml"
    config.write_text(spec.model_copy(update={"rollout": rollout, "steps": 1, "runs": str(tmp_path)}).dump())
    ended = as_one_rank("perturbed.py", str(config), "model.layers.0.mlp.down_proj.weight", "0.01")
    assert "as-it-is ended" in ended.stdout and "perturbed ended" not in ended.stdout, ended.stderr[-2000:]
    assert ended.returncode != 0
    sentence = ended.stderr.strip().splitlines()[-1]
    token = r"'[^']*' \(row \d, token \d: engine -\d+\.\d{5}, trainer -\d+\.\d{5}\)"
    found = re.search(
        r"step 0: rollout engine and trainer disagree about the same tokens: rollout\.parity\.(max|mean)_difference "
        r"0\.0+1, found ([\d.e-]+) nats \(mean [\d.e-]+, largest ([\d.e-]+)\); "
        rf"worst tokens: {token}, {token}, {token}$",
        sentence,
    )
    assert found is not None and 1e-4 < float(found[2]) <= float(found[3]), sentence


def as_one_rank(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of this directory as the one rank of a job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env={**os.environ, **job, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("case", params([PADDED, PADDED_VLLM], [PADDED_VLLM]))
def test_ids_that_other_models_have_no_embedding_for_are_never_sampled(launches: Launches, case: Case) -> None:
    """A fifth of the actor's ids are padding, and random weights would sample them; the gate compares log-probs."""
    outcome = launches.outcome(case)
    for step in range(len(outcome.metrics)):
        columns = outcome.columns(step)
        sampled = columns["tokens"][:, -columns["response_mask"].shape[1] :][columns["response_mask"].bool()]
        assert int(sampled.min()) >= 0 and int(sampled.max()) < SIZES["vocab_size"] == outcome.plan.sampled_ids
    assert torch.equal(columns["tokens"], launches.outcome(PADDED).columns(step)["tokens"])
