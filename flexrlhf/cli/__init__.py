"""The command line: parse and validate, then import the heavy part. ``plan`` never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import add
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.config.output_path import check_output
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import check_scopes, load_spec, parse_vector, split_scope
from flexrlhf.engines.capabilities import check_device
from flexrlhf.errors import UserError
from flexrlhf.operators.registry import make_graph
from flexrlhf.placement.hosts import Hosts, equal_nodes, under_torchrun, with_device
from flexrlhf.plan.memory_text import measured_memory
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan, format_summary
from flexrlhf.plan.suggestions import check_fits

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="RLHF by placement ratios."
)

Configs = Annotated[list[Path] | None, typer.Argument(help="YAML files, run in order; none: the quick start")]
Ratio = Annotated[str | None, typer.Option(help="vector such as [1,1,0.5,0.5], for the runs that have so many models")]
Devices = Annotated[int | None, typer.Option(min=1, help="ranks to start; replaces cluster.devices")]
Force = Annotated[bool, typer.Option("--force", help="go on where the plan needs more memory than devices have")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a setting; NAME:KEY=VALUE for one run")
]


@app.command()
def plan(
    configs: Configs = None,
    placement_ratio: Ratio = None,
    devices: Devices = None,
    set_: Sets = None,
    force: Force = False,
) -> None:
    """Print who sits where, who runs when, what moves, and how many bytes. Starts nothing."""
    with _user_errors():
        plans = _plans(_specs(configs, placement_ratio, devices, set_))
        for made in plans:
            typer.echo(format_plan(made) + "\n")
        _check_memory(plans, force)


@app.command(name="simulate")
def simulate_(
    configs: Configs = None,
    placement_ratio: Ratio = None,
    devices: Devices = None,
    set_: Sets = None,
    response_tokens: Annotated[
        str | None,
        typer.Option(help="length of answers: a number, a JSON list, or metrics.jsonl of a run; default: the longest"),
    ] = None,
    mean_response: Annotated[
        float | None, typer.Option(min=1, help="their mean instead, with lengths spread about it, as in `advise`")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="times measured by `flexrlhf profile`")] = None,
    against: Annotated[Path | None, typer.Option(help="timeline.json of a run, to compare with")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the timeline, a Chrome trace")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps in that timeline")] = 4,
) -> None:
    """Print how long a step will take and why, and what waits meanwhile. Starts nothing."""
    from flexrlhf.guideline.simulation.compare import compare, read_run
    from flexrlhf.guideline.simulation.inputs import costs_for, read_lengths
    from flexrlhf.guideline.simulation.simulate import simulate, write_timeline
    from flexrlhf.guideline.simulation.simulation_text import format_comparison, format_simulation

    with _user_errors():
        if output is not None:
            check_output(output, "--output", "trace.json")
        measured = read_run(against) if against is not None else None
        plans = _plans(_specs(configs, placement_ratio, devices, set_))
        if len(plans) > 1 and (against or output):
            raise UserError(f"{'--against' if against else '--output'}: goes with one config, found {len(plans)}")
        for made in plans:
            source = costs_for(made.spec, profile)
            simulation = simulate(made, source.costs, read_lengths(response_tokens, made, mean_response))
            typer.echo(format_simulation(simulation, source.name) + "\n")
            if measured is not None:
                typer.echo(format_comparison(compare(simulation, measured), against) + "\n")
            if output is not None:
                write_timeline(simulation, output, steps)


@app.command(name="advise")
def advise_(
    config: Annotated[Path | None, typer.Argument(help="YAML whose models, batch and cluster are asked about")] = None,
    model: Annotated[
        str | None, typer.Option(help="of all roles: a name, a model directory or a config.json; default: llama-7b")
    ] = None,
    critic: Annotated[str | None, typer.Option(help="default: as --reward, else --model")] = None,
    ref: Annotated[str | None, typer.Option(help="default: as --model")] = None,
    reward: Annotated[str | None, typer.Option(help="default: as --critic, else --model")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="devices, eight in a node; default: 8")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="their class; default: A100-80G")] = None,
    cluster: Annotated[Path | None, typer.Option(help="YAML with a list of nodes, instead of --gpus")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="the most of a prompt; default: 1024")] = None,
    response_tokens: Annotated[int | None, typer.Option(min=1, help="the most of an answer; default: 1024")] = None,
    mean_response: Annotated[float | None, typer.Option(min=1, help="tokens of an answer; default: the most")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="in a step; default: 512")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="answers to each prompt, as the algorithm has; of PPO by default: 1")
    ] = None,
    mini_batches: Annotated[int | None, typer.Option(min=1, help="optimizer steps of a step; default: 8")] = None,
    engine: Annotated[str | None, typer.Option(help="that trains: torch or deepspeed; default: torch")] = None,
    rollout: Annotated[str | None, typer.Option(help="what generates: transformers or vllm; default: vllm")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="rank of adapters; default: all weights are trained")] = None,
    set_: Sets = None,
    profile: Annotated[Path | None, typer.Option(help="times measured by `flexrlhf profile`")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="that the searches may take")] = 60.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the YAML of what to use")] = None,
) -> None:
    """Say which placement to use, how fast it will be and why, with what else was thought of. Starts nothing."""
    from flexrlhf.guideline.advice.advice_text import format_advice
    from flexrlhf.guideline.advice.advise import advise, write_advised
    from flexrlhf.guideline.advice.request import AdviceOptions
    from flexrlhf.guideline.simulation.inputs import costs_for, lengths_for

    options = AdviceOptions(
        model,
        critic,
        ref,
        reward,
        gpus,
        gpu_type,
        cluster,
        prompt_tokens,
        response_tokens,
        prompts,
        samples,
        mini_batches,
        engine,
        rollout,
        lora,
    )
    with _user_errors():
        if output is not None:
            check_output(output, "--output", "advised.yaml")
        spec = options.spec(config, tuple(set_ or ()))
        source = costs_for(spec, profile)
        advice = advise(spec, source.costs, lengths_for(spec, mean_response), seconds)
        typer.echo(format_advice(advice, source.name))
        if output is not None:
            write_advised(advice.best, output)
            typer.echo(f"\nwritten to {output}: flexrlhf plan {output}")


@app.command(name="profile")
def profile_(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="YAML files whose models are measured; none: the quick start's PPO")
    ] = None,
    devices: Devices = None,
    set_: Sets = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("runs/profile.json"),
    seconds: Annotated[float, typer.Option(min=0.1, help="for which the calls of each model are repeated")] = 5.0,
) -> None:
    """Measure on this machine what `simulate` and `advise` compute times from. Takes a minute, trains nothing."""
    with _user_errors():
        plans = _plans(_specs(configs, None, devices, set_))
        _measure(plans, seconds, output, quick_start=not configs)


@app.command()
def run(
    configs: Configs = None,
    placement_ratio: Ratio = None,
    devices: Devices = None,
    set_: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check configs, models and data, print the plan, start nothing")
    ] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="machines of the job")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="number of this machine")] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT of machine 0, with several machines")] = "",
    force: Force = False,
) -> None:
    """Train. Starts one process for each device of this machine; under torchrun it is one of them."""
    with _user_errors():
        machines = Hosts(nnodes, node_rank, rdzv_endpoint)
        machines.check()
        specs = _specs(configs, placement_ratio, devices, set_, nnodes)
        if nnodes > 1 or under_torchrun():
            _check_placed(specs)
        plans = _plans(specs)
        _check_memory(plans, force)
        num_local = machines.num_ranks(plans[0].cluster)
        if dry_run:
            _dry_run(plans, quick_start=not configs)
        else:
            _execute(plans, machines, num_local, quick_start=not configs)


def _check_memory(plans: Sequence[Plan], force: bool) -> None:
    for made in plans:
        try:
            check_fits(made)
        except UserError as error:
            if not force:
                raise
            typer.echo(f"flexrlhf: {error} (--force: going on)", err=True)


def _specs(
    configs: Sequence[Path] | None,
    placement_ratio: str | None,
    devices: int | None,
    sets: Sequence[str] | None,
    nnodes: int = 1,
) -> list[Spec]:
    """Load every config with the overrides of the command line; ``placement: auto`` is still open."""
    from flexrlhf.data.quickstart import config_paths

    overrides = tuple(sets or ())
    if devices is not None:
        overrides += (f"cluster.devices={devices}",)
    paths = list(configs or config_paths())
    general = tuple(override for override in overrides if _role_of(override) is None)
    specs = [load_spec(path, general) for path in paths]
    check_scopes(overrides, specs)
    settings = [_settings_for(spec, specs, overrides) for spec in specs]
    # settings of models may change which roles a run has
    specs = [load_spec(path, chosen) for path, chosen in zip(paths, settings, strict=True)]
    own = [_own_overrides(spec, placement_ratio, nnodes) for spec in specs]
    if placement_ratio is not None and not any(f"placement={placement_ratio}" in extra for extra in own):
        # no run has so many models: let the first say which vectors it takes
        own[0] += (f"placement={placement_ratio}",)
    return [load_spec(path, all_) for path, all_ in zip(paths, map(add, settings, own), strict=True)]


def _check_placed(specs: Sequence[Spec]) -> None:
    """Raise UserError where every process would look for a placement by itself, and find one when it does."""
    for spec in specs:
        if spec.placement == "auto":
            raise UserError(
                f"placement: auto of {spec.name} is chosen by each process anew, and there are several here; write it "
                f"once with `flexrlhf advise CONFIG -o FILE` and run that file"
            )


def _plans(specs: Sequence[Spec]) -> list[Plan]:
    return make_plans([_placed(spec) for spec in specs])


def _placed(spec: Spec) -> Spec:
    """With what ``placement: auto`` comes to."""
    if spec.placement != "auto":
        return spec
    from flexrlhf.guideline.advice.auto import with_placement

    chosen, told = with_placement(spec)
    typer.echo(told + "\n")
    return chosen


def _role_of(override: str) -> str | None:
    """``actor`` for ``models.actor.zero=3``: a setting for whichever runs have that model."""
    scope, setting = split_scope(override)
    section, _, rest = setting.partition("=")[0].partition(".")
    return rest.partition(".")[0] if scope is None and section == "models" and rest else None


def _settings_for(spec: Spec, specs: Sequence[Spec], overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides without those of models that this run lacks and another one has."""
    roles = make_graph(spec).roles
    elsewhere = {role for other in specs for role in make_graph(other).roles} - set(roles)
    return tuple(override for override in overrides if _role_of(override) not in elsewhere)


