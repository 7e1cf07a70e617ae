"""Operators on this rank's responses as text: scores from outside the models, and tokens of another tokenizer.

Functions, services and rules score from outside the models. A model with another tokenizer than the policy receives
prompts and responses in its own tokens, which the ranks of the responses compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.reward_sources import ModelSource
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Chat, Message
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.data.turn_tokens import ReadReply, ReadReset, TurnTokens
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.rewards.base import Sample
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.open_rows import parts_of

_DTYPES = {"scores": torch.float32, "token_scores": torch.float32, Column.STEP_ENDS: torch.uint8}
DecodeTokens = Callable[[Sequence[int]], str]
"""Tokens of a response to the text that scores read."""


class ExternalScorers:
    """Scorers of a run, by section of the YAML (reward, cost): tensors in, tensors out."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        decode: DecodeTokens,
        separators: Mapping[str, Mapping[str, str]] | None = None,
        read_reply: ReadReply | None = None,
        read_reset: ReadReset | None = None,
    ) -> None:
        """
        separators:    section → model that scores steps → the text that ends one.
        read_reply:    returns the messages of a reply; None: responses are no episodes.
        read_reset:    returns the messages of a reset, which stand behind a prompt; None: there are none.
        """
        self._read_reply, self._read_reset = read_reply, read_reset
        self._scorers = scorers
        self._separators = separators or {}
        self._decode = decode

    def score(
        self, operator: Operator, batch: Batch, examples: Sequence[Example], tp: RankGroup
    ) -> tuple[Columns, Moments]:
        """Return the columns that ``operator`` writes for the responses of ``batch``; ``examples`` has one for each.

        The first rank of the tensor-parallel group scores for all: two calls for one response may differ.
        """
        mask = batch["response_mask"].bool()
        written = [name.removesuffix(operator.suffix) for name in operator.writes]
        columns, failed = self._columns(operator.function, written, mask, batch, examples, tp.is_first)
        columns = {name: tp.sum(each.to(mask.device)).to(_DTYPES[Column.plain(name)]) for name, each in columns.items()}
        failed = tp.sum(failed.to(mask.device))
        if not any(Column.plain(name) == "scores" for name in written):
            return columns, {}
        share = failed.double() / max(len(batch), 1)
        return columns, {"score_failed": moments(share, torch.full_like(share, len(batch)))}

    def _columns(
        self,
        section: str,
        names: Sequence[str],
        mask: Tensor,
        batch: Batch,
        examples: Sequence[Example],
        is_scoring: bool,
    ) -> tuple[Columns, Tensor]:
        """Return the columns called ``names``, and the number (1,) of responses without a score; 0 unless scoring."""
        shapes = {"scores": (len(batch),), "token_scores": mask.shape, Column.STEP_ENDS: mask.shape}
        columns = {name: torch.zeros(shapes[Column.plain(name)], dtype=torch.float32) for name in names}
        failed = torch.zeros(1)
        if not is_scoring:
            return columns, failed
        samples = self._samples(batch, examples)
        scores = self._scorers[section].score(samples)
        failed[0] = float(scores.failed)
        for name, column in columns.items():
            model = name.partition(".")[2]
            if Column.plain(name) == "scores":
                column[:] = torch.tensor(scores.totals, dtype=torch.float32)
            elif Column.plain(name) == "token_scores":
                _fill(column, mask, scores.tokens or [])
            elif model in self._separators.get(section, {}):
                _mark(column, mask, [each.step_ends(self._separators[section][model]) for each in samples])
            else:
                _mark(column, mask, scores.ends or [])
        return columns, failed

    def _samples(self, batch: Batch, examples: Sequence[Example]) -> list[Sample]:
        """Return the responses of ``batch`` as text, each with the columns of its example.

        The turns of an episode are joined by line breaks.
        """
        samples = []
        for example, prompt, parts in zip(examples, _prompts(batch), _parts(batch), strict=True):
            spoken = [tokens for is_sampled, tokens in parts if is_sampled]
            response = [token for tokens in spoken for token in tokens]
            text, characters = _joined(self._decode, spoken, len(response)), partial(_length, self._decode, spoken)
            turns = [{"role": turn.role, "content": turn.content} for turn in example.turns]
            conversation = []
            if self._read_reply is not None:
                reset = None if self._read_reset is None else self._read_reset(example, prompt)
                said = (*(reset or ()), *_conversation(parts, self._decode, self._read_reply))
                conversation = [{"role": role or "environment", "content": content} for role, content in said]
            samples.append(
                Sample(*(example.text, text, len(response), example.columns, characters, response, turns, conversation))
            )
        return samples

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


