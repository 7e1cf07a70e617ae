"""Checks of the class of an environment before any episode: its arguments, its form and the columns that it takes.

The class is loaded here, in a process of its own (``flexrlhf.environments.tool_schemas``), with the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

from flexrlhf.config.secrets import has_references
from flexrlhf.environments.process_limits import ProcessLimits
from flexrlhf.environments.programs import ProgramProcess
from flexrlhf.environments.sources import load_environment, package_of
from flexrlhf.environments.tool_runs import has_steps, parameters_of
from flexrlhf.user_code.call_failures import BadReply, CallFailed, Caught

CHECKED_FILES = 1024
"""Open files of a process that loads a program."""
PROBED = ("gymnasium",)
"""Packages whose environments are made here: they need nothing but this machine."""
STEPS = {"reset": ("row", "seed"), "step": ("reply",), "truncate": (), "close": ()}
"""Arguments of the methods of a class with steps."""


def class_facts(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of the class of ``path``: ``problem``, a setting and a sentence about it, if there is one; else
    ``needed`` and ``taken``, the columns that ``reset`` in TRL's form cannot be called without, and all that it takes.

    ``taken`` is null if it takes all.
    """
    with Caught("load", "could not be loaded:") as loading:
        kind, make = load_environment(path)
    if loading.failure is not None:
        return {"problem": ("path", loading.failure.text)}
    for setting, check in (("options", _check_arguments), ("path", _check_methods)):
        with Caught("check", "could not be checked:") as checking:
            check(kind, path, options)
        if checking.failure is not None:
            return {"problem": (setting, checking.failure.text)}
    if (package_of(path) or ("", ""))[0] in PROBED and not has_references(options):
        with Caught("make", "raised") as making:
            make(**options).close()
        if making.failure is not None:
            return {"problem": ("path", f"could not be made: {making.failure.text}")}
    return {} if has_steps(kind) else _columns(parameters_of(kind, "reset"))


def program_facts(path: str, options: Mapping[str, Any], python: str | None) -> dict[str, Any]:
    """Return facts of a program as ``class_facts``: why its interpreter cannot load it, or call it."""
    try:
        ProgramProcess(path, python, options, ProcessLimits(None, CHECKED_FILES)).wait()
    except CallFailed as error:
        kind, text = error.failure.kind, error.failure.text
        return {"problem": ("python" if kind in ("start", "crash") else "path", text)}
    return {}


def _check_arguments(kind: Any, path: str, options: Mapping[str, Any]) -> None:
    """Raise BadReply for arguments that a class does not take, and for missing ones."""
    first = (path,) if package_of(path) else ()
    try:
        # with the object itself, whose name an option may have
        initialise = signature(kind.__init__) if kind.__init__ is not object.__init__ else None
        bound = signature(kind) if initialise is None or kind.__new__ is not object.__new__ else initialise
    except (ValueError, TypeError):
        return
    own = (None,) if bound is initialise else ()
    try:
        bound.bind(*own, *first, **options)
    except TypeError as error:
        names = [name for name in [*bound.parameters][len(own) + len(first) :]]
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        raise BadReply(f"{error}; {takes}") from None


def _check_methods(kind: type, path: str, options: Mapping[str, Any]) -> None:
    """Raise BadReply for methods that cannot be called as the form of a class has it."""
    is_own = has_steps(kind)
    reset = parameters_of(kind, "reset")
    if not is_own and not hasattr(kind, "step") and {"row", "seed"} <= {each.name for each in reset or ()}:
        raise BadReply(
            f"{kind.__name__} has reset(row, seed) and no step; give it step(reply), or a reset that takes columns by "
            f"name, as **columns"
        )
    for name, arguments in STEPS.items() if is_own else (("get_reward", ()), ("close", ())):
        parameters = parameters_of(kind, name) if hasattr(kind, name) else None
        if parameters is not None and not _takes(parameters, arguments):
            found = str(Signature(parameters))
            raise BadReply(f"{kind.__name__}.{name}{found}: it is called with ({', '.join(arguments)})")


def _takes(parameters: Sequence[Parameter], arguments: Sequence[str]) -> bool:
    try:
        Signature(parameters).bind(*arguments)
    except TypeError:
        return False
    return True


def _columns(parameters: Sequence[Parameter] | None) -> dict[str, Any]:
    """Return the columns that a ``reset`` needs, and takes."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    if parameters is None:
        return {"needed": [], "taken": None}
    named = [each for each in parameters if each.kind in kinds]
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    needed = [each.name for each in named if each.default is Parameter.empty]
    return {"needed": needed, "taken": None if takes_all else [each.name for each in named]}
