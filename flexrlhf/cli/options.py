"""Arguments and options that several commands have, their completion in a shell, and the specs that they give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from flexrlhf.config.ratio_vector import vector_of_option
from flexrlhf.config.setting_list import keys_from
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import SpecFile, program_settings
from flexrlhf.data.quickstart import config_paths
from flexrlhf.errors import UserError
from flexrlhf.plan.algorithm_graph import make_graph


def complete_config(incomplete: str) -> list[str]:
    """Return the YAML files and the directories that ``incomplete`` may go on to."""
    folder, slash, start = incomplete.rpartition("/")
    directory = Path(folder + slash or ".")
    if not directory.is_dir():
        return []
    entries = [each for each in sorted(directory.iterdir()) if each.name.startswith(start) and each.name[:1] != "."]
    return [
        f"{folder}{slash}{each.name}{'/' * each.is_dir()}"
        for each in entries
        if each.is_dir() or each.suffix in (".yaml", ".yml")
    ]


Configs = Annotated[
    list[Path] | None,
    typer.Argument(help="YAML files, run in order; default: the quick start", autocompletion=complete_config),
]
PlacementRatio = Annotated[
    str | None,
    typer.Option(metavar="RATIOS", help="vector such as 1,1,0.5,0.5; applies to the runs with that number of models"),
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "--config-path",
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
        autocompletion=lambda incomplete: list(keys_from(incomplete)),
    ),
]
Force = Annotated[bool, typer.Option("--force", help="continue although the plan exceeds the memory of the devices")]
Price = Annotated[
    str | None,
    typer.Option(
        metavar="NUMBER", help="price of an hour of a GPU, for the money of the run; CLASS=NUMBER,... by device class"
    ),
]
Nnodes = Annotated[int, typer.Option(min=1, help="number of nodes")]
NodeRank = Annotated[int, typer.Option(min=0, help="number of this node")]
RdzvEndpoint = Annotated[str, typer.Option(help="HOST:PORT of node 0, with several nodes")]

Launcher = Annotated[
    str,
    typer.Option(
        metavar="auto|local|torchrun|slurm|ray|NAME",
        help="what starts the ranks: this command, torchrun, srun, Ray or a plug-in; auto: by the environment",
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """Arguments and options of a command on runs: their YAMLs, and values in place of their settings."""

    configs: Configs = None
    config: ConfigOption = None
    actor_model_path: ActorModelPath = None
    critic_model_path: CriticModelPath = None
    placement_ratio: PlacementRatio = None
    devices: Devices = None
    set_: Overrides = None

    @property
    def paths(self) -> list[Path]:
        """YAMLs, which are given as words or by ``--config``; none: the quick start's."""
        return [*(self.config or ()), *(self.configs or ())]

    @property
    def only_path(self) -> Path | None:
        """YAML of a command that takes one. Raises UserError for several."""
        if len(self.paths) > 1:
            first, second = self.paths[:2]
            raise UserError(f"--config {first}: this command takes one config, and {second} is given, too")
        return self.paths[0] if self.paths else None

    @property
    def settings(self) -> list[str]:
        """Overrides, of which the paths of models win."""
        paths = {"actor": self.actor_model_path, "critic": self.critic_model_path}
        return program_settings(self.set_ or (), None, paths)

    def specs(self, nnodes: int = 1) -> list[Spec]:
        """Return the spec of each YAML; ``placement: auto`` stays as it is. Raises UserError.

        A setting of a model is for the runs that have the model, a vector for those with that number of models. Without
        ``cluster.nodes`` the devices are on ``nnodes`` equal nodes.
        """
        settings = self.settings + ([f"cluster.devices={self.devices}"] if self.devices is not None else [])
        vector = None if self.placement_ratio is None else vector_of_option(self.placement_ratio)
        files = [SpecFile(path) for path in self.paths or config_paths()]
        SpecFile.check_scopes(settings, [file.name for file in files])
        by_run = _settings_by_run(files, settings)
        vectors = _vectors_by_run(files, by_run, vector)
        return [file.spec_on(nnodes, own, each) for file, own, each in zip(files, by_run, vectors, strict=True)]


def _settings_by_run(files: Sequence[SpecFile], settings: Sequence[str]) -> list[Sequence[str]]:
    """Return the settings of each run: all but those of models that it lacks and another run has."""
    if len(files) == 1 or not any(map(_role_of, settings)):
        return [settings] * len(files)
    general = [setting for setting in settings if _role_of(setting) is None]
    roles = [make_graph(file.spec(general)).roles for file in files]
    every = {role for own in roles for role in own}
    return [[setting for setting in settings if _role_of(setting) not in every.difference(own)] for own in roles]


def _role_of(override: str) -> str | None:
    """Return ``actor`` for ``models.actor.zero=3``, which applies to every run that has that model."""
    scope, setting = SpecFile.split_scope(override)
    section, _, rest = setting.partition("=")[0].partition(".")
    return rest.partition(".")[0] if scope is None and section == "models" and rest else None


def _vectors_by_run(
    files: Sequence[SpecFile], by_run: Sequence[Sequence[str]], vector: Sequence[Any] | None
) -> list[Sequence[Any] | None]:
    """Return the vector of each run: ``vector`` where it has as many models. If none has, the first run takes it, whose
    error lists the vectors that there are."""
    if vector is None or len(files) == 1:
        return [vector] * len(files)
    graphs = [make_graph(file.spec(own)) for file, own in zip(files, by_run, strict=True)]
    sizes = [(len(each.roles), len(each.roles) + len(each.trained) * each.can_shadow) for each in graphs]
    found = [vector if len(vector) in able else None for able in sizes]
    return found if any(found) else [vector, *found[1:]]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the fields of each parameter that is a dataclass as options in its place."""
    own = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}
    fields = {name: signature(group, eval_str=True).parameters for name, group in groups.items()}

    @wraps(command)
    def call(**options: Any) -> None:
        made = {name: group(**{key: options.pop(key) for key in fields[name]}) for name, group in groups.items()}
        command(**made, **options)

    named = [part for each in own for part in (fields[each.name].values() if each.name in groups else [each])]
    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in named]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call
