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


PLANNING = "weights memory placement operators rewards data config errors metrics text"
"""The folders that planning is made of, and the modules next to them."""
PURE_ENGINES = "engines.capabilities engines.deepspeed.config engines.megatron_checks engines.vllm.config"
PURE_RUNS = (
    "runs.fingerprints runs.flight_log runs.free_space runs.kept_runs runs.library_versions runs.manifest "
    "runs.resumption runs.run_directory runs.run_order"
)
PURE_LAUNCH = (
    "launch.execution_engine launch.fork_server launch.job launch.lifetime launch.rank launch.rank_factory "
    "launch.shared_directories launch.terms"
)
LAYERS = (
    # planned and printed without torch
    Layer("errors metrics text timeline"),
    Layer("display", "display metrics text"),
    Layer("config", "config errors"),
    Layer("data", "data config errors"),
    Layer("rewards", "rewards config errors"),
    Layer("loggers", "loggers config errors"),
    Layer("operators", "operators config data errors metrics"),
    Layer("placement", "placement config errors"),
    Layer("weights memory", "weights memory placement config errors"),
    Layer("strategies", "strategies memory weights placement operators config errors"),
    Layer(PURE_ENGINES, f"{PURE_ENGINES} placement operators memory weights config errors"),
    Layer("plan", f"plan {PURE_ENGINES} strategies {PLANNING}"),
    Layer("guideline", f"guideline plan {PURE_ENGINES} strategies timeline {PLANNING}", arrays=True),
    # a config is checked, and ranks are forked, before torch is loaded
    Layer(PURE_RUNS, f"{PURE_RUNS} plan {PURE_ENGINES} timeline {PLANNING}"),
    Layer(
        PURE_LAUNCH,
        f"{PURE_LAUNCH} {PURE_RUNS} loggers plan {PURE_ENGINES} {PLANNING}",
        lazily="launch guideline.advice",
    ),
    Layer(
        "cli",
        f"cli display launch.lifetime launch.rank_factory plan {PURE_ENGINES} strategies {PLANNING}",
        lazily="launch runs guideline measure report verify",
    ),
    Layer("__main__", "cli"),
    # loaded by the ranks
    Layer("comm", "comm strategies.instructions weights placement operators.columns config errors text", torch=True),
    Layer("engines", "engines comm.reduce memory weights placement operators config errors", torch=True),
    Layer("objectives", "objectives engines.base engines.hashing operators config metrics errors", torch=True),
    Layer("runs", f"runs engines comm plan strategies timeline {PLANNING}", torch=True),
    Layer(
        "trainer",
        f"trainer display loggers objectives runs engines comm plan strategies timeline {PLANNING}",
        torch=True,
    ),
    Layer("launch", f"launch trainer runs display loggers engines comm plan {PLANNING}", torch=True),
    Layer(
        "measure",
        f"measure display guideline.costs guideline.simulation.pass_counts launch trainer runs engines comm plan "
        f"strategies {PLANNING}",
        torch=True,
    ),
    Layer("verify", f"verify launch runs engines plan strategies {PLANNING}", torch=True),
    # reads what runs have written
    Layer("report", f"report runs guideline plan strategies timeline {PLANNING}"),
)
"""A row a folder, lower rows import upper ones. ``RULES`` has what holds inside a folder."""
RULES = (
    # loaded by the processes that call a user's code
    Layer(
        "config.user_code.loading rewards.base rewards.worker_calls rewards.replies rewards.signatures rewards.steps",
        "config.user_code.loading rewards.base rewards.replies rewards.signatures rewards.steps",
    ),
    # costs take no plans, and the search takes neither plans nor costs
    Layer("guideline.costs", "guideline.costs memory weights placement config errors"),
    Layer("guideline.simulation", f"guideline.costs guideline.simulation plan strategies timeline {PLANNING}"),
    Layer("guideline.search", "guideline.search guideline.simulation.walk placement.relation", arrays=True),
    Layer(
        "guideline.simulation.walk guideline.search.problem guideline.search.graph guideline.search.evaluate",
        "guideline.simulation.walk guideline.search.problem guideline.search.graph guideline.search.evaluate "
        "placement.relation",
    ),
    # facts are judged, and figures compared, without torch
    Layer(
        "measure.checks measure.facts measure.host_checks measure.job_checks "
        "measure.doctor_report measure.profiled_models measure.profile_text verify.sides verify.tolerances "
        "verify.deviation",
        f"measure verify guideline.costs {PURE_LAUNCH} {PURE_RUNS} plan {PURE_ENGINES} {PLANNING}",
    ),
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
        ("cli", "from flexrlhf.launch.start import launch", False),
        ("cli", "def run():\n    from flexrlhf.launch import start", True),
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
