"""The dependency rule: what each module may import of the package, and which may load torch and the like.

CONTRIBUTING.md shows ``LAYERS`` as a table. A module belongs to the row that names it with the longest prefix.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import flexrlhf

PACKAGE = Path(flexrlhf.__file__).parent
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors"}


@dataclass(frozen=True)
class Layer:
    """Which modules may import which, by prefix.

    ``torch``: whether loading them may load HEAVY; without, they import no module with it. ``arrays``: the same of
    numpy alone. Functions may load HEAVY everywhere. ``lazily``: what of the package functions may import besides.
    """

    modules: str
    may_import: str = ""
    torch: bool = False
    lazily: str = ""
    arrays: bool = False


PLANNING = "weights placement operators rewards user_code data config errors metrics text"
"""The folders that planning is made of, and the modules next to them."""
PURE_ENGINES = "engines.capabilities engines.deepspeed.config engines.megatron_checks engines.vllm.config"
LAYERS = (
    # planned and printed without torch
    Layer("errors metrics text timeline"),
    Layer("display", "display metrics text"),
    Layer("config data", "config data errors"),
    Layer("user_code", "user_code config.user_paths errors"),
    Layer("rewards", "rewards user_code config errors"),
    Layer("loggers", "loggers config errors"),
    Layer("operators", "operators user_code config data errors metrics"),
    Layer("placement", "placement config errors"),
    # how texts lie in the rows of a pass: plain numbers, for engines and for plans
    Layer("engines.packing", "engines.packing"),
    Layer("weights memory", "engines.packing weights memory placement config errors"),
    Layer("strategies", "strategies memory weights placement operators config errors"),
    Layer(PURE_ENGINES, f"{PURE_ENGINES} placement operators memory weights config errors"),
    Layer("plan", f"plan {PURE_ENGINES} strategies memory {PLANNING}"),
    Layer(
        "guideline", f"guideline plan engines.packing {PURE_ENGINES} strategies memory timeline {PLANNING}", arrays=True
    ),
    Layer(
        "cli",
        f"cli display execution.lifetime execution.rank_factory plan {PURE_ENGINES} strategies memory {PLANNING}",
        lazily="execution guideline preflight profiling report side_by_side verification",
    ),
    Layer("__main__", "cli"),
    # loaded by the ranks
    Layer("comm", "comm strategies.instructions weights placement operators.columns config errors text", torch=True),
    Layer("checkpoints", "checkpoints comm.weights weights placement errors", torch=True),
    Layer("engines", "engines comm.reduce memory weights placement operators config errors", torch=True),
    Layer(
        "objectives", "objectives engines.base engines.hashing operators user_code config metrics errors", torch=True
    ),
    Layer(
        "execution",
        f"execution display loggers objectives engines checkpoints comm plan strategies memory timeline {PLANNING}",
        torch=True,
    ),
    Layer(
        "profiling",
        f"profiling display guideline.costs guideline.simulation.pass_counts execution engines comm plan strategies "
        f"memory {PLANNING}",
        torch=True,
    ),
    Layer("preflight", f"preflight execution engines.capabilities comm plan {PLANNING}", torch=True),
    Layer("verification", f"verification execution engines plan strategies {PLANNING}", torch=True),
    # reads what runs have written
    Layer("report", f"report execution guideline plan strategies memory timeline {PLANNING}"),
    Layer(
        "side_by_side",
        "side_by_side report.run_contents report.step_times operators config metrics text timeline errors",
    ),
)
"""A row a folder, lower rows import upper ones. ``RULES`` has what holds inside a folder."""
RULES = (
    # loaded by the processes that call a user's code
    Layer(
        "rewards.base rewards.worker_calls rewards.replies rewards.signatures rewards.steps",
        "rewards.base rewards.replies rewards.signatures rewards.steps user_code.loading",
    ),
    Layer("user_code.loading"),
    # costs take no plans, and the search takes neither plans nor costs
    Layer("guideline.costs", "guideline.costs memory weights placement config errors"),
    Layer(
        "guideline.simulation",
        f"guideline.costs guideline.simulation engines.packing plan strategies memory timeline {PLANNING}",
    ),
    Layer("guideline.simulation.walk"),
    Layer("guideline.search", "guideline.search guideline.simulation.walk placement.relation", arrays=True),
    Layer(
        "guideline.search.problem guideline.search.graph guideline.search.evaluate",
        "guideline.search.problem guideline.search.graph guideline.search.evaluate guideline.simulation.walk "
        "placement.relation",
    ),
    # an engine imports no other engine
    Layer("engines.torch", "engines comm.reduce weights placement operators config", torch=True),
    # run again by the processes that a rank starts, so without torch
    Layer("execution.rank", lazily="execution.worker execution.lifetime"),
    Layer("execution.lifetime", "rewards.processes"),
    Layer("execution.fork_server", "execution.lifetime rewards.processes text"),
    Layer("execution.rank_factory", "execution.fork_server execution.lifetime placement.hosts errors"),
    Layer("execution.flight_log", "timeline"),
    Layer("checkpoints.manifest", "errors"),
    Layer("execution.run_directory", "checkpoints.manifest plan config errors"),
    Layer("execution.run_order", "config"),
    Layer(
        "execution.resumption", "execution.run_directory execution.run_order checkpoints.manifest plan config errors"
    ),
    Layer(
        "execution.kept_runs",
        "execution.resumption execution.run_directory weights.model_files plan config errors",
    ),
    Layer("execution.library_versions", "data.reasoning_tasks engines.capabilities plan"),
    Layer(
        "execution.fingerprints execution.terms execution.shared_directories",
        f"execution.fingerprints execution.library_versions plan {PLANNING}",
    ),
    Layer("execution.free_space", "execution.resumption checkpoints.manifest plan errors text"),
    # a config is checked before torch is loaded
    Layer(
        "execution.job execution.execution_engine",
        "execution.job execution.run_directory execution.run_order execution.resumption execution.kept_runs "
        "execution.free_space execution.rank_factory "
        f"checkpoints.manifest loggers.packages {PURE_ENGINES} plan {PLANNING}",
        lazily="execution guideline.advice",
    ),
    # facts are judged without torch
    Layer(
        "preflight.checks preflight.facts preflight.libraries preflight.pairs preflight.host_checks "
        "preflight.job_checks preflight.report",
        f"preflight {PURE_ENGINES} execution.free_space execution.library_versions execution.shared_directories "
        f"execution.terms plan {PLANNING}",
    ),
    # what may differ, and how far, is data
    Layer("verification.sides verification.tolerances verification.deviation", f"plan {PLANNING}"),
    Layer("profiling.profiled_models profiling.table", f"profiling guideline.costs plan {PLANNING}"),
)


@dataclass(frozen=True)
class Import:
    """``module``: without the package's name if it is ours, else the first part alone. ``lazy``: in a function."""

    module: str
    ours: bool
    lazy: bool
    line: int


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"}


