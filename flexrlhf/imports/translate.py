"""Translation of one file: which system's job it is, its settings, and that system's translation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexrlhf.api import UserError, hidden, instead_of
from flexrlhf.imports.areal import job as areal
from flexrlhf.imports.deepspeed_chat import job as deepspeed_chat
from flexrlhf.imports.device_parts import fit_cache, named_class
from flexrlhf.imports.launches import Launch, find_launches, flags, overrides, served_devices, stray_words
from flexrlhf.imports.nemo_rl import job as nemo_rl
from flexrlhf.imports.openrlhf import job as openrlhf
from flexrlhf.imports.parts import check_families, check_warmup
from flexrlhf.imports.python_calls import PythonFile
from flexrlhf.imports.run_parts import check_evaluation
from flexrlhf.imports.score_parts import references
from flexrlhf.imports.settings import MARK, JobSettings, Setting, flat, read_scalar
from flexrlhf.imports.shell_script import ShellScript
from flexrlhf.imports.translation import Translation
from flexrlhf.imports.trl import job as trl
from flexrlhf.imports.trl.algorithm import ALGORITHMS
from flexrlhf.imports.trl.run import OF_FILE, OF_LAUNCHER, accelerate_file, with_options
from flexrlhf.imports.trl.trainers import is_missing, is_of_trl, trainers_of
from flexrlhf.imports.verl import job as verl
from flexrlhf.imports.yaml_trees import Tree, read_tree, referenced, resolved, with_overrides

Class = tuple[str, str] | None
SYSTEMS = ("verl", "OpenRLHF", "TRL", "NeMo-RL", "AReaL", "DeepSpeed-Chat")
MAX_BYTES = 2_000_000
"""Largest job file."""
_ENDINGS = (".sh", ".yaml", ".yml", ".py", ".slurm", ".sbatch")
_CONFIGS = (
    r"(GRPO|RLOO|SFT|DPO|Reward|KTO|ORPO|CPO|PPO|OnlineDPO|GKD|BCO|NashMD|XPO|PRM|Distillation|GOLD|AsyncGRPO)Config"
)

_COMMANDS = re.compile(r"(?m)^[ \t]*((?:[A-Z_]+=\S+ )*(?:python3?|accelerate|trl|torchrun|deepspeed|uv|vllm)\b.*)$")
"""Commands in a text for people."""


class JobFile:
    """A job file of another system, and what is known in addition to it.

    path:          the file.
    device_class:  class of its devices and where that is from; None: it has none.
    given:         values of variables that it leaves to its environment.
    served:        devices of the vLLM server that its commands start, and of one of its engines.
    """

    def __init__(self, path: Path, device_class: str | None, given: Mapping[str, str]) -> None:
        self.path, self.given, self.text = path, given, _text(path)
        named = named_class(f"{path.stem}\n{self.text}")
        self.served: tuple[Setting, Setting] | None = None
        self.device_class: Class = None
        if device_class is not None:
            self.device_class = (device_class, "--gpu-type")
        elif named is not None:
            self.device_class = (named, "named in the file")

    def translated(self) -> Translation:
        """Return the translation. Raises UserError, without secrets of the file."""
        try:
            if self.path.suffix in (".yaml", ".yml"):
                return self._of_tree(read_tree(self.path), {})
            return self._of_python() if self.path.suffix == ".py" else self._of_script(self.text)
        except UserError as error:
            raise UserError(hidden(str(error))) from None
        except RecursionError:
            raise UserError(f"import {self.path}: nested more deeply than Python reads") from None

    def _start(self, system: str) -> Translation:
        out = Translation(system, self.path.name, self.device_class)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.path.stem).strip("-._") or "imported"
        out.put("name", name, "the file's name")
        return out

    def _unknown(self) -> UserError:
        return UserError(f"import {self.path}: no job of a known system; known: {', '.join(SYSTEMS)}")

    def _of_script(self, text: str) -> Translation:
        script = ShellScript(text, self.given)
        commands = [command.words for command in script.commands]
        launches = list(find_launches(commands))
        if not launches:
            raise self._unknown()
        self.served = served_devices(commands)
        out = self._of_launch(launches[0])
        if len(launches) > 1:
            out.note(f"the file starts {len(launches)} jobs: this is the first")
        for sentence in script.assumed:
            out.note(sentence)
        for word in launches[0].arguments:
            if re.fullmatch(f"{MARK}[^{MARK}]*{MARK}", word):
                out.note(f"arguments in ${word.strip(MARK)} are not in the file")
        for stray in stray_words(replace(launches[0], system=out.system)):
            out.drop(Setting(stray.key, hidden(stray.value, stray.key)), "an argument that sets nothing")
        return out

    def _of_launch(self, launch: Launch) -> Translation:
        match launch.system:
            case "verl":
                return self._verl(launch)
            case "OpenRLHF":
                openrlhf.translate(out := self._start("OpenRLHF"), launch)
                return out
            case "DeepSpeed-Chat":
                folders = self.path.absolute().parent.parts
                deepspeed_chat.translate(out := self._start("DeepSpeed-Chat"), launch, folders)
                return out
            case "TRL":
                file = launch.config
                tree = {} if file is None else resolved(read_tree(self._beside(file)), self.given)
                return self._trl(tree, launch)
        if launch.config is None:
            raise UserError(
                f"import {self.path}: {launch.system} is started without --config, which names its settings"
            )
        tree = read_tree(self._beside(launch.config))
        if not any(is_of(tree) for is_of, *_ in _TREES):
            return self._trl_tree(tree, replace(launch, system="TRL"))
        return self._of_tree(tree, overrides(launch.arguments))

    def _beside(self, name: str) -> Path:
        """Return the file that a script names, from its folder or one above. Raises UserError if it is not there."""
        found = self._near(name)
        if found is None:
            raise UserError(f"import {self.path}: its settings are in {name}, which is not there; import that file")
        return found

    def _near(self, name: str) -> Path | None:
        folder = self.path.parent.absolute()
        return next((parent / name for parent in (folder, *folder.parents) if (parent / name).is_file()), None)

    def _verl(self, launch: Launch) -> Translation:
        out = self._start("verl")
        found = {key: Setting(key, value) for key, value in overrides(launch.arguments).items()}
        for number, word in enumerate(launch.arguments):
            if (option := re.match("--(config-(?:name|path))(?:=|$)", word)) is not None:
                value = word.partition("=")[2] or "".join(launch.arguments[number + 1 : number + 2])
                found[option[1]] = Setting(option[1], value.strip("'\""))
        if any(key.startswith("worker.") for key in found):  # of EasyR1, which has verl's modules and others' settings
            raise self._unknown()
        if (file := self._of_hydra(found)) is not None:
            leaves = resolved(with_overrides(read_tree(file), overrides(launch.arguments)), self.given)
            found |= {key: Setting(key, value) for key, value in leaves.items()}
            out.note(f"overrides of the command come before the settings in {file.name} (config-name)")
        found |= {each.key: each for each in launch.devices() if each is not None}
        verl.translate(out, JobSettings(found), launch.program)
        return out

    def _of_hydra(self, found: Mapping[str, Setting]) -> Path | None:
        """Return the file that ``--config-name`` names, if it is there."""
        name, folder = (str(found[key].value) if key in found else "" for key in ("config-name", "config-path"))
        file = name if name.endswith(".yaml") else f"{name}.yaml"
        places = (self._near(f"{each}/{file}".lstrip("/")) for each in (folder.strip("/"), "config", "."))
        return next(filter(None, places), None) if name else None

    def _trl(self, found: Mapping[str, Any], launch: Launch) -> Translation:
        """Translate a job of TRL. ``found``: settings in addition to the command's arguments, which replace them."""
        options = flags(launch.arguments)
        if launch.config is not None and options.get("config", launch.config).split()[0] == launch.config:
            options.pop("config", None)
        found = {**found, **{name: read_scalar(value) for name, value in options.items()}}
        nodes, per_node = launch.devices()
        if "model_name_or_path" in self.given:
            found["model_name_or_path"] = self.given["model_name_or_path"]
        out = self._start("TRL")
        if launch.config is not None:
            out.note(f"options of the command come before the settings in {launch.config} (config)")
        named = flags(launch.before).get("config_file"), found.get("accelerate_config"), found.get("deepspeed")
        file = next((each for each in named if isinstance(each, str)), None)
        accelerate = with_options(accelerate_file(file, self.path.parent), flags(launch.before))
        trl.translate(out, found, launch.program, (nodes, per_node), self.served, accelerate)
        for key, value in flat({key: each for key, each in accelerate.items() if key not in OF_FILE}):
            if key.rpartition(".")[2] not in (*OF_LAUNCHER, "zero_stage"):
                fixed = Setting(f"{key} of accelerate's file", hidden(value, key))
                out.drop(fixed, "of the launcher, whose mixed precision and batches the settings have", matters=False)
        for key, value in flags(launch.before).items():
            if f"--{key}" not in (nodes.key if nodes else "", per_node.key if per_node else ""):
                changes = any(word in key for word in ("precision", "gradient", "offload", "fsdp"))
                why = "of the launcher, whose mixed precision and batches the settings have"
                out.drop(Setting(f"--{key}", hidden(value, key)), why, matters=changes and key not in OF_LAUNCHER)
        return out

    def _of_python(self) -> Translation:
        """Translate the arguments of TRL's config class, under the options of a command in the file's description."""
        file = PythonFile(self.path, self.text)
        configs = list(file.calls(_CONFIGS))
        texts = [found for text in file.docstrings for found in _COMMANDS.findall(text.replace("\\\n", " "))]
        commands = [line.words for text in texts for line in ShellScript(text, self.given).commands]
        launches = [each for each in find_launches(commands, self.path.name) if each.system == "TRL"]
        self.served = served_devices(commands)
        trainer = next((name.removesuffix("Config").lower() for name in file.names(_CONFIGS)), "")
        if not launches and not any(name for name, arguments in configs if arguments):
            raise self._unknown()
        found: dict[str, Any] = {}
        for _, arguments in configs[:1]:
            found |= {key: value for key, value in arguments.items() if key}
        for _, arguments in list(file.calls(r"\w*Trainer"))[:1]:
            found |= {key: value for key, value in arguments.items() if key not in ("", "args", "peft_config")}
        for _, arguments in list(file.calls("LoraConfig"))[:1]:
            names = {"r": "lora_r", "target_modules": "lora_target_modules"}
            found |= {"use_peft": True, **{names.get(key, key): value for key, value in arguments.items() if key}}
        for _, arguments in list(file.calls("load_dataset"))[:1]:
            own = {"dataset_name": "", "dataset_config": "name", "dataset_train_split": "split"}
            known = {key: arguments[each] for key, each in own.items() if isinstance(arguments.get(each), str)}
            found = {key: each for key, each in known.items() if key == "dataset_name" or MARK not in each} | found
        if "reward_funcs" in found:
            found["reward_funcs"] = references(self.path, self.text, found["reward_funcs"])
        others = [name for name, arguments in configs[1:] if arguments]
        launch = launches[0] if launches else Launch("TRL", trainer, ())
        trainer = launch.program if launch.program in ALGORITHMS else trainer or launch.program
        if trainer == launch.program and trainer not in ALGORITHMS and not is_missing(trainer):
            raise self._unknown()
        out = self._trl(found, replace(launch, program=trainer))
        if others:
            out.drop(
                Setting("config", ", ".join(others)), "the first configuration of the file is read, others are not"
            )
        if launches:
            out.note("settings are of the first command in the file's description")
        return out

    def _of_tree(self, tree: Tree, values: Mapping[str, Any]) -> Translation:
        for is_of, system, translate in _TREES:
            if is_of(tree):
                leaves = resolved(with_overrides(tree, values), self.given)
                out, job = self._start(system), JobSettings.of(leaves)
                job.passed |= {key: ("other settings name it", False) for key in referenced(tree)}
                changes = any("trainer" not in str(each) for each in leaves.get("defaults") or ())
                job.passed["defaults"] = ("files that are not read: the system's defaults are taken", changes)
                translate(out, job)
                return out
        return self._trl_tree(tree, Launch("TRL", "", ()))

    def _trl_tree(self, tree: Tree, launch: Launch) -> Translation:
        """Translate a YAML of TRL's options. Raises UserError for one that has none of them."""
        if not is_of_trl(dict(flat(tree)), flags(launch.arguments)):
            raise self._unknown()
        leaves = resolved(tree, self.given)
        trainer, others = self.given.get("trainer"), []
        path = self._near(launch.script) if launch.script and trainer is None else None
        if path is not None:
            names = PythonFile(path, _text(path)).names(_CONFIGS)
            trainer = next((name.removesuffix("Config").lower() for name in names), None)
        if trainer is None and (launch.program in ALGORITHMS or is_missing(launch.program)):
            trainer = launch.program
        is_assumed = trainer is None
        if trainer is None:
            trainer, *others = trainers_of({**leaves, **flags(launch.arguments)})
        out = self._trl(leaves, replace(launch, system="TRL", program=trainer))
        if others:
            why = f"the file does not name its trainer; also possible: {', '.join(others)}: --var trainer=NAME"
            out.drop(Setting("trainer", f"{trainer}, assumed"), why)
        elif is_assumed:
            out.note(f"the file does not name its trainer: by its settings it is {trainer}")
        return out