def _parts(batch: Batch) -> Iterator[list[tuple[bool, list[int]]]]:
    """Yield the turns and the replies of each response in ``batch``: whether they are sampled, and their tokens."""
    mask = batch["response_mask"].bool().cpu()
    responses = batch["tokens"][:, -mask.shape[1] :].cpu()
    counts = batch["attention_mask"][:, -mask.shape[1] :].sum(1).tolist()
    ends = batch[Column.TURN_ENDS].cpu() if Column.TURN_ENDS in batch.columns else torch.zeros_like(mask)
    for row, count in enumerate(counts):
        yield [
            (is_sampled, responses[row, places.start : places.stop].tolist())
            for is_sampled, places in parts_of(mask[row], ends[row], count)
        ]


def _conversation(
    parts: Iterable[tuple[bool, Sequence[int]]], decode: DecodeTokens, read_reply: ReadReply
) -> Iterator[tuple[str, str]]:
    """Yield roles and contents of the turns of an episode and the messages between them; role "" of a plain text."""
    for is_sampled, tokens in parts:
        yield from [("assistant", decode(tokens))] if is_sampled else read_reply(tokens)


def make_external_scorers(
    graph: Graph,
    spec: Spec,
    decode: DecodeTokens,
    read_reply: ReadReply | None = None,
    read_reset: ReadReset | None = None,
) -> ExternalScorers:
    """Make the scorers of the sections that operators of ``graph`` call. ``read_reply`` and ``read_reset``: as of
    ExternalScorers."""
    called = {operator.function for operator in (*graph.operators, *graph.evaluation) if operator.kind == "score"}
    sections = {"reward": spec.reward or (), "cost": spec.cost or ()}
    scorers = {}
    for name in sorted(called):
        others = [source for source in sections[name] if not isinstance(source, ModelSource)]
        with_models = len(others) < len(sections[name])
        scorers[name] = Scorer(others, name, spec.timeout_seconds / 2, with_models=with_models)
    separators = {
        name: {
            source.model: source.separator
            for source in sections[name]
            if isinstance(source, ModelSource) and source.separator is not None
        }
        for name in scorers
    }
    return ExternalScorers(scorers, decode, separators, read_reply, read_reset)


def _length(decode: DecodeTokens, turns: Sequence[Sequence[int]], count: int) -> int:
    """Return the characters of the text of the first ``count`` tokens of ``turns``."""
    return len(_joined(decode, turns, count))


def _joined(decode: DecodeTokens, turns: Sequence[Sequence[int]], count: int) -> str:
    """Return the text of the first ``count`` tokens of ``turns``."""
    texts = []
    for turn in turns:
        texts.append(decode(turn[:count]))
        count -= len(turn)
        if count <= 0:
            break
    return "\n".join(texts)


def _mark(column: Tensor, mask: Tensor, ends: Sequence[set[int]]) -> None:
    """Write 1 to the places of the mask that end steps."""
    for row, places in enumerate(ends):
        positions = mask[row].nonzero().squeeze(1).cpu()
        column[row, positions[sorted(places)]] = 1.0


def _fill(column: Tensor, mask: Tensor, tokens: Sequence[Sequence[float]]) -> None:
    """Write token scores to the places of the mask; a response without scores gets NaN there."""
    for row, values in enumerate(tokens):
        places = mask[row].cpu()
        column[row, places] = torch.tensor(values, dtype=torch.float32) if values else float("nan")


