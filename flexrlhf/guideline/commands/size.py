"""``flexrlhf size``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexrlhf.api import MOST_TOKENS, OutputPath, Overrides, Price, load_plugin, working
from flexrlhf.guideline.advice.request import (
    AdviceOptions,
    Engine,
    MiniBatches,
    Prompts,
    PromptTokens,
    Rollout,
    Samples,
)
from flexrlhf.guideline.commands.advise import MeanResponse

if TYPE_CHECKING:
    from flexrlhf.guideline.advice.sizes import Size
    from flexrlhf.guideline.advice.sizes_text import SizesText

Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="models of all roles: names, model directories or config.json")
]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", help="algorithm, such as grpo or dpo; repeatable; default: ppo")
]
GpuTypes = Annotated[
    list[str] | None,
    typer.Option("--gpu-type", help="device class; repeatable; default: RTX4090-24G, L40S-48G, A100-80G, H100-80G"),
]
ResponseTokens = Annotated[
    list[int] | None,
    typer.Option(
        "--response-tokens", min=1, max=MOST_TOKENS, help="maximum response length; repeatable; default: 1024 and 8192"
    ),
]
RANK = 16
Rank = Annotated[int, typer.Option("--lora", min=1, help="rank of adapters in the rows on them")]
Directory = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIRECTORY", help="write the YAMLs of all plans")
]
Markdown = Annotated[Path | None, typer.Option(help="write the table as Markdown")]
Html = Annotated[Path | None, typer.Option("--html", help="write the table as a page")]


def size(
    models: Models,
    algorithm: Algorithms = None,
    gpu_type: GpuTypes = None,
    response_tokens: ResponseTokens = None,
    lora: Rank = RANK,
    prompt_tokens: PromptTokens = None,
    mean_response: MeanResponse = None,
    prompts: Prompts = None,
    samples: Samples = None,
    mini_batches: MiniBatches = None,
    engine: Engine = None,
    rollout: Rollout = None,
    set_: Overrides = None,
    price: Price = None,
    output: Directory = None,
    markdown: Markdown = None,
    html: Html = None,
) -> None:
    """Show the fewest devices on which a model trains.

    By device class and response length, with all weights or adapters, and the predicted speed on these devices and
    more. Starts nothing.
    """
    from flexrlhf.guideline.advice.sizes import CLASSES, RESPONSES, SizeTable
    from flexrlhf.guideline.advice.sizes_text import SizesText, is_sizes
    from flexrlhf.guideline.simulation.usage import read_prices

    if output is not None:
        OutputPath(output, "--output").check_directory()
    if markdown is not None:
        OutputPath(markdown, "--markdown").check_file("sizes.md", is_sizes)
    page = None if html is None else load_plugin("options", "tables")(html, "sizes.html")
    others = AdviceOptions(
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        samples=samples,
        mini_batches=mini_batches,
        engine=engine,
        rollout=rollout,
    )
    table = SizeTable(
        models=models,
        algorithms=algorithm or ("ppo",),
        classes=gpu_type or CLASSES,
        responses=response_tokens or RESPONSES,
        rank=lora,
        others=others,
        overrides=tuple(set_ or ()),
        mean=mean_response,
    )
    cells, sizes = table.cells, []
    prices = read_prices(price, table.device_classes)
    for number, cell in enumerate(cells):
        training = "full" if cell.lora is None else f"LoRA {cell.lora}"
        what = f"{cell.model}, {cell.algorithm}, {cell.response_tokens} tokens, {training}, {cell.gpu_type}"
        with working(f"{number + 1} of {len(cells)}: {what}"):
            sizes.append(table.size(cell))
    given = {
        "algorithm": algorithm,
        "gpu_type": gpu_type,
        "response_tokens": response_tokens,
        "lora": lora if lora != RANK else None,
        "mean_response": mean_response,
        **others.given,
        "set": set_,
        "price": price,
        "markdown": markdown,
    }
    text = SizesText(table, sizes, _command(models, given), prices)
    typer.echo(text.terminal())
    if output is not None:
        _write_plans(output, sizes)
        typer.echo(f"\nwritten to {output}: flexrlhf plan {shlex.quote(str(output))}/NAME.yaml")
    if markdown is not None:
        OutputPath(markdown, "--markdown").write(text.markdown())
    if page is not None:
        page.write("Devices that a model needs", _sections(text), text.command)


def _command(models: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the command line with these options, of which some are lists."""
    words = ["flexrlhf", "size", *models]
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            words += [] if each is None else [f"--{name.replace('_', '-')}", str(each)]
    return shlex.join(words)


def _write_plans(directory: Path, sizes: list[Size]) -> None:
    """Write the YAML of each plan. Raises UserError for a file of somebody else."""
    from flexrlhf.guideline.advice.advised_yaml import is_advised, write_advised

    directory.mkdir(parents=True, exist_ok=True)
    for plan in (plan for size in sizes for plan in size.plans):
        path = directory / plan.file_name
        OutputPath(path, "--output").check_file(plan.file_name, is_advised)
        write_advised(plan.chosen, path)


def _sections(text: SizesText) -> Sequence[Mapping[str, Any]]:
    """Return the sections of a page: all classes next to each other, then the plan of each cell."""
    return (
        {"key": "devices", "title": "Devices", "caption": text.title, "tables": [text.grid()], "notes": text.notes()},
        {
            "key": "plans",
            "title": "Plans on the fewest devices",
            "tables": [text.lines(), text.costs()],
            "notes": [text.cost_note],
        },
    )
