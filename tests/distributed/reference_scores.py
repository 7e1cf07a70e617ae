"""Sources of scores of the reference's responses: models, a user's function, rules, or several with weights."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference_models import Scorer
from reference_responses import SECTIONS, Response, text_of
from transformers import AutoTokenizer

from flexrlhf.config.reward_sources import FunctionSource, ModelSource, RuleSource
from flexrlhf.config.spec import Spec

Score = float | list[float] | None
"""Score of a response, one for each of its tokens, or none."""


class Judge:
    """The sources of one section of the YAML, ``reward`` or ``cost``."""

    def __init__(self, spec: Spec, section: str, tokenizer: Any) -> None:
        given = getattr(spec, section)
        self.section, self.tokenizer = section, tokenizer
        self.is_plain = given is None
        self.sources = given or (ModelSource(model=section),)
        self.models = {s.model: Scorer(spec.models.of(s.model), spec.seed) for s in self.sources if is_model(s)}
        self.own = {
            role: (AutoTokenizer.from_pretrained(model.path), model.max_text_tokens)
            for role, model in spec.models
            if role in self.models and model.retokenize
        }
        self.by_token = any(source.level != "answer" for source in self.sources)
        self.of_steps = [source for source in self.sources if source.level == "step"]
        self.compares_steps = getattr(spec.algorithm, "supervision", "outcome") == "process"
        self.calls_others = len(self.models) < len(self.sources)

    @torch.no_grad()
    def judge(self, response: Response) -> None:
        """Fill in the scores of ``response``."""
        found = [(source, self._call(source, response)) for source in self.sources]
        ends = {id(source): self._ends(source, response, each) for source, each in found if source.level == "step"}
        # a step's score is on the token that ends it
        scores = [(source, at_ends(each, ends[id(source)]) if id(source) in ends else each) for source, each in found]
        called = [(source, each) for source, each in scores if not is_model(source)]
        if self.models and not self.is_plain:
            response.by_source |= self._columns([x for x in found if is_model(x[0])], called, len(response.tokens))
            response.by_source |= self._ends_by_source(ends, len(response.tokens))
        if self.compares_steps and self.of_steps:
            response.step_ends = union(list(ends.values()), len(response.tokens))
        response.scores[self.section] = weighted_total(scores)
        if self.by_token:
            response.token_scores[self.section] = weighted_tokens(scores, len(response.tokens))
        if called:
            response.has_failed[self.section] = any(each is None for _, each in called)

    def _ends_by_source(self, ends: dict[int, list[int]], length: int) -> dict[str, Any]:
        suffix = SECTIONS[self.section]
        columns = {f"step_ends.{s.model}{suffix}": union([ends[id(s)]], length) for s in self.of_steps if is_model(s)}
        called = [ends[id(source)] for source in self.of_steps if not is_model(source)]
        if called and self.compares_steps:
            columns[f"step_ends.called{suffix}"] = union(called, length)
        return columns

    def _ends(self, source: Any, response: Response, score: Score) -> list[int]:
        """The tokens that end steps: the first after which the text is as long; the last token ends the last step."""
        if score is None:
            return []
        text = self._text(response)
        if source.separator is None:
            assert isinstance(score, list)
            characters = [end for end, _ in score]
        else:
            characters = list(itertools.accumulate(map(len, steps_of(text, source.separator))))
        lengths = [len(self._text_of(response.tokens[:count])) for count in range(1, len(response.tokens) + 1)]
        last = len(response.tokens) - 1
        return [last if end == len(text) else next(t for t, n in enumerate(lengths) if n >= end) for end in characters]

    def _call(self, source: Any, response: Response) -> Score:
        if isinstance(source, ModelSource):
            model = self.models[source.model]
            if source.level != "answer":
                return response.of_sampled(model.everywhere(response.prompt, response.text)[1:]).tolist()
            if source.model in self.own:
                return model.score([], self._own_text(source.model, response)).item()
            return model.score(response.prompt, response.text).item()
        assert response.example is not None, "the row that the prompt is of"
        if isinstance(source, RuleSource):
            return ruled(source, response, self._text(response))
        assert isinstance(source, FunctionSource)
        function = function_of(source.function)
        columns = {"num_tokens": len(response.tokens), **response.example.columns}
        if source.separator is not None:
            columns["steps"] = steps_of(self._text(response), source.separator)
        accepted = [name for name in list(inspect.signature(function).parameters)[2:] if name in columns]
        (score,) = function(
            [response.example.text], [self._text(response)], **{name: [columns[name]] for name in accepted}
        )
        return score

    def _own_text(self, role: str, response: Response) -> list[int]:
        """Prompt and response, with replies, in the tokens of a model with its own tokenizer, cut to the limit."""
        tokenizer, limit = self.own[role]
        text = text_of(self.tokenizer, response.prompt + response.text)
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * response.finished
        response.own_texts[role] = padded_text(ids[-limit:], limit)
        response.is_cut[role] = len(ids) > limit
        return ids[-limit:]

    def _text(self, response: Response) -> str:
        return self._text_of(response.tokens)

    def _text_of(self, tokens: list[int]) -> str:
        return text_of(self.tokenizer, tokens)

    def _columns(self, scores: list[tuple[Any, Score]], called: list[tuple[Any, Score]], length: int) -> dict[str, Any]:
        """Columns of several models one by one, and of all other sources together."""
        suffix, columns = SECTIONS[self.section], {}
        for source, each in scores:
            if is_model(source):
                kind = "scores" if source.level == "answer" else "token_scores"
                columns[f"{kind}.{source.model}{suffix}"] = each
        if called:
            columns[f"scores.called{suffix}"] = weighted_total(called)
            if any(source.level != "answer" for source, _ in called):
                columns[f"token_scores.called{suffix}"] = weighted_tokens(called, length)
        return columns


def steps_of(text: str, separator: str) -> list[str]:
    """A step is something, up to a separator, and all separators and blanks around it."""
    end = re.escape(separator)
    something = rf"(?:(?!{end}).)+(?:{end}(?:\s*{end})*(?:\s*$)?|$)"
    return re.findall(rf"^(?:\s|{end})*$|^(?:\s*{end})*{something}|{something}", text, re.DOTALL) or [""]


def at_ends(found: Any, ends: list[int]) -> Score:
    """Scores on the ends of steps, from a model's of every token, from a score per step, or from pairs (end, score)."""
    if found is None:
        return None
    values = [each[1] if isinstance(each, tuple) else each for each in found]
    scores = [values[end] for end in ends] if len(values) > len(ends) else values
    length = max(ends, default=-1) + 1
    return Stepped([sum(x for x, end in zip(scores, ends, strict=True) if end == t) for t in range(length)])


