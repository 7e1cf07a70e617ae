"""Write the generated parts of the documents: ``docs/reference.md``, and pictures and files in README and docs.

``python docs/generate.py`` from the root of the repository; ``tests/unit/test_documents.py`` compares.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo
from typer.testing import CliRunner

from flexrlhf import api
from flexrlhf.api import engine, homes
from flexrlhf.cli import app
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_names import MODELS
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.plugins import SHIPPED, load_plugin
from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.presets.table import Cell, MiniBatchesOf, Peer, WarmUp
from flexrlhf.config.rules import YES, Rule, Values
from flexrlhf.config.setting_list import SettingRow, setting_sections, yaml_text
from flexrlhf.config.strict_model import plain_text
from flexrlhf.errors import either
from flexrlhf.metrics import METRICS
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.plan.size_rules import MODEL_RULES

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r"(<!-- picture: (?P<arguments>.+?) -->\n\n```text\n)(?P<picture>.*?)(```\n)", re.DOTALL)
RULES = re.compile(r"(<!-- rules of models -->\n\n)((?:\|.*\n)*)")
FILE = re.compile(r"(<!-- file: (?P<path>\S+) -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)
WIDTH = 76
"""Characters for the time of a step."""
SETTLED = 5
"""Step from which all steps take the same time, also with a lag."""
SHORT = {
    "generate": ("gen",),
    "logprobs": ("lp",),
    "ref_logprobs": ("ref_lp", "ref"),
    "scores": ("sc",),
    "values": ("va",),
    "train_actor": ("actor", "ta"),
    "train_critic": ("critic", "tc"),
}


# --- rules


def model_rules() -> str:
    """Return the table of the settings of a model that rules are about: engines, families and settings they go with."""
    engines = [EngineFacts.of(name) for name in EngineFacts.model_engines()]
    by_setting: dict[str, list[Rule]] = {}
    for rule in MODEL_RULES.rules:
        if rule.setting in ModelSpec.model_fields and "role.trained" not in rule.needs:
            by_setting.setdefault(rule.setting, []).append(rule)
    rows = []
    for name in (name for name in ModelSpec.model_fields if name in by_setting):
        cells = [_on_engine(name, by_setting[name], facts) for facts in engines]
        families, others = _families(by_setting[name]), _goes_with(by_setting[name])
        if name != "engine" and ({*cells} != {"yes"} or families or others):
            rows.append((f"`{name}`", *cells, others, families))
    return _table(("setting", *(facts.name for facts in engines), "goes with", "models"), rows)


def _on_engine(name: str, rules: Sequence[Rule], facts: EngineFacts) -> str:
    if name == "zero":
        return ", ".join(map(str, facts.zero))
    if any(not _meant(rule.needs["engine"]).have(facts.name, str) for rule in rules if "engine" in rule.needs):
        return "no"
    needs = [(subject, meant) for rule in rules for subject, meant in rule.needs.items() if "engine." in subject]
    limits = [(rule, rule.when[rule.setting]) for rule in rules if rule.setting in rule.when and rule.needs]
    lacks = any(not _meant(meant).have(getattr(facts, subject.partition(".")[2]), str) for subject, meant in needs)
    values = [each for rule, each in limits if any("engine." in subject for subject in rule.needs)]
    if not lacks:
        return "yes"
    listed = ", ".join(str(value) for each in values for value in _meant(each).listed)
    excepted = any(_meant(each).excepted for each in values)
    return f"only {listed}" if values and excepted else f"not {listed}" if values else "no"


def _goes_with(rules: Sequence[Rule]) -> str:
    needs: dict[str, str] = {}
    for rule in rules:
        for subject, meant in rule.needs.items():
            if subject in ModelSpec.model_fields and subject not in (rule.setting, "engine"):
                needs[subject] = f"`{subject}: {either(map(yaml_text, _meant(meant).listed))}`{_condition(rule)}"
    return ", ".join(needs.values())


def _condition(rule: Rule) -> str:
    """Return in words which values of a setting, or which models, a rule is about alone."""
    own = _meant(rule.when.get(rule.setting, ()))
    words = {"sizes.have_experts": "models with experts", "sizes.adapt_experts": "adapters of experts"}
    found = [text for subject, text in words.items() if subject in rule.when]
    if own.listed and not own.excepted:
        found += map(str, own.listed)
    return f" ({', '.join(found)})" if found else ""


def _families(rules: Sequence[Rule]) -> str:
    """Return the families of models that a setting needs; of several rules the last, which is the closest."""
    found = ""
    for rule in rules:
        is_own = rule.when.get("role.is_rollout") != YES and rule.setting != "engine"
        if "sizes.have_experts" in rule.needs and is_own:
            found = "with experts"
        if "decoder.family" in rule.needs and is_own:
            meant = _meant(rule.needs["decoder.family"])
            found = ("not " * meant.excepted + ", ".join(map(str, meant.listed))) if meant.listed else found
    return found


def _meant(values: Values | tuple[object, ...]) -> Values:
    return values if isinstance(values, Values) else Values(values)


# --- pictures of a step


@dataclass(frozen=True)
class Box:
    """One Run of a row of ranks, in characters from the left."""

    left: int
    right: int
    name: str


def with_pictures(text: str) -> str:
    """``text`` with the picture after every ``<!-- picture: ARGUMENTS OF SIMULATE -->``, the file after every
    ``<!-- file: PATH -->``, and the table after ``<!-- rules of models -->``."""
    text = RULES.sub(lambda match: f"{match[1]}{model_rules()}\n", text)
    text = FILE.sub(lambda match: match[1] + (ROOT / match["path"]).read_text() + match[4], text)
    return PICTURE.sub(lambda match: match[1] + picture(match["arguments"]) + match[4], text)


def picture(arguments: str) -> str:
    """Return a drawing: ranks from top to bottom, a step from left to right, a box for each Run, as simulated."""
    runs = [event for event in _timeline(arguments) if event["cat"] == "run"]
    start, end = (_first_generation(runs, step) for step in (SETTLED, SETTLED + 1))
    character = (end - start) / WIDTH
    rows: dict[tuple[Box, ...], list[int]] = {}
    for rank in sorted({run["tid"] for run in runs}):
        # a run that goes on behind the step, as under a lag, is in part in this one and in part in the next one
        own = [
            run
            for run in runs
            if run["tid"] == rank and run["ts"] + character < end and run["ts"] + run["dur"] - character > start
        ]
        boxes = tuple(_boxes(own, lambda time: min(WIDTH + 1, max(0, round((time - start) / character)))))
        rows.setdefault(boxes, []).append(rank)
    lines = [*_drawing(rows), *_legend(rows, (end - start) / 1e6)]
    return "\n".join(lines) + "\n"


def _first_generation(runs: Sequence[Mapping[str, Any]], step: int) -> float:
    return min(run["ts"] for run in runs if run["name"].startswith("generate") and run["args"]["step"] == step)


def _timeline(arguments: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        options = ["--steps", str(SETTLED + 2), "--output", str(trace)]
        result = CliRunner().invoke(app, ["simulate", *shlex.split(arguments), *options])
        assert result.exit_code == 0, result.output
        return [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]


def _boxes(runs: Sequence[Mapping[str, Any]], place: Callable[[float], int]) -> Iterator[Box]:
    """Boxes of one rank, without runs that are too short for two characters."""
    last = 0
    for run in sorted(runs, key=lambda run: run["ts"]):
        left, right = place(run["ts"]), place(run["ts"] + run["dur"])
        left = last if left - last == 1 else left
        if right - left > 1:
            yield Box(left, right, run["name"].partition(" on ")[0])
            last = right


def _name(box: Box) -> str:
    """Return the name of a box, or the longest short one that fits."""
    room = box.right - box.left - 1
    return next(name for name in (box.name, *SHORT.get(box.name, ()), "") if len(name) <= room)


CORNERS = dict(zip(range(16), " ╵╶└╷│┌├╴┘─┴┐┤┬┼", strict=True))
"""By the sides that have a line: 1 up, 2 right, 4 down, 8 left."""


def _drawing(rows: Mapping[tuple[Box, ...], Sequence[int]]) -> Iterator[str]:
    all_boxes = list(rows)
    names = [f"rank{'s' * (len(ranks) > 1)} {ranks[0]}" + f"-{ranks[-1]}" * (len(ranks) > 1) for ranks in rows.values()]
    margin = max(map(len, names)) + 2
    for number, boxes in enumerate(all_boxes):
        yield " " * margin + _border(all_boxes[number - 1] if number else (), boxes)
        yield f"{names[number]:<{margin}}" + _content(boxes)
    yield " " * margin + _border(all_boxes[-1], ())


def _border(above: Sequence[Box], below: Sequence[Box]) -> str:
    line = [0] * (WIDTH + 2)
    for box, side in [*((box, 1) for box in above), *((box, 4) for box in below)]:
        for column in range(box.left, box.right + 1):
            line[column] |= (2 if column < box.right else 0) | (8 if column > box.left else 0)
            line[column] |= side if column in (box.left, box.right) else 0
    return "".join(CORNERS[sides] for sides in line).rstrip()


def _content(boxes: Sequence[Box]) -> str:
    line = [" "] * (WIDTH + 2)
    for box in boxes:
        line[box.left] = line[box.right] = "│"
        line[box.left + 1 : box.right] = f"{_name(box):^{box.right - box.left - 1}}"
    return "".join(line).rstrip()


def _legend(rows: Mapping[tuple[Box, ...], Sequence[int]], seconds: float) -> Iterator[str]:
    short = {_name(box): box.name for boxes in rows for box in boxes if _name(box) not in ("", box.name)}
    yield f"one step, {seconds:.1f} s" + "".join(f"; {name}: {full}" for name, full in short.items())


# --- reference


def reference() -> str:
    """Return the page of all settings, commands and metrics."""
    parts = [
        REFERENCE_HEAD,
        *_settings(),
        *_commands(),
        *_face(),
        "## Metrics of a run",
        "One line a step in `metrics.jsonl`, without metrics that a run does not have. Names and definitions are "
        "the same in every [logger](loggers.md). **Steps are numbered from 0** here, in the other files, in loggers "
        "and in warnings; counts of completed steps begin with 1: `step 1/50` prints the row of step 0.",
        _table(("metric", "definition"), [(f"`{name}`", text) for name, text in _metrics().items()]),
        "## Presets",
        PRESETS_HEAD,
        *(text for like, peer in PEERS.items() for text in _preset(like, peer)),
        "## Device classes",
        "`class` of a node, and `--gpu-type` of `advise`. Bandwidths are in one direction; the source of each figure, "
        "and which are fitted, is in `flexrlhf/placement/devices.py`.",
        _devices(),
        "## Models by name",
        "`--model` of `advise`, and its like: " + ", ".join(f"`{name}`" for name in MODELS) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _metrics() -> dict[str, str]:
    """Return the entries of a row of metrics and their definitions."""
    return dict(METRICS.definitions)


REFERENCE_HEAD = """\
<!-- written by docs/generate.py: change the descriptions in flexrlhf/config and the commands, then run it -->
# Reference

