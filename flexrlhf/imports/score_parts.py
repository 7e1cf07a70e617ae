"""Parts of a YAML on scores: functions of a job's own code, which are named and run, and rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrlhf.api import definitions
from flexrlhf.imports.run_parts import put_columns
from flexrlhf.imports.settings import MARK, JobSettings, Setting, read_scalar
from flexrlhf.imports.translation import Translation

_THOUGHT = r"<think>(?!.*<think>)(.*?)</think>.*"
_RULES: Mapping[str, Mapping[str, Any]] = {
    "accuracy_reward": {"rule": "math"},
    "accuracy": {"rule": "math"},
    "think_format_reward": {"rule": "format", "pattern": _THOUGHT},
}
"""Functions of trl.rewards, and of recipes that took them over → the same as rules."""
_REFERENCE = re.compile(r"(.+\.py|[\w.]+):\w+")
IN_PLACE = "a rule in the place of code"
CHANGED = "scores are by code that is not named here: a rule stands for it, name a function in reward"


def rule_for(out: Translation) -> str:
    """Return the rule that scores responses to the rows that are written."""
    sources = out.value("data.sources") or [{"path": out.value("data.path") or ""}]
    return "gsm8k" if all("gsm8k" in str(each["path"]) for each in sources) else "math"


def put_scored_by_code(out: Translation, *sources: Setting | None) -> None:
    """Write a rule in the place of code that scores responses, which changes the scores."""
    out.put("reward", {"rule": rule_for(out)}, next(filter(None, sources), None), IN_PLACE)
    for source in sources:
        out.drop(source, CHANGED)
    if not any(sources):
        out.note("the file does not name what scores responses: a rule does here")


def put_function(out: Translation, reference: str, *sources: Setting | None, needs: Mapping[str, str]) -> None:
    """Write a function of the user as the source of scores. ``needs``: columns that it receives → of the rows."""
    out.put("reward", {"function": reference}, *sources)
    put_columns(out, {name: Setting("its form", column) for name, column in needs.items()})


def put_functions(out: Translation, job: JobSettings) -> bool:
    """Write the functions and rules of TRL's ``reward_funcs``, with their weights; return whether there are some.

    Others, such as ones that are made while the job runs, are listed.
    """
    setting = job.found.get("reward_funcs")
    weights = job.listed("reward_weights")
    names = _listed(None if setting is None else setting.value)
    shares = _listed(None if weights is None else weights.value)
    shares = shares if len(shares) == len(names) else []
    sources: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        own = _source(out, name)
        if own:
            share = shares[number] if shares else 1
            sources.append({**own, **({"weight": share} if share != 1 else {})})
        elif name != "get_soft_overlong_punishment":
            out.drop(Setting("reward_funcs", name), "scores by code that is not named here are left out")
    if not sources:
        return False
    out.put("reward", sources[0] if len(sources) == 1 else sources, setting, weights if shares else None)
    if {"rule": "math"} in [{"rule": each.get("rule")} for each in sources]:
        put_columns(out, {"answer": Setting("accuracy_reward's column", "solution")})
    return True


def _listed(value: Any) -> list[Any]:
    """Return the values of a list, or of the words of an option."""
    if isinstance(value, str) and not value.startswith(MARK):
        return [read_scalar(word) for word in value.split()]
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _source(out: Translation, name: Any) -> dict[str, Any]:
    """Return the source that a name stands for; nothing for one that is not known."""
    if name in _RULES:
        return dict(_RULES[name])
    if name == "get_soft_overlong_punishment":
        _put_overlong(out, Setting("reward_funcs", name))
        return {}
    text = str(name)
    if _REFERENCE.fullmatch(text):
        return {"function": text}
    module, _, function = text.rpartition(".")
    is_dotted = re.fullmatch(r"[\w.]+", module) and function.isidentifier() and not module.startswith("trl.")
    return {"function": f"{module}:{function}"} if is_dotted else {}


def _put_overlong(out: Translation, source: Setting) -> None:
    """Write the punishment of long responses as TRL's script makes it: of the last 256 of 1280 tokens."""
    if out.value("data.max_response_tokens") == 1280:
        out.put("algorithm.overlong.buffer_tokens", 256, source)
        out.put("algorithm.overlong.penalty", 1.0, source)
    else:
        out.drop(source, "it punishes from 1024 tokens on, algorithm.overlong at the end of the longest response")


def references(path: Path, text: str, value: Any) -> Any:
    """Return the functions that a Python file names, as path:name or module:name; others as they are.

    value:  names in the file as marked texts, or a list of them.
    """
    defined = dict(definitions(ast.parse(text).body))
    if isinstance(value, list):
        return [_reference(path, defined, each) for each in value]
    return _reference(path, defined, value)


def _reference(path: Path, defined: Mapping[str, ast.AST], value: Any) -> Any:
    name = value.strip(MARK) if isinstance(value, str) and value.startswith(MARK) else ""
    match defined.get(name):
        case ast.FunctionDef():
            return f"{path}:{name}"
        case ast.ImportFrom(module=module, names=names, level=level):
            own = next((alias.name for alias in names if (alias.asname or alias.name) == name), name)
            parts = [] if module is None else module.split(".")
            file = path.parent.joinpath(*[".."] * max(0, level - 1), *parts).with_suffix(".py") if parts else None
            if file is not None and file.is_file():
                return f"{file}:{own}"
            return own if parts[:1] == ["trl"] else f"{module}:{own}"
    return value
