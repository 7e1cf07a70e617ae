"""flexrlhf: RLHF by placement ratios. The names of ``__all__`` are loaded when first used, so this imports no torch."""

from __future__ import annotations

from importlib import import_module

# of typing, which would load before __main__ can see to Ctrl-C
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from flexrlhf.config.spec_file import load_spec
    from flexrlhf.launch.execution_engine import ExecutionEngine
    from flexrlhf.launch.session import Session
    from flexrlhf.plan.pipeline import make_plan

    advise: Any
    simulate: Any

__all__ = ["ExecutionEngine", "Session", "advise", "load_spec", "make_plan", "simulate"]
_MODULES = {
    "ExecutionEngine": "flexrlhf.launch.execution_engine",
    "Session": "flexrlhf.launch.session",
    "load_spec": "flexrlhf.config.spec_file",
    "make_plan": "flexrlhf.plan.pipeline",
}
_PARTS = ("advise", "simulate")
"""Names of parts that are found by name."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("flexrlhf")
    if name in _PARTS:
        from flexrlhf.config.plugins import load_plugin

        return load_plugin("functions", name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