_TREES: tuple[tuple[Callable[[Tree], bool], str, Callable[[Translation, JobSettings], None]], ...] = (
    (lambda tree: "actor_rollout_ref" in tree, "verl", lambda out, job: verl.translate(out, job, "")),
    (lambda tree: isinstance(tree.get("policy"), dict) and "cluster" in tree, "NeMo-RL", nemo_rl.translate),
    (lambda tree: "experiment_name" in tree and isinstance(tree.get("actor"), dict), "AReaL", areal.translate),
)


def translated(path: Path, device_class: str | None = None, given: Mapping[str, str] | None = None) -> Translation:
    """Return the translation of a file. Raises UserError for one that is no job of a known system, or that has no
    counterpart.

    device_class:  class of the devices; None: the one that the file names.
    given:         values of variables that the file leaves to its environment.
    """
    out = JobFile(path, device_class, given or {}).translated()
    check_warmup(out)
    check_evaluation(out)
    check_families(out)
    fit_cache(out)
    return out


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"import {path}: no such file{instead_of(path, *_ENDINGS)}")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"import {path}: {path.stat().st_size} bytes are too many for a job file")
    try:
        return path.read_text(encoding="utf-8-sig").replace(MARK, "")
    except UnicodeDecodeError:
        raise UserError(f"import {path}: not a text file") from None
