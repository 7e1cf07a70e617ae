"""Responses in segments: with the same weights they are the responses that are generated whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from small_models import ONE_RANK, engine_for, in_segments, placed
from test_decoding import LENGTHS, PLAIN, SAMPLINGS, assert_same, model_of, passes_of
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch
from flexrlhf.engines.sampling import sample_tokens
from flexrlhf.engines.slots import Slots
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import GENERATE
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.rollout import KeptSlots
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.open_rows import OpenRows
from flexrlhf.weights.shapes import model_shape

PROMPTS, SAMPLES, TOKENS = 5, 2, 4
"""Prompts of a step, samples of each, and tokens of a segment."""


def prompts_of(step: int, prompts: int = PROMPTS, samples: int = SAMPLES) -> Batch:
    """Prompts of 1 to 7 tokens, each with samples."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, LENGTHS.prompt + 1, (prompts, 1), generator=generator)
    mask = (torch.arange(LENGTHS.prompt) >= LENGTHS.prompt - lengths).to(torch.uint8)
    tokens = torch.randint(4, 32, mask.shape, generator=generator, dtype=torch.int32) * mask
    columns = {"prompts": tokens.repeat_interleave(samples, 0), "prompt_mask": mask.repeat_interleave(samples, 0)}
    return Batch(columns, torch.arange(prompts * samples), samples)


# --- decoding


@pytest.mark.parametrize("tokens", [1, 5, 11, 12])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_segments_are_the_response_that_is_generated_whole(name: str, tokens: int) -> None:
    """Prompts of several lengths, samples of a prompt that end in other segments, stop strings over a border."""
    model, batch = model_of(), prompts_of(0, 7, 3)
    for together in (100, 4):
        passes = passes_of(model, together)
        whole = passes.generate(batch, SAMPLINGS[name])
        assert_same(in_segments(passes.generate, batch, SAMPLINGS[name], tokens, LENGTHS.response), whole)


def test_the_noise_is_that_of_the_step_that_took_a_row() -> None:
    """Rows of several steps are in one call."""
    passes, batch = passes_of(model_of()), prompts_of(0)
    steps = torch.arange(len(batch)) % 3 + PLAIN.step
    mixed = passes.generate(batch.with_columns({"noise_step": steps}), replace(PLAIN, step=77))
    for step in set(steps.tolist()):
        alone, own = passes.generate(batch, replace(PLAIN, step=step)), steps == step
        assert_same({name: column[own] for name, column in mixed.items()}, {name: c[own] for name, c in alone.items()})
    assert not torch.equal(mixed["tokens"], passes.generate(batch, PLAIN)["tokens"])


# --- rounds


