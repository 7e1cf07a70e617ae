"""Seconds a step of an agent whose replies are late, by the rule that limits its rows before weights change.

    python -m benchmarks.asynchrony.row_lives [--cap SECONDS] [--steps N] [--seeds N]

Two ranks generate and two train, by events. Turns of episodes, tokens and times of replies follow quantiles of 357,161
steps of coding agents that were published by TraceLab (University of Washington, 2026, CC BY 4.0; tables
session_internal_counts, session_timing_distribution, token_length_distribution). Rows live in a ``RowTable``, whose
account is printed; the free-running loop has no table, and its rows are trained on in the order in which they end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import exp, inf, log
from random import Random
from statistics import mean
from typing import NamedTuple

from benchmarks.asynchrony.row_table import Life, Phase, Progress, RowKey, RowTable
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.text import table

STEPS_OF_A_REQUEST = ((0.25, 1.0), (0.5, 2.0), (0.9, 21.0), (0.99, 87.0))
OUTPUT_TOKENS = ((0.0, 30.0), (0.5, 214.0), (0.9, 1650.0), (0.99, 5000.0))
APPENDED_TOKENS = ((0.0, 50.0), (0.5, 875.0), (0.9, 3000.0))
REPLY_SECONDS = ((0.0, 0.02), (0.5, 0.3), (0.9, 13.6), (0.99, 216.0))
"""Share of the values below → value; between two of them the logarithm grows evenly."""
MOST_TURNS, PROMPT = 20, 1000
ROWS, LAG = 128, 2


class Turn(NamedTuple):
    """A turn of an episode: tokens that are sampled, time of the reply, and its tokens."""

    sampled: int
    seconds: float
    appended: int


Episode = Sequence[Turn]


def quantile(quantiles: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which a share of all values is."""
    for (low, first), (high, last) in pairwise(quantiles):
        if share <= high:
            return exp(log(first) + (log(last) - log(first)) * (share - low) / (high - low))
    return quantiles[-1][1]


def make_episode(random: Random, cap: float) -> Episode:
    """Return a random episode. ``cap``: deadline of a reply in seconds."""
    turns = round(quantile(STEPS_OF_A_REQUEST, 0.25 + 0.75 * random.random()))
    return [
        Turn(
            round(quantile(OUTPUT_TOKENS, random.random())),
            min(cap, quantile(REPLY_SECONDS, random.random())),
            round(quantile(APPENDED_TOKENS, random.random())),
        )
        for _ in range(min(MOST_TURNS, turns))
    ]


@dataclass(frozen=True)
class Speeds:
    """Speeds of a rank, of the order of a 7B model on an H100.

    step:     time of a decoding step in seconds, and of each row in it.
    prefill:  tokens a second.
    train:    tokens a second of both ranks that train.
    sync:     seconds in which weights change.
    """

    step: tuple[float, float] = (0.01, 0.0001)
    slots: int = 128
    prefill: float = 20000.0
    train: float = 12000.0
    sync: float = 3.0


@dataclass
class Piece:
    """Tokens that a row samples without a pause."""

    key: RowKey
    tokens: int


@dataclass
class Rank:
    """A rank that generates: all of its rows get a token in each decoding step.

    ends:     decoding step in which each row is done.
    steps:    so far.
    prefill:  time of the prefill that is due.
    busy:     time of decoding and prefill so far.
    full:     the same, decoding weighted by the share of the slots that are full.
    computed: tokens of both.
    """

    speeds: Speeds
    now: float = 0.0
    steps: float = 0.0
    prefill: float = 0.0
    busy: float = 0.0
    full: float = 0.0
    computed: float = 0.0
    ends: list[tuple[float, int, Piece]] = field(default_factory=list)
    queue: list[tuple[int, int, Piece, int]] = field(default_factory=list)
    count: int = 0

    @property
    def step_seconds(self) -> float:
        fixed, each = self.speeds.step
        return fixed + each * len(self.ends)

    @property
    def next_end(self) -> float:
        """Time at which the next row is done; infinite without rows."""
        if not self.ends:
            return inf
        return self.now + self.prefill + max(0.0, self.ends[0][0] - self.steps) * self.step_seconds

    def wait_until(self, time: float) -> None:
        """Compute until ``time``."""
        filled = min(self.prefill, time - self.now)
        decoding = time - self.now - filled if self.ends else 0.0
        self.prefill -= filled
        self.busy += filled + decoding
        self.full += filled + decoding * len(self.ends) / self.speeds.slots
        self.steps += decoding / self.step_seconds
        self.now = time

    def put(self, age: int, piece: Piece, tokens: int) -> None:
        """Queue a row, older rows first. ``tokens``: that are new to its cache."""
        self.count += 1
        heappush(self.queue, (age, self.count, piece, tokens))
        self.fill()

    def fill(self) -> None:
        """Give free slots to rows of the queue."""
        while self.queue and len(self.ends) < self.speeds.slots:
            _, number, piece, tokens = heappop(self.queue)
            self.compute(tokens)
            heappush(self.ends, (self.steps + piece.tokens, number, piece))

    def compute(self, tokens: int) -> None:
        self.prefill += tokens / self.speeds.prefill
        self.computed += tokens

    def take_end(self) -> Piece:
        """Remove the row that is done and return it."""
        piece = heappop(self.ends)[2]
        self.computed += piece.tokens
        return piece


