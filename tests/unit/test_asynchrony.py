"""Lags and segments with rows of several lengths: laws, cases by hand, and the printed table."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from small_runs import PPO, spec_of
from typer.testing import CliRunner

from benchmarks.asynchrony.completion_order import Speeds, both_orders, completion_order_seconds
from flexrlhf.cli import app
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic
from flexrlhf.guideline.costs.decode_phases import decode_phases
from flexrlhf.guideline.simulation.asynchrony import AsynchronyTable, compare_lags
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.lengths import batch_lengths, expected_lengths, heavy_tail
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.variants import Variant, Variants
from flexrlhf.guideline.simulation.walk import TimedInstruction, walk_steps
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.strategies.instructions import Run

DOCUMENT = Path(__file__).parents[2] / "docs" / "asynchrony.md"
HALVES = [0.5] * 6
NODES = "cluster.nodes=[{count: 1, devices: 4, class: A100-80G}]"
LONG = "data.max_response_tokens=64"


class ByLength(AnalyticCosts):
    """A decoding step of any rows takes a second, a trained token ``trained``; all else takes no time."""

    trained = 0.1

    def call(self, call: Call, mesh: Mesh) -> Cost:
        if call.kind == "generate":
            return Cost({"decode": call.longest_response - 1})
        passes = call.passes
        assert passes is not None
        return Cost({"compute": self.trained * passes.responses * passes.count if call.kind == "train" else 0.0})

    def combine(self, rows: int, width: float) -> Cost:
        return Cost()

    def move(self, primitive: str, traffic: Traffic, links: Links) -> Cost:
        return Cost()

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        return Cost()


class Balanced(ByLength):
    """Training that takes as long as generation with responses of ``heavy_tail(12, 64)``."""

    trained = 0.2


class ByToken(ByLength):
    """A computed token of a pass takes a second, with the prompts."""

    def call(self, call: Call, mesh: Mesh) -> Cost:
        passes = call.passes
        return Cost({"compute": passes.tokens}) if passes else super().call(call, mesh)


def variants_of(responses: tuple[float, ...], *settings: str, costs: AnalyticCosts | None = None) -> Variants:
    spec = spec_of(HALVES, 4, NODES, LONG, *settings)
    return Variants(spec, costs or ByLength(), TextLengths(4, responses), most_lag=8)


def test_with_one_length_every_lag_is_as_fast_as_the_slower_side() -> None:
    variants = variants_of((21.0,))
    alone, *lagging = [variants.simulate(lag) for lag in (0, 1, 2, 4, 8)]
    # two replicas of four rows each: 84 tokens, which actor and critic train on the same ranks
    assert alone.generation == 20 and alone.training == pytest.approx(2 * 8.4)
    assert [each.seconds for each in lagging] == pytest.approx([20.0] * 4)
    assert alone.seconds == pytest.approx(20 + 2 * 8.4)
    assert [each.staleness for each in (alone, *lagging)] == [0, 1, 2, 4, 8]
    assert [each.samples * each.seconds for each in lagging] == pytest.approx([8.0] * 4)
    assert lagging[0].sides["training"].idle == pytest.approx(1 - 16.8 / 20)
    assert lagging[0].sides["inference"].idle == pytest.approx(0)


def test_ranks_that_wait_for_replies_of_environments_are_idle() -> None:
    """Two turns of half of the tokens, with a reply of 30 s each; in segments of a turn the rows of two steps have one
    at the same time, in twice the processes."""
    for tokens, turns, processes in ((None, 2, 8), (11, 1, 16)):
        game = f"environment={{path: game.py:Game, max_turns: 2, processes: {processes}, seconds: 30}}"
        lagging = variants_of((22.0,), game).simulate(1, tokens)
        assert lagging.seconds == pytest.approx(turns * (10 + 30))
        assert lagging.sides["inference"].idle == pytest.approx(30 / 40)


@pytest.mark.parametrize("seed", range(3))
def test_more_lag_is_not_slower_where_lengths_vary(seed: int) -> None:
    """Long and short steps alternate by chance: with a lag of 1 each is as long as the longer of two calls."""
    responses = heavy_tail(12, 64, "test")
    variants = variants_of(responses, f"seed={seed}", costs=Balanced())
    seconds = [variants.simulate(lag).seconds for lag in (0, 1, 2, 4)]
    assert seconds[0] > 1.1 * seconds[1] and seconds[1] > 1.01 * seconds[2]
    # a copy receives the weights of one batch at a time, so training cannot be more batches in advance
    assert seconds[3] == pytest.approx(seconds[2], rel=0.04) and seconds[3] < seconds[1]


def test_a_step_takes_what_its_rows_take() -> None:
    """The mean over steps is that of the longest rows and of all tokens, not that of the mean length."""
    variants = variants_of((1.0, 41.0))
    found = variants.simulate(0)
    plan = variants.plan(0)
    measured = variants.measured(plan)
    batches = batch_lengths(plan, variants.lengths, measured.stop)[measured.start :]
    assert found.generation == pytest.approx(sum(max(rows) - 1 for rows in batches) / len(batches))
    # two replicas, of which the longer counts
    halves = [max(sum(rows[:4]), sum(rows[4:])) for rows in batches]
    assert found.training == pytest.approx(2 * 0.1 * sum(halves) / len(batches))
    assert found.samples == pytest.approx(8 / found.seconds)


GROUPS = (
    "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 4, kl: null}",
    "placement={actor.rollout: 0.5, actor: 0.5}",
    "reward={rule: gsm8k}",
    "models.reward=null",
)


def test_each_attempt_of_dynamic_sampling_generates_its_own_prompts() -> None:
    once, thrice = (
        variants_of((21.0,), *GROUPS, f"algorithm.dynamic_sampling={rounds}", costs=AnalyticCosts())
        for rounds in ("null", "{rounds: 3}")
    )
    alone = thrice.simulate(0)
    assert alone.generation == pytest.approx(3 * once.simulate(0).generation)
    assert alone.samples * alone.seconds == pytest.approx(3 * 8 * 4)
    assert alone.seconds == pytest.approx(simulate(thrice.plan(0), thrice.costs, thrice.lengths).seconds, 0.01)
    # each attempt has rows of its own, as its ranks have under the plan's layout
    varied = variants_of((1.0, 41.0), *GROUPS, "algorithm.dynamic_sampling={rounds: 2}")
    plan = varied.plan(0)
    rows = batch_lengths(plan, varied.lengths, varied.measured(plan).stop)
    prompts = [[max(batch[4 * p : 4 * p + 4]) for p in range(16)] for batch in rows[varied.measured(plan).start :]]
    longest = [max(batch[0::2]) - 1 + max(batch[1::2]) - 1 for batch in prompts]
    assert varied.simulate(0).generation == pytest.approx(sum(longest) / len(longest))


def test_responses_that_are_trained_as_they_end_are_fresher_and_have_prompts_of_their_own() -> None:
    wait, ended = (
        variants_of(
            heavy_tail(12, 64, "test"),
            *GROUPS,
            f"rollout={{segment_tokens: 16, groups: {groups}}}",
            costs=ByToken(),
        )
        for groups in ("wait", "as-ended")
    )
    assert ended.simulate(1, 16).staleness < wait.simulate(1, 16).staleness - 0.2
    assert ended.simulate(1, 16).training > wait.simulate(1, 16).training
    seconds = [simulate(each.plan(1, 16), each.costs, each.lengths).seconds for each in (wait, ended)]
    assert seconds[0] < seconds[1]
    # whole responses end together
    assert ended.simulate(1) == wait.simulate(1)


def test_segments_hold_up_no_round() -> None:
    """A round takes as long as a segment, and a token waits for those of its row that follow."""
    whole, cut = (variants_of((8.0,) * 7 + (64.0,)).simulate(1, tokens) for tokens in (None, 8))
    assert whole.generation > 35 and cut.generation == pytest.approx(7)
    assert cut.seconds < 0.5 * whole.seconds and cut.samples > 2 * whole.samples
    # an eighth of the rows has 64 of 120 tokens, which wait 3.5 rounds on the average
    assert cut.staleness == pytest.approx(1 + 3.5 * 64 / 120, rel=0.15)


def test_a_plan_with_segments_takes_the_mean_of_its_rounds() -> None:
    variants = variants_of(heavy_tail(12, 64, "test"), costs=AnalyticCosts())
    simulation = simulate(variants.plan(1, 16), variants.costs, variants.lengths)
    assert simulation.plan.batch.num_rows == 4 * simulation.plan.batch.num_taken
    assert simulation.seconds == pytest.approx(variants.simulate(1, 16).seconds, rel=0.03)
    assert simulation.samples_per_second == pytest.approx(8 / simulation.seconds)


def test_places_for_prompts_that_replace_others_have_no_price() -> None:
    """A step takes its share in the mean, whatever number it may take."""
    lengths, prices = TextLengths(4, heavy_tail(12, 64, "test")), []
    for further in ("null", "{rounds: 4}"):
        grpo = f"algorithm={{name: grpo, prompts_per_step: 8, kl: null, dynamic_sampling: {further}}}"
        plan = make_plan(spec_of(None, 4, NODES, LONG, "rollout.segment_tokens=16", grpo))
        simulation = simulate(plan, AnalyticCosts(), lengths)
        runs = [(each.instruction, each.cost.seconds) for each in simulation.priced]
        prices.append({run.operator.name: seconds for run, seconds in runs if isinstance(run, Run)})
    assert prices[1].pop("take_prompts") >= 0
    assert prices[1] == pytest.approx(prices[0])


def test_texts_of_carried_rows_are_read_again_with_new_weights() -> None:
    often, rarely = (
        variants_of((64.0,), f"sync.every={every}", costs=AnalyticCosts()).simulate(1, 8) for every in (1, 4)
    )
    assert rarely.generation < often.generation
    assert rarely.staleness == pytest.approx(often.staleness + 1.5)


def test_weights_are_sent_once_those_before_are_stored() -> None:
    """Generation takes 1, 1, 10, 1, ... seconds: two batches that are trained early cannot send their weights."""
    nodes = [
        TimedInstruction((0,), 1, uses=(0,)),
        TimedInstruction((1,), 1, after=(0,), lag=4),
        TimedInstruction((0, 1), 1, after=(1,), lag=4, fills=0, sends=(1,)),
    ]
    slow = lambda index, step: 20.0 if (index, step) == (0, 6) else 1.0  # noqa: E731
    visits = {(each.index, each.step): each for each in walk_steps(nodes, 2, 9, seconds=slow).visits if each.block == 1}
    # the weights of batch 2 are for batch 7; until its generation begins those of batch 3 cannot be sent, nor 4 packed
    begun = next(
        each.start for each in walk_steps(nodes, 2, 9, seconds=slow).visits if (each.index, each.step) == (0, 7)
    )
    assert visits[1, 3].end < begun < visits[1, 5].start


def test_rows_are_decoded_until_each_has_ended() -> None:
    """Of rows whose lengths are known the longest has ended after its own steps, with a probability of 1."""
    phases = list(decode_phases("refill", 3, 8, (2.0, 4.0, 11.0), is_exact=True))
    assert [(each.steps, each.rows) for each in phases] == [(1, 3), (2, pytest.approx(2)), (7, pytest.approx(1))]
    static = list(decode_phases("static", 3, 8, (2.0, 4.0, 11.0), is_exact=True))
    assert [(each.steps, each.rows) for each in static] == [(1, 3), (2, 3), (7, 3)]


# --- the order of completion


def completed(lag: int, batches: list[list[int]], training: float = 0.0, forwards: float = 0.0) -> float:
    speeds = Speeds(lambda rows: 1.0, 100, 0.0, forwards, 1.0, lambda tokens: training)
    return completion_order_seconds(batches, 1, lag, speeds, range(2, len(batches) - lag - 1))


def test_in_the_order_of_completion_short_responses_overtake() -> None:
    same = [[5, 5]] * 12
    assert completed(0, same, training=3, forwards=1) == pytest.approx(9)
    # two batches at a time, since rows do not slow each other down here
    assert completed(1, same, training=3) == pytest.approx((5 + 3) / 2, rel=0.05)
    # a long response of every fourth batch: in the order of submission such a step takes 41 seconds
    tail = [[1, 41] if step % 4 == 0 else [1, 1] for step in range(40)]
    assert completed(0, tail) == pytest.approx(11, rel=0.1)
    assert completed(4, tail) < 0.6 * completed(0, tail)


# --- the document

LARGER = (
    "placement={actor.rollout: 0.625, actor: 0.375}",
    "rollout={engine: vllm, tp: 4, kv_tokens: 600000}",
    "models.actor={init: qwen2.5-32b, zero: 3, tp: 2, micro_batch_tokens: 36864, activation_checkpointing: true}",
)


def long_tail(directory: Path, settings: tuple[str, ...], lags: list[int]) -> AsynchronyTable:
    """The document's run with such lags, with segments and without."""
    text = DOCUMENT.read_text()
    block = next(part for part in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "long-tail" in part)
    (directory / "a.yaml").write_text(block)
    spec = load_spec(directory / "a.yaml", settings)
    return compare_lags(spec, AnalyticCosts(), expected_lengths(spec, "heavy-tail"), lags, [8192])


