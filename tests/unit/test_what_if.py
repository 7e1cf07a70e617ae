"""What-if: a changed setting is the run with that setting; FP8 and speculative decoding follow their formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Mesh
from flexrlhf.guideline.costs.speculation import Speculation
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.simulation.what_if import Outcome, what_if
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run

CONFIG = Path(__file__).parents[2] / "configs" / "interleaving-8.yaml"
NODES = "cluster.nodes=[{count: %d, devices: 8, class: A100-80G%s}]"
SCORES = "reward=[{model: reward}, {rule: gsm8k, seconds: %g}]"
LENGTHS = TextLengths(256, (64.0, 128.0, 256.0))


def planned(*overrides: str) -> Plan:
    return make_plan(load_spec(CONFIG, overrides))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(NODES % (2, ""), "placement=[1,1,1,1]", SCORES % 0)


def outcomes(plan: Plan, *names: str) -> dict[str, Outcome]:
    return {each.name: each for each in what_if(plan, AnalyticCosts(), LENGTHS, names)}


def simulated(outcome: Outcome) -> Simulation:
    assert outcome.simulation is not None, outcome.note
    return outcome.simulation


@pytest.mark.parametrize(
    ("change", "nodes", "seconds", "others"),
    [
        ("network=10", NODES % (2, ", network_gb_s: 10"), 0, ()),
        ("network=0.5x", NODES % (2, ", network_gb_s: 100"), 0, ()),
        ("link=50", NODES % (2, ", link_gb_s: 50"), 0, ()),
        ("devices=2x", NODES % (4, ""), 0, ()),
        ("reward=2s", NODES % (2, ""), 2, ()),
        ("rollout=float32", NODES % (2, ""), 0, ("rollout.dtype=float32",)),
        ("devices=2x,reward=2s,network=10", NODES % (4, ", network_gb_s: 10"), 2, ()),
        ("network=10,devices=2x", NODES % (4, ", network_gb_s: 10"), 0, ()),
    ],
)
def test_a_changed_setting_is_the_run_with_it(
    plan: Plan, change: str, nodes: str, seconds: float, others: tuple[str, ...]
) -> None:
    found = outcomes(plan, change)
    written = planned(nodes, "placement=[1,1,1,1]", SCORES % seconds, *others)
    assert simulated(found[change]).seconds == simulate(written, AnalyticCosts(), LENGTHS).seconds
    assert found[change].peak == max(memory.peak_bytes for memory in written.memories)
    assert simulated(found[change]).seconds != simulated(found["as planned"]).seconds
    assert "not a setting" not in found[change].note


def test_a_cache_that_is_not_written_is_sized_again() -> None:
    settings = NODES % (1, ", memory_gb: 60"), "placement=[1,1,1,1]", "rollout={engine: vllm}"
    found = outcomes(planned(*settings), "rollout=float32")["rollout=float32"]
    changed, written = simulated(found).plan, planned(*settings, "rollout.dtype=float32")
    assert changed.spec.rollout.kv_tokens == written.spec.rollout.kv_tokens
    assert written.cache and found.peak == max(memory.peak_bytes for memory in written.memories)


def test_eight_bits_halve_the_matrices_that_decoding_reads_and_stores(plan: Plan) -> None:
    found = outcomes(plan, "rollout=fp8")
    # Llama 2 7B: 32 layers of 4 x 4096^2 + 3 x 4096 x 11008 numbers, of 6.74e9 in all
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    before, after = (_generation(simulated(found[name])) for name in ("as planned", "rollout=fp8"))
    share = 1 - 0.5 * matrices / 6.738e9
    assert after["weights"] / before["weights"] == pytest.approx(share, rel=1e-3)
    assert {name for name in before if after[name] != before[name]} == {"weights", "compute"}
    assert found["as planned"].peak - found["rollout=fp8"].peak == pytest.approx(matrices, rel=1e-3)
    assert "not a setting of a run" in found["rollout=fp8"].note


def test_an_eight_bit_cache_halves_the_keys_and_values_that_decoding_reads_and_stores(plan: Plan) -> None:
    found = outcomes(plan, "cache=fp8")
    before, after = (_generation(simulated(found[name])) for name in ("as planned", "cache=fp8"))
    assert {name for name in before if after[name] != before[name]} == {"cache"}
    assert after["cache"] == pytest.approx(before["cache"] / 2)
    rollout = next(model for model in plan.placement.models if model.rollout is not None)
    assert found["as planned"].peak - found["cache=fp8"].peak == plan.sizing.kv_bytes(rollout) / 2


def _generation(simulation: Simulation) -> dict[str, float]:
    (item,) = [item for item in simulation.regular if item.instruction.label.startswith("generate")]
    return dict(item.cost.parts)


def test_a_verification_yields_as_many_tokens_as_leviathan_has(plan: Plan) -> None:
    for acceptance, drafted in ((0.0, 4), (0.5, 1), (0.7, 4), (0.9, 7)):
        expected = (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
        assert Speculation(acceptance, drafted).tokens == pytest.approx(expected)
    assert Speculation(1.0, 3).tokens == 4
    seconds = [
        simulated(outcomes(plan, name)[name]).seconds
        for name in ("speculative=0:4:0.1", "speculative=0.5:4:0.1", "speculative=0.9:4:0.1", "speculative=0.9:4:0")
    ]
    before = simulated(outcomes(plan)["as planned"]).seconds
    assert seconds[0] > before > seconds[1] > seconds[2] > seconds[3]


def test_verifications_read_weights_less_often_and_compute_more(plan: Plan) -> None:
    call, mesh = _generate_call(plan)
    costs = AnalyticCosts()
    plain = costs.call(call, mesh).parts
    speculative = costs.call(replace(call, speculation=Speculation(0.7, 4, 0.1)), mesh).parts
    decoding = sum(seconds for name, seconds in plain.items() if name != "prefill")
    tokens = (1 - 0.7**5) / 0.3
    for part in ("weights", "cache", "layers", "scheduler"):
        assert speculative[part] == pytest.approx(plain[part] / tokens), part
    assert speculative["compute"] > plain["compute"] / tokens
    assert speculative["drafting"] == pytest.approx(4 * 0.1 / tokens * decoding)
    assert speculative["prefill"] == plain["prefill"]


def _generate_call(plan: Plan) -> tuple[Call, Mesh]:
    pricer = Pricer(plan, AnalyticCosts(), LENGTHS)
    runs = (each for each in plan.schedule.instructions if isinstance(each, Run))
    return next(pricer.calls(next(run for run in runs if run.operator.call == "generate")))


def test_the_default_changes_are_those_that_the_run_can_have(plan: Plan) -> None:
    assert set(outcomes(plan, "default")) == {
        *(
            "as planned",
            "rollout=fp8",
            "cache=fp8",
            "speculative=0.7",
            "network=0.5x",
            "network=2x",
            "devices=2x",
            "reward=2s",
        )
    }
    # one node, a reward model, and an actor that generates with its own weights in float32
    small = planned("rollout.engine=transformers", "models.all.dtype=float32")
    assert set(outcomes(small, "default")) == {"as planned", "speculative=0.7", "devices=2x"}
    assert "one node" in outcomes(small, "network=10")["network=10"].note
    assert "more than a plan" in outcomes(small, "devices=9999x")["devices=9999x"].note
    assert "has a copy" in outcomes(small, "rollout=fp8")["rollout=fp8"].note


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("netwrk=10", "did you mean 'network'"),
        ("network=fast", "above 0 in GB/s"),
        ("speculative=1.5", "acceptance rate from 0 to 1"),
        ("speculative=0.7:x", "speculative=0.7:4:0.05"),
        ("devices=1.5x", "devices=2x"),
        ("rollout=int4", "fp8, float32"),
        ("my.yaml", "no such change; known: rollout=..."),
        ("reward=1e300", "from 1e-06 to 1,000,000 in seconds"),
        ("link=1e-300", "from 1e-06 to 1,000,000 in GB/s"),
        ("reward=5,reward=6", "reward is there twice"),
    ],
)
def test_a_text_that_is_no_change_is_one_sentence(plan: Plan, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"^--what-if {text}: .*{expected}"):
        outcomes(plan, text)


def test_the_command_prints_a_row_and_a_sentence_for_each_change() -> None:
    for options in (("--what-if",), ("--what-if", "--lengths", "128"), ("--what-if", "devices=2x")):
        result = CliRunner().invoke(app, ["simulate", str(CONFIG), *options])
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        row = next(line.split() for line in lines if line.startswith("  devices=2x "))
        before = next(line.split() for line in lines if line.startswith("  as planned "))
        assert float(row[1]) < float(before[2])
        assert "  devices=2x: cluster.nodes with 16 devices, settings as planned" in lines
    refused = CliRunner().invoke(app, ["simulate", str(CONFIG), "--what-if", "devices=2x", "--lags", "0,1"])
    assert refused.exit_code == 2
    assert "--what-if: not together with --lags" in refused.stderr