@dataclass
class Row:
    """A row beside its progress.

    answered:  time at which the reply to its last turn is there.
    context:   tokens, replies included.
    cached:    of these, tokens in its rank's cache.
    """

    answered: float = 0.0
    context: int = PROMPT
    cached: int = 0


@dataclass(frozen=True)
class Rule:
    """A rule that limits rows before weights change.

    life:      limits; None: the free-running loop.
    behind:    steps that training is behind generation.
    by_turns:  whether rows go on when all of the batch have their replies.
    carries:   whether a row whose reply is late when all others are at the cut is carried over, which the run records.
    keeps:     whether caches are kept when weights change; else they are computed again.
    """

    name: str
    life: Life | None
    behind: int
    by_turns: bool = False
    carries: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Figures:
    """Figures of a run.

    seconds:  of training on as many rows as a step takes, once a third of the steps are done.
    idle:     share of the time of the ranks that generate, and of those that train.
    full:     share of the slots of the ranks that generate.
    ages:     mean and most steps from the one that took a row to the one that trained on it.
    computed: tokens of decoding and prefill for each one that is sampled.
    """

    seconds: float
    idle: tuple[float, float]
    full: float
    ages: tuple[float, int]
    computed: float
    account: RowAccount


class Loop:
    """A run of a rule."""

    def __init__(
        self, rule: Rule, episodes: Callable[[int], Episode], steps: int, speeds: Speeds, rows: int = ROWS
    ) -> None:
        self.rule, self.episodes, self.num_steps, self.speeds = rule, episodes, steps, speeds
        self.num_rows = rows
        self.ranks = [Rank(speeds) for _ in range(2)]
        self.rows: dict[RowKey, Row] = {}
        self._places: dict[RowKey, list[int]] = {}
        self.ages: list[int] = []
        self.sampled, self.training = 0, 0.0
        self.ends: list[float] = []
        self.trained: list[int] = []

    def rank_of(self, key: RowKey) -> Rank:
        return self.ranks[key[0] % len(self.ranks)]

    def places(self, key: RowKey) -> list[int]:
        """Place behind each turn of a row."""
        if key not in self._places:
            self._places[key] = list(accumulate(turn.sampled for turn in self.episodes(key[0])))
        return self._places[key]

    def train(self, keys: Sequence[RowKey], taken: Sequence[int], now: float) -> float:
        """Train on rows that are whole at ``now``; returns when that ends."""
        tokens = sum(PROMPT + sum(turn.sampled + turn.appended for turn in self.episodes(key[0])) for key in keys)
        seconds = tokens / self.speeds.train
        self.ages += [len(self.ends) - each for each in taken]
        self.training += seconds
        self.trained.append(len(keys))
        self.ends.append(max(now, self.ends[-1] if self.ends else 0.0) + seconds)
        return self.ends[-1]

    def begin(self, key: RowKey, age: int, progress: Progress, most: float) -> None:
        """Have a row sample up to ``most`` tokens, or to the end of its turn."""
        row, places = self.rows.setdefault(key, Row()), self.places(key)
        turn = progress.turn + (progress.phase is Phase.AWAITING)
        tokens = int(min(places[turn] - progress.place, most))
        self.rank_of(key).put(age, Piece(key, tokens), row.context - row.cached)
        row.cached = row.context

    def finish(self, piece: Piece, progress: Progress) -> Progress:
        """Return the progress of a row after a piece."""
        row, places, rank = self.rows[piece.key], self.places(piece.key), self.rank_of(piece.key)
        self.sampled += piece.tokens
        row.context += piece.tokens
        row.cached = row.context
        turn, place = progress.turn + (progress.phase is Phase.AWAITING), progress.place + piece.tokens
        if place < places[turn]:
            return Progress(place, turn)
        reply = self.episodes(piece.key[0])[turn]
        row.answered = rank.now + reply.seconds
        row.context += reply.appended
        return Progress(place, turn, Phase.AWAITING if turn + 1 < len(places) else Phase.ENDED)

    def run(self) -> Figures:
        """Execute all steps."""
        account = self.run_steps(self.rule.life) if self.rule.life else self.run_freely()
        end, first = self.ends[-1], len(self.ends) // 3
        trained = sum(self.trained[first + 1 :])
        generated = max(rank.now for rank in self.ranks)
        return Figures(
            (end - self.ends[first]) * self.num_rows / trained,
            (1 - mean(rank.busy for rank in self.ranks) / generated, 1 - self.training / end),
            mean(rank.full for rank in self.ranks) / generated,
            (mean(self.ages), max(self.ages)),
            sum(rank.computed for rank in self.ranks) / self.sampled,
            account,
        )

    def run_steps(self, life: Life) -> RowAccount:
        """Execute steps whose rows live in a table."""
        rows, now = RowTable(life), 0.0
        for step in range(self.num_steps):
            if step > self.rule.behind:
                now = max(now, self.ends[step - self.rule.behind - 1] + self.speeds.sync)
                for row in self.rows.values():
                    row.cached *= self.rule.keeps  # else they are of other weights
            rows = rows.take(self.num_rows)
            found = {key: row.progress for key, row in rows.rows.items()}
            if self.rule.by_turns:
                while any(each.phase is not Phase.ENDED for each in found.values()):
                    now = max([self.work(rows, found, now, turns=1), *(self.rows[key].answered for key in found)])
            else:
                now = self.work(rows, found, now)
            taken = {key: row.taken for key, row in rows.rows.items()}
            rows, settled = rows.advance(found).settle(lambda prompt: True, self.num_rows)
            rows = rows.next_step()
            whole = max([now, *(self.rows[key].answered for key in settled.trained)])
            self.train(settled.trained, [taken[key] for key in settled.trained], whole)
        return RowAccount({**rows.counts, RowAccount.IN_FLIGHT: len(rows.rows)})

    def work(self, table: RowTable, found: dict[RowKey, Progress], start: float, turns: int | None = None) -> float:
        """Have all rows go on to the cut, and return when they have come to it. ``found``: their progress."""
        now, waiting = start, list[tuple[float, RowKey]]()
        left: dict[RowKey, float] = {}
        begun: dict[RowKey, float] = {}
        for key, progress in found.items():
            limit = table.limit(key)
            left[key] = inf if limit.tokens is None else limit.tokens
            begun[key] = min(inf if limit.turns is None else limit.turns, turns or inf)
            if progress.phase is not Phase.ENDED:
                heappush(waiting, (max(now, self.rows[key].answered if key in self.rows else 0.0), key))
        for rank in self.ranks:
            rank.wait_until(max(rank.now, now))
        while waiting or any(rank.ends for rank in self.ranks):
            is_idle = not any(rank.ends for rank in self.ranks) and waiting[0][0] > now
            if self.rule.carries and is_idle and not any(table.is_due(key) for _, key in waiting):
                break
            rank = min(self.ranks, key=lambda each: each.next_end)
            time = min(rank.next_end, waiting[0][0] if waiting else inf)
            is_reply = time < rank.next_end
            for each in self.ranks:
                each.wait_until(time)
            now = time
            if is_reply:
                _, key = heappop(waiting)
                begun[key] -= found[key].phase is Phase.AWAITING or not found[key].place
                self.begin(key, table.rows[key].taken, found[key], left[key])
                continue
            piece = rank.take_end()
            key = piece.key
            found[key] = self.finish(piece, found[key])
            left[key] -= piece.tokens
            if found[key].phase is Phase.AWAITING and left[key] > 0 and begun[key] > 0:
                heappush(waiting, (self.rows[key].answered, key))
            rank.fill()
        return now

    def run_freely(self) -> RowAccount:
        """Train whenever a batch has ended; weights change under the rows, of which none waits for another."""
        version, taken, now, trained = 0, 0, 0.0, inf
        waiting, ended = list[tuple[float, RowKey]](), list[RowKey]()
        progress, begun = dict[RowKey, Progress](), dict[RowKey, int]()
        while version < self.num_steps:
            while taken < (version + self.rule.behind + 1) * self.num_rows:
                key = (taken, 0)
                taken, progress[key], begun[key] = taken + 1, Progress(), version
                self.begin(key, taken, progress[key], inf)
            rank = min(self.ranks, key=lambda each: each.next_end)
            time = min(rank.next_end, waiting[0][0] if waiting else inf, trained)
            is_end = time == rank.next_end
            for each in self.ranks:
                each.wait_until(time)
            now = time
            if time == trained:
                version, trained = version + 1, inf
                for each in self.ranks:
                    each.prefill += self.speeds.sync
                    for _, _, piece in each.ends:
                        each.compute(self.rows[piece.key].context)
                for row in self.rows.values():
                    row.cached = 0
                for each in self.ranks:
                    for _, _, piece in each.ends:
                        self.rows[piece.key].cached = self.rows[piece.key].context
            elif is_end:
                key = rank.ends[0][2].key
                progress[key] = self.finish(rank.take_end(), progress[key])
                heappush(waiting, (self.rows[key].answered, key))
                rank.fill()
            else:
                _, key = heappop(waiting)
                if progress[key].phase is Phase.ENDED:
                    ended.append(key)
                else:
                    self.begin(key, key[0], progress[key], inf)
            if trained == inf and len(ended) >= self.num_rows:
                keys, ended = ended[: self.num_rows], ended[self.num_rows :]
                trained = self.train(keys, [begun[key] for key in keys], now)
        counts = {"trained": version * self.num_rows, RowAccount.IN_FLIGHT: taken - version * self.num_rows}
        return RowAccount(counts)


