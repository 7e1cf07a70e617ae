"""``flexrlhf advise``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import ConfigOption, MeasuredIn, Overrides, Profile, RunOptions, complete_config
from flexrlhf.cli.working import working
from flexrlhf.config.engines import MODEL_ENGINES
from flexrlhf.config.spec import MAX_LAG
from flexrlhf.config.user_paths import check_output
from flexrlhf.errors import UserError, either

Text = str | None
Count = int | None
Config = Annotated[
    Path | None,
    typer.Argument(
        help="YAML with the models, batch and cluster to advise on",
        autocompletion=complete_config,
    ),
]
Algorithm = Annotated[Text, typer.Option(help="algorithm, such as grpo or dpo; default: ppo")]
Model = Annotated[
    Text, typer.Option(help="model of all roles: a name, a model directory or a config.json; default: llama-7b")
]
Critic = Annotated[Text, typer.Option(help="critic model; default: as --reward, else --model")]
Ref = Annotated[Text, typer.Option(help="reference model; default: as --model")]
Reward = Annotated[Text, typer.Option(help="reward model; default: as --critic, else --model")]
Gpus = Annotated[Count, typer.Option(min=1, help="number of devices, eight in a node; default: 8")]
GpuType = Annotated[Text, typer.Option(help="device class; default: A100-80G")]
ClusterFile = Annotated[Path | None, typer.Option(help="YAML with a list of nodes, instead of --gpus")]
PromptTokens = Annotated[Count, typer.Option(min=1, help="maximum prompt length; default: 1024")]
ResponseTokens = Annotated[Count, typer.Option(min=1, help="maximum response length; default: 1024")]
MeanResponse = Annotated[float | None, typer.Option(min=1, help="mean response length; default: the maximum")]
Lengths = Annotated[Text, typer.Option(metavar="WHAT", help="response lengths instead, as of `simulate`")]
MaxLag = Annotated[
    Count, typer.Option(min=0, max=MAX_LAG, help="largest schedule.lag to choose; default: 1 is shown, none chosen")
]
Prompts = Annotated[Count, typer.Option(min=1, help="prompts in a step; default: 512")]
Samples = Annotated[Count, typer.Option(min=1, help="responses to each prompt; default: the algorithm's, 1 for PPO")]
MiniBatches = Annotated[Count, typer.Option(min=1, help="optimizer steps in a step; default: 8")]
Engine = Annotated[
    Text, typer.Option(help=f"training engine: {either(MODEL_ENGINES)}; default: torch, deepspeed if only that fits")
]
Rollout = Annotated[Text, typer.Option(help="generation engine: auto, transformers, torch or vllm; default: vllm")]
Lora = Annotated[Count, typer.Option(min=1, help="rank of LoRA adapters; default: all weights are trained")]
Seconds = Annotated[
    float,
    typer.Option(min=0.1, help="work of the searches, in seconds of an ordinary core: every machine finds the same"),
]
Tie = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="relative difference in seconds within which the simplest placement is taken, 0: always the fastest; "
        "default: the accuracy of the predictions",
    ),
]
PerOperator = Annotated[
    bool, typer.Option("--per-operator", help="a placement for each operator instead of each model")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write the recommended YAML")]


def advise(
    config: Config = None,
    config_option: ConfigOption = None,
    algorithm: Algorithm = None,
    model: Model = None,
    critic: Critic = None,
    ref: Ref = None,
    reward: Reward = None,
    gpus: Gpus = None,
    gpu_type: GpuType = None,
    cluster: ClusterFile = None,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    mean_response: MeanResponse = None,
    lengths: Lengths = None,
    prompts: Prompts = None,
    samples: Samples = None,
    mini_batches: MiniBatches = None,
    engine: Engine = None,
    rollout: Rollout = None,
    lora: Lora = None,
    set_: Overrides = None,
    profile: Profile = None,
    seconds: Seconds = 15.0,
    tie: Tie = None,
    per_operator: PerOperator = False,
    max_lag: MaxLag = None,
    from_: MeasuredIn = None,
    output: Output = None,
) -> None:
    """Recommend a placement, with reasons and alternatives.

    And their predicted times. Starts nothing.
    """
    from flexrlhf.guideline.advice.advice_text import (
        format_advice,
        format_operator_advice,
        is_advised,
        write_advised,
        write_operator_advice,
    )
    from flexrlhf.guideline.advice.advise import advise
    from flexrlhf.guideline.advice.operator_space import advise_operators
    from flexrlhf.guideline.advice.request import AdviceOptions
    from flexrlhf.guideline.simulation.inputs import costs_for
    from flexrlhf.guideline.simulation.lengths import expected_lengths

    if per_operator and tie is not None:
        raise UserError(f"--tie {tie:g}: --per-operator takes the fastest placement; leave one out")
    config = RunOptions(None if config is None else [config], config_option).only_path
    options = AdviceOptions(
        algorithm=algorithm,
        model=model,
        critic=critic,
        ref=ref,
        reward=reward,
        gpus=gpus,
        gpu_type=gpu_type,
        cluster=cluster,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        prompts=prompts,
        samples=samples,
        mini_batches=mini_batches,
        engine=engine,
        rollout="transformers" if rollout is None and per_operator and config is None else rollout,
        lora=lora,
    )
    if output is not None:
        check_output(output, "--output", "advised.yaml", is_advised, (config, cluster, profile))
    run = None
    if from_ is not None:
        from flexrlhf.guideline.simulation.measured_run import measured_run
        from flexrlhf.report.run_record import read_record

        run = measured_run(read_record(from_), profile)
    is_as_trained = run is not None and config is None
    if is_as_trained and (options.given or set_ or per_operator):
        raise UserError(f"--from {from_}: decides on that run as it is; to change a setting, give a config, too")
    spec = run.record.plan.spec if run is not None and is_as_trained else options.spec(config, tuple(set_ or ()))
    if run is not None and lengths is None and mean_response is None:
        expected = run.lengths
    else:
        expected = expected_lengths(spec, lengths, mean_response)
    source = costs_for(spec, profile) if run is None else run.source
    if run is not None and is_as_trained:
        from flexrlhf.guideline.advice.replan import format_replan, replan
        from flexrlhf.report.run_record import restart_seconds

        with working("searching for a placement"):
            found = replan(replace(run, lengths=expected), restart_seconds(run), None, seconds, tie)
        typer.echo(f"{format_advice(found.advice, source)}\n\n{format_replan(found)}")
        if output is not None:
            write_advised(found.best, output)
    elif per_operator:
        with working("searching for a placement of each operator"):
            operators = advise_operators(spec, source.costs, expected, seconds)
        typer.echo(format_operator_advice(operators, source))
        if output is not None:
            write_operator_advice(operators, output)
    else:
        with working("searching for a placement"):
            margin = source.accuracy.tie if tie is None else tie
            advice = advise(spec, source.costs, expected, seconds, margin, max_lag=max_lag)
        typer.echo(format_advice(advice, source))
        if output is not None:
            write_advised(advice.best, output)
    if output is not None:
        next_command = "run --resume auto" if is_as_trained else "plan"
        typer.echo(f"\nwritten to {output}: flexrlhf {next_command} {shlex.quote(str(output))}")
