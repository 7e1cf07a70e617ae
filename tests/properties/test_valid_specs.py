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
from random_specs import features
from varied_specs import VariedSpecs, make_varied_spec

from flexrlhf.config.algorithms import ALGORITHMS, KINDS
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
    *(f"placement {form}" for form in ("none", "vector of 1", "vector of 4", "mapping", "mapping with on", "ranks")),
    *(f"engine torch-{zero}" for zero in (0, 2, 3)),
    *(f"engine deepspeed-{zero}" for zero in (0, 1, 2, 3)),
    *(f"engine megatron-{zero}" for zero in (0, 1)),
    *(f"source {kind}" for kind in ("ModelSource", "FunctionSource", "ServiceSource", "RuleSource")),
    *("rollout same ranks, asleep", "rollout apart, inline", "adapters some", "adapters shared", "row shares unequal"),
    *("syncs whole to whole", "tensor parallel 2", "pipeline stages 2 of a role", "evaluation with moves"),
    *("lag 1", "chunks 2", "sections sync", "sections checkpoint", "sections guards"),
}


def features_of(plan: Plan) -> Iterator[str]:
    """Features that specs of ``random_specs`` have, too, and further ones."""
    spec = plan.spec
    sections = [
        *(["checkpoint"] if spec.checkpoint.every is not None else []),
        *(["sync"] if spec.sync.every > 1 else []),
        *(["guards"] if spec.guards != type(spec.guards)() else []),
    ]
    further = {
        "like": [getattr(spec.algorithm, "like", None)],
        "source": [type(source).__name__ for source in (*(spec.reward or ()), *(spec.cost or ()))],
        "sections": sections,
    }
    for feature, values in (features(plan) | further).items():
        yield from (f"{feature} {value}" for value in values)


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
