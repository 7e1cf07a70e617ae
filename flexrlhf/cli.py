"""The command line: parse and validate, then import the heavy part. ``plan`` never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.errors import UserError
from flexrlhf.operators.registry import make_graph
from flexrlhf.plan import Plan, make_plans
from flexrlhf.report import format_plan, format_summary
from flexrlhf.run_directory import prepare_directory, read_lines
from flexrlhf.spec import Spec
from flexrlhf.spec_file import check_scopes, load_spec, parse_vector

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="RLHF by placement ratios."
)

Configs = Annotated[list[Path] | None, typer.Argument(help="YAML files, run in order; none: the quick start")]
Ratio = Annotated[str | None, typer.Option(help="vector such as [1,1,0.5,0.5], for the runs that have so many models")]
Devices = Annotated[int | None, typer.Option(min=1, help="ranks to start; replaces cluster.devices")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a setting; NAME:KEY=VALUE for one run")
]


@app.command()
def plan(configs: Configs = None, placement_ratio: Ratio = None, devices: Devices = None, set_: Sets = None) -> None:
    """Print who sits where, who runs when, what moves, and how many bytes. Starts nothing."""
    with _user_errors():
        for made in make_plans(_specs(configs, placement_ratio, devices, set_)):
            typer.echo(format_plan(made) + "\n")


@app.command()
def run(
    configs: Configs = None,
    placement_ratio: Ratio = None,
    devices: Devices = None,
    set_: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything and print the plan only")] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="machines of the job")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="number of this machine")] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT of machine 0, with several machines")] = "",
) -> None:
    """Train. Starts one process for each device of this machine; under torchrun it is one of them."""
    with _user_errors():
        quick_start = not configs
        specs = _specs(configs, placement_ratio, devices, set_)
        plans = make_plans(specs)
        if dry_run:
            typer.echo("\n\n".join(format_plan(made) for made in plans))
            return
        if nnodes > 1 and not rdzv_endpoint:
            raise UserError("--rdzv-endpoint: missing; several machines need HOST:PORT of machine 0")
        _execute(plans, quick_start, (nnodes, node_rank, rdzv_endpoint))


def _specs(
    configs: Sequence[Path] | None, placement_ratio: str | None, devices: int | None, sets: Sequence[str] | None
) -> list[Spec]:
    """Load every config with the overrides of the command line."""
    from flexrlhf.quickstart import config_paths

    overrides = tuple(sets or ())
    if devices is not None:
        overrides += (f"cluster.devices={devices}",)
    paths = list(configs or config_paths())
    specs = [load_spec(path, overrides) for path in paths]
    check_scopes(overrides, specs)
    if placement_ratio is None:
        return specs
    placement = f"placement={placement_ratio}"
    fitting = [_takes_vector(spec, parse_vector(placement_ratio)) for spec in specs]
    if not any(fitting):
        fitting = [True] * len(specs)
    return [
        load_spec(path, (*overrides, placement)) if fits else spec
        for path, spec, fits in zip(paths, specs, fitting, strict=True)
    ]


def _takes_vector(spec: Spec, vector: Sequence[object]) -> bool:
    graph = make_graph(spec)
    return len(vector) in (len(graph.roles), len(graph.roles) + len(graph.trained) * graph.can_shadow)


def _execute(plans: Sequence[Plan], quick_start: bool, machines: tuple[int, int, str]) -> None:
    """Check the data, prepare the run directories, start the ranks, print the summary."""
    from flexrlhf import launch
    from flexrlhf.quickstart import prepare_corpus
    from flexrlhf.run_data import check_run_data
    from flexrlhf.worker import work

    if quick_start:
        prepare_corpus()
    for index, made in enumerate(plans):
        check_run_data(made, pending={str(earlier.spec.directory) for earlier in plans[:index]})
    if launch.under_torchrun():
        launch.check_world(plans[0])
        if launch.is_first_rank():
            _prepare(plans)
        work([made.spec for made in plans])
        return
    if machines[1] == 0:
        _prepare(plans)
    try:
        launch.launch([made.spec for made in plans], plans[0], launch.Rendezvous(*machines))
    except launch.Interrupted as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(130) from None
    except launch.RankFailure as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(1) from None
    if machines[1] == 0:
        _summarise(plans)


def _prepare(plans: Sequence[Plan]) -> None:
    for made in plans:
        typer.echo(format_plan(made) + "\n")
        prepare_directory(made, format_plan(made))


def _summarise(plans: Sequence[Plan]) -> None:
    for made in plans:
        rows, samples = (read_lines(made.spec.directory / name) for name in ("metrics.jsonl", "samples.jsonl"))
        newest = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
        typer.echo("\n" + format_summary(made.spec.name, str(made.spec.directory), rows, newest))


@contextmanager
def _user_errors() -> Iterator[None]:
    """What a user can mend is one sentence and exit code 2, without a traceback."""
    try:
        yield
    except UserError as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(2) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
