"""``flexrlhf verify``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.api import (
    ConfigOption,
    Devices,
    Force,
    OutputPath,
    Overrides,
    PlacementRatio,
    Plan,
    RankFactory,
    RunOptions,
    Spec,
    UserError,
    check_memory,
    complete_config,
    config_paths,
    load_spec,
    plan_runs,
    prepare_corpus,
    process_directory,
    read_vector,
)

Config = Annotated[
    Path | None, typer.Argument(help="YAML file; default: the quick start's PPO", autocompletion=complete_config)
]
Against = Annotated[
    list[str] | None,
    typer.Option(metavar="RATIO|CONFIG", help="other side: a vector such as 1,1,0.5,0.5, or a YAML file; repeatable"),
]
AgainstSettings = Annotated[
    list[str] | None,
    typer.Option("--against-set", metavar="KEY=VALUE", help="override a setting of the other sides alone"),
]
Determinism = Annotated[
    bool, typer.Option("--determinism", help="run the config itself twice: on CPUs the same to the last bit")
]
Steps = Annotated[int, typer.Option(min=1, help="steps of each side")]
Keep = Annotated[Path | None, typer.Option(help="directory that the runs stay in; default: a temporary one")]


@dataclass(frozen=True)
class Side:
    """One side of a verification.

    option:       of the command line, for messages
    name:         of its run
    spec:         as the command line gives it
    is_repeated:  whether it is the first side once more
    """

    option: str
    name: str
    spec: Spec
    is_repeated: bool = False


def verify(
    config: Config = None,
    config_option: ConfigOption = None,
    against: Against = None,
    against_set: AgainstSettings = None,
    determinism: Determinism = False,
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    steps: Steps = 3,
    keep: Keep = None,
    force: Force = False,
) -> None:
    """Compare all numbers of a few steps under two placements.

    Exit code 0: the same; 1: they part.
    """
    config = RunOptions(None if config is None else [config], config_option).only_path
    common = (*([f"cluster.devices={devices}"] if devices is not None else []), *(set_ or ()))
    first = _load(config, placement_ratio, common)
    sides = [Side("--determinism", "repeated", first, is_repeated=True)] if determinism else []
    settings = (*common, *(against_set or ()))
    if against_set and not against:
        sides.append(Side("--against-set", "against", _load(config, placement_ratio, settings)))
    sides += [_other_side(config, other, settings) for other in against or ()]
    if not sides:
        raise UserError(
            "verify: nothing to compare with; give --against 1,1,0.5,0.5, --against-set KEY=VALUE or --determinism"
        )
    if keep is not None:
        OutputPath(keep, "--keep").check_directory()
    if config is None:
        prepare_corpus()
        if _random_weights():
            typer.echo("the quick start's models are not trained yet (flexrlhf run): random weights take their place\n")
    with process_directory() if keep is None else nullcontext(keep) as directory:
        is_same = _verify(_plans(first, sides, directory, steps, force), sides)
    if keep is not None:
        typer.echo(f"the runs are in {keep}")
    if not is_same:
        raise typer.Exit(1)


def _load(config: Path | None, placement_ratio: str | None, settings: Sequence[str]) -> Spec:
    """Load one side; the quick start's PPO has random weights where the models before it are not trained yet."""
    path = config or config_paths()[-1]
    overrides = (*(_random_weights() if config is None else ()), *settings)
    return RunOptions([path], placement_ratio=placement_ratio, set_=[*overrides]).specs()[0]


def _random_weights() -> tuple[str, ...]:
    """Return overrides of the quick start's last config: random weights of the same shape, for models that are not
    trained yet."""
    sft, *_, last = config_paths()
    actor, models = load_spec(sft).models.actor, load_spec(last).models
    assert actor is not None, "the quick start trains an actor"
    shape = json.dumps(actor.init)
    absent = [role for role, model in models if model and model.path is not None and not Path(model.path).is_dir()]
    return tuple(f"models.{role}.{setting}" for role in absent for setting in ("path=null", f"init={shape}"))


def _other_side(config: Path | None, other: str, settings: Sequence[str]) -> Side:
    """Return the side of one ``--against``: a vector for the config itself, or another config."""
    option = f"--against {other}"
    if read_vector(other) is not None:
        return Side(option, "against", _load(config, other, settings))
    if not Path(other).exists():
        raise UserError(f"{option}: neither a vector such as 1,1,0.5,0.5 nor a YAML file")
    return Side(option, "against", _load(Path(other), None, settings))


def _plans(first: Spec, sides: Sequence[Side], directory: Path, steps: int, force: bool) -> list[Plan]:
    """Return the plans of the first side and of ``sides``. Raises UserError if their results must differ."""
    from flexrlhf.verify.sides import check_comparable, short_spec

    names = [side.name if len(sides) == 1 else f"{side.name}-{number}" for number, side in enumerate(sides, 1)]
    specs = [short_spec(first, "as-given", directory, steps)]
    specs += [short_spec(side.spec, name, directory, steps, specs[0]) for side, name in zip(sides, names, strict=True)]
    # a plan each: the sides need not have equally many ranks
    plans = [plan_runs([spec])[0] for spec in specs]
    for side, plan in zip(sides, plans[1:], strict=True):
        check_comparable(plans[0], plan, side.option)
    check_memory(plans, force)
    return plans


def _verify(plans: Sequence[Plan], sides: Sequence[Side]) -> bool:
    """Run and compare all sides; return whether all have the results of the first."""
    with RankFactory.starting(is_copied=True) as factory:
        from flexrlhf.verify.sides import side_text
        from flexrlhf.verify.verify import run_side, verify_side

        for plan in plans:
            typer.echo(side_text(plan, plans[0]))
        first = run_side(plans[0], factory)
        verdicts = [
            verify_side(first, run_side(plan, factory), side.is_repeated, typer.echo, factory)
            for side, plan in zip(sides, plans[1:], strict=True)
        ]
    return all(verdict.is_same for verdict in verdicts)