def imports(node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                names = [alias.name for alias in child.names]
            case ast.ImportFrom():
                assert child.level == 0, f"line {child.lineno}: a relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            case _:
                names = []
        for name in names:
            package, _, rest = name.partition(".")
            ours = package == "flexrlhf"
            yield Import(_module_in(rest) if ours else package, ours, lazy, child.lineno)
        yield from imports(child, lazy or isinstance(child, ast.FunctionDef | ast.Lambda))


def _module_in(name: str) -> str:
    """``config.spec`` in ``config.spec.Spec``."""
    return name if name in FILES else name.rpartition(".")[0]


def fit(module: str, prefixes: str) -> int:
    """Length of the longest of ``prefixes`` that ``module`` starts with; 0 when there is none."""
    return max((len(prefix) for prefix in prefixes.split() if f"{module}.".startswith(f"{prefix}.")), default=0)


def layer_of(module: str) -> Layer:
    layer = max((*LAYERS, *RULES), key=lambda layer: fit(module, layer.modules))
    assert fit(module, layer.modules), f"{module} stands in no layer: add it to LAYERS and to CONTRIBUTING.md"
    return layer


def violations(module: str, source: str) -> list[str]:
    layer = layer_of(module)
    return [
        f"{module}, line {found.line}: {found.module}"
        for found in imports(ast.parse(source))
        if not _is_allowed(layer, found)
    ]


def _is_allowed(layer: Layer, found: Import) -> bool:
    if not found.ours:
        return layer.torch or found.lazy or found.module not in (HEAVY - {"numpy"} if layer.arrays else HEAVY)
    if found.lazy and fit(found.module, layer.lazily):
        return True
    other = layer_of(found.module)
    loads = layer.torch or not (other.torch or (other.arrays and not layer.arrays))
    return fit(found.module, layer.may_import) > 0 and loads


def engine_of(module: str) -> str:
    """``vllm`` of ``engines.vllm.worker``; nothing for what engines share, and outside engines/."""
    folder, _, rest = module.partition(".")
    return rest.partition(".")[0] if folder == "engines" and "." in rest else ""


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_what_its_layer_may(module: str) -> None:
    assert violations(module, FILES[module].read_text()) == []


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("engines.")])
def test_an_engine_imports_no_other_engine(module: str) -> None:
    found = [item for item in imports(ast.parse(FILES[module].read_text())) if item.ours]
    if module in ("engines.factory", "engines.capabilities"):  # makes engines in functions; reads their pure settings
        found = [item for item in found if not item.lazy and not item.module.endswith(".config")]
    assert {engine_of(item.module) for item in found} <= {"", engine_of(module)}


