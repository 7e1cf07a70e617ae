"""README, CONTRIBUTING and docs/: commands, configs, Python, links and names in them work as written.

``plan``, ``simulate`` and ``advise`` run as typed, in a directory where the quick start and ``my-ppo.yaml`` have been.
What would train or measure is checked without that (``run --dry-run``; options and configs); ``REALLY_RUN`` names the
tests that do it. A ``console`` block shows a command with lines of its output, ``...`` for those left out.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from test_pure import TORCH
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.algorithms import AnyAlgorithm
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.strict_model import mappings
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.data.quickstart import CORPUS, config_paths, prepare_corpus
from flexrlhf.guideline.costs.measurements import VERSION
from flexrlhf.runs.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import generate  # noqa: E402

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REALLY_RUN = {
    "run": "tests/distributed/test_quickstart.py",
    "profile": "tests/distributed/test_profile.py",
    "verify": "tests/distributed/test_verify.py",
    "doctor": "tests/distributed/test_doctor.py",
    "torchrun": "tests/distributed/test_nodes.py",
    "export": "tests/distributed/test_resume.py",
    "serve-reward": "tests/distributed/test_reward_runs.py",
    "serve-model": "tests/engines/test_served_policy.py",
    "join": "tests/distributed/test_nodes.py",
    "compare": "tests/distributed/test_quickstart.py",
    "python": "tests/distributed/test_python_script.py",
    "ray": "tests/distributed/test_ray.py",
}
"""Commands that start ranks, and the test that starts them."""
BASE = "my-ppo.yaml"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    place:     document and line, for messages.
    language:  ``bash``, ``console``, ``yaml``, ``python`` or ``text``.
    """

    place: str
    language: str
    text: str

    def __str__(self) -> str:
        return self.place


def blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(f"{document.relative_to(ROOT)}:{line}", match[1], match[2])


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def in_language(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language in languages]


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


