"""One rank of the measurement of whole calls; rank 0 writes the times."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from flexrlhf.comm.world import World, open_world
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.launch.lifetime import end_with_launcher
from flexrlhf.measure.model_calls import ProfileContext
from flexrlhf.measure.profiled_models import LengthSample, profiled_models
from flexrlhf.measure.stopwatch import Stopwatch
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.trainer.bare_rank import BareRank


@dataclass(frozen=True)
class MeasuredCall:
    """A whole call of a replica: its kind, rows, number and tokens of its passes; the lower quartile of its times."""

    kind: str
    rows: int
    passes: int
    tokens: int
    seconds: float


def measure(text: str, lengths: LengthSample, rows: int, world: World, budget: float) -> list[MeasuredCall]:
    """Measure the calls of the trained model of a run on its own layout, with ``rows`` on each replica."""
    plan = make_plan(Spec.parse(read_yaml(text)))
    rank = BareRank(world, plan.spec.name, plan.spec.timeout_seconds)
    rank.connect("profile", groups=plan.groups)
    stopwatch = Stopwatch(rank.all_ranks("profile"), world.rank, world.device, False)
    context = ProfileContext(plan, lengths, rank, stopwatch, budget)
    model = profiled_models(plan)[0]
    with rank.loaded(plan, model.placed) as loaded:
        calls = {kind: context.call(operator, loaded, rows) for kind, operator in model.operators.items()}
        timings = stopwatch.time(calls, budget)
        passes = context.passes(model.placed, rows)
    rank.disconnect()
    return [
        MeasuredCall(kind, rows, len(passes), sum(each.tokens for each in passes), timing.low)
        for kind, timing in timings.items()
    ]


@record
def main(request_file: str, path: str) -> None:
    """Measure the runs of a request and write their times."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.loads(Path(request_file).read_text())
    with open_world("cpu", 1800.0) as world:
        found = [
            measure(run["spec"], LengthSample(tuple(run["prompts"]), tuple(run["responses"])), run["rows"], world, 1.0)
            for run in request["runs"]
        ]
        if world.rank == 0:
            Path(path).write_text(json.dumps([[asdict(call) for call in each] for each in found]))
        world.meet("the end of the calls", 1800.0)


if __name__ == "__main__":
    end_with_launcher()
    main(sys.argv[1], sys.argv[2])
