"""Times of a plan's calls in rounds whose rows have lengths of their own, on the slowest replica of each round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import TypeVar

from flexrlhf.api import EngineFacts, Instruction, PackedPass, PlacedModel, Plan, Run, TextGroup
from flexrlhf.guideline.costs.cost_model import Call, Cost, Mesh
from flexrlhf.guideline.simulation.calls import CallMaker, all_passes, mixed, reads_prompts_once, texts_per_row
from flexrlhf.guideline.simulation.episode_prices import REPLIES
from flexrlhf.guideline.simulation.free_episodes import LateRow, followed_rows
from flexrlhf.guideline.simulation.free_prices import FIRST_TOKEN, free_generation
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.lengths import batch_texts
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.guideline.simulation.rounds import EndedRow, Prompt, Round, Segment, Segments, make_rounds

Row = TypeVar("Row")
NUM_ROUNDS = 16
"""Rounds over which the mean of a call with segments is taken."""


@dataclass(frozen=True)
class RoundPricer:
    """Times of calls in ``rounds``.

    pricer:  prices of instructions whose time does not depend on the rows
    rounds:  rows of each round
    """

    pricer: Pricer
    rounds: Sequence[Round]

    def cost(self, run: Run, number: int) -> Cost:
        """Return the time of a model call in round ``number``."""
        costs = self._generate(run, number) if run.operator.call == "generate" else self._passes(run, number)
        return max(costs, key=lambda cost: cost.seconds, default=Cost())

    def mean_cost(self, run: Run, numbers: range) -> Cost:
        """Return the mean time of a model call in the rounds ``numbers``."""
        parts: Counter[str] = Counter()
        for number in numbers:
            parts.update({name: seconds / len(numbers) for name, seconds in self.cost(run, number).parts.items()})
        return Cost(dict(parts))

    def _generate(self, run: Run, number: int) -> list[Cost]:
        """Return the costs on the replicas with most tokens, with the longest piece, and of episodes with most turns of
        a row, of each device class."""
        model, costs = self.pricer.plan.placement[run.model], []
        for device, replicas in self.pricer.replicas_by_class(model).items():
            mesh = self.pricer.mesh(model, device)
            pieces = {replica: found for replica in replicas if (found := self._pieces(run, replica, number))}
            if not pieces:
                continue
            fullest = max(pieces, key=lambda each: sum(piece.tokens for piece in pieces[each]))
            longest = max(pieces, key=lambda each: max((piece.tokens, len(pieces[each])) for piece in pieces[each]))
            latest = max(pieces, key=lambda each: max(len(piece.turns) for piece in pieces[each]))
            for replica in dict.fromkeys((fullest, longest, latest)):
                if run.operator.has_replies:
                    costs.append(self._episodes(run, mesh, replica, number))
                else:
                    costs.append(self._decode(run, model, mesh, pieces[replica], number))
        return costs

    def _pieces(self, run: Run, replica: int, number: int) -> list[Segment]:
        """Return the pieces that a replica generates in round ``number``."""
        return _of(self.rounds[number].generated, chain(*self._blocks(run, replica)))

    def _episodes(self, run: Run, mesh: Mesh, replica: int, number: int) -> Cost:
        """Return the cost of pieces of episodes, whose rows await replies between turns."""
        model, pieces = self.pricer.plan.placement[run.model], self._pieces(run, replica, number)
        episodes, segments = self.pricer.episodes, Segments.of(self.pricer.plan, self.pricer.lengths)
        assert episodes is not None, "rows with replies are of episodes"
        alike = self.pricer.plan.batch.alike_rows if reads_prompts_once(model) else 1
        is_read_again, carried = self._reads_again(model, number), segments.tokens or 0
        found = [
            (row, piece)
            for piece in pieces
            if (row := episodes.row_of(piece, carried, alike, None if is_read_again else piece.unread)).turns
        ]
        if not found:
            return Cost()
        rows = [row for row, _ in found]
        tokens = tuple(sorted(piece.tokens for piece in pieces))
        whole = self._call(run, model, [[len(pieces)]], self.pricer.lengths.prompt, tokens)
        keeps = self.pricer.keeps_turns(model, whole)
        if run.operator.is_free:
            few = followed_rows(len(rows), round(sum(len(row.turns) for row in rows) / len(rows)))
            own = episodes.followed_pieces(mixed(found)[:few], len(rows) / few)
            carries = self.pricer.plan.spec.rollout.late_replies == "carry"
            own = own.with_late(self._late(run, mesh, replica, number - 1) if carries else ())
            cost, late = free_generation(
                self.pricer.costs, whole, mesh, own, episodes.lanes(run.layout), keeps, carries
            )
            self._known_late[run.operator.name, replica, number] = late
            return cost
        processes = max(1, episodes.settings.processes // run.layout.dp)
        prompt, begun = self.pricer.lengths.prompt, sum(row.begins for row in rows)
        parts, waiting = Counter[str](), episodes.seconds(begun, processes, is_reset=True)
        turns = zip_longest(*(zip(row.contexts, row.turns, strict=True) for row in rows))
        for turn, all_rows in enumerate(turns):
            going = [(row, *each) for row, each in zip(rows, all_rows, strict=True) if each is not None]
            read = [row.read(turn, context, keeps) for row, context, _ in going] if turn else None
            parts_of_turn = [Segment(context - prompt, sampled) for _, context, sampled in going]
            parts.update(self._decode(run, model, mesh, parts_of_turn, number, read).parts)
            replied = sum(turn < row.num_replies for row in rows)
            waiting += episodes.seconds(replied, processes)
        return Cost({**parts, REPLIES: waiting})

    def _late(self, run: Run, mesh: Mesh, replica: int, number: int) -> tuple[LateRow, ...]:
        """Return the rows of a replica that round ``number`` carries before their replies."""
        key = run.operator.name, replica, number
        if number >= 0 and key not in self._known_late:
            self._episodes(run, mesh, replica, number)
        return self._known_late.get(key, ())

    @cached_property
    def _known_late(self) -> dict[tuple[str, int, int], tuple[LateRow, ...]]:
        """Late rows so far, by operator, replica and round."""
        return {}

    def _decode(
        self,
        run: Run,
        model: PlacedModel,
        mesh: Mesh,
        pieces: list[Segment],
        number: int,
        read: Sequence[float] | None = None,
    ) -> Cost:
        """Return the cost of ``pieces``: passes over prompts, and over texts so far if they are read again, then
        decoding.

        read:  tokens that are read of each; None: prompts, of their samples together, and as round ``number`` has it.
        """
        prompt, costs = self.pricer.lengths.prompt, self.pricer.costs
        tokens = sum(piece.tokens for piece in pieces)
        context = prompt + sum(piece.tokens * piece.start for piece in pieces) / tokens
        whole = self._call(run, model, [[len(pieces)]], context, tuple(sorted(piece.tokens for piece in pieces)))
        if read is not None:
            return Cost({**costs.call(whole, mesh).parts, "prefill": self._prefill(whole, mesh, read)})
        carried = [prompt + piece.start for piece in pieces if piece.start]
        if not carried:
            return costs.call(whole, mesh)
        prompts = [prompt] * -(-(len(pieces) - len(carried)) // whole.prompt_samples)
        first = self._prefill(whole, mesh, prompts)
        parts = {**costs.call(whole, mesh).parts, "prefill": first}
        if self._reads_again(model, number):
            parts["read again"] = max(0.0, self._prefill(whole, mesh, prompts + carried) - first)
        return Cost(parts)

    def _reads_again(self, model: PlacedModel, number: int) -> bool:
        """Whether round ``number`` reads the texts of carried rows again: weights are new, and their keys and values
        are not kept; or these are dropped behind a checkpoint."""
        kept = self.pricer.plan.kept_slots.get(model.name)
        if kept is not None:
            return kept.period(number) != kept.period(number - 1)
        # vLLM finds the keys and values of a text that it has read with the same weights
        keeps = model.has_cache and reads_prompts_once(model)
        return not keeps or number % self.pricer.plan.spec.sync.every == 0

    def _prefill(self, whole: Call, mesh: Mesh, lengths: Sequence[float]) -> float:
        """Return the time in which the call ``whole`` reads texts of so many tokens; vLLM reads them without padding,
        decoding with transformers in passes of similar lengths."""
        if not lengths:
            return 0.0
        # attention in a pass grows with the square of a text's length
        width = sum(length**2 for length in lengths) / sum(lengths)
        passes = [(max(1, round(sum(lengths) / width)), width)]
        if not EngineFacts.of(whole.engine).by_requests:
            texts = tuple((TextGroup(round(length), (0,)),) for length in lengths)
            budget = len(texts) * round(max(lengths))
            passes = [(len(each.rows), each.width) for each in PackedPass.all_of(texts, budget, together=False)]
        seconds = 0.0
        for rows, width in passes:
            call = replace(whole, rows=rows, prompt=width, prompt_samples=1, responses=FIRST_TOKEN)
            seconds += self.pricer.costs.call(call, mesh).parts.get("prefill", 0.0)
        return seconds

    def _passes(self, run: Run, number: int) -> list[Cost]:
        """Return the cost on the fullest replica of each device class: of training that of each mini-batch, since
        replicas wait for each other at every update."""
        model, trained = self.pricer.plan.placement[run.model], self.rounds[number].trained
        costs, trains = [], run.operator.call == "train"
        for device, replicas in self.pricer.replicas_by_class(model).items():
            rows = [
                [[_of(trained, (block,)) for block in blocks] for blocks in self._blocks(run, each)]
                for each in replicas
            ]
            if trains:
                fullest = [max(parts, key=_tokens) for parts in zip(*rows, strict=True)]
            else:
                fullest = max(rows, key=lambda parts: sum(map(_tokens, parts)))
            # each mini-batch has passes of its own
            calls = [self._blocks_call(run, model, blocks) for blocks in fullest if _tokens(blocks)]
            if calls:
                costs.append(self.pricer.costs.call(_joined(calls), self.pricer.mesh(model, device)))
        return costs

    def _blocks_call(self, run: Run, model: PlacedModel, blocks: Sequence[Sequence[EndedRow]]) -> Call:
        """Return the call of a mini-batch, whose blocks are in passes of their own."""
        prompt = self.pricer.lengths.prompt
        parts = [tuple(float(row.tokens) for row in block) for block in blocks if block]
        calls = [self._call(run, model, [[len(part)]], prompt, part) for part in parts]
        return replace(_joined(calls), updates=calls[0].updates)

    def _call(
        self, run: Run, model: PlacedModel, rows: Sequence[Sequence[int]], prompt: float, responses: tuple[float, ...]
    ) -> Call:
        kind = run.operator.call
        assert kind is not None, f"{run.operator.name} is no model call"
        lengths = TextLengths(prompt, responses, self.pricer.lengths.prompts)
        maker = self.pricer.maker if kind == "generate" else self._maker
        maker, shape, model = replace(maker, lengths=lengths), self.pricer.shape(model), model.with_passes(run.tokens)
        call = maker.call(kind, model, shape, rows, texts_per_row(run.operator), run.operator.compares_responses)
        return replace(call, is_exact=True)

    @cached_property
    def _maker(self) -> CallMaker:
        """Maker of calls with rows in one block. Samples that are trained apart each have a copy of their prompt."""
        maker, batch = self.pricer.maker, replace(self.pricer.maker.batch, num_blocks=1)
        if not Segments.of(self.pricer.plan, self.pricer.lengths).are_joined:
            batch = replace(batch, num_prompts=batch.num_rows, samples_per_prompt=1, segments=1, sequences=1)
        return replace(maker, batch=batch)

    def _blocks(self, run: Run, replica: int) -> list[list[Sequence[Prompt]]]:
        """Return the prompts of a replica in each block of each mini-batch of ``run``, by their numbers among those of
        one round."""
        key = run.mini_batches, run.attempt, run.layout, replica
        if key not in self._known_blocks:
            self._known_blocks[key] = self._blocks_of(run, replica)
        return self._known_blocks[key]

    @cached_property
    def _known_blocks(self) -> dict[Hashable, list[list[Sequence[Prompt]]]]:
        """Blocks found so far, which are the same in every round."""
        return {}

    def _blocks_of(self, run: Run, replica: int) -> list[list[Sequence[Prompt]]]:
        batch, layout = self.pricer.plan.batch, run.layout
        rank, places = layout.replica_sets[replica][0], batch.num_rows // batch.num_taken
        every = [batch.blocks_on(layout, rank, range(m, m + 1)) for m in run.mini_batches]
        if run.attempt is not None:
            return [[block[run.attempt :: batch.attempts] for block in blocks] for blocks in every]
        return [[[place // places for place in block[::places]] for block in blocks] for blocks in every]


def _joined(calls: Sequence[Call]) -> Call:
    """Return consecutive ``calls`` of one model as one."""
    return replace(
        calls[0],
        rows=sum(call.rows for call in calls),
        updates=sum(call.updates for call in calls),
        responses=tuple(chain.from_iterable(call.responses for call in calls)),
        passes=all_passes((1, call.passes) for call in calls if call.passes is not None),
    )


def _tokens(blocks: Sequence[Sequence[EndedRow]]) -> float:
    return sum(row.tokens for block in blocks for row in block)


def _of(rows: Mapping[Prompt, list[Row]], parts: Iterable[Sequence[Prompt]]) -> list[Row]:
    """Return the rows of the prompts in ``parts``."""
    return [row for part in parts for prompt in part for row in rows.get(prompt, ())]


def rounds_of(plan: Plan, lengths: TextLengths, number: int) -> list[Round]:
    """Return the rows of the first ``number`` rounds of ``plan``."""
    return make_rounds(batch_texts(plan, lengths, number), plan.batch.samples_per_prompt, Segments.of(plan, lengths))


def price_of(pricer: Pricer) -> Callable[[Instruction], Cost]:
    """Return the function that gives the price of an instruction: of a call whose responses are generated in segments,
    or are episodes whose turns are known, its mean over settled rounds."""
    plan, segments = pricer.plan, pricer.plan.batch.segments
    has_turns = plan.spec.environment is not None and bool(pricer.lengths.episodes)
    if segments == 1 and not has_turns:
        return pricer.price
    settled = range(segments, segments + NUM_ROUNDS)
    by_round = RoundPricer(pricer, rounds_of(plan, pricer.lengths, settled.stop))

    def price(instruction: Instruction) -> Cost:
        if not isinstance(instruction, Run) or instruction.operator.call is None:
            return pricer.price(instruction)
        if segments == 1 and not instruction.operator.has_replies:
            return pricer.price(instruction)
        return by_round.mean_cost(instruction, settled)

    return price