class Stepped(list[float]):
    """Scores up to the token that ends the last step."""


def union(parts: list[list[int]], length: int) -> list[int]:
    ends = {end for part in parts for end in part}
    return [int(token in ends) for token in range(length)]


def padded_text(ids: list[int], width: int) -> list[int]:
    """Left-padded with 0."""
    return [0] * (width - len(ids)) + ids


def is_model(source: Any) -> bool:
    return isinstance(source, ModelSource)


def weighted_total(scores: list[tuple[Any, Score]]) -> float:
    """NaN if a source gives no score."""
    if any(each is None for _, each in scores):
        return math.nan
    return sum(source.weight * (sum(each) if isinstance(each, list) else each) for source, each in scores)


def weighted_tokens(scores: list[tuple[Any, Score]], length: int) -> list[float]:
    """A score of the whole response is on its last token."""
    if any(each is None for _, each in scores):
        return [math.nan] * length
    tokens = [0.0] * length
    for source, each in scores:
        spread = each if isinstance(each, list) else [0.0] * (length - 1) + [each]
        spread = [*spread, *[0.0] * (length - len(spread))]
        tokens = [token + source.weight * value for token, value in zip(tokens, spread, strict=True)]
    return tokens


def ruled(source: RuleSource, response: Response, text: str) -> Score:
    """Score of a rule; None for a row that has no solution."""
    assert response.example is not None
    if source.rule == "length":
        assert source.target_tokens is not None
        return max(0.0, 1 - abs(len(response.tokens) - source.target_tokens) / source.target_tokens)
    assert source.rule == "exact_answer", f"the reference has no rule {source.rule}"
    right = response.example.columns.get(source.answer)
    return None if right is None else float(text.strip() == right.strip())


def function_of(reference: str) -> Callable[..., Any]:
    """``path/to/file.py:name``."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"scores_of_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
