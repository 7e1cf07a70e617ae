"""Export of a trained model: a directory that transformers loads, or its adapters as peft's, from a run's files.

Tensors are read and written one after another, so that no more than one is in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

from flexrlhf.config.model_settings import Dtype, ModelSpec, SavedDtype
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.chat import ChatFormat
from flexrlhf.engines.base import TrainingState
from flexrlhf.engines.models import DTYPES
from flexrlhf.errors import UserError, nearest
from flexrlhf.plan.hub_names import in_cache
from flexrlhf.plan.run_tokenizer import end_tokens, load_tokenizer, saved_template, usage_files
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory
from flexrlhf.runs.model_directory import TOKENIZER_FILES, ModelDirectory, SavedAdapters
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.tensor_files import Piece, PieceReader
from flexrlhf.weights.expert_files import file_pieces
from flexrlhf.weights.loading import load_config
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.stored_model import StoredModel


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in a checkpoint, or adapters that a run has saved.

    role:       its name.
    settings:   of the model.
    config:     its Hugging Face config as text.
    tokenizer:  directory with the run's tokenizer; None if that is gone.
    usage:      further files that say how the model is used (``usage_files``), by name.
    names:      of the trained parameters, sorted.
    tensor:     returns a trained parameter, whole and in float32.
    origin:     the checkpoint, or the directory of the adapters.
    """

    role: str
    settings: ModelSpec
    config: str
    tokenizer: str | None
    usage: Mapping[str, str]
    names: Sequence[str]
    tensor: Callable[[str], Tensor]
    origin: Path

    @classmethod
    def find(cls, run: Path, role: str | None) -> TrainedModel:
        """Return a trained model of the newest undamaged checkpoint in ``run``, a run's or a checkpoint's directory.

        In a run without checkpoints: adapters that it has saved, which ``run`` may be, too.
        ``role``: None: the actor, or the only one. Raises UserError if there is none.
        """
        found = CheckpointDirectory.found_at(run)
        if not found:
            return _saved_model(run, role)
        checkpoint = _newest_undamaged(found)
        manifest, path = checkpoint.manifest, checkpoint.path
        roles = sorted(manifest.progress.numbers)
        chosen = role or roles[0]
        if chosen not in roles:
            raise UserError(f"--model {chosen}: {checkpoint} has {', '.join(roles)}{nearest(chosen, roles)}")
        spec, reader = in_cache(manifest.settings), PieceReader(path, chosen)
        prefix = Piece.key(TrainingState.WEIGHTS, "")
        names = sorted(key.removeprefix(prefix) for key in reader.pieces if key.startswith(prefix))
        config = (path / f"{chosen}.config.json").read_text()
        return _trained_model(spec, chosen, config, names, lambda name: reader.tensor(prefix + name), path)

    def export(self, output: Path, merge_adapters: bool, dtype: SavedDtype, replaces: bool = False) -> None:
        """Write the model into the directory ``output``, which must not exist or be empty.

        Adapters are written as such, or with ``merge_adapters`` added to their base weights. ``dtype``: ``auto``: the
        one in which a run saves the model. ``replaces``: another model there is replaced. Raises UserError.
        """
        _check_output(output, replaces)
        directory = ModelDirectory(output, self.tokenizer, self.usage)
        chosen = DTYPES[_saved_type(self.settings) if dtype == "auto" else dtype]
        lora = self.settings.lora
        if lora is not None and not merge_adapters:
            tensors = {name: self.tensor(name).to(chosen) for name in self.names}
            directory.save_adapters(tensors, self.settings)
            return
        config = AutoConfig.for_model(**json.loads(self.config))
        config.dtype = chosen
        base = _base_tensors(self.settings)
        read = _reader(self, base)
        names = sorted({*base, *(name for name in self.names if lora is None or ".lora_" not in name)})
        types = {name: torch.float32 if ParameterName(name).is_router_bias else chosen for name in names}
        forms = {name: read(name).to("meta", types[name]) for name in names}
        with directory.writer(forms, config) as files:
            for name in names:
                files.write({name: read(name).to(types[name])})


def _trained_model(
    spec: Spec, role: str, config: str, names: Sequence[str], tensor: Callable[[str], Tensor], origin: Path
) -> TrainedModel:
    settings = spec.models.of(role)
    assert settings is not None, "the spec of a run is resolved"
    paths = [spec.data.tokenizer, *(model.path for _, model in spec.models if model is not None)]
    tokenizer = next((path for path in paths if path is not None and (Path(path) / TOKENIZER_FILES[0]).is_file()), None)
    usage = {} if tokenizer is None else _usage(spec, role, tokenizer)
    return TrainedModel(role, settings, config, tokenizer, usage, names, tensor, origin)


