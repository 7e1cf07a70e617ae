"""The two forms of a reward function, told apart by its parameters. Worker processes load this.

| form        | signature                            | called with                                             |
|-------------|--------------------------------------|---------------------------------------------------------|
| ``texts``   | ``f(prompts, responses, **columns)`` | two lists of texts by place, columns by name            |
| ``by_name`` | ``f(completions, **kwargs)`` (TRL)   | prompts, completions, completion_ids, columns: by name  |

A parameter named ``completions`` or ``completion_ids`` makes it TRL's; else two parameters by place make it ours. A
function of neither that takes ``**kwargs``, and nothing else or ``prompts``, is TRL's, too.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Literal

Form = Literal["texts", "by_name"]
BY_NAME = ("completions", "completion_ids", "prompts")
"""What a function in TRL's form is called with in addition to columns."""
LEFT_OUT = ("prompt", "completion")
"""Columns that a function in TRL's form does not receive: ``prompts`` has them as they are used."""
FORMS = "f(prompts, responses, **columns) nor, as in TRL, f(completions, **kwargs)"
_PLACES = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMES = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def form_of(signature: Signature) -> Form | None:
    """Return the form of a function with ``signature``; None for neither."""
    names = {one.name for one in signature.parameters.values() if one.kind in _NAMES}
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


def accepted_names(signature: Signature) -> set[str] | None:
    """Return the names of the parameters that may be passed by name; None where any may, by ``**kwargs``."""
    if any(one.kind is Parameter.VAR_KEYWORD for one in signature.parameters.values()):
        return None
    return {one.name for one in signature.parameters.values() if one.kind in _NAMES}


def required_columns(signature: Signature, form: Form) -> list[str]:
    """Return the parameters without a default that are not texts."""
    texts = by_place(signature)[:2] if form == "texts" else BY_NAME
    kinds = (*_PLACES, Parameter.KEYWORD_ONLY)
    required = [one.name for one in signature.parameters.values() if one.kind in kinds and one.default is one.empty]
    return [name for name in required if name not in texts]
