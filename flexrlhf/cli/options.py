"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexrlhf.cli.completion import complete_config, complete_setting

Configs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="YAML files, run in order; default: the quick start",
        autocompletion=complete_config,
    ),
]
PlacementRatio = Annotated[
    str | None,
    typer.Option(metavar="RATIOS", help="vector such as 1,1,0.5,0.5; applies to the runs with that number of models"),
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file, as without this option; repeatable",
        autocompletion=complete_config,
    ),
]
ActorModelPath = Annotated[
    str | None, typer.Option(metavar="PATH", help="directory or Hub name of the actor; replaces models.actor.path")
]
CriticModelPath = Annotated[
    str | None, typer.Option(metavar="PATH", help="directory or Hub name of the critic; replaces models.critic.path")
]
Devices = Annotated[int | None, typer.Option(min=1, help="number of ranks; replaces cluster.devices")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a setting; NAME:KEY=VALUE for one run",
        autocompletion=complete_setting,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="continue although the plan exceeds the memory of the devices")]
Profile = Annotated[Path | None, typer.Option(help="times measured by `flexrlhf profile`")]
Nnodes = Annotated[int, typer.Option(min=1, help="number of nodes")]
NodeRank = Annotated[int, typer.Option(min=0, help="number of this node")]
RdzvEndpoint = Annotated[str, typer.Option(help="HOST:PORT of node 0, with several nodes")]

Launcher = Annotated[
    Literal["auto", "local", "torchrun", "slurm", "ray"],
    typer.Option(help="what starts the ranks: this command, torchrun, srun or a Ray cluster; auto: by the environment"),
]
