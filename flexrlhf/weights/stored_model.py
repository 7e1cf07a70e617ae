"""Directories with the weights of a model: a whole one, or low-rank adapters as peft writes them, which name the model
that they change.

A model either goes on training the adapters in its ``path``, or they are merged into the weights that they change.
Files are the ones that transformers loads: ``model.safetensors``, else the ones in an index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.errors import UserError, shown, some_of
from flexrlhf.weights.model_files import SCALAR_BIAS, StoredTensors, check_regular
from flexrlhf.weights.parameters import ParameterName

HEAD_NAMES = ("v_head", "value_head", "reward_head", "score_head", "classifier", "v_head.summary")
"""What other libraries call the linear layer that transformers calls ``score``."""
KINDS = ("LORA", "LOHA", "LOKR", "IA3")
"""Values of ``peft_type`` whose adapters are merged."""
MOST_LAYERS = 8
"""Adapters on a model that is itself adapters on another one, and so on; more are a circle."""
_OTHER_FORMS = (
    *("use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "arrow_config"),
    *("alora_invocation_tokens", "use_bdlora", "kasa_config", "velora_config", "monteclora_config"),
)
"""Settings of peft with which adapters compute something else, or are on some layers alone; peft merges them."""


@dataclass(frozen=True)
class StoredModel:
    """A directory with a model's weights: whole, or adapters on the weights of another directory.

    path:  the directory; None for a model without one, which is made from a config.
    key:   setting with the path, for messages.
    """

    path: str | None
    key: str = "model"

    SINGLE: ClassVar = "model.safetensors"
    INDEX: ClassVar = "model.safetensors.index.json"
    ADAPTER_CONFIG: ClassVar = "adapter_config.json"
    ADAPTER_WEIGHTS: ClassVar = "adapter_model.safetensors"
    PREFIX: ClassVar = "base_model.model."
    """Beginning of the names of peft's tensors."""
    NOT_ADAPTED: ClassVar = ("embed_tokens", "lm_head", "score")
    """Modules that have no adapters here."""

    @classmethod
    def of(cls, role: str, model: ModelSpec) -> StoredModel:
        """Return the directory of a role."""
        return cls(model.path, f"models.{role}.path")

    @classmethod
    def frozen(cls, role: str, model: ModelSpec) -> StoredModel:
        """Return what the adapters of a role change: its directory without the adapters that it goes on training,
        unless an earlier run of the command is to write these.
        """
        stored = cls.of(role, model)
        return stored.below if model.goes_on_adapters and stored.has_adapters else stored

    @property
    def has_adapters(self) -> bool:
        """Whether the directory has adapters instead of a whole model."""
        if self.path is None or not (Path(self.path) / self.ADAPTER_CONFIG).is_file():
            return False
        directory = Path(self.path)
        has_weights = any((directory / name).exists() for name in (self.SINGLE, self.INDEX))
        return not ((directory / "config.json").is_file() and has_weights)

    @property
    def whole(self) -> StoredModel:
        """The whole model under any adapters.

        Raises UserError for adapters without weights or without the path of their base model.
        """
        last = self
        for _ in range(MOST_LAYERS):
            if not last.has_adapters:
                last._check_one_kind()
                return last
            last = last.below
        raise UserError(f"{last.where}: its {self.ADAPTER_CONFIG} names adapters on adapters, {MOST_LAYERS} and more")

    @property
    def below(self) -> StoredModel:
        """The model that the adapters change. Its path in their config may be relative to the current directory."""
        base = self._adapter_config.get("base_model_name_or_path")
        if not isinstance(base, str) or not Path(base).is_dir():
            raise UserError(
                f"{self.where}: contains adapters, and their base model {base!r} is no directory here; correct "
                f"base_model_name_or_path in {self.ADAPTER_CONFIG}, or merge them with `flexrlhf export "
                f"--merge-adapters`"
            )
        if not (self._directory / self.ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{self.where}: contains adapters without their weights (no file {self.ADAPTER_WEIGHTS})")
        return replace(self, path=base)

    @property
    def layers(self) -> list[str]:
        """Directories with adapters, this one and others below it, in the order in which they are merged."""
        return [*self.below.layers, str(self.path)] if self.has_adapters else []

    @property
    def adapters(self) -> LoraSpec | None:
        """Settings of the adapters; None where training cannot go on with them: they are of another form than plain
        low-rank ones.
        """
        config = self._adapter_config
        names = self.adapter_tensors.keys() - {ParameterName.SCALAR_HEAD}
        targets = sorted({name.split(".")[-4] for name in names if name.count(".") > 3})
        rank, alpha = config.get("r", _DEFAULT), config.get("lora_alpha", _DEFAULT)
        is_plain = (
            config.get("peft_type") == "LORA"
            and config.get("bias") in (None, "none")
            and config.get("init_lora_weights") in (None, True, False, "gaussian")
            and not any(config.get(name) for name in _OTHER_FORMS)
            and all(
                name.split(".")[-3:] in [[each, ParameterName.ADAPTER, "weight"] for each in ParameterName.MATRICES]
                for name in names
            )
            and not {*targets} & {*self.NOT_ADAPTED}
            and targets != []
        )
        if not is_plain or not isinstance(alpha, int | float) or alpha < 1 or alpha != int(alpha):
            return None
        return LoraSpec(rank=rank, alpha=int(alpha), targets=tuple(targets))

    @property
    def adapter_tensors(self) -> StoredTensors:
        """Tensors of the adapters, a scalar head among them, by the model's parameters."""
        renamed = StoredTensors()
        for name, tensor in StoredTensors.read(self.where, self._directory / self.ADAPTER_WEIGHTS).items():
            own = name.removeprefix(self.PREFIX)
            for matrix in ParameterName.MATRICES:
                own = own.replace(f".{matrix}.weight", f".{matrix}.{ParameterName.ADAPTER}.weight")
            renamed[own] = tensor
        return renamed

    @property
    def tensors(self) -> StoredTensors:
        """Tensors of a whole model by name; none where the directory has no weights.

        A scalar head of another library's name has the name that transformers gives it.
        """
        stored = StoredTensors()
        for file in self.files:
            found = StoredTensors.read(self.where, file)
            for name in sorted(found.keys() & stored.keys()):
                raise UserError(
                    f"{self.where}: {name} is in {stored[name].file.name} and in {file.name}; copy the whole "
                    f"directory, or remove the file that is not of this model"
                )
            stored |= found
        head = _own_head_name(stored)
        renamed = {} if head is None else {f"{head}.weight": ParameterName.SCALAR_HEAD, f"{head}.bias": SCALAR_BIAS}
        return StoredTensors((renamed.get(name, name), tensor) for name, tensor in stored.items())

    @property
    def head_name(self) -> str | None:
        """Name of the scalar head in the files where it is not transformers', without ``.weight``."""
        return _own_head_name({name for file in self.files for name in StoredTensors.read(self.where, file)})

    @property
    def files(self) -> tuple[Path, ...]:
        """Safetensors files that transformers loads; none where the directory has no weights.

        Raises UserError for an index that is no index or names missing files, and for files that no index names.
        """
        if self.path is None:
            return ()
        directory = self._directory
        if _exists(directory / self.SINGLE):
            return (directory / self.SINGLE,)
        if _exists(directory / self.INDEX):
            files = tuple(directory / name for name in self._indexed)
            if not files:
                raise UserError(f"{self.where}: {self.INDEX} names no file; copy the whole directory")
            missing = [file.name for file in files if not _exists(file)]
            if missing:
                raise UserError(
                    f"{self.where}: {self.INDEX} names {some_of(missing, 3)}, which is not there; copy the whole "
                    f"directory"
                )
            return files
        others = sorted(file.name for file in directory.glob("*.safetensors"))
        if others:
            raise UserError(
                f"{self.where}: has {some_of(others, 3)}, but neither {self.SINGLE} nor {self.INDEX}, one of which "
                f"is loaded"
            )
        return ()

    @property
    def _directory(self) -> Path:
        return Path(str(self.path))

    @property
    def where(self) -> str:
        """Name of the model in messages: with its path where it has one."""
        return self.key.removesuffix(".path") if self.path is None else f"{self.key} {self.path}"

    @property
    def _indexed(self) -> list[str]:
        """Names of the files in the index."""
        where, index = self.where, self._directory / self.INDEX
        check_regular(where, index)
        try:
            content = json.loads(index.read_bytes())
        except OSError as error:
            raise UserError(f"{where}: {index.name} cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError):
            content = None
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{where}: {index.name} is no index of weights (JSON with a weight_map); copy it again")
        outside = next((name for name in names.values() if name in ("", "..") or Path(name).name != name), None)
        if outside is not None:
            raise UserError(
                f"{where}: {index.name} names {shown(outside)}, which is not in the directory; copy it again"
            )
        return sorted(set(names.values()))

    def _check_one_kind(self) -> None:
        """Raise UserError for a whole model next to adapters, of which transformers would load either."""
        if self.path is not None and (self._directory / self.ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{self.where}: has a whole model and {self.ADAPTER_CONFIG}; remove one of them, since either could "
                f"be meant"
            )

    @property
    def _adapter_config(self) -> dict[str, Any]:
        """Config of the adapters. Raises UserError for one that cannot be read, or has a value that peft does not
        take."""
        where = f"{self.where}: its {self.ADAPTER_CONFIG}"
        try:
            config: Any = json.loads((self._directory / self.ADAPTER_CONFIG).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{where} cannot be read ({str(error).splitlines()[0]})") from None
        if not isinstance(config, dict):
            raise UserError(f"{where} contains {type(config).__name__}, not a mapping")
        if config.get("peft_type") not in KINDS:
            raise UserError(
                f"{where} has peft_type {shown(config.get('peft_type'))}, and {', '.join(KINDS)} are read here; merge "
                f"others with peft's merge_and_unload, and give the whole model"
            )
        if config["peft_type"] == "LORA":
            _check_values(where, config)
        return config


def _own_head_name(names: Collection[str]) -> str | None:
    """Return the name of a scalar head among ``names`` of tensors that is not transformers', without ``.weight``; None
    where there is none."""
    if ParameterName.SCALAR_HEAD in names:
        return None
    return next((name for name in HEAD_NAMES if f"{name}.weight" in names), None)


def _exists(file: Path) -> bool:
    """Whether there is such an entry, a dangling link too: reading that is an error."""
    return file.exists() or file.is_symlink()


def _check_values(key: str, config: dict[str, Any]) -> None:
    """Raise UserError for a setting of low-rank adapters of another type or range, or for other layers."""
    if config.get("layer_replication"):
        raise UserError(
            f"{key} has layer_replication {shown(config['layer_replication'])}, with which the model has other layers "
            f"than its config; merge it with peft's merge_and_unload, and give the whole model"
        )
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    for name, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(values, dict) or not all(map(_is_expression, values)):
            raise UserError(f"{key} has {name} {shown(values)}: expected expressions of names of modules, with values")
    found = [("r", config.get("r", _DEFAULT), *_RANK), ("lora_alpha", config.get("lora_alpha", _DEFAULT), *_ALPHA)]
    found += [(f"rank_pattern.{name}", value, *_RANK) for name, value in ranks.items()]
    found += [(f"alpha_pattern.{name}", value, *_ALPHA) for name, value in alphas.items()]
    for name, value, is_valid, expected in found:
        if isinstance(value, bool) or not is_valid(value):
            raise UserError(f"{key} has {name} {shown(value)}: expected {expected}")


def _is_expression(name: str) -> bool:
    try:
        re.compile(name)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_DEFAULT, _MOST_RANK = 8, 2**16
"""Rank and alpha of peft for configs that leave them out; and the largest rank."""
_RANK: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, int) and 1 <= value <= _MOST_RANK,
    f"a whole number from 1 to {_MOST_RANK}",
)
_ALPHA: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, int | float) and 0 < abs(value) < math.inf,
    "a finite number other than 0",
)
"""Whether a value is valid, and the valid ones in words."""
