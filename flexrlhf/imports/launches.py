"""Commands that start a job of a known system: the program, its arguments, and the devices that its launcher names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexrlhf.imports.settings import MARK, Setting, read_scalar

TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "reward", "kto", "ppo", "orpo", "cpo", "gspo", "online_dpo", "bco", "gkd")
_PROGRAMS = (
    (r"verl\.trainer\.(?:fsdp_)?sft_trainer(?:_ray)?|.*/(?:fsdp_)?sft_trainer\.py", "verl", "sft"),
    (r"(?:verl|recipe)\.[\w.]*main\w*|.*/main_(?:ppo|dapo)\w*\.py", "verl", ""),
    (r"verl_mlite\.launch", "verl", ""),
    (r"openrlhf\.cli\.train_(\w+)|(?:\S*/)?train_(ppo_ray|ppo|sft|rm|dpo|kto)\.py", "OpenRLHF", ""),
    (r".*run_(grpo|sft|dpo|rm|ppo|distillation|vlm_grpo|vlm_sft)\w*\.py", "NeMo-RL", ""),
    (r"areal\.launcher\.\w+|.*areal/launcher/\w+\.py", "AReaL", ""),
    (r"trl\.scripts\.(\w+)|(?:.*/)?(\w+)\.py", "TRL", ""),
)
_LAUNCHERS = {"accelerate", "torchrun", "torch.distributed.run", "deepspeed", "srun", "mpirun"}
MOST_BEFORE = 200
"""Words of a command among which its program is."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODES = ("--nnodes", "--num_nodes", "--num_machines", "-N", "--nodes")
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node")


_OVERRIDE = re.compile(r"[+~]{0,2}'?([\w@./-]+)=(.*)", re.S)