def _saved_model(run: Path, role: str | None) -> TrainedModel:
    """Return a model that a run has saved as adapters. Raises UserError for others: these are whole already."""
    if (run / StoredModel.ADAPTER_CONFIG).is_file() and RunDirectory(run.parent).config.is_file():
        run, role = run.parent, role or run.name
    whole = [path.parent for path in sorted(run.glob("*/config.json"))]
    roles = [path.parent.name for path in sorted(run.glob(f"*/{StoredModel.ADAPTER_CONFIG}"))]
    chosen = role or next(iter(sorted([*roles, *(path.name for path in whole)])), "")
    written = RunDirectory(run).config
    if chosen not in roles or not written.is_file():
        adapters = f"; adapters of {', '.join(roles)} are there" if roles else ""
        raise UserError(
            f"{run}: no checkpoint in it; models that the run has saved are already directories of transformers "
            f"({', '.join(map(str, whole)) or 'none here'}){adapters}"
        )
    directory, spec = run / chosen, in_cache(load_spec(written))
    settings = spec.models.of(chosen)
    if settings is None or settings.lora is None:
        raise UserError(f"{directory}: adapters, and {written} has none for models.{chosen}; restore that file")
    config, saved = load_config(chosen, settings), SavedAdapters(chosen, directory)
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if saved.gives_scores else MODEL_FOR_CAUSAL_LM_MAPPING
    config.num_labels = 1 if saved.gives_scores else config.num_labels
    # of code of its own there is none
    config.architectures = [made.__name__ for made in (classes.get(type(config), None),) if made] or None
    return _trained_model(spec, chosen, config.to_json_string(), saved.names, saved.tensor, directory)


def _usage(spec: Spec, role: str, directory: str) -> dict[str, str]:
    """Return the files that say how ``role`` is used, with the tokenizer in ``directory``."""
    file, policy = spec.data.chat_template, spec.models.actor if role == "actor" else None
    read = ChatFormat.read(spec.data.chat, file if file is not None and Path(file).is_file() else None)
    tokenizer = load_tokenizer(directory, policy is not None and policy.trust_remote_code)
    chat = replace(read, end=spec.data.end_token)
    eos, pad = end_tokens(tokenizer, chat, policy), tokenizer.pad_token_id
    return usage_files(saved_template(tokenizer, chat), policy, eos, eos[0] if pad is None else pad)


def _check_output(output: Path, replaces: bool) -> None:
    """Raise UserError for a directory with files; with ``replaces`` for one that is no model's."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    is_model = any((output / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not is_model:
        raise UserError(f"--output {output}: exists and is no model's directory; give a directory that does not exist")
    if not replaces:
        raise UserError(
            f"--output {output}: has a model already; give a directory that does not exist, or --force to replace it"
        )


def _saved_type(settings: ModelSpec) -> Dtype:
    """Return the type in which a run saves a model: the type of its files, as far as these are still there."""
    if settings.save_dtype != "auto":
        return settings.save_dtype
    path = Path(settings.path) if settings.path is not None and settings.lora is None else None
    stored = StoredModel(None if path is None else str(path), "the base model")
    return stored.tensors.common_type if path is not None and path.is_dir() else "float32"


def _newest_undamaged(found: list[CheckpointDirectory]) -> CheckpointDirectory:
    problems = []
    for checkpoint in found:
        try:
            names = checkpoint.manifest.files
        except UserError as error:
            problems.append(str(error))
            continue
        wrong = [text for name in names if (text := checkpoint.damage(name)) is not None]
        if not wrong:
            for problem in problems:
                print(f"flexrlhf: {problem}; an earlier one is taken", file=sys.stderr)
            return checkpoint
        problems.append(f"checkpoint {checkpoint}: {wrong[0]}")
    raise UserError(problems[0])


def _base_tensors(settings: ModelSpec) -> dict[str, safe_open]:
    """Open the files of the model that adapters change: name of a tensor → its file; none without adapters."""
    if settings.lora is None:
        return {}
    base = replace(StoredModel.frozen("", settings), key="the base model")
    if base.path is None:
        raise UserError("--merge-adapters: the base model has no path, it was made of random weights")
    if base.has_adapters:
        raise UserError(
            f"--merge-adapters: the base model {base.path} is itself adapters; export that run with "
            f"--merge-adapters first, and load the adapters of this one on the result"
        )
    files = [safe_open(path, framework="pt") for path in base.files]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _reader(model: TrainedModel, base: Mapping[str, safe_open]) -> Callable[[str], Tensor]:
    """Return a function from the name of a weight to its tensor, with adapters merged."""
    trained, lora, tensor = set(model.names), model.settings.lora, cache(model.tensor)
    experts: dict[str, tuple[str, tuple[range, ...]]] = {}
    for first in trained if lora is not None else ():
        weight, matrix = ParameterName(first).without_adapter
        if matrix == "lora_A" and ParameterName(first).is_of_experts:
            (number, _, inputs), (_, outputs, _) = (
                tensor(first).shape,
                tensor(ParameterName(weight).merged_from[2]).shape,
            )
            pieces = file_pieces(json.loads(model.config)["model_type"], weight, (number, outputs, inputs))
            experts |= {piece.name: (weight, piece.box) for piece in pieces}

    def read(name: str) -> Tensor:
        if name in trained:
            return model.tensor(name)
        plain: Tensor = base[name].get_tensor(name).float()
        weight, box = experts.get(name, (name, ()))
        _, a, b = ParameterName(weight).merged_from
        if lora is None or a not in trained:
            return plain
        if not box:
            return plain + lora.scale * (model.tensor(b) @ model.tensor(a))
        (expert,), rows, _ = box
        return plain + lora.scale * (tensor(b)[expert, rows.start : rows.stop] @ tensor(a)[expert])

    return read
