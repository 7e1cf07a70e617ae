"""Random valid specs of every algorithm and setting: they are planned, and written as YAML they are the same specs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from varied_specs import VariedSpecs, make_varied_spec

from flexrlhf.config.algorithms import ALGORITHMS, KINDS
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan

SAMPLE, ALL = 200, 4000
SEED = 27
PRINTED = 5
"""Every fifth spec is written with all defaults, and its plan's text is compared."""
FROM_FILES = {
    *(f"ModelSpec.{name}" for name in ("path", "trust_remote_code", "retokenize", "max_text_tokens")),
    "Spec.epochs",
}
"""Settings that are read from files, or name a run's files."""
CHOICE = re.compile(r"\n  rollout\.(engine: auto is|kv_tokens: not written,) .*")
"""Lines of a plan whose engine or cache is not written."""
OWN_CODE = {f"AlgorithmSpec.{name}" for name in ("graph", "loop", "settings", "protocols")}
"""Code of a user's own, with its settings."""


@pytest.mark.parametrize(
    "count", [SAMPLE, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=str
)
def test_random_specs_are_planned_and_written_as_yaml_they_are_the_same(count: int, tmp_path: Path) -> None:
    specs, features, settings = VariedSpecs(SEED), Counter[str](), set[str]()
    for number, (raw, plan) in enumerate(islice(specs, count)):
        spec = Spec.parse(raw)
        check_round_trip(spec, tmp_path / "spec.yaml", short=number % PRINTED > 0)
        if number % PRINTED == 0:
            check_plan(plan, tmp_path / "resolved.yaml")
        features.update(features_of(plan))
        # a plan has the settings of all models in each of them
        settings.update(changed_settings(spec), changed_settings(plan.spec))
    print(f"{count} valid, {specs.refused.total()} refused; {dict(sorted(features.items()))}")
    assert features.keys() >= FEATURES, FEATURES - features.keys()
    if count == ALL:
        assert settings >= every_setting() - FROM_FILES - OWN_CODE, every_setting() - FROM_FILES - OWN_CODE - settings
    assert specs.refused.total() < count


def check_round_trip(spec: Spec, file: Path, short: bool) -> None:
    text = spec.dump(short)
    file.write_text(text)
    assert load_spec(file) == spec, text
    assert Spec.parse(json.loads(json.dumps(spec.written()))) == spec, text


def check_plan(plan: Plan, file: Path) -> None:
    """The YAML of a run's directory, with models and limits filled in: the same plan."""
    text = plan.spec.dump()
    file.write_text(text)
    again = load_spec(file)
    assert (again, again.dump()) == (plan.spec, text)
    assert format_plan(make_plan(again)) == CHOICE.sub("", format_plan(plan)), text


def test_an_engine_that_is_not_written_refuses_nothing_that_transformers_can_do() -> None:
    """On GPUs that compute in bfloat16 most runs generate with vLLM; the others are planned with transformers."""
    rng, chosen = Random(SEED), Counter[str]()
    for _ in range(SAMPLE):
        try:
            raw = make_varied_spec(rng)
        except UserError:
            continue
        raw["cluster"]["device"] = "cuda"
        for node in raw["cluster"]["nodes"]:
            node["class"] = "A100-80G"
        raw["rollout"] = {"engine": "transformers"}
        try:
            make_plan(Spec.parse(raw))
        except UserError:
            continue
        chosen[make_plan(Spec.parse(raw | {"rollout": {}})).spec.rollout.engine] += 1
    assert min(chosen["transformers"], chosen["vllm"]) > SAMPLE / 10, chosen


# --- features of the specs

FEATURES = {
    *(f"algorithm {name}" for name in ALGORITHMS),
    *(f"like {name}" for name in PEERS),
    *(f"strategy {name}" for name in ("co-located", "interleaving", "disaggregated")),
    *(f"placement {form}" for form in ("none", "vector", "mapping", "ranks", "row shares")),
    *(f"engine torch zero {zero}" for zero in (0, 2, 3)),
    *(f"engine deepspeed zero {zero}" for zero in (0, 1, 2, 3)),
    *(f"engine megatron zero {zero}" for zero in (0, 1)),
    *(f"source {kind}" for kind in ("ModelSource", "FunctionSource", "ServiceSource", "RuleSource")),
    *("engine vllm", "lora", "shared base", "shadow", "tensor parallel", "stages", "evaluation", "checkpoint"),
    *("guards", "sync period", "lag", "chunks"),
}


def features_of(plan: Plan) -> Iterator[str]:
    spec, placement = plan.spec, plan.placement
    yield f"algorithm {spec.algorithm.name}"
    yield f"like {getattr(spec.algorithm, 'like', None)}"
    yield f"strategy {plan.strategy}"
    yield from (f"placement {form}" for form in _forms(spec))
    yield from (f"engine {model.engine} zero {model.settings.zero}" for model in placement.models if not model.rollout)
    yield from (f"source {type(source).__name__}" for source in (*(spec.reward or ()), *(spec.cost or ())))
    ref = spec.models.ref
    marks = {
        "engine vllm": spec.rollout.engine == "vllm",
        "lora": any(model.settings.lora for model in placement.models),
        "shared base": ref is not None and ref.share is not None,
        "shadow": bool(placement.shadows),
        "tensor parallel": any(model.layout.dims.tp > 1 for model in placement.models),
        "stages": any(model.layout.dims.pp > 1 for model in placement.models),
        "evaluation": spec.eval is not None,
        "checkpoint": spec.checkpoint.every is not None,
        "guards": spec.guards != type(spec.guards)(),
        "sync period": spec.sync.every > 1,
        "lag": spec.schedule.lag > 0,
        "chunks": spec.schedule.num_chunks > 1,
    }
    yield from (name for name, is_there in marks.items() if is_there)


def _forms(spec: Spec) -> Iterator[str]:
    if not isinstance(spec.placement, PlacementMap):
        yield "none" if spec.placement is None else "vector"
        return
    for entry in spec.placement.models.values():
        yield "ranks" if entry.ranks is not None else "mapping"
        if entry.row_shares is not None:
            yield "row shares"


def changed_settings(value: Any) -> Iterator[str]:
    """Settings that are not their defaults."""
    if isinstance(value, tuple):
        for item in value:
            yield from changed_settings(item)
    if not isinstance(value, StrictModel):
        return
    for name, field in type(value).model_fields.items():
        if field.is_required() or getattr(value, name) != field.get_default(call_default_factory=True):
            yield _setting(type(value), name)
    for _, part in value:
        yield from changed_settings(part)


def every_setting() -> set[str]:
    """All settings that can have several values."""
    kinds, found = [Spec, *KINDS.values()], set()
    while kinds:
        kind = kinds.pop()
        found |= {_setting(kind, name) for name, field in kind.model_fields.items() if _is_open(field.annotation)}
        kinds += [part for field in kind.model_fields.values() for part in _parts(field.annotation)]
    return found


def _setting(kind: type[StrictModel], name: str) -> str:
    """``Class.field`` by the class that algorithms have it from."""
    owner = next(base for base in reversed(kind.__mro__) if name in getattr(base, "__annotations__", {}))
    return f"{owner.__name__}.{name}"


def _is_open(annotation: Any) -> bool:
    """Whether a setting is more than a word for its class."""
    return len(getattr(annotation, "__args__", (0, 0))) != 1 or not str(annotation).startswith("typing.Literal")


def _parts(annotation: Any) -> Iterator[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel) and annotation is not Spec:
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _parts(argument)
