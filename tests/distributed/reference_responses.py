"""Responses of the reference, their columns, and results of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from reference_models import Weights
from reference_terms import Metric
from torch import Tensor
from transformers import DynamicCache

from flexrlhf.config.spec import Spec
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.examples import Example, LoadedExamples
from flexrlhf.operators.outcomes import EpisodeState

NEEDS = {"sft": "responses", "reward": "pairs", **dict.fromkeys(("dpo", "simpo", "orpo", "kto"), "pairs")}
"""Columns that a row of the data must have; all other algorithms generate their responses."""


@dataclass
class Episode:
    """Turns of a policy, and the replies of an environment between them.

    ``positions``: of the sampled tokens in ``text``, ``ends``: of those that end a turn, among the sampled ones.
    ``outcome``: why it has no further turn. ``everywhere``: log-probs and values of all tokens, by column. ``game``:
    the environment; ``turn``: tokens of a turn that has no reply yet; ``digests``: of its reset and replies;
    ``awaits``: whether its turn is whole, and its reply is late.
    """

    text: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    outcome: str = "going on"
    everywhere: dict[str, list[float]] = field(default_factory=dict)
    game: Any = None
    turn: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    awaits: bool = False


@dataclass
class Response:
    """One row of a step. ``margins``: by how much each token won over the second best. ``versions``: of the weights
    that sampled each token. ``place``: row of the step's batch, also of rows that are not whole yet. ``siblings``: all
    responses to the prompt, if each is trained on when it ends; ``total``: its score, once it has one, and
    ``step_rewards``, of its steps by their ends; ``is_whole``: whether it has ended.

    ``rollout_logprobs``: of the tokens when they were sampled; ``logprobs``: under the policy that the loss takes its
    ratio to. ``by_source``: scores of each of several sources, by column; ``scores``, ``token_scores``: their sums, by
    section of the YAML; ``has_failed``: sections with a source that gave no score. ``counts``: its scores are finite,
    and no rule leaves it out; ``is_taken``: it is in a group that is trained on, or ``reason`` is why
    not. ``shaped``: its score after all rules. ``step_ends``: 1 for tokens that end a step. ``kept``: tokens that
    importance sampling does not reject; ``selected``: 1 for tokens that a covariance selects. ``values``, ``returns``:
    by critic. ``own_texts``: the tokens for models with their own tokenizer, by role, padded; ``is_cut``: whether their
    beginning is left out. ``episode``: replies between its tokens, if an environment has made some. ``experts``: of
    each layer, of the tokens that calls have read, ``num_read``. ``cache``: keys and values of tokens that were read,
    if the run keeps them.
    """

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    finished: bool
    versions: list[int] = field(default_factory=list)
    example: Example | None = None
    place: int = 0
    siblings: list[Response] = field(default_factory=list)
    total: float | None = None
    step_rewards: dict[int, float] = field(default_factory=dict)
    is_whole: bool = False
    rollout_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    by_source: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    token_scores: dict[str, list[float]] = field(default_factory=dict)
    has_failed: dict[str, bool] = field(default_factory=dict)
    own_texts: dict[str, list[int]] = field(default_factory=dict)
    is_cut: dict[str, bool] = field(default_factory=dict)
    greedy: Response | None = None
    counts: bool = True
    is_taken: bool = True
    reason: str = ""
    number: int = 0
    attempt: int = 0
    position: int = 0
    shaped: float = 0.0
    step_ends: list[int] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    selected: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)
    returns: dict[str, list[float]] = field(default_factory=dict)
    episode: Episode | None = None
    experts: list[Tensor] = field(default_factory=list)
    num_read: int = 0
    cache: DynamicCache = field(default_factory=DynamicCache)

    @property
    def text(self) -> list[int]:
        """All tokens behind the prompt."""
        return self.tokens if self.episode is None else self.episode.text

    @property
    def positions(self) -> list[int]:
        """Places of the sampled tokens in the text."""
        return list(range(len(self.tokens))) if self.episode is None else self.episode.positions

    def of_sampled(self, values: Tensor) -> Tensor:
        """The values (T, ...) of sampled tokens, of one for each token of the text."""
        return values if self.episode is None else values[self.positions]

    def spread(self, values: list[Any], fill: Any) -> list[Any]:
        """Values of the sampled tokens, each at its place in the text; the others are ``fill``."""
        if self.episode is None:
            return values
        found = dict(zip(self.positions, values, strict=bool(values)))
        return [found.get(place, fill) for place in range(len(self.text))]

    @classmethod
    def empty(cls, example: Example, position: int = 0) -> Response:
        """A response to ``example`` before its first token."""
        return cls(list(example.prompt), [], [], False, example=example, position=position)

    @property
    def is_trained(self) -> bool:
        return self.counts and self.is_taken


@dataclass
class Step:
    """``columns``: as the package records them, one row per response, padded. ``places``: of these in the step's
    batch; None: they are all of it. ``carried``: responses that the next step goes on with."""

    columns: dict[str, Tensor]
    metrics: dict[str, Metric]
    responses: list[Response] = field(default_factory=list)
    places: list[int] | None = None
    carried: int = 0


@dataclass
class Result:
    """``weights``: by role, after the last step, named as in files. ``moved``: how far they went, to their norm."""

    steps: list[Step]
    weights: dict[str, Weights]
    moved: dict[str, float]


def read_examples(spec: Spec, tokenizer: Any, path: str, needs: str | None = None, form: str = "auto") -> list[Example]:
    return LoadedExamples.load(
        path,
        form=form,
        needs=needs or NEEDS.get(spec.algorithm.name, "prompts"),  # type: ignore[arg-type]
        tokenizer=tokenizer,
        max_prompt_tokens=spec.data.max_prompt_tokens,
        max_response_tokens=spec.data.max_response_tokens,
        with_columns=True,
        chat=ChatFormat.read(spec.data.chat, spec.data.chat_template),
    ).examples


CRITICS = {"critic": "", "cost_critic": ".cost", "actor": ""}
SECTIONS = {"reward": "", "cost": ".cost"}
"""Suffixes of their columns' names; an actor that has values is its own critic."""