# --- a directory to type the commands in


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory of a reader who has run the quick start and ``my-ppo.yaml``; without weights."""
    path, before = tmp_path_factory.mktemp("reader"), Path.cwd()
    os.chdir(path)
    shutil.copytree(ROOT / "configs", "configs")
    prepare_corpus()
    for model, head in (("runs/quickstart-sft/actor", "Causal"), ("runs/quickstart-reward/reward", "Sequence")):
        make_model(model, head)
    for file, key in ((BASE, "name"), ("cluster.yaml", "nodes")):
        found = next(block for block in BLOCKS if block.language == "yaml" and key in read_yaml(block.text))
        Path(file).write_text(found.text)
    leave_a_run()
    shutil.copy(ROOT / "tests" / "fixtures" / "imports" / "openrlhf_ppo.sh", "job.sh")
    yield path
    os.chdir(before)


def make_model(path: str, head: str, **changes: int) -> None:
    """A model directory as the quick start leaves it, but for the weights, which no plan reads, and with positions for
    the lengths of any document."""
    init = read_yaml(config_paths()[0].read_text())["models"]["actor"]["init"] | changes
    init["max_position_embeddings"] = 1 << 16
    shutil.copytree(CORPUS / "tokenizer", path)
    architecture = {"Causal": "LlamaForCausalLM", "Sequence": "LlamaForSequenceClassification"}[head]
    (Path(path) / "config.json").write_text(json.dumps(init | {"architectures": [architecture], "num_labels": 1}))
    (Path(path) / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def leave_a_run() -> None:
    """Config, status, timeline and metrics of ``my-ppo``, and a profile of the machine, in their own formats."""
    runs = Path("runs")
    (runs / "my-ppo").mkdir()
    (runs / "my-ppo" / "metrics.jsonl").write_text("".join(json.dumps(METRICS | {"step": n}) + "\n" for n in range(4)))
    (runs / "my-ppo" / "config.yaml").write_text(load_spec(BASE).dump())
    RunDirectory(runs / "my-ppo").write_status("stopped", 4, 100, start_seconds=9.0)
    (runs / "profile.json").write_text(json.dumps(PROFILE))
    invoke("simulate", BASE, "-o", "runs/my-ppo/timeline.json")


METRICS = {"step": 0, "reward_mean": 1.0, "response_length": 12.0, "seconds": 0.1}
LINE = {"start": 0.001, "per_byte": 1e-9}
POINTS = [{"rows": rows, "seconds": 0.01 * rows} for rows in (1, 8, 64)]
MODEL = {"layers": 3, "hidden": 96, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 386}
PART = {"forward": POINTS, "train": POINTS, "prefill": POINTS, "step": [{"cache": 20, "points": POINTS}]}
MACHINE = {"date": "2026-01-01", "torch": "2.13", "transformers": "5.19", "device": "cpu", "cores": 2, "threads": 1}
PROFILE = {
    "version": VERSION,
    "machine": {**MACHINE, "ranks": 2},
    "models": [
        {"engine": "torch", "item": 4, "width": 36, "prompt": 16, "model": MODEL}
        | {"layers": {"1": {"embedding": {}, "block": PART, "head": PART}}, "update": {"1": LINE, "2": LINE}}
    ],
    "combine": POINTS,
    "bookkeeping": 0.001,
    "statistics": 0.001,
    "contention": {"1": 1.0, "2": 1.1},
    "memory_bytes_s": 1e10,
    "reduce": LINE,
    "moves": {name: LINE for name in ("all_gather", "all_to_all", "point_to_point")},
    "sync": LINE,
    "switch": LINE,
    "save": LINE,
}


# --- commands


def invoke(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, f"flexrlhf {shlex.join(arguments)}\n{result.output}"
    return result.stdout


def lines_of(block: Block) -> list[str]:
    """The commands of a block, without prompts and comments."""
    lines = block.text.replace("\\\n", "").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def check(command: str) -> str:
    """Run a command, or the part of it that starts no ranks; what it prints."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["flexrlhf", "run", *arguments]:
            return dry_run(arguments)
        case ["flexrlhf", "profile", *arguments]:
            invoke("profile", *arguments, "--help")  # which refuses unknown options
            configs = [word for word in arguments if word.endswith(".yaml")]
            return invoke("plan", *configs)
        case ["flexrlhf", "export" | "join" | "compare" | "chat" | "serve-reward" | "serve-model" as name, *arguments]:
            return invoke(
                name, *arguments, "--help"
            )  # the reader's run has no model, no job is there, and a server goes on
        case ["flexrlhf", "verify" | "doctor" as name, *arguments]:
            invoke(name, *arguments, "--help")
            configs = [word for word in arguments if word.endswith(".yaml")]
            return invoke("plan", *configs[:1])
        case ["flexrlhf", "size", *arguments]:
            return invoke("size", *arguments, "--help")  # test_sizes.py compares some of its cells
        case ["flexrlhf", "advise", *arguments]:
            return invoke("advise", *arguments, "--seconds", "0.5")
        case ["flexrlhf", *arguments]:
            return invoke(*arguments)
        case ["torchrun", *arguments]:
            check_torchrun(arguments)
        case ["ray", "job", "submit", "--address", _, "--", *arguments]:
            return check(shlex.join(arguments))
        case ["ray", "start", *arguments]:
            check_ray_start(arguments)
        case ["export", *_]:
            assert command.startswith(JobSecret.MAKE)
        case ["sbatch", script]:
            assert "#SBATCH" in Path(script).read_text()
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["git", "clone", "URL", directory]:
            assert directory == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
        case ["cd", directory]:
            assert directory == "flexrlhf"
        case ["source", script]:
            assert script.partition("/")[0] == ".venv" and "VENV := .venv\n" in (ROOT / "Makefile").read_text()
        case ["sudo", *words]:
            return check(shlex.join(words))
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        case ["python", script, *_]:
            compile((ROOT / script).read_text(), script, "exec")
        case ["pip", "install", requirement]:
            extra = requirement.removeprefix("flexrlhf[").removesuffix("]")
            assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        case ["pip", "uninstall", *packages]:
            assert " ".join(packages) in (ROOT / "Makefile").read_text()
        case _:
            pytest.fail(f"no test runs {command!r}")
    return ""


def _without_option(arguments: list[str], option: str) -> list[str]:
    """``arguments`` without an option and its value."""
    at = arguments.index(option) if option in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :]]


