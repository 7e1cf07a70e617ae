"""Samples for people to read, in ``samples.jsonl``: some responses of training and of evaluations, as text.

Rows are chosen by their numbers, so that a run keeps the same ones under every placement. Operators that write
responses or scores report them on the first rank of their model, and rank 0 puts the parts of a row together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.config.spec import Spec
from flexrlhf.data.turn_tokens import ReadReply
from flexrlhf.operators.columns import Column
from flexrlhf.placement.layout import BatchShape
from flexrlhf.trainer.execution import Execution, Observer, OperatorRun
from flexrlhf.trainer.open_rows import parts_of

SampleOrigin = Literal["training", "evaluation"]
ORDER: tuple[SampleOrigin, ...] = ("training", "evaluation")
SamplePart = dict[str, Any]
"""Fields of one sample, among them ``rows`` and ``row``; the others are those that one operator reports."""
FIELDS = (
    *("rows", "step", "row", "weights_version", "prompt", "response", "turns"),
    *("turn_tokens", "length", "finished", "score", "cost"),
)
"""Fields of a line, in this order."""
TEXTS = ("tokens", "attention_mask", "response_mask", "finished", "policy_version")
"""Columns of a generate that prompts and responses are decoded from."""
SCORES = {"scores": "score", "scores.cost": "cost"}
"""Column of scores → field."""


@dataclass(frozen=True)
class ResponseTexts:
    """Texts of responses.

    decode:      tokens of a prompt to text.
    text:        tokens of a response to the text that scores read.
    read_reply:  tokens of a reply to its messages; None: responses are no episodes.
    """

    decode: Callable[..., str]
    text: Callable[[Sequence[int]], str]
    read_reply: ReadReply | None = None

    def parts(self, values: Mapping[str, Tensor]) -> list[SamplePart]:
        """Return prompt, response, length, finish and weights version of each row; nothing of one without a prompt."""
        tokens, mask = values["tokens"].long(), values["response_mask"].bool()
        width = tokens.shape[1] - mask.shape[1]
        attention = values["attention_mask"].bool()[:, :width]
        return [
            {
                "prompt": self.decode(tokens[i, :width][attention[i]].tolist(), skip_special_tokens=True),
                "response": self.text(tokens[i, width:][mask[i]].tolist()),
                "length": int(mask[i].sum()),
                "finished": bool(values["finished"][i]),
                "weights_version": int(values["policy_version"][i].max()),
                **({} if self.read_reply is None else self._turns(values, i, self.read_reply)),
            }
            if attention[i].any()
            else {}
            for i in range(len(tokens))
        ]

    def _turns(self, values: Mapping[str, Tensor], row: int, read_reply: ReadReply) -> SamplePart:
        """Return the turns of the policy, with their rewards, and the messages between them; and the tokens of each
        turn and of the reply to it."""
        sampled, width = values["response_mask"][row].bool(), values["response_mask"].shape[1]
        count = int(values["attention_mask"][row, -width:].sum())
        tokens, rewards = values["tokens"][row, -width:].long().tolist(), values[Column.REWARDS][row]
        turns, numbers = list[dict[str, Any]](), list[list[int]]()
        for is_sampled, places in parts_of(sampled, values[Column.TURN_ENDS][row], count):
            ids = tokens[places.start : places.stop]
            if is_sampled:
                reward = _number(float(rewards[places.start : places.stop].sum()))
                turns.append({"role": "policy", "text": self.text(ids), "reward": reward})
                numbers.append([len(ids), 0])
            else:
                found = read_reply(ids)
                turns += [{"role": role or "environment", "text": content} for role, content in found]
                numbers[-1][1] = len(ids)
        return {"turns": turns, "turn_tokens": numbers}


class Samples(Observer):
    """Collector of the samples that operators write, of some steps and of each evaluation."""

    def __init__(self, spec: Spec, texts: ResponseTexts) -> None:
        # the last step has samples in any case
        self._settings, self._last_step, self._texts = spec.samples, spec.steps - 1, texts

    def computed(self, execution: Execution) -> None:
        """Collect the columns that the operator has written of the sampled rows."""
        step, kind = execution.step, ORDER[execution.inner is not None]
        if kind == "training" and step % self._settings.every and step != self._last_step:
            return
        execution.samples = collect_samples(execution.work, execution.store, kind, self._settings.count, self._texts)


def sample_rows(shape: BatchShape, count: int) -> tuple[int, ...]:
    """Return ``count`` responses to the prompts that a step takes, or all if there are fewer, evenly spaced from the
    first one: in segments each of its places in the batches of the steps that it may be trained on in. Of an episode
    its first sequence."""
    k = shape.sequences
    number = shape.num_taken // k
    count = min(count, number)
    taken = (divmod(index * number // count * k, shape.samples_per_prompt) for index in range(count))
    # dynamic sampling takes prompts for some of the places in segments, as far apart as they can be
    apart = shape.num_rows // shape.segments // shape.num_taken * shape.samples_per_prompt
    rows = (prompt * apart + sample for prompt, sample in taken)
    return tuple(shape.place_of(taken, row) for row in rows for taken in range(shape.segments))


def collect_samples(
    run: OperatorRun, store: RowStore, rows: SampleOrigin, count: int, texts: ResponseTexts
) -> list[SamplePart]:
    """Return what ``run`` has written of the sampled rows: responses, or scores.

    Every rank of the model calls this; the first one receives the parts, all others none.
    """
    # samples are made of the first responses, which a greedy operator does not sample, and their scores
    columns = tuple(name for name in SCORES if name in run.operator.writes)
    if _has_texts(run):
        columns = TEXTS + (Column.TURN_ENDS, Column.REWARDS) * (
            Column.REWARDS in (*run.operator.reads, *run.operator.writes)
        )
    if not columns:
        return []
    prompts = {prompt for m in run.mini_batches for prompt in run.shape.prompts_of_attempt(m, run.attempt)}
    chosen = [row for row in sample_rows(run.shape, count) if row // run.shape.samples_per_prompt in prompts]
    if not chosen:
        return []
    # in segments rows of other steps are there as well
    is_of_step = (Column.PRESENT,) if run.shape.segments > 1 else ()
    values = _gathered(run, store, chosen, (*columns, *is_of_step))
    if run.rank != run.model.placed.ranks[0]:
        return []
    present = values.pop(Column.PRESENT, torch.ones(len(chosen), 1))[:, 0].bool().tolist()
    parts = texts.parts(values) if "tokens" in values else _scores(values)
    found = zip(chosen, parts, present, strict=True)
    return [{"rows": rows, "row": row, **part} for row, part, is_present in found if part and is_present]


def _has_texts(run: OperatorRun) -> bool:
    """Whether ``run`` reports responses: it writes them, in segments the rows that the step trains on."""
    operator = run.operator
    if run.shape.segments == 1:
        return operator.samples_responses
    return Column.PRESENT in operator.writes and not {*TEXTS}.difference(operator.reads, operator.writes)


def merged_samples(step: int, parts: Iterable[SamplePart]) -> list[dict[str, Any]]:
    """Return the samples of ``step``, each from the parts that operators have reported, in the order of their rows."""
    merged: dict[tuple[SampleOrigin, int], SamplePart] = {}
    for part in parts:
        merged.setdefault((part["rows"], part["row"]), {"step": step}).update(part)
    # of rows in flight when a run went on with another number of samples one operator has reported alone
    whole = [merged[key] for key in sorted(merged, key=lambda key: (ORDER.index(key[0]), key[1]))]
    return [{field: each[field] for field in FIELDS if field in each} for each in whole if "response" in each]


def sample_lines(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines of ``samples`` in the run's file."""
    return "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)


