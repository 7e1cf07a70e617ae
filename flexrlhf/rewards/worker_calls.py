"""Calls that run in a worker process: here alone a user's code is loaded and run.

The standard library alone, and the package of a rule: math-verify, reasoning-gym. A reward function has one of four
forms:

| form        | signature                                   | called with                                             |
|-------------|---------------------------------------------|---------------------------------------------------------|
| ``texts``   | ``f(prompts, responses, **columns)``        | two lists of texts by place, columns by name            |
| ``by_name`` | ``f(completions, **kwargs)`` (TRL)          | prompts, completions, completion_ids, columns: by name  |
| ``single``  | ``f(solution_str, ground_truth)`` (verl)    | each response by itself, with columns of its row        |
| ``queries`` | ``f(queries, prompts, labels)`` (OpenRLHF)  | prompts with responses, prompts, a column: by name      |

The parameters that these are named after make a function verl's or OpenRLHF's, one named ``completions`` or
``completion_ids`` TRL's; else two parameters by place make it ours. A function of neither that takes ``**kwargs``, and
nothing else or ``prompts``, is TRL's, too.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable
from copy import deepcopy
from inspect import Parameter, Signature
from inspect import signature as signature_of
from typing import Any, Literal

from flexrlhf.config.code_loading import load_function
from flexrlhf.rewards.base import Reply, Score, ScoreBatch
from flexrlhf.rewards.replies import read_applicable, read_reply
from flexrlhf.rewards.solutions import missing_solution, parsed_response, parsed_solution, unread_solution
from flexrlhf.user_code.call_failures import CallFailure, Caught

CallForm = Literal["texts", "by_name", "single", "queries"]
BY_NAME = ("completions", "completion_ids", "prompts")
"""Arguments of a function in TRL's form in addition to columns."""
LEFT_OUT = ("prompt", "completion")
"""Columns that a function in TRL's form does not receive: ``prompts`` has them as they are used."""
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a function in verl's form."""
QUERIES = ("queries", "prompts", "labels")
"""Arguments of a function in OpenRLHF's form."""
FORMS = "f(prompts, responses, **columns) nor, as in TRL, f(completions, **kwargs)"
_PLACES = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMES = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def form_of(signature: Signature) -> CallForm | None:
    """Return the form of a function with ``signature``; None for neither."""
    names = {one.name for one in signature.parameters.values() if one.kind in _NAMES}
    if {"solution_str", "ground_truth"} <= names:
        return "single"
    if names.issuperset(QUERIES):
        return "queries"
    if not names.isdisjoint(("completions", "completion_ids")):
        return "by_name"
    kinds = {one.kind for one in signature.parameters.values()}
    if len(by_place(signature)) >= 2 or Parameter.VAR_POSITIONAL in kinds:
        return "texts"
    needed = {one.name for one in signature.parameters.values() if one.kind in _PLACES and one.default is one.empty}
    return "by_name" if Parameter.VAR_KEYWORD in kinds and needed <= {"prompts"} & names else None


def by_place(signature: Signature) -> list[str]:
    """Return the names of the parameters that may be passed by place, in their order."""
    return [one.name for one in signature.parameters.values() if one.kind in _PLACES]


def required_columns(signature: Signature, form: CallForm) -> list[str]:
    """Return the parameters without a default that are not texts."""
    given = {"by_name": BY_NAME, "single": ("solution_str", "extra_info"), "queries": QUERIES}
    texts = given.get(form) or by_place(signature)[:2]
    kinds = (*_PLACES, Parameter.KEYWORD_ONLY)
    required = [one.name for one in signature.parameters.values() if one.kind in kinds and one.default is one.empty]
    return [name for name in required if name not in texts]


def load(reference: str) -> CallFailure | None:
    """Load the function, once in a process. Return why it could not be loaded, or not be called."""
    with Caught("load", "could not be loaded") as caught:
        signature = signature_of(function_of(reference))
        if form_of(signature) is None:
            return CallFailure("load", f"its signature {signature} is neither {FORMS}")
    return caught.failure


def call(reference: str, level: str, batch: ScoreBatch) -> Reply:
    """Return the function's scores of a batch; whatever it raises is a reply with a failure."""
    with Caught("raise", "raised") as caught:
        function = function_of(reference)
        signature = signature_of(function)
        # the function may change its arguments
        given = deepcopy(batch)
        match form_of(signature):
            case "by_name":
                return read_applicable(function(**_accepted(signature, _named(given))), batch, level)
            case "single":
                replies = [function(**_accepted(signature, row)) for row in _rows(given)]
                return read_reply([_part(reply, "score") for reply in replies], batch, level)
            case "queries":
                reply = function(**_accepted(signature, _queries(given)))
                return read_reply(_part(reply, "rewards"), batch, level)
        texts = by_place(signature)[:2]
        columns = {name: values for name, values in _columns(given).items() if name not in texts}
        return read_reply(function(given.prompts, given.responses, **_accepted(signature, columns)), batch, level)
    assert caught.failure is not None, "a call that neither returned nor raised"
    return Reply.failed(batch, caught.failure)