WHOLE, IN_CUTS = Life(), Life(tokens=2000, cuts=19, as_ended=True)
RULES = (
    Rule("turns, lag 0 (today)", WHOLE, 0, by_turns=True),
    Rule("turns, lag 1 (today)", WHOLE, 1, by_turns=True),
    Rule("rounds of a turn, lag 1", Life(turns=1, cuts=MOST_TURNS - 1, as_ended=True), 1),
    Rule("cuts, lag 0", WHOLE, 0),
    Rule("cuts, lag 1", WHOLE, 1),
    Rule("cuts, 6 turns ahead, lag 3", Life(turns=6, cuts=2), 1),
    Rule("cuts of 2,000 tokens", IN_CUTS, 1),
    Rule("cuts of 4,000 tokens", Life(tokens=4000, cuts=9, as_ended=True), 1),
    Rule("cuts of 2,000 tokens, caches kept", IN_CUTS, 1, keeps=True),
    Rule("cuts of 4,000 tokens, late rows recorded", Life(tokens=4000, cuts=9, as_ended=True), 1, carries=True),
    Rule("cuts of 2,000, late rows and caches kept", IN_CUTS, 1, carries=True, keeps=True),
    Rule("free-running, at most 1 behind", None, 1),
    Rule("free-running, at most 2 behind", None, LAG),
)