def _gathered(run: OperatorRun, store: RowStore, chosen: Sequence[int], columns: Sequence[str]) -> dict[str, Tensor]:
    """Return ``columns`` (n, ...) of the ``chosen`` rows of all replicas, on the host, as float64, which has all token
    ids exactly."""
    present = set(run.rows)
    places = [place for place, row in enumerate(chosen) if row in present]
    mine = [chosen[place] for place in places]
    suffix = run.operator.suffix if run.operator.kind == "generate" else ""
    read = [store.get(f"{name}{suffix}", mine).double() for name in columns]
    read = [part if part.dim() == 2 else part[:, None] for part in read]
    widths = [part.shape[1] for part in read]
    table = torch.zeros(len(chosen), sum(widths), dtype=torch.float64, device=read[0].device)
    table[places] = torch.cat(read, dim=1)
    return dict(zip(columns, run.model.dp.sum(table).cpu().split(widths, dim=1), strict=True))


def _scores(values: Mapping[str, Tensor]) -> list[SamplePart]:
    """Return the scores of each row with six digits; one that is no finite number is null."""
    numbers = {SCORES[name]: column[:, 0].tolist() for name, column in values.items()}
    rows = zip(*numbers.values(), strict=True)
    return [{name: _number(value) for name, value in zip(numbers, row, strict=True)} for row in rows]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