def dry_run(arguments: list[str]) -> str:
    """``run`` up to where it would start ranks."""
    # the reader's run has no checkpoint
    return invoke("run", *_without_option(arguments, "--resume"), "--dry-run")


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    assert (parsed.module, parsed.training_script) == (True, "flexrlhf")
    command, *rest = parsed.training_script_args
    assert command == "run"
    dry_run(rest)


def check_ray_start(arguments: list[str]) -> None:
    """Parse the options as Ray does."""
    scripts = pytest.importorskip("ray.scripts.scripts")
    with scripts.start.make_context("start", list(arguments)) as context:
        assert context.params["head"] or context.params["address"]


@pytest.mark.parametrize("block", in_language("bash", "console"))
def test_commands_run(block: Block, directory: Path) -> None:
    printed = [check(command) for command in lines_of(block)]
    if block.language == "console":
        assert_shows(block, "\n".join(printed))


def assert_shows(block: Block, printed: str) -> None:
    """Every part of a console block between ``...`` stands in the output, in this order."""
    shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
    place = 0
    for part in "\n".join(shown).split("\n...\n"):
        lines = part.removesuffix("\n...").removeprefix("...\n")
        found = f"\n{printed}\n".find(f"\n{lines}\n", place)
        assert found >= 0, f"{block.place}: not in the output, or not there:\n{lines}"
        place = found + len(lines)


@pytest.mark.parametrize("test", REALLY_RUN.values())
def test_what_starts_ranks_has_a_test_of_its_own(test: str) -> None:
    assert (ROOT / test).is_file()


# --- configs and Python


def make_models(config: Mapping[str, Any]) -> None:
    """Directories for the models that a config names, with layers for two stages."""
    for role, model in config.get("models", {}).items():
        path = (model or {}).get("path")
        if path and not Path(path).exists():
            head = "Causal" if role in ("actor", "ref") else "Sequence"
            make_model(path, head, num_hidden_layers=4)


@pytest.mark.parametrize("block", in_language("yaml"))
def test_configs_are_planned(block: Block, directory: Path) -> None:
    """Whole ones by themselves, sections in the place of those of ``my-ppo.yaml``; a file of nodes is a cluster."""
    written = read_yaml(block.text)
    if set(written) == {"nodes"}:
        assert ClusterSpec.model_validate(written).nodes
        return
    if "apiVersion" in written:
        check_manifest(written)
        return
    config = written if "name" in written else read_yaml(Path(BASE).read_text()) | written
    make_models(config)
    Path("block.yaml").write_text(yaml.safe_dump(config))
    assert "schedule of one step" in invoke("plan", "block.yaml")