def _own_overrides(spec: Spec, placement_ratio: str | None, nnodes: int) -> tuple[str, ...]:
    """What the command line means for one run: the vector where its length fits, nodes for a cluster without any."""
    extra: tuple[str, ...] = ()
    if placement_ratio is not None and _takes_vector(spec, parse_vector(placement_ratio)):
        extra += (f"placement={placement_ratio}",)
    if nnodes > 1 and not spec.cluster.nodes:
        extra += (f"cluster.nodes={equal_nodes(spec.cluster.devices or 1, nnodes)}",)
    return extra


def _takes_vector(spec: Spec, vector: Sequence[object]) -> bool:
    graph = make_graph(spec)
    return len(vector) in (len(graph.roles), len(graph.roles) + len(graph.trained) * graph.can_shadow)


def _dry_run(plans: Sequence[Plan], quick_start: bool) -> None:
    from flexrlhf.plan.inputs import check_runs

    if not quick_start:
        check_runs(plans)
    typer.echo("\n\n".join(format_plan(made) for made in plans))


def _execute(plans: Sequence[Plan], machines: Hosts, num_local: int, quick_start: bool) -> None:
    """Check all inputs, prepare the run directories, run on all ranks, print the summary."""
    from flexrlhf.execution import launch
    from flexrlhf.execution.worker import work

    is_worker = under_torchrun()
    num_local = launch.num_local_ranks(plans[0]) if is_worker else num_local
    device = launch.settle_device(plans[0].spec.cluster.device, num_local)
    for made in plans:
        check_device(made.placement, made.shapes, device)
    is_first = launch.is_first_rank() if is_worker else machines.node_rank == 0
    if is_first or not is_worker:
        _check_inputs(plans, quick_start)
    if is_first:
        _prepare(plans)
    specs = [with_device(made.spec, device) for made in plans]
    if is_worker:
        work(specs)
    else:
        _launch(specs, plans[0], machines)
    if is_first:
        _summarise(plans)