def make_text_encoders(plan: Plan, models: Mapping[ModelName, LoadedModel]) -> dict[str, TextEncoder]:
    """Return the encoder for each role that operators on ``models``, of this rank, encode responses for."""
    here = {model.placed.role for model in models.values()}
    operators = [each for each in (*plan.graph.operators, *plan.graph.evaluation) if each.kind == "retokenize"]
    return {role: plan.data.text_encoder(role) for role in {each.function for each in operators if each.role in here}}


def retokenized(
    operator: Operator,
    batch: Batch,
    examples: Sequence[Example],
    encoder: TextEncoder,
    decode: DecodeTokens,
    turns: TurnTokens | None = None,
) -> tuple[Columns, Moments]:
    """Return the columns that ``operator`` writes, left-padded, and the share of sequences that were cut off.

    examples:  one for each row of ``batch``.
    decode:    tokens of the policy to the text that scores read.
    turns:     tokens around replies of environments; None: responses are no episodes.
    """
    rows = zip(examples, _prompts(batch), _parts(batch), batch["finished"].tolist(), strict=True)
    texts = [
        encoder.encode(
            *(_chat(example, prompt, parts, decode, turns) if example.turns else _text(example, prompt, parts, decode)),
            bool(finished),
        )
        for example, prompt, parts, finished in rows
    ]
    ids = torch.zeros(len(texts), encoder.limit, dtype=torch.int32)
    mask = torch.zeros_like(ids, dtype=torch.uint8)
    for row, (tokens, _) in enumerate(texts):
        ids[row, -len(tokens) :] = torch.tensor(tokens, dtype=torch.int32)
        mask[row, -len(tokens) :] = 1
    columns = {"tokens": ids, "attention_mask": mask}
    device = batch.rows.device
    cut = torch.tensor([is_cut for _, is_cut in texts], dtype=torch.float32, device=device)
    written = [name.removesuffix(operator.suffix) for name in operator.writes]
    return {name: columns[name.partition(".")[0]].to(device) for name in written}, {"text_cut": moments(cut)}


def _prompts(batch: Batch) -> list[list[int]]:
    """Return the prompt of each row, with the messages of a reset."""
    tokens, mask = batch["tokens"].cpu(), batch["attention_mask"].bool().cpu()
    width = tokens.shape[1] - batch["response_mask"].shape[1]
    return [row[:width][is_text[:width]].tolist() for row, is_text in zip(tokens, mask, strict=True)]


def _text(
    example: Example, prompt: Sequence[int], parts: Iterable[tuple[bool, Sequence[int]]], decode: DecodeTokens
) -> tuple[Example, Chat]:
    """Return a row that is a text, and the text behind it: of a reset, of turns and of replies.

    A prompt that was truncated because of the reset is read as the policy read it.
    """
    behind, number = [token for _, tokens in parts for token in tokens], len(example.prompt)
    if tuple(prompt[:number]) == example.prompt:
        prompt, behind = prompt[:number], [*prompt[number:], *behind]
    else:
        example = replace(example, text=decode(prompt))
    return example, (Message("assistant", _response(behind, prompt, decode)),)


def _chat(
    example: Example,
    prompt: Sequence[int],
    parts: Iterable[tuple[bool, Sequence[int]]],
    decode: DecodeTokens,
    turns: TurnTokens | None,
) -> tuple[Example, Chat]:
    """Return a row that is a chat, and the turns behind it: messages of a reset, the policy's and of replies.

    A prompt whose messages cannot be read, since it was truncated because of the reset, is one turn of the user.
    """
    if turns is None:
        return example, (Message("assistant", decode([token for _, tokens in parts for token in tokens])),)
    reset = turns.reset_messages(example, prompt)
    if reset is None:
        example = replace(example, turns=(Message("user", decode(prompt)),))
    said = list(_conversation(parts, decode, turns.messages)) or [("assistant", "")]
    return example, tuple(Message(role or "user", content) for role, content in (*(reset or ()), *said))


def _response(tokens: Sequence[int], prompt: Sequence[int], decode: DecodeTokens) -> str:
    """Return a response as text, as it stands behind ``prompt``: some tokenizers drop a space in front of a text."""
    before, both = decode(prompt), decode([*prompt, *tokens])
    return both[len(before) :] if both.startswith(before) else decode(tokens)
