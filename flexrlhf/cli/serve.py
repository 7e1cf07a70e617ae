"""``flexrlhf serve``: episodes of a run's environment on a machine without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import Overrides, complete_config
from flexrlhf.errors import UserError

ServedConfig = Annotated[Path, typer.Argument(help="YAML file of the run", autocompletion=complete_config)]
Listen = Annotated[str, typer.Option("--listen", help="HOST:PORT of this machine, an entry of environment.hosts")]
Most = Annotated[int | None, typer.Option("--processes", min=1, help="most at once; default: environment.processes")]


def serve(config: ServedConfig, listen: Listen, processes: Most = None, override: Overrides = None) -> None:
    """Run episodes here for ranks of other machines.

    This machine needs no devices; it needs the code of the environment, and the same secret (FLEXRLHF_TOKEN) as the
    run. Runs start and end its processes.
    """
    from flexrlhf.config.spec_file import load_spec
    from flexrlhf.trainer.episode_service import serve_forever

    spec = load_spec(config, override or ())
    if spec.environment is None:
        raise UserError(f"{config}: the run has no environment, so there are no episodes to run here")
    serve_forever(spec.environment, listen, processes or spec.environment.processes)
