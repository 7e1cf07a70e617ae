"""Plug-ins: parts of a run or of the command line that packages add by entry points, found by group and name.

Parts of this package that not every run needs are found alike, in a table: it is read without the metadata of all
installed packages, which takes tens of milliseconds, and from a checkout that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from flexrlhf.config.code_loading import NamedErrors
from flexrlhf.errors import UserError, nearest

OURS = "flexrlhf"
"""Name of this package, and prefix of the groups of entry points."""
SHIPPED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "engines": {
            "torch": "flexrlhf.config.engines:TORCH",
            "deepspeed": "flexrlhf.engines.deepspeed.facts:DEEPSPEED",
            "megatron": "flexrlhf.engines.megatron.facts:MEGATRON",
            "vllm": "flexrlhf.engines.vllm.facts:VLLM",
        },
        "commands": {
            "run": "flexrlhf.cli.run:run",
            "join": "flexrlhf.cli.run:join",
            "serve-reward": "flexrlhf.cli.serve_reward:serve_reward",
            "slurm": "flexrlhf.cli.slurm:slurm",
            "doctor": "flexrlhf.measure.commands.doctor:doctor",
            "plan": "flexrlhf.cli.plan:plan",
            "data": "flexrlhf.cli.plan:data",
            "settings": "flexrlhf.cli.settings:settings",
            "schema": "flexrlhf.cli.settings:schema",
            "advise": "flexrlhf.guideline.commands.advise:advise",
            "size": "flexrlhf.guideline.commands.size:size",
            "simulate": "flexrlhf.guideline.commands.simulate:simulate",
            "profile": "flexrlhf.measure.commands.profile:profile",
            "import": "flexrlhf.imports.command:import_",
            "chat": "flexrlhf.cli.chat:chat",
            "serve-model": "flexrlhf.cli.serve_model:serve_model",
            "report": "flexrlhf.report.commands:report",
            "compare": "flexrlhf.report.commands:compare",
            "verify": "flexrlhf.verify.command:verify",
            "export": "flexrlhf.cli.export:export",
        },
        "launchers": {
            "local": "flexrlhf.launch.local:LocalLauncher",
            "torchrun": "flexrlhf.launch.torchrun:TorchrunLauncher",
            "ray": "flexrlhf.launch.ray.driver:RayLauncher",
        },
        "loggers": {
            "tensorboard": "flexrlhf.loggers.tensorboard:TensorBoardLogger",
            "wandb": "flexrlhf.loggers.wandb:WandbLogger",
            "mlflow": "flexrlhf.loggers.mlflow:MlflowLogger",
        },
        "environments": {
            "gymnasium": "flexrlhf.environments.packages.gymnasium_text:GymnasiumText",
            "openenv": "flexrlhf.environments.packages.openenv_client:OpenEnvClient",
            "reasoning-gym": "flexrlhf.environments.packages.reasoning_tasks:ReasoningTask",
            "verifiers": "flexrlhf.environments.packages.verifiers_rollout:VerifiersRollout",
        },
        "algorithms": {
            "ppo": "flexrlhf.config.algorithms.ppo:PpoSpec",
            "ac-share": "flexrlhf.config.algorithms.ppo:AcShareSpec",
            "grpo": "flexrlhf.config.algorithms.grpo:GrpoSpec",
            "rloo": "flexrlhf.config.algorithms.grpo:RlooSpec",
            "gspo": "flexrlhf.config.algorithms.grpo:GspoSpec",
            "raft": "flexrlhf.config.algorithms.grpo:RaftSpec",
            "reinforce++": "flexrlhf.config.algorithms.reinforce:ReinforceSpec",
            "remax": "flexrlhf.config.algorithms.reinforce:RemaxSpec",
            "safe-rlhf": "flexrlhf.config.algorithms.ppo:SafeRlhfSpec",
            "dpo": "flexrlhf.config.algorithms.supervised:DpoSpec",
            "simpo": "flexrlhf.config.algorithms.supervised:SimpoSpec",
            "orpo": "flexrlhf.config.algorithms.supervised:OrpoSpec",
            "kto": "flexrlhf.config.algorithms.supervised:KtoSpec",
            "sft": "flexrlhf.config.algorithms.supervised:SftSpec",
            "reward": "flexrlhf.config.algorithms.supervised:RewardSpec",
        },
        # functions of other packages: the rules that ship are the setting rule
        "rewards": {},
        # what an option of a command does, where another part does it
        "options": {
            "html": "flexrlhf.report.pages:PlanPage",
            "tables": "flexrlhf.report.pages:TablesPage",
            "predictions": "flexrlhf.guideline.simulation.predictions:print_predictions",
            "preflight": "flexrlhf.measure.commands.doctor:run_preflight",
            "replan": "flexrlhf.guideline.advice.replanning:Replanner",
        },
        # what Python programs and other parts call
        "functions": {
            "advise": "flexrlhf.guideline.advice.advise:advise",
            "simulate": "flexrlhf.guideline.simulation.simulate:simulate",
            "read_record": "flexrlhf.report.run_record:read_record",
        },
        # the settings of a YAML without a placement, and of placement: auto
        "chooser": {"search": "flexrlhf.guideline.advice.auto:choose"},
    }
)
"""Plug-ins of this package, by group and name: ``module:attribute``."""

NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engines": ("name", "kinds", "constructor", "priced_as"),
        "launchers": ("device", "failures", "__call__"),
        "loggers": ("settings", "modules", "hint", "errors", "check", "log_row", "log_samples", "finish"),
        "environments": ("reset", "step"),
        "algorithms": ("model_validate", "step_graph"),
        "commands": ("__call__",),
    }
)
"""Attributes of the objects of other packages, by group; their contracts are documented with those of this package."""


@dataclass(frozen=True)
class Plugin:
    """A plug-in.

    group:      what it is: a group of ``SHIPPED``
    name:       as users write it
    reference:  ``module:attribute``
    package:    that has it
    version:    of the package
    """

    group: str
    name: str
    reference: str
    package: str = OURS
    version: str = ""

    @classmethod
    def of_group(cls, group: str) -> Mapping[str, Plugin]:
        """Return all plug-ins of a group by name, this package's first.

        Raises UserError for a name that several packages have.
        """
        found = {name: cls(group, name, reference) for name, reference in SHIPPED[group].items()}
        for each in (each for each in cls.of_others() if each.group == group):
            if (other := found.get(each.name)) is not None:
                raise UserError(f"{each.title}: of {other.package} and of {each.package}; uninstall one of them")
            found[each.name] = each
        return MappingProxyType(found)

    @classmethod
    @cache
    def of_others(cls) -> tuple[Plugin, ...]:
        """Return the plug-ins that other packages have, by group."""
        from importlib.metadata import entry_points

        # all groups at once: each question reads the metadata of every package
        found = entry_points()
        return tuple(
            cls(group, each.name, each.value, each.dist.name, each.dist.version)
            for group in SHIPPED
            for each in found.select(group=f"{OURS}.{group}")
            if each.dist is not None and each.dist.name != OURS
        )

    @classmethod
    def find(cls, group: str, name: str) -> Plugin | None:
        """Return the plug-in of that name, if there is one. Raises UserError as ``of_group``."""
        if name in SHIPPED[group]:
            return cls(group, name, SHIPPED[group][name])
        return cls.of_group(group).get(name)

    @classmethod
    def named(cls, group: str, name: str, where: str, others: tuple[str, ...] = ()) -> Plugin:
        """Return the plug-in of that name. Raises UserError if there is none.

        where:   place of the name, for the message.
        others:  names that go there and are no plug-ins.
        """
        found = cls.find(group, name)
        if found is None:
            known = tuple(dict.fromkeys((*others, *cls.of_group(group))))
            raise UserError(f"{where} {name!r}: unknown{nearest(name, known)}; known: {', '.join(known) or 'none'}")
        return found

    @classmethod
    def chosen(cls, group: str) -> Plugin:
        """Return the only plug-in of a group: another package's goes before this package's.

        Raises UserError if several packages have one.
        """
        others = [each for each in cls.of_others() if each.group == group]
        if len(others) > 1:
            found = " and ".join(f"{each.name} of {each.package}" for each in others)
            raise UserError(f"{group}: {found}; uninstall one")
        return others[0] if others else next(iter(cls.of_group(group).values()))

    @property
    def is_ours(self) -> bool:
        """Whether this package has it."""
        return self.package == OURS

    @property
    def title(self) -> str:
        """Group and name for messages, such as ``engine torch``."""
        return f"{self.group.removesuffix('s')} {self.name}"

    def load(self) -> Any:
        """Load the object. Raises UserError for one that is missing, or whose module raises."""
        module, _, attribute = self.reference.partition(":")
        if self.is_ours:
            return getattr(self._own_module(module), attribute)
        with NamedErrors(f"{self.title}: the package {self.package} {self.version} cannot be used, since it"):
            found = getattr(import_module(module), attribute)
        if lacking := [name for name in NEEDED.get(self.group, ()) if not hasattr(found, name)]:
            owner = f"{self.package} {self.version}"
            raise UserError(f"{self.title}: {self.reference} of {owner} lacks {', '.join(lacking)}")
        return found

    def _own_module(self, name: str) -> Any:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # a library that is missing is for the plug-in to say
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UserError(
                f"{self.title} needs the part {error.name} of this package, which is not installed; "
                f"pip install --force-reinstall {OURS}"
            ) from None


@cache
def load_plugin(group: str, name: str) -> Any:
    """Load a plug-in, once in a process. Raises UserError as ``Plugin.load``, and for an unknown name."""
    return Plugin.named(group, name, group.removesuffix("s")).load()


def named_reference(group: str, written: str) -> str:
    """Return ``module:attribute`` of a plug-in that a setting names; other texts as they are.

    Raises UserError as ``Plugin.of_group``.
    """
    found = Plugin.of_group(group).get(written) if written.replace("-", "_").isidentifier() else None
    return written if found is None else found.reference
