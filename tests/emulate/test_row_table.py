"""Random lives of rows under clocks that differ: the same tokens of the same weights, and one outcome for each row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.asynchrony.row_table import Life, Limit, Phase, Progress, Row, RowKey, RowTable, Settled
from flexrlhf.metrics import Outcome

NUM_RUNS, BY_DEFAULT, PER_TEST = 2000, 100, 50
"""Numbers of random lives, in total, in `make test` and in one test."""
STEPS = 7


@dataclass(frozen=True)
class Episode:
    """Turns of a row, by their tokens; the environment replies to each but the last."""

    turns: tuple[int, ...]

    @classmethod
    def of(cls, seed: str, key: RowKey) -> Episode:
        random = Random(f"{seed} {key}")
        return cls(tuple(random.choice((1, 1, 2, 3, 5, 9)) for _ in range(random.choice((1, 1, 2, 3, 6)))))

    @property
    def ends(self) -> list[int]:
        """Place behind each turn."""
        return [sum(self.turns[: number + 1]) for number in range(len(self.turns))]

    def pieces(self, life: Life) -> Iterator[int]:
        """Yield the tokens that a row samples in each interval, by the definition of the settings."""
        place, total, ends = 0, self.ends[-1], self.ends
        for _ in range(life.cuts):
            stop = total if life.tokens is None else min(total, place + life.tokens)
            if life.turns is not None:
                begun = [end for start, end in zip([0, *ends], ends, strict=False) if start >= place]
                # a turn that was cut goes on in addition to those that begin
                cut = [] if place in (0, *ends) else [next(end for end in ends if end > place)]
                stop = min(stop, [*cut, *begun, *[total] * life.turns][len(cut) + life.turns - 1])
            yield stop - place
            place = stop
        yield total - place


@dataclass
class Sampled:
    """All that a run has sampled: the step that took each row, that of each token and outcome, and progress at cuts."""

    taken: dict[RowKey, int] = field(default_factory=dict)
    tokens: dict[RowKey, list[int]] = field(default_factory=dict)
    outcomes: dict[RowKey, tuple[int, str]] = field(default_factory=dict)
    progress: list[dict[RowKey, Progress]] = field(default_factory=list)


class RandomRun:
    """A run whose rows are worked on in the order of a random clock."""

    def __init__(self, seed: str, clock: Random, life: Life, prompts: int, stops_early: bool = False) -> None:
        """``stops_early``: rows reach the cut wherever the clock finds them, as in a run that waits for none."""
        self.seed, self.clock, self.life, self.prompts, self.stops_early = seed, clock, life, prompts, stops_early
        self.sampled = Sampled()

    def is_useful(self, prompt: int) -> bool:
        return self.life.takes == 1 or Random(f"{self.seed} useful {prompt}").random() < 0.6

    def work(self, table: RowTable, place: int, tokens: dict[RowKey, list[int]]) -> RowTable:
        """Return the table after the work between two cuts; ``place``: weights that it samples with."""
        progress = {key: row.progress for key, row in table.rows.items()}
        limits = {key: table.limit(key) for key in progress}
        first = {key: each.place for key, each in progress.items()}
        begun: Counter[RowKey] = Counter()
        going = [key for key, each in progress.items() if each.phase is not Phase.ENDED]
        while going:
            key = self.clock.choice(going)
            limit, each, ends = limits[key], progress[key], Episode.of(self.seed, key).ends
            left = ends[-1] if limit.tokens is None else first[key] + limit.tokens - each.place
            begins = each.place in (0, *ends)
            is_over = limit.turns is not None and begins and begun[key] == limit.turns
            if left <= 0 or is_over or (self.stops_early and not table.is_due(key) and self.clock.random() < 0.1):
                going.remove(key)
                continue
            begun[key] += begins
            turn = each.turn + (each.phase is Phase.AWAITING)
            stop = min(ends[turn], each.place + self.clock.randint(1, left))
            tokens.setdefault(key, []).extend([place] * (stop - each.place))
            phase = Phase.OPEN if stop < ends[turn] else Phase.AWAITING if stop < ends[-1] else Phase.ENDED
            progress[key] = Progress(stop, turn, phase)
            if phase is Phase.ENDED:
                going.remove(key)
        return table.advance(progress)

    def run(self, recorded: list[dict[RowKey, Progress]] | None = None) -> Sampled:
        """Execute all steps; now and then go on from a checkpoint, of this step or an earlier one."""
        table, saved = RowTable(self.life, recorded=recorded), None
        replaced = 0
        while table.step < STEPS:
            if saved is None or self.clock.random() < 0.3:
                saved = json.dumps([table.written(), self.written(), replaced])
            if self.clock.random() < 0.15:
                written, own, replaced = json.loads(saved)
                table = replace(RowTable.read(self.life, written), recorded=recorded)
                self.read(own)
            table, replaced = self.step(table, replaced)
            if table.step == STEPS or self.clock.random() < 0.2:
                self.check(table)
        return self.sampled

    def step(self, table: RowTable, replaced: int) -> tuple[RowTable, int]:
        required = lacking = self.prompts
        lacking += replaced
        left_out = 0
        while lacking:
            table = table.take(lacking)
            self.sampled.taken |= {key: row.taken for key, row in table.rows.items() if row.taken == table.step}
            table = self.work(table, table.step, self.sampled.tokens)
            if table.num_takes == 1:
                self.sampled.progress.append({key: row.progress for key, row in table.rows.items()})
            table, settled = table.settle(self.is_useful, required)
            self.add(table.step, settled)
            left_out += sum(map(len, settled.left_out.values())) // self.life.samples
            lacking = settled.lacking
        return table.next_step(), left_out if self.life.takes > 1 and self.life.cuts else 0

    def add(self, step: int, settled: Settled) -> None:
        for name, keys in {Outcome.TRAINED: settled.trained, **settled.left_out}.items():
            for key in keys:
                assert key not in self.sampled.outcomes, f"{key} is settled twice"
                self.sampled.outcomes[key] = (step, name)

    def check(self, table: RowTable) -> None:
        """Compare the table with the sampled tokens, by the definitions of the settings."""
        life, sampled = self.life, self.sampled
        every = {(number, sample) for number in range(table.taken) for sample in range(life.samples)}
        assert every == sampled.taken.keys() == sampled.outcomes.keys() | table.rows.keys(), "a row is lost"
        assert sampled.outcomes.keys().isdisjoint(table.rows), "a row is settled and under way"
        assert table.counts == Counter(name for _, name in sampled.outcomes.values()), "the account differs"
        assert table.rows or table.taken * life.samples == sum(table.counts.values())
        for key, (step, name) in sampled.outcomes.items():
            taken, episode = sampled.taken[key], Episode.of(self.seed, key)
            assert step - taken <= life.cuts, f"{key} passes more cuts than it may"
            assert len(sampled.tokens[key]) == episode.ends[-1], f"tokens of {key} are lost"
            if not self.stops_early and table.recorded is None:
                pieces = enumerate(episode.pieces(life), taken)
                assert sampled.tokens[key] == [at for at, n in pieces for _ in range(n)], f"{key} has other limits"
                last = max(self.last(life, each, taken) for each in self.group(key))
                assert step == last, f"{key} is settled in another step"
            assert (name is Outcome.TRAINED) == self.is_useful(key[0]) or name == Outcome.SURPLUS
        for step in range(table.step):
            trained = {key[0] for key, found in sampled.outcomes.items() if found == (step, Outcome.TRAINED)}
            if not life.cuts and life.together:
                tried = sum(step == sampled.taken[number, 0] for number in range(table.taken))
                assert len(trained) <= self.prompts and (len(trained) == self.prompts or life.takes > 1)
                assert len(trained) == self.prompts or tried > self.prompts, "the step takes too few prompts"

    def group(self, key: RowKey) -> list[RowKey]:
        return [(key[0], sample) for sample in range(self.life.samples)] if self.life.together else [key]

    def last(self, life: Life, key: RowKey, taken: int) -> int:
        """Return the step that a row is trained on in, by the definition of the settings."""
        sizes = list(Episode.of(self.seed, key).pieces(life))
        return taken + (max(n for n, size in enumerate(sizes) if size) if life.as_ended else life.cuts)

    def written(self) -> list[Any]:
        taken = [[*key, step] for key, step in self.sampled.taken.items()]
        rows = [[*key, tokens] for key, tokens in self.sampled.tokens.items()]
        ended = [[*key, *found] for key, found in self.sampled.outcomes.items()]
        return [taken, rows, ended, [[[*key, *each] for key, each in cut.items()] for cut in self.sampled.progress]]

    def read(self, written: list[Any]) -> None:
        taken, rows, ended, cuts = written
        self.sampled = Sampled(
            {(prompt, sample): step for prompt, sample, step in taken},
            {(prompt, sample): tokens for prompt, sample, tokens in rows},
            {(prompt, sample): (step, Outcome(name)) for prompt, sample, step, name in ended},
            [{(p, s): Progress(place, turn, Phase(phase)) for p, s, place, turn, phase in cut} for cut in cuts],
        )


def random_life(random: Random) -> Life:
    cuts = random.choice((0, 0, 1, 2, 4))
    return Life(
        samples=random.randint(1, 3),
        tokens=random.choice((None, 1, 2, 3, 5)) if cuts else None,
        turns=random.choice((None, 1, 2)) if cuts else None,
        cuts=cuts,
        as_ended=random.random() < 0.6 and cuts > 0,
        together=random.random() < 0.7,
        takes=1,
    )


def check_lives(number: int) -> None:
    """Execute a run under two clocks, without a clock's cuts, and as another run has recorded its cuts."""
    random = Random(f"lives {number}")
    life, prompts, seed = random_life(random), random.randint(1, 5), str(number)
    if life.together and random.random() < 0.5:
        life = replace(life, takes=random.randint(2, 3))
    first, second = (RandomRun(seed, Random(f"{seed} {clock}"), life, prompts).run() for clock in range(2))
    assert first == second, "the clock changes a token or an outcome"
    if life.cuts:
        free = RandomRun(seed, Random(f"{seed} free"), life, prompts, stops_early=True).run()
        repeated = RandomRun(seed, Random(f"{seed} again"), life, prompts).run(free.progress)
        assert repeated == free, "a recorded run is not repeated"