Every key of the YAML with its default and meaning, every command with its options, every metric. A key without a
default is required; `null` switches a setting off, or has the stated meaning. Unknown keys are refused.
Settings that a section shares with another are listed in front of its table, with their own defaults and values.
`--set KEY=VALUE` changes any of them on the command line, as in `--set models.actor.zero=3`.
Algorithms, placements and the other subjects are explained in [the other pages](README.md)."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """Return a cell of a table, with HTML outside of code escaped."""
    parts = re.sub(r"\bNone\b", "`null`", text).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def _settings() -> Iterator[str]:
    yield "## Settings"
    sections = list(setting_sections())
    # rows of other files are explained where those of the data are
    ordered = sorted(sections, key=lambda section: section.prefix != "data")
    first = {(row.name, row.meaning): (each, row) for each in reversed(ordered) for row in reversed(each.rows)}
    for section in sections:
        yield f"### {section.title}"
        if section.text:
            yield section.text
        shared: dict[str, list[str]] = {}
        rows = []
        for row in section.rows:
            origin, told = first[row.name, row.meaning]
            if origin is section:
                default = f"`{row.default}`" if row.default else ""
                rows.append((f"`{row.name}`", row.values, default, row.meaning))
            else:
                shared.setdefault(origin.title, []).append(_shared(row, told))
        if shared:
            yield f"As in {'; '.join(f'{_link(title)}: ' + ', '.join(names) for title, names in shared.items())}."
        if rows:
            yield _table(("key", "value", "default", "meaning"), rows)


def _link(title: str) -> str:
    anchor = re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{anchor})"


def _shared(row: SettingRow, told: SettingRow) -> str:
    """Return a setting that an earlier section has, with its default and values where these are its own."""
    is_required = "" if row.default else " (required)"
    default = f": {row.default}" if row.default != told.default and row.default else ""
    values = f" ({row.values})" if row.values != told.values else ""
    return f"`{row.name}{default}`{values}{is_required}"


PRESETS_HEAD = """\
Values that `algorithm.like` sets for keys missing in the YAML: the defaults of the engine's own trainer.
How it is used: [presets](presets.md). Names without a section belong to `algorithm`; an empty cell is not set."""


def _preset(like: str, peer: Peer) -> Iterator[str]:
    """Yield the table of one preset, its defaults of penalties, and differences that cannot be expressed."""
    yield f"### `like: {like}`"
    yield f"{peer.title}."
    cells = {(name, cell.key): cell for name, trainer in peer.trainers.items() for cell in trainer.cells}
    rows = []
    for key in dict.fromkeys(key for _, key in cells):
        found = [cells.get((name, key)) for name in peer.trainers]
        sources = dict.fromkeys(cell.source for cell in found if cell is not None)
        rows.append((f"`{key.removeprefix('algorithm.')}`", *map(_of_peer, found), "; ".join(sources)))
    yield _table(("setting", *(f"`{name}`" for name in peer.trainers), "source"), rows)
    parts = [
        f"- `{name}`, `kl.place: {place}`: {', '.join(f'`{key}: {yaml_text(value)}`' for key, value in part.items())}"
        for name, trainer in peer.trainers.items()
        for place, part in trainer.penalties.items()
    ]
    if parts:
        yield "Defaults for the missing keys of a KL penalty in the YAML:"
        yield "\n".join(parts)
    differs = [f"- `{name}`: {text}" for name, trainer in peer.trainers.items() for text in trainer.differs]
    if differs:
        yield "Not expressed:"
        yield "\n".join(differs)


def _of_peer(cell: Cell | None) -> str:
    if cell is None:
        return ""
    is_derived = isinstance(cell.value, MiniBatchesOf | WarmUp)
    return str(cell.value) if is_derived else f"`{yaml_text(cell.value)}`"


def _face() -> Iterator[str]:
    yield "## Names for parts"
    yield "Names that a part of another package may import ([plugins.md](plugins.md)), and its own parts do."
    for face in (api, engine):
        yield f"### `{face.__name__}`"
        rows = [(f"`{name}`", f"`{home}`", _meaning(home, name)) for name, home in homes(str(face.__file__)).items()]
        yield _table(("name", "of", "meaning"), sorted(rows))


def _meaning(module: str, name: str) -> str:
    """Return the first sentence of the documentation of a name, which stands in it or after it."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return _sentence(ast.get_docstring(node) or "")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            return _sentence(str(after.value.value)) if is_text else ""
    return ""