@pytest.mark.parametrize("layer", (*LAYERS, *RULES), ids=lambda layer: layer.modules.split()[0])
def test_a_layer_has_modules(layer: Layer) -> None:
    assert any(layer_of(module) is layer for module in FILES)


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("placement.packing", "from flexrlhf.placement.cluster import Cluster", True),
        ("placement.packing", "from flexrlhf.strategies.schedule import Schedule", False),
        ("placement.packing", "from flexrlhf.plan.plan import make_plan", False),
        ("operators.ppo", "from flexrlhf.operators.graph import Graph", True),
        ("operators.ppo", "from flexrlhf.objectives.advantages import gae", False),
        ("operators.another", "import torch", False),
        ("strategies.overlap", "import torch", False),
        ("plan.inputs", "from transformers import AutoTokenizer", False),
        ("plan.inputs", "def load():\n    from transformers import AutoTokenizer", True),
        ("cli", "from flexrlhf.execution.launch import launch", False),
        ("cli", "def run():\n    from flexrlhf.execution import launch", True),
        ("guideline.search.bounds", "import numpy", True),
        ("guideline.search.problem", "import numpy", False),
        ("guideline.simulation.walk", "import numpy", False),
        ("guideline.advice.advise", "import numpy", True),
        ("guideline.advice.advise", "import torch", False),
        ("guideline.simulation.simulate", "from flexrlhf.guideline.search.branch_and_bound import search", False),
        ("plan.plan", "def load():\n    from flexrlhf.engines.factory import make_engine", False),
        ("comm.move", "from flexrlhf.strategies.instructions import Move", True),
        ("comm.move", "from flexrlhf.strategies.schedule import walk", False),
        ("comm.reduce", "from flexrlhf.engines.base import Batch", False),
        ("engines.another", "from flexrlhf.engines.sampling import gumbel_noise", True),
        ("engines.another", "from flexrlhf.plan.plan import Plan", False),
        ("engines.torch.engine", "from flexrlhf.strategies.instructions import Run", False),
    ],
)
def test_the_rule_has_teeth(module: str, line: str, allowed: bool) -> None:
    assert (violations(module, line) == []) == allowed