@pytest.mark.parametrize(
    "part",
    [pytest.param(n, marks=[pytest.mark.full] * (n >= BY_DEFAULT // PER_TEST)) for n in range(NUM_RUNS // PER_TEST)],
)
def test_a_clock_changes_no_token_and_no_outcome(part: int) -> None:
    for number in range(part * PER_TEST, (part + 1) * PER_TEST):
        check_lives(number)


def planted(name: str, wrong: Callable[..., Any]) -> AbstractContextManager[Any]:
    return patch.object(RowTable, name, wrong)


LIMIT, SETTLE, TAKE, ADVANCE = RowTable.limit, RowTable.settle, RowTable.take, RowTable.advance
WRITTEN, NEXT, IS_DUE = RowTable.written, RowTable.next_step, RowTable.is_due


def without_limit(table: RowTable, key: RowKey) -> Limit:
    return Limit(None, LIMIT(table, key).turns) if table.recorded is None else LIMIT(table, key)


def one_turn_more(table: RowTable, key: RowKey) -> Limit:
    tokens, turns = LIMIT(table, key)
    return Limit(tokens, turns and turns + 1)


def whole_record(table: RowTable, key: RowKey) -> Limit:
    return LIMIT(table, key) if table.recorded is None else Limit(table.recorded[table.step][key].place)


def due_one_later(table: RowTable, key: RowKey) -> bool:
    return table.step - table.rows[key].taken > table.life.cuts


def settled_with(**changes: Any) -> Callable[..., Any]:
    def wrong(table: RowTable, is_useful: Callable[[int], bool], required: int) -> tuple[RowTable, Settled]:
        made, settled = SETTLE(replace(table, life=replace(table.life, **changes)), is_useful, required)
        return replace(made, life=table.life), settled

    return wrong


def rows_stay(table: RowTable, is_useful: Callable[[int], bool], required: int) -> tuple[RowTable, Settled]:
    made, settled = SETTLE(table, is_useful, required)
    return replace(made, rows=table.rows), settled


def left_out_uncounted(table: RowTable, is_useful: Callable[[int], bool], required: int) -> tuple[RowTable, Settled]:
    made, settled = SETTLE(table, is_useful, required)
    return replace(made, counts={name: n for name, n in made.counts.items() if name is Outcome.TRAINED}), settled


def lacks_nothing(table: RowTable, is_useful: Callable[[int], bool], required: int) -> tuple[RowTable, Settled]:
    made, settled = SETTLE(table, is_useful, required)
    return made, replace(settled, lacking=0)


def a_prompt_skipped(table: RowTable, prompts: int) -> RowTable:
    return TAKE(replace(table, taken=table.taken + (table.step == 3)), prompts)


def a_prompt_twice(table: RowTable, prompts: int) -> RowTable:
    return TAKE(replace(table, taken=table.taken - (table.step == 3)), prompts)


def late_rows_lost(table: RowTable, found: Mapping[RowKey, Progress]) -> RowTable:
    made = ADVANCE(table, found)
    return replace(made, rows={k: r for k, r in made.rows.items() if r.progress.phase is not Phase.AWAITING})


def late_turn_lost(table: RowTable, found: Mapping[RowKey, Progress]) -> RowTable:
    return ADVANCE(table, {k: p for k, p in found.items() if p.phase is not Phase.AWAITING})


def places_not_written(table: RowTable) -> Any:
    return WRITTEN(replace(table, rows={k: replace(r, progress=Progress()) for k, r in table.rows.items()}))


def useful_kept(table: RowTable) -> RowTable:
    return replace(NEXT(table), useful=table.useful)


def takes_kept(table: RowTable) -> RowTable:
    return replace(NEXT(table), num_takes=table.num_takes)


def aged(table: RowTable) -> RowTable:
    made = NEXT(table)
    return replace(made, rows={key: Row(row.taken - 1, row.progress) for key, row in made.rows.items()})


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tokens without a limit": ("limit", without_limit),
    "a turn more": ("limit", one_turn_more),
    "a record of places is taken for tokens": ("limit", whole_record),
    "due a cut later": ("is_due", due_one_later),
    "trained on when due": ("settle", settled_with(as_ended=False)),
    "trained on when ended": ("settle", settled_with(as_ended=True)),
    "a group is divided": ("settle", settled_with(together=False)),
    "surplus is trained on": ("settle", settled_with(takes=1)),
    "trained on twice": ("settle", rows_stay),
    "left out uncounted": ("settle", left_out_uncounted),
    "no further prompts": ("settle", lacks_nothing),
    "a prompt is skipped": ("take", a_prompt_skipped),
    "a prompt is taken twice": ("take", a_prompt_twice),
    "rows with late replies are lost": ("advance", late_rows_lost),
    "turns with late replies are lost": ("advance", late_turn_lost),
    "a checkpoint without places": ("written", places_not_written),
    "useful prompts of the step before": ("next_step", useful_kept),
    "takes of the step before": ("next_step", takes_kept),
    "rows age twice as fast": ("next_step", aged),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(*BUGS[bug]), pytest.raises((AssertionError, KeyError, IndexError)):
        for number in range(200):
            check_lives(number)