def pad_columns(spec: Spec, responses: list[Response], pad: int) -> dict[str, Tensor]:
    """Columns with prompts padded on the left, all else on the right; empty if a response is not trained on."""
    behind, first = spec.data.max_response_tokens, responses[0]

    def right(parts: list[list[float]], fill: float = 0.0) -> Tensor:
        return padded([a.spread(part, fill) for a, part in zip(responses, parts, strict=True)], behind, fill)

    def everywhere(name: str, parts: list[list[float]], width: int = behind) -> Tensor:
        found = [a.episode.everywhere[name] if a.episode else part for a, part in zip(responses, parts, strict=True)]
        return padded(found, width, 0.0)

    columns = sampled_columns(spec, responses, pad)
    columns["policy_version"] = right([a.versions for a in responses], 0)
    columns["rollout_logprobs"] = right([a.rollout_logprobs for a in responses])
    columns["logprobs"] = right([a.logprobs for a in responses])
    if spec.algorithm.kl is not None:
        columns["ref_logprobs"] = everywhere("ref_logprobs", [a.ref_logprobs for a in responses])
    has_digests = spec.rollout.segment_tokens is not None
    if first.episode is not None:
        columns |= episode_columns(responses, behind, has_digests)
    if first.greedy is not None:
        greedy = [a.greedy for a in responses if a.greedy is not None]
        own = sampled_columns(spec, greedy, pad) | score_columns(greedy, behind)
        own |= episode_columns(greedy, behind, has_digests) if first.greedy.episode is not None else {}
        columns |= {f"{name}.greedy": column for name, column in own.items()}
    columns |= score_columns(responses, behind)
    if any(a.step_ends for a in responses):
        columns["step_ends"] = padded([a.spread(a.step_ends, 0) for a in responses], behind, 0)
    for role in first.values:
        name = f"values{CRITICS[role]}"
        columns[name] = everywhere(name, [a.values[role] for a in responses], behind + 1)
    columns["loss_mask"] = right([[int(a.is_trained)] * len(a.tokens) for a in responses], 0)
    columns["advantages"] = right([a.advantages if a.is_trained else [] for a in responses])
    for name, parts in (
        ("kept_mask", [a.kept for a in responses]),
        ("selected_tokens", [a.selected for a in responses]),
    ):
        if first.tokens and any(parts):
            counted = [[int(x and a.is_trained) for x in part] for a, part in zip(responses, parts, strict=True)]
            columns[name] = right(counted, 0)
    for role in first.values:
        columns[f"returns{CRITICS[role]}"] = right([a.returns[role] if a.is_trained else [] for a in responses])
    return columns


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text that scores and stop strings read: with <unk>, without padding, beginning and end of a text."""
    borders = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    text: str = tokenizer.decode([token for token in tokens if token not in borders])
    return text


def sampled_columns(spec: Spec, responses: list[Response], pad: int) -> dict[str, Tensor]:
    before, behind = spec.data.max_prompt_tokens, spec.data.max_response_tokens
    left = torch.tensor([[pad] * (before - len(a.prompt)) + a.prompt for a in responses])
    return {
        "tokens": torch.cat([left, padded([a.text for a in responses], behind, pad)], 1),
        "response_mask": padded([a.spread([1] * len(a.tokens), 0) for a in responses], behind, 0),
        "finished": torch.tensor([int(a.finished) for a in responses]),
    }


def score_columns(responses: list[Response], width: int) -> dict[str, Tensor]:
    """Scores of single sources, and their sums."""
    columns: dict[str, Tensor] = {}
    for name, first in responses[0].by_source.items():
        parts = [of_tokens(a, a.by_source[name]) if isinstance(first, list) else a.by_source[name] for a in responses]
        columns[name] = padded(parts, width, 0.0) if isinstance(first, list) else torch.tensor(parts)
    for role in responses[0].own_texts:
        columns[f"tokens.{role}"] = torch.tensor([a.own_texts[role] for a in responses])
    for section in responses[0].scores:
        columns[f"scores{SECTIONS[section]}"] = torch.tensor([a.scores[section] for a in responses])
    for section in responses[0].token_scores:
        name = f"token_scores{SECTIONS[section]}"
        columns[name] = padded([of_tokens(a, a.token_scores[section]) for a in responses], width, 0.0)
    return columns


def of_tokens(response: Response, scores: list[float]) -> list[float]:
    """An episode that failed before its first turn has no token for its score."""
    return response.spread(scores, 0.0) if response.text or response.episode is None else [math.nan]


def episode_columns(responses: list[Response], width: int, has_digests: bool) -> dict[str, Tensor]:
    episodes = [response.episode for response in responses if response.episode]
    replied = torch.zeros(len(episodes), width + 1, dtype=torch.int32)
    for row, episode in zip(replied, episodes, strict=True):
        row[0] = episode.digests[0]
        for end, digest in zip(episode.ends, episode.digests[1:], strict=True):
            row[episode.positions[end] + 1] = digest
    ends = [[int(place in set(a.episode.ends)) for place in range(len(a.tokens))] for a in responses if a.episode]
    return {
        "turn_ends": padded([a.spread(each, 0) for a, each in zip(responses, ends, strict=True)], width, 0),
        # a failure is an exception of the game
        "episode": torch.tensor(
            [EpisodeState.NUMBERS[each.outcome.replace("failed", "failed: raise")] for each in episodes]
        ),
        "turns": torch.tensor([len(episode.ends) for episode in episodes]),
        "tool_calls": torch.zeros(len(episodes)),
        "failed_tool_calls": torch.zeros(len(episodes)),
        **({"replied": replied} if has_digests else {}),
    }


def padded(parts: list[list[Any]], width: int, fill: float) -> Tensor:
    """(len(parts), width), of the type of ``fill``."""
    return torch.tensor([part + [fill] * (width - len(part)) for part in parts])