def run_rules(
    rules: Sequence[Rule], cap: float, steps: int, seeds: int, rows: int = ROWS
) -> Iterator[tuple[Rule, list[Figures]]]:
    """Yield the figures of each rule for every seed. ``rows``: of a step."""
    for rule in rules:
        found = []
        for seed in range(seeds):
            known: dict[int, Episode] = {}

            def episode(row: int, seed: int = seed, known: dict[int, Episode] = known) -> Episode:
                return known.setdefault(row, make_episode(Random(f"{seed} {row}"), cap))

            found.append(Loop(rule, episode, steps, Speeds(), rows).run())
        yield rule, found


def figures_table(found: Mapping[str, Sequence[Figures]]) -> str:
    """Return a table of means over seeds."""
    rows = [
        [
            name,
            f"{mean(each.seconds for each in all):.0f}",
            f"{mean(each.idle[0] for each in all):.0%}",
            f"{mean(each.full for each in all):.0%}",
            f"{mean(each.idle[1] for each in all):.0%}",
            f"{mean(each.ages[0] for each in all):.1f} / {max(each.ages[1] for each in all)}",
            f"{mean(each.computed for each in all):.1f}",
            str(all[0].account),
        ]
        for name, all in found.items()
    ]
    head = ["rule", "s / step", "idle", "slots full", "training idle", "age mean / max", "computed / sampled", "rows"]
    return "\n".join(table([head, *rows], "<" + ">" * 6 + "<"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cap", type=float, nargs="+", default=[15.0, 60.0, 300.0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    for cap in arguments.cap:
        found = {rule.name: all for rule, all in run_rules(RULES, cap, arguments.steps, arguments.seeds)}
        print(f"replies of at most {cap:g} s\n{figures_table(found)}\n")


if __name__ == "__main__":
    main()
