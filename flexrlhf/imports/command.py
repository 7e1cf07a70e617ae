"""``flexrlhf import``: job files of other systems."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.api import OutputPath, Spec, UserError, print_error, working

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="shell script, YAML or Python file of another system")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write the YAML; else it is printed")]
GpuType = Annotated[
    str | None, typer.Option(help="device class, such as H100-80G; default: the one that the file names")
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--var", metavar="NAME=VALUE", help="variable that the file takes from its environment, or argument 1=VALUE"
    ),
]


def import_(file: JobFile, output: Output = None, gpu_type: GpuType = None, var: Variables = None) -> None:
    """Translate a job of another system into a YAML.

    Of verl, OpenRLHF, TRL, NeMo-RL, AReaL or DeepSpeed-Chat, for `plan`, `simulate` and `advise`. Each line says which
    setting it is from; settings without a counterpart are listed. The file is read, never executed.
    """
    from flexrlhf.api import DeviceClass
    from flexrlhf.imports.translate import translated
    from flexrlhf.imports.translation import is_imported

    if output is not None:
        OutputPath(output, "--output").check_file("my.yaml", is_imported, (file,))
    device_class = None if gpu_type is None else DeviceClass.find(gpu_type, "--gpu-type")
    given = dict(_pair(text) for text in var or ())
    with working(f"reading {file}"):
        found = translated(file, device_class, given)
    if output is None:
        typer.echo(found.text(), nl=False)
    else:
        output.write_text(found.text())
        typer.echo(f"{found.report()}\n\nwritten to {output}: flexrlhf plan {shlex.quote(str(output))}".lstrip())
    try:
        Spec.parse(found.tree(), file.name)
    except UserError as error:
        print_error(f"`flexrlhf plan` refuses this translation until it is mended: {error}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace("_", "a").isalnum():
        raise UserError(f"--var {text}: expected NAME=VALUE")
    return name, value