def check_manifest(written: dict[str, Any]) -> None:
    """The containers of a Kubernetes job run torchrun, as a reader would."""
    for replica in written["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        program, *arguments = container["command"]
        assert program == "torchrun"
        check_torchrun([BASE if argument.endswith(".yaml") else argument for argument in arguments])


@pytest.mark.parametrize("block", in_language("python"))
def test_python_runs(block: Block, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where it would start ranks; ``tests/distributed/test_python_script.py`` and ``test_session.py`` do that.

    Calls of a session are planned and not sent.
    """
    import torch

    from flexrlhf.launch.execution_engine import ExecutionEngine, RunResult
    from flexrlhf.launch.session import Session
    from flexrlhf.launch.session_connection import SessionRanks

    def called(engine: ExecutionEngine) -> RunResult:
        return RunResult(engine.plan.spec.directory, [METRICS], {})

    monkeypatch.setattr(ExecutionEngine, "__call__", called)
    unsent = {
        "__enter__": lambda session: session,
        "__exit__": lambda session, *error: None,
        "column": lambda session, batch, name: torch.zeros(len(batch), 1),
        "statistics": lambda session, batch, number: {},
    }
    for name, function in unsent.items():
        monkeypatch.setattr(Session, name, function)
    monkeypatch.setattr(SessionRanks, "exchange", lambda ranks: nullcontext())
    monkeypatch.setattr(SessionRanks, "send", lambda ranks, message: None)
    exec(compile(block.text, block.place, "exec"), {})


def test_blocks_say_what_they_are() -> None:
    known = ("bash", "console", "python", "text", "toml", "yaml")
    assert [block.place for block in BLOCKS if block.language not in known] == []


# --- links and names


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(document)):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", [page.name for page in DOCUMENTS if page.parent == ROOT / "docs"])
def test_every_page_is_listed(page: str) -> None:
    assert page == "README.md" or f"({page})" in (ROOT / "docs" / "README.md").read_text()


def words_in_code(document: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(document)))


PATH = re.compile(r"(?!runs/)[\w.-]+(/[\w.-]+)*/?(?<!NAME)(?<!ROLE)(?<!-best)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_paths_exist(document: Path) -> None:
    """Of the repository, or of the package in the pages that say so."""
    paths = [word for word in words_in_code(document) if "/" in word and PATH.fullmatch(word)]
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "flexrlhf"))] == []


def has_key(kinds: list[Any], key: str) -> bool:
    """Whether a dotted key of the YAML exists in one of ``kinds``; a role of models stands for all of them."""
    name, _, rest = key.partition(".")
    for kind in kinds:
        for field, info in getattr(kind, "model_fields", {}).items():
            if (info.alias or field) == name:
                inner = [ModelSpec] if kind.__name__ == "ModelsSpec" else list(mappings(info.annotation))
                inner += get_args(AnyAlgorithm) if field == "algorithm" else []
                if not rest or has_key(inner, rest):
                    return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_settings_exist(document: Path) -> None:
    keys = [word for word in words_in_code(document) if re.fullmatch(r"[a-z_]+(\.\w+)+", word)]
    own = [
        key for key in keys if key.split(".")[0] in Spec.model_fields and not key.endswith((".py", ".json", ".jsonl"))
    ]
    own = [re.sub(r"\.ROLE\b", ".actor", key).removesuffix(".MODEL").removesuffix(".OPERATOR") for key in own]
    assert [key for key in own if not has_key([Spec], key)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_options_exist(document: Path) -> None:
    known = (ROOT / "docs" / "reference.md").read_text()
    options = {match for word in words_in_code(document) for match in re.findall(r"^--[a-z-]+", word)}
    assert [option for option in options - {"--help"} if f"`{option}" not in known] == []


# --- what is copied from the code


@pytest.mark.parametrize("page", [*DOCUMENTS[:1], *DOCUMENTS[2:]], ids=lambda page: page.stem)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    expected = generate.reference() if page.stem == "reference" else generate.with_pictures(page.read_text())
    assert page.read_text() == expected, f"{page.relative_to(ROOT)}: write it with `python docs/generate.py`"


def test_a_run_that_goes_on_behind_the_step_is_drawn_in_part() -> None:
    assert max(map(len, generate.picture("configs/rollout-six-lag.yaml").splitlines())) < generate.WIDTH + 20


def test_each_guarantee_has_a_default_test() -> None:
    """Unless its row says where else it is tested."""
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if "`tests/" in line]
    assert len(rows) > 50
    for row in rows:
        named = [ROOT / path for path in re.findall(r"`(tests/[^`]*)`", row)]
        files = [file for path in named for file in ([path] if path.suffix else sorted(path.glob("test_*.py")))]
        assert files and all(file.exists() for file in files), row
        assert "make test-all" in row or any(map(has_default_test, files)), row


def has_default_test(file: Path) -> bool:
    """Whether a file has a test that is not of the long matrix alone."""
    if re.search(r"^pytestmark = .*mark\.full", file.read_text(), re.MULTILINE):
        return False
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if node.name.startswith("test_")]
    return any("pytest.mark.full" not in map(ast.unparse, node.decorator_list) for node in tests)


def test_the_table_of_rooms_is_that_of_the_layers() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| (yes|no) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = [(folder, torch == "yes") for folders, torch in rows for folder in re.findall(r"`(\w+)`", folders)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for layer in reversed(contracts[0]["layers"]):
        folders = set(layer.split(" | "))
        here, shown = shown[: len(folders)], shown[len(folders) :]
        assert set(here) == {(folder, folder in TORCH) for folder in folders}
    assert shown == []
