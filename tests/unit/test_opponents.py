"""Opponents of advice: requests are valid, a single change has the settings it names, a climb leaves a slow setting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from benchmarks.opponents.cases import cases
from benchmarks.opponents.moves import Moves, changed_paths, with_values
from benchmarks.opponents.searches import PlannedSeconds, climbed
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.inputs import lengths_for

SMALL = AdviceOptions(model="qwen2.5-0.5b", gpus=2, prompts=16, mini_batches=2, response_tokens=64)


def test_requests_have_specs(tmp_path: Path) -> None:
    found = list(cases())
    specs = [each.spec(tmp_path) for each in found]
    assert len(found) >= 120
    assert max(Counter(each.file_name for each in found).values()) == 1
    assert len({each.cluster.num_devices for each in specs}) > 15


def test_a_single_change_changes_what_it_names() -> None:
    spec = SMALL.spec(None)
    raw = read_yaml(spec.dump(short=True))
    changes = Moves(Random(0), raw, spec).singles(raw)
    assert all(set(changed_paths(raw, with_values(raw, each))) <= set(each) for each in changes)
    named = {path.rpartition(".")[2] for each in changes for path in each}
    assert named >= {"zero", "tp", "micro_batch_tokens", "shard", "placement", "num_chunks", "kv_tokens"}


def test_a_climb_leaves_a_slow_setting() -> None:
    spec = SMALL.spec(None)
    raw = with_values(read_yaml(spec.dump(short=True)), {"models.actor.micro_batch_tokens": 1})
    seconds = PlannedSeconds(AnalyticCosts(), lengths_for(spec, None), lag=0)
    first = seconds.of(raw)
    assert isinstance(first, float)
    found = climbed(seconds, raw, first, Moves(Random(0), raw, spec), limit=1.0)
    assert found.seconds < 0.9 * first
    assert found.seconds == seconds.of(found.raw)