@dataclass(frozen=True)
class Launch:
    """A command that starts a job.

    system:     whose job it is.
    program:    its trainer, such as ``ppo_ray`` of ``openrlhf.cli.train_ppo_ray`` or the whole name of the program.
    arguments:  words behind the program.
    before:     words in front of it, of launchers.
    script:     file that is started, if it is one.
    """

    system: str
    program: str
    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()
    script: str = ""

    @property
    def config(self) -> str | None:
        """File that ``--config`` names, or that stands alone in the first place."""
        value = flags(self.arguments).get("config")
        first = self.arguments[0] if self.arguments and _is_yaml(self.arguments[0]) else None
        return first if value is None else value.split()[0]

    def devices(self) -> tuple[Setting | None, Setting | None]:
        """Return nodes and devices of one, as far as a launcher names them."""
        words = (*self.arguments, *self.before) if self.system in ("TRL", "config") else self.before
        options = {f"{'-' if len(key) == 1 else '--'}{key}": value for key, value in flags(words).items()}
        found = []
        for names in (_NODES, _PER_NODE):
            name = next((each for each in names if re.fullmatch(r"\d+(:\d+)?", str(options.get(each, "")))), None)
            found.append(None if name is None else Setting(name, int(str(options[name]).partition(":")[0])))
        nodes, per_node = found
        visible = [word for word in self.before if re.fullmatch(rf"{VISIBLE}=\d+(,\d+)*", word)]
        if per_node is None and visible and nodes is None:
            return None, Setting(f"devices in {VISIBLE}", visible[0].count(",") + 1)
        total = options.get("--num_processes")
        if per_node is None and total is not None and re.fullmatch(r"\d+", str(total)):
            machines = 1 if nodes is None else nodes.value
            per_node = Setting("--num_processes", max(1, int(total) // machines))
        if per_node is None and self.system in ("TRL", "config") and self.before and not _LAUNCHERS & set(self.before):
            per_node = Setting("processes without a launcher", 1)
        return nodes, per_node


def served_devices(commands: Sequence[Sequence[str]]) -> tuple[Setting, Setting] | None:
    """Return the devices of a vLLM server that a command starts, and of one of its engines."""
    for words in commands:
        for place, word in enumerate(words[:-1]):
            if (word, words[place + 1]) in (("vllm", "serve"), ("trl", "vllm-serve"), ("trl", "vllm_serve")):
                options = flags(words[place + 2 :])
                texts = (options.get(f"{key}_parallel_size", "1") for key in ("tensor", "data"))
                tp, dp = (int(text) if text.isdecimal() else 1 for text in texts)
                name = f"{word} {words[place + 1]}"
                return Setting(f"devices of {name}", tp * dp), Setting(f"{name} --tensor-parallel-size", tp)
    return None


def find_launches(commands: Sequence[Sequence[str]], own: str = "") -> Iterator[Launch]:
    """Yield the commands that start a job of a known system. ``own``: a script that is one of TRL."""
    for words in commands:
        for place, word in enumerate(words[:MOST_BEFORE]):
            is_own = bool(own) and word.rpartition("/")[2] == own
            rest = (tuple(words[place + 1 :]), tuple(words[:place]))
            launch = Launch("TRL", own.removesuffix(".py"), *rest) if is_own else _launch(words, place, word)
            if launch is not None:
                yield launch
                break


def _launch(words: Sequence[str], place: int, word: str) -> Launch | None:
    before, arguments = tuple(words[:place]), tuple(words[place + 1 :])
    if word == "trl" and arguments and arguments[0].replace("-", "_") in TRL_TRAINERS:
        return Launch("TRL", arguments[0].replace("-", "_"), arguments[1:], before)
    for pattern, system, name in _PROGRAMS:
        found = re.fullmatch(pattern, word)
        if found is None:
            continue
        script = word if word.endswith(".py") else ""
        program = name or next(filter(None, found.groups()), word)
        options = flags(arguments)
        if system == "OpenRLHF" and word.endswith(".py") and "pretrain" not in options:
            continue  # of others with a file of this name
        if system == "TRL":
            is_chat = program == "main" and {"data_path", "actor_model_name_or_path", "zero_stage"} & set(options)
            if is_chat:
                return Launch("DeepSpeed-Chat", program, arguments, before)
            config = str(options["config"]).split()[0] if "config" in options else next(iter(arguments), "")
            if _is_yaml(config):
                return Launch("config", program, arguments, before, script)
            if program not in TRL_TRAINERS and "model_name_or_path" not in options:
                return None
        return Launch(system, program, arguments, before, script)
    return None


def flags(words: Sequence[str]) -> dict[str, str]:
    """Return options by name, without their dashes: ``--name value``, ``--name=value``, or ``true`` alone.

    Several values are joined by blanks.
    """
    found: dict[str, str] = {}
    name = None
    for word in words:
        option = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.S)
        if option is not None:
            name = option[1] if MARK in option[1] or "." in option[1] else option[1].replace("-", "_")
            found[name] = "true" if option[2] is None else option[2]
            name = None if option[2] is not None else name
        elif name is not None:
            found[name] = word if found[name] == "true" else f"{found[name]} {word}"
    return found


def overrides(words: Sequence[str]) -> dict[str, object]:
    """Return Hydra's overrides by key: ``key=value``, ``+key=value``, ``++key=value``; the last one of a key wins."""
    found: dict[str, object] = {}
    for word in words:
        setting = _OVERRIDE.fullmatch(word)
        if setting is not None and not word.startswith("-"):
            found[setting[1]] = read_scalar(setting[2].strip().strip("'\""))
    return found


def _is_yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def stray_words(launch: Launch) -> list[Setting]:
    """Return the arguments that are neither options nor settings, and of Hydra's programs the options, too."""
    takes_options = launch.system in ("TRL", "OpenRLHF", "DeepSpeed-Chat", "config")
    found, name = [], ""
    for word in launch.arguments:
        is_option = re.fullmatch(r"--?[A-Za-z][\w.-]*(=.*)?", word, re.S) is not None
        if is_option:
            name = word.partition("=")[0] if "=" not in word else ""
            key, _, value = word.partition("=")
            if not takes_options and key not in ("--config", "--config-name", "--config-path"):
                found.append(Setting(key, value or "true"))
        elif takes_options and not name and word != launch.config:
            found += [Setting("argument", word)] if "=" not in word or launch.system != "config" else []
        elif not takes_options and word != launch.config and _OVERRIDE.fullmatch(word) is None:
            if name in ("", "--config", "--config-name", "--config-path") or not found:
                found += [] if name else [Setting("argument", word)]
            else:
                found[-1] = Setting(found[-1].key, word)
            name = ""
    return found