@pytest.mark.full
def test_few_responses_on_each_device_gain_more(tmp_path: Path) -> None:
    found = long_tail(tmp_path, ("algorithm.prompts_per_step=32",), [1])
    assert isinstance(found.co_located, Variant)
    assert found.variants[1].samples / found.co_located.samples == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("column", "settings"),
    [pytest.param(2, (), id="7B"), pytest.param(4, LARGER, id="32B", marks=pytest.mark.full)],
)
def test_the_figures_of_the_document_are_predicted(column: int, settings: tuple[str, ...], tmp_path: Path) -> None:
    found = long_tail(tmp_path, settings, [0, 1, 4])
    assert isinstance(found.co_located, Variant) and found.enough.lag == 1
    predicted = {(str(each.lag), "-" if each.tokens is None else str(each.tokens)): each for each in found.variants}
    predicted["co-located", "-"] = found.co_located
    base, rows = found.variants[0].samples, 0
    expected = DOCUMENT.read_text().split("### What to expect")[1].split("\n## ")[0]
    for line in re.findall(r"^\| .* \|$", expected, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if each := predicted.get((cells[0], cells[1])):
            rows += 1
            assert cells[column : column + 2] == [f"{each.seconds:.0f}", f"{each.samples / base:.2f}"]
        elif "completion" in cells[0]:
            variants = Variants(found.plan.spec, AnalyticCosts(), found.lengths, 4)
            ((_, _, completion),) = both_orders(variants, [4])
            assert cells[column] == f"{completion:.0f}"
    assert rows == 7


# --- the command

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    raw = PPO | {"placement": HALVES, "cluster": {"nodes": [{"count": 1, "devices": 4, "class": "A100-80G"}]}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(raw | {"placement": [1, 1, 1, 1]}))
    return partial(CliRunner().invoke, app)


def test_the_table_names_what_pays(invoke: Invoke) -> None:
    result = invoke(["simulate", "a.yaml", "--lengths", "heavy-tail:3", "--lags", "1,0", "--segments", "2"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("test: lags and segments on 4 devices (A100-80G), by figures")
    rows = [line.split()[:2] for line in lines if line.strip()[:2] in ("0 ", "1 ", "co")]
    assert rows == [["0", "-"], ["1", "-"], ["0", "2"], ["1", "2"], ["co-located", "-"]]
    for words in ("lag", "segments"):
        assert any(line.startswith(f"  {words}") for line in lines[8:]), result.stdout
    assert max(map(len, lines)) <= 120, max(lines, key=len)


def test_without_a_lag_any_placement_may_have_segments(invoke: Invoke) -> None:
    result = invoke(["simulate", "one.yaml", "--lengths", "heavy-tail:3", "--lags", "0", "--segments", "4"])
    assert result.exit_code == 0 and "segments: none pays" in result.stdout, result.output