def match(pattern: str, batch: ScoreBatch) -> Reply:
    """Return 1 for each response that ``pattern`` matches as a whole, without blanks around it, else 0."""
    expression = re.compile(pattern, re.DOTALL)
    return Reply([float(expression.fullmatch(response.strip()) is not None) for response in batch.responses])


def same_value(column: str, batch: ScoreBatch) -> Reply:
    """Return 1 for each response whose answer has the value of the solution in ``column``, else 0; None without
    one, and for one that math-verify cannot read.
    """
    from math_verify import verify

    def score(solution: Any, response: str) -> tuple[Score, CallFailure | None]:
        if solution is None:
            return None, missing_solution(column)
        if not (right := parsed_solution(solution)):
            return None, unread_solution(column, solution)
        return float(verify(right, parsed_response(response))), None

    solutions = batch.columns.get(column, [None] * len(batch))
    found = [score(*each) for each in zip(solutions, batch.responses, strict=True)]
    return Reply([each for each, _ in found], next((failure for _, failure in found if failure is not None), None))


def task_score(batch: ScoreBatch) -> Reply:
    """Return the scores of reasoning-gym's tasks; None for a row of none, 0 for a text that its task cannot read."""
    from reasoning_gym.utils import extract_answer

    def score(task: Any, settings: Any, entry: Any, response: str) -> tuple[Score, CallFailure | None]:
        with Caught("task", "a row has no task of reasoning-gym:") as row:
            scorer, right = task_scorer(task, settings), ast.literal_eval(entry)
            with Caught("raise", f"{task} raised") as scored:
                return float(scorer(extract_answer(response), right)), None
            return 0.0, scored.failure
        return None, row.failure

    columns = [batch.columns.get(name, [None] * len(batch)) for name in ("task", "settings", "entry")]
    found = [score(*each) for each in zip(*columns, batch.responses, strict=True)]
    return Reply([each for each, _ in found], next((failure for _, failure in found if failure is not None), None))


@functools.cache
def task_scorer(task: str, settings: str) -> Callable[[str | None, dict[str, Any]], float]:
    """Return the scorer of a task: of some it depends on their settings."""
    from reasoning_gym.factory import create_dataset

    scorer: Callable[[str | None, dict[str, Any]], float] = create_dataset(task, **json.loads(settings)).score_answer
    return scorer


@functools.cache
def function_of(reference: str) -> Callable[..., Any]:
    """Load a function, once in a process: a run goes on with the code that it began with."""
    return load_function(reference)


def _columns(batch: ScoreBatch) -> dict[str, list[Any]]:
    """Return the arguments that a function may take by name: columns of the data, numbers of tokens, and more."""
    further = {"steps": batch.steps, "conversation": batch.conversations}
    own = {name: values for name, values in further.items() if values is not None}
    return {**batch.columns, "num_tokens": batch.num_tokens, **own}


def _named(batch: ScoreBatch) -> dict[str, list[Any]]:
    """Return all that a function in TRL's form may take: chats are lists of messages, other prompts texts."""
    prompts = [chat or prompt for chat, prompt in zip(batch.chats, batch.prompts, strict=True)]
    whole = batch.conversations or [[{"role": "assistant", "content": response}] for response in batch.responses]
    completions = [
        messages if chat else response
        for chat, response, messages in zip(batch.chats, batch.responses, whole, strict=True)
    ]
    columns = {name: values for name, values in _columns(batch).items() if name not in LEFT_OUT}
    return {**columns, "prompts": prompts, "completions": completions, "completion_ids": batch.token_ids}


def _rows(batch: ScoreBatch) -> list[dict[str, Any]]:
    """Return for each response what a function in verl's form may take."""
    columns = {name: batch.columns.get(name, [None] * len(batch)) for name in SINGLE}
    columns |= {"solution_str": batch.responses, "extra_info": [each or {} for each in columns["extra_info"]]}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _queries(batch: ScoreBatch) -> dict[str, list[Any]]:
    """Return what a function in OpenRLHF's form may take; labels are a column of this name, or empty."""
    queries = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
    labels = batch.columns.get("labels", [""] * len(batch))
    return {"queries": queries, "prompts": list(batch.prompts), "labels": list(labels)}


def _part(reply: Any, name: str) -> Any:
    """Return the scores of a reply that has other values next to them, or the reply."""
    return reply[name] if isinstance(reply, dict) and name in reply else reply


def _accepted(signature: Signature, values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of ``values`` that a function takes by name: all, with ``**kwargs``."""
    if any(one.kind is Parameter.VAR_KEYWORD for one in signature.parameters.values()):
        return values
    names = {one.name for one in signature.parameters.values() if one.kind in _NAMES}
    return {name: each for name, each in values.items() if name in names}