def _check_inputs(plans: Sequence[Plan], quick_start: bool) -> None:
    from flexrlhf.data.quickstart import prepare_corpus
    from flexrlhf.plan.inputs import check_runs

    if quick_start:
        prepare_corpus()
    check_runs(plans)


def _launch(specs: Sequence[Spec], plan: Plan, machines: Hosts) -> None:
    """Start the ranks of this machine; a failed rank is one sentence, as is Ctrl-C."""
    from flexrlhf.execution import launch

    try:
        launch.launch(specs, plan, machines)
    except launch.Interrupted as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(130) from None
    except launch.RankFailure as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(1) from None


def _measure(plans: Sequence[Plan], seconds: float, output: Path, quick_start: bool) -> None:
    """Measure with all ranks and print what was found; of the quick start PPO alone, which has the others' models."""
    from flexrlhf.data.quickstart import prepare_corpus
    from flexrlhf.execution import launch
    from flexrlhf.profiling.command import profile
    from flexrlhf.profiling.table import format_measurements

    if quick_start:
        prepare_corpus()
    try:
        measured = profile(plans[-1:] if quick_start else plans, plans, seconds, output)
    except launch.Interrupted as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(130) from None
    except launch.RankFailure as error:
        typer.echo(f"flexrlhf: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"\n{format_measurements(measured)}\n\nwritten to {output}")


def _prepare(plans: Sequence[Plan]) -> None:
    from flexrlhf.execution.run_directory import prepare_directory

    for made in plans:
        typer.echo(format_plan(made) + "\n")
        prepare_directory(made, format_plan(made))


def _summarise(plans: Sequence[Plan]) -> None:
    from flexrlhf.execution.run_directory import read_facts, read_lines

    for made in plans:
        rows, samples = (read_lines(made.spec.directory / name) for name in ("metrics.jsonl", "samples.jsonl"))
        newest = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
        typer.echo("\n" + format_summary(made.spec.name, str(made.spec.directory), rows, newest))
        facts = read_facts(made.spec.directory / "timeline.json")
        typer.echo("\n".join(measured_memory(made, facts)))


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