def _sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s", " ".join(plain_text(text).split()))[0].rstrip(":")


def _commands() -> Iterator[str]:
    yield "## Commands"
    for name in SHIPPED["commands"]:
        command = load_plugin("commands", name)
        hints = get_type_hints(command, include_extras=True)
        parameters = signature(command).parameters.items()
        rows = [_parameter(name, hints[name], parameter.default) for name, parameter in parameters]
        yield f"### `flexrlhf {name}`"
        yield plain_text(command.__doc__)
        yield _table(("option", "default", "meaning"), rows)


def _parameter(name: str, hint: Any, default: Any) -> tuple[str, str, str]:
    kind, info = hint.__origin__, hint.__metadata__[-1]
    shown = "" if default in (None, "", False, Parameter.empty) else f"`{default}`"
    if isinstance(info, ArgumentInfo):
        return f"`{name.upper()}{' ...' if 'list' in str(kind) else ''}`", shown, info.help or ""
    words = {bool: "", int: " N", float: " NUMBER", Path: " FILE", str: " TEXT"}
    plain = next((each for each in get_args(kind) if each is not NoneType), kind)
    choices = f" {'|'.join(get_args(kind))}" if get_origin(kind) is Literal else ""
    metavar = f" {info.metavar}" if info.metavar else choices or words.get(plain, " TEXT")
    # the first name of an option stands where the default of one without Annotated would
    names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    flags = names or ["--" + name.replace("_", "-")]
    return " or ".join(f"`{flag}{metavar}`" for flag in flags), shown, info.help or ""


def _devices() -> str:
    head = ("class", "TFLOP/s, 16 bits", "GiB", "GB/s of memory", "of a link", "to the host", "of a node")
    rows = [
        (item.name, item.tflops, item.memory_gb, item.memory_gb_s, item.link_gb_s, item.host_gb_s, item.node_gb_s)
        for item in DeviceClass.KNOWN.values()
    ]
    return _table(head, [[f"`{row[0]}`", *(f"{value:g}" for value in row[1:])] for row in rows])


def generated() -> dict[Path, str]:
    """Return the text that each generated or illustrated page should have."""
    pages = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "reference")]
    return {page: with_pictures(page.read_text()) for page in pages} | {ROOT / "docs" / "reference.md": reference()}


if __name__ == "__main__":
    for page, text in generated().items():
        page.write_text(text)