class Rounds:
    """Ranks of a model that generate round by round; ``stores``: rows of the newest step by rank."""

    def __init__(
        self, num_ranks: int, segments: int, by_row: bool = False, kept_slots: KeptSlots | None = None
    ) -> None:
        self.shape = BatchShape(PROMPTS * segments, SAMPLES, 2, segments=segments, is_by_row=by_row)
        model = placed(generate_tokens=6 * (LENGTHS.prompt + LENGTHS.response))
        self.engine = engine_for(model, lengths=LENGTHS, kept_slots=kept_slots)
        model = replace(model, layout=Layout(tuple(range(num_ranks))))
        loaded = LoadedModel(model, self.engine, ONE_RANK, ONE_RANK, model_shape("actor", model.settings))
        written = (*GENERATE.writes, "rollout_logprobs", "logprobs", Column.PRESENT)
        carried = tuple(name for name in written if name != "attention_mask")
        operator = replace(GENERATE, writes=written, carries=carried)
        mini_batches = self.shape.mini_batches
        layout = loaded.placed.layout
        self.runs = [OperatorRun(operator, loaded, layout, self.shape, mini_batches, rank) for rank in range(num_ranks)]
        self.stores: list[RowStore | None] = [None] * num_ranks

    def generate(self, step: int, version: int) -> list[OpenRows]:
        """Execute the round of ``step`` on every rank."""
        made = []
        for run, before in zip(self.runs, self.stores, strict=True):
            store = self.stores[run.rank] = RowStore(LENGTHS, torch.device("cpu"))
            for row in run.rows:
                of_step, number = self.shape.as_taken(row, step)
                taken = prompts_of(max(0, of_step))
                for name in GENERATE.reads:
                    store.put(name, [row], taken[name][number : number + 1])
            batch = run.batch(store, torch.device("cpu"))
            each = OpenRows.begin(run, batch, step, LENGTHS, PLAIN.pad_token_id, before, TOKENS)
            places = each.open_places
            generated = self.engine.generate(each.continued(places), replace(PLAIN, step=step))
            each.add(places, generated, version)
            columns = each.columns()
            for name in run.operator.writes:
                store.put(name, run.rows, columns[name])
            made.append(each)
        return made

    def trained(self, step: int) -> dict[tuple[int, int], dict[str, Tensor]]:
        """Columns of the rows that ``step`` trains on, by the step that took them and their number there."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for run, store in zip(self.runs, self.stores, strict=True):
            assert store is not None
            for row in run.rows:
                cells = {name: store.get(name, [row])[0] for name in run.operator.writes}
                if cells[Column.PRESENT]:
                    found[self.shape.as_taken(row, step)] = cells
        return found


@pytest.mark.parametrize(
    ("num_ranks", "segments", "by_row"), [(1, 3, False), (2, 3, True), (3, 2, False), (1, 2, True), (2, 1, False)]
)
def test_rows_that_are_carried_become_the_responses_of_their_steps(num_ranks: int, segments: int, by_row: bool) -> None:
    """Each is trained on once, when it ends, or with its prompt's other samples, when the last of them ends.

    Versions are those of the rounds. With too few segments responses end early.
    """
    rounds, steps, ends = Rounds(num_ranks, segments, by_row), 6, dict[tuple[int, int], int]()
    whole = [rounds.engine.generate(prompts_of(step), replace(PLAIN, step=step)) for step in range(steps)]
    longest = torch.arange(LENGTHS.response) < TOKENS * segments
    for step in range(steps):
        for each in rounds.generate(step, version=10 + step):
            assert (each.steps > step - segments).all() and (each.steps <= step).all()
        for (taken, number), cells in rounds.trained(step).items():
            expected = {name: column[number] for name, column in whole[taken].items()}
            mask = expected["response_mask"].bool() & longest
            assert torch.equal(cells["response_mask"].bool(), mask)
            assert torch.equal(cells["attention_mask"][LENGTHS.prompt :].bool(), mask)
            responses = (each["tokens"][LENGTHS.prompt :][mask] for each in (cells, expected))
            assert torch.equal(*responses)
            assert cells["finished"] == (expected["finished"] & (expected["response_mask"].bool() == mask).all())
            for name in ("rollout_logprobs", "logprobs"):
                assert torch.allclose(cells[name], expected["rollout_logprobs"] * mask, atol=1e-5, rtol=0)
            versions = 10 + taken + torch.arange(LENGTHS.response) // TOKENS
            assert torch.equal(cells["policy_version"], (versions * mask).int())
            assert (taken, number) not in ends, "trained on twice"
            ends[taken, number] = step
    for taken, columns in enumerate(whole):
        lengths = (columns["response_mask"].bool() & longest).sum(1)
        if not by_row:
            lengths = lengths.view(PROMPTS, SAMPLES).max(1).values.repeat_interleave(SAMPLES)
        last = [taken + -(-length // TOKENS) - 1 for length in lengths.tolist()]
        assert [ends.get((taken, row), steps) for row in range(len(last))] == [min(end, steps) for end in last]


def test_an_empty_place_has_nothing() -> None:
    """In the first step no prompts are under way, and a prompt that is trained on leaves its place empty."""
    rounds = Rounds(1, 3)
    first, *_ = rounds.generate(0, 0)
    trained = rounds.trained(0)
    assert first.exists.sum() == rounds.shape.num_taken and not any(taken for taken, _ in trained)
    second, *_ = rounds.generate(1, 1)
    (store,) = rounds.stores
    assert store is not None
    for row in rounds.runs[0].rows:
        taken, number = rounds.shape.as_taken(row, 1)
        is_empty = taken == -1 or (taken, number) in trained
        assert bool(second.exists[row]) != is_empty
        assert not is_empty or not any(
            store.get(name, [row]).any() for name in ("response_mask", "attention_mask", Column.PRESENT)
        )


def test_rows_that_are_put_again_take_no_further_memory() -> None:
    """As the turns of an episode do."""
    store, rows = RowStore(LENGTHS, torch.device("cpu")), range(4)
    for turn in range(5):
        store.put("scores", rows, torch.full((4,), float(turn)))
    store.put("scores", [1], torch.tensor([9.0]))
    assert store.get("scores", rows).tolist() == [4, 9, 4, 4]
    assert [len(block) for block in store._blocks["scores"]] == [0, 0, 0, 0, 4, 1]


# --- keys and values that are kept


class MovingWeights:
    """Weights of a model in each step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.first = {name: values.clone() for name, values in model.state_dict().items()}

    def put(self, model: PreTrainedModel, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        moved = {n: v + 0.3 * torch.randn(v.shape, generator=generator) * v.std() for n, v in self.first.items()}
        model.load_state_dict(moved)


@torch.no_grad()
def kept_response(
    model: PreTrainedModel, weights: MovingWeights, taken: int, number: int, steps: range, renewed: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a row, one by one: each token is read once, but in the steps ``renewed``."""
    batch, cache, response, logprobs = prompts_of(taken), DynamicCache(), list[int](), list[float]()
    prompt = batch["prompts"][number][batch["prompt_mask"][number] == 1].tolist()
    for step in steps:
        weights.put(model, step)
        cache = DynamicCache() if step in renewed else cache
        for _ in range(min(TOKENS, LENGTHS.response - len(response))):
            if response and response[-1] in PLAIN.eos_token_ids:
                break
            text = (prompt + response)[cache.get_seq_length() :]
            logits = model(input_ids=torch.tensor([text]), past_key_values=cache, use_cache=True).logits[:, -1]
            rows = torch.tensor([number])
            token, logprob = sample_tokens(logits, replace(PLAIN, step=taken), rows, len(response))
            response.append(token.item())
            logprobs.append(logprob.item())
    return response, logprobs


@pytest.mark.parametrize(("lag", "every", "dropped"), [(0, None, ()), (0, 2, ()), (1, 3, ()), (0, None, (2, 3, 5))])
def test_carried_rows_have_keys_and_values_of_the_weights_that_read_each_token(
    lag: int, every: int | None, dropped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is read twice, but in the first batch behind a checkpoint, or where a session drops keys and values
    (``dropped``: before these steps); samples of a prompt share its tokens alone.
    Evaluations neither read them nor overwrite them."""
    segments, num_steps, read, counts = 3, 7, Slots._read, list[int]()

    def counted(slots: Slots, rows: list[int], first: int, tokens: Tensor, begun: list[int], ends: list[int]) -> None:
        counts.append(sum(ends[row] - begun[row] for row in rows))
        read(slots, rows, first, tokens, begun, ends)

    monkeypatch.setattr(Slots, "_read", counted)
    renewed = [*dropped, *(step for step in range(lag + 1, num_steps) if every and (step - lag) % every == 0)]
    rounds = Rounds(2, segments, by_row=True, kept_slots=KeptSlots(PROMPTS * SAMPLES * segments, segments, lag, every))
    model, num_carried = rounds.engine._model, 0
    weights, whole = MovingWeights(model), 0
    for step in range(num_steps):
        weights.put(model, step)
        prompts, evaluated = prompts_of(step), prompts_of(50 + step)
        new = int((prompts["prompt_mask"][::SAMPLES].sum(1) - 1).sum())
        counts.clear()
        if step in dropped:
            rounds.engine.drop_kept_rows()
        rows = rounds.generate(step, step)
        if step not in renewed:
            assert sum(counts) == new
        num_carried += sum(int((each.exists & (each.steps < step)).sum()) for each in rows)
        before = rounds.engine.generate(evaluated, replace(PLAIN, step=-1))
        assert_same(before, rounds.engine.generate(evaluated, replace(PLAIN, step=-1)))
        for (taken, number), cells in rounds.trained(step).items():
            tokens, logprobs = kept_response(model_of(), weights, taken, number, range(taken, step + 1), renewed)
            mask = cells["response_mask"].bool()
            assert cells["tokens"][LENGTHS.prompt :][mask].tolist() == tokens
            assert torch.allclose(cells["rollout_logprobs"][mask], torch.tensor(logprobs), atol=1e-5, rtol=0)
            whole += taken < step
    assert num_carried > 20 and whole > 10
