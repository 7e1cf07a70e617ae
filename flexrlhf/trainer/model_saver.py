"""Execute a Save: gather the trained weights of a model, whose ranks write the files of a directory in turns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexrlhf.comm.weights import WeightGather
from flexrlhf.engines.models import DTYPES
from flexrlhf.plan.run_tokenizer import saved_template, usage_files
from flexrlhf.runs.model_directory import ModelDirectory
from flexrlhf.strategies.instructions import Save
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import Recorder
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.saving import SavedBucket, SavedFile


@dataclass(frozen=True)
class _Gathering:
    """Gathers of the trained weights of a model.

    index:  of this rank among those that gather.
    live:   parts of this rank.
    dtype:  of the saved model.
    """

    model: LoadedModel
    gather: WeightGather
    index: int
    live: Mapping[str, Tensor]
    dtype: torch.dtype

    @cached_property
    def forms(self) -> dict[str, Tensor]:
        """Tensors of the shapes and types of all that is saved, on the meta device."""
        shapes = self.model.shape.of_copy(self.model.placed).trained
        types = {name: torch.float32 if ParameterName(name).is_router_bias else self.dtype for name, _ in shapes}
        return {name: torch.empty(shape, dtype=types[name], device="meta") for name, shape in shapes}

    def bucket(self, bucket: SavedBucket, target: int = 0) -> dict[str, Tensor]:
        """Return the weights of ``bucket`` on the rank of the group at index ``target``; on others they may not all be
        there. A collective."""
        if bucket.experts is not None:
            (name,) = bucket.names
            return {name: self.gather.experts(self.live, name, bucket.experts, self.dtype, target)}
        biases = [name for name in bucket.names if ParameterName(name).is_router_bias]
        others = [name for name in bucket.names if name not in biases]
        found = self.gather.whole(self.live, others, self.dtype)
        return found | (self.gather.whole(self.live, biases, torch.float32) if biases else {})


class ModelSaver:
    """Executes Save instructions on this rank."""

    def __init__(self, context: RankContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder

    def save(self, save: Save, step: int) -> None:
        """Write the model of ``save``; a best model only if its metric in ``step`` is better than all before."""
        if save.best is None:
            self._save(save, self._name(save, step), step)
        elif (value := self._recorder.improved(save, step)) is not None:
            best = {"step": step, "metric": save.best, "value": value}
            self._save(save, f"{save.model}-best", step, best)

    def _name(self, save: Save, step: int) -> str:
        """Return the name of the directory: one for each step before the last if all are kept."""
        spec = self._context.plan.spec
        return f"{save.model}-step-{step + 1:06d}" if spec.save.keep and step + 1 < spec.steps else save.model

    def _save(self, save: Save, name: str, step: int, best: Mapping[str, Any] | None = None) -> None:
        """Gather the weights, by all ranks of ``save``, and write the directory ``name``."""
        model, ranks = self._context.models[save.model], save.ranks
        shards = tuple(model.shape.trained_parts(model.placed, rank) for rank in ranks)
        group = self._context.groups.get(f"gather {model.placed.name}", ranks)
        dtype = DTYPES[model.shape.saved_type(model.placed)]
        gather = WeightGather(group, ranks, shards, self._context.wait)
        gathering = _Gathering(model, gather, ranks.index(self._context.rank), model.engine.weights(), dtype)
        path = self._context.directory.path / name
        if model.placed.settings.lora is not None:
            self._save_adapters(gathering, path, best)
        else:
            self._save_files(gathering, path, step, best)
        if gathering.index == 0:
            self._context.files.send_directory(path)

    def _save_adapters(self, gathering: _Gathering, path: Path, best: Mapping[str, Any] | None) -> None:
        """Gather all adapters; the first rank writes them."""
        placed, weights = gathering.model.placed, dict[str, Tensor]()
        (file,) = self._files(gathering, "", math.inf)
        for bucket in file.buckets:
            found = gathering.bucket(bucket)
            if gathering.index == 0:
                weights |= {name: each.to("cpu", copy=True) for name, each in found.items()}
        if gathering.index == 0:
            self._directory(gathering, path, best).save_adapters(weights, placed.settings, placed.head)

    def _save_files(self, gathering: _Gathering, path: Path, step: int, best: Mapping[str, Any] | None) -> None:
        """Gather the weights bucket by bucket; ranks write the files in turns.

        Where machines have directories of their own the first rank writes all.
        """
        config = copy.deepcopy(gathering.model.engine.config)
        config.dtype = gathering.dtype
        shard_bytes = self._context.plan.spec.save.shard_bytes
        files = self._files(gathering, config.model_type, shard_bytes)
        writers = 1 if self._context.files.are_copied else min(len(gathering.gather.ranks), len(files))
        if gathering.index >= writers:
            _write_files(gathering, files, writers, None)
        else:
            # other machines may take the directory of an earlier step for this one, for seconds, by its name
            own, directory = (gathering.index, writers), self._directory(gathering, path, best)
            with directory.writer(gathering.forms, config, shard_bytes, own, f"-{step}") as written:
                _write_files(gathering, files, writers, written.write)
                if gathering.index == 0 and writers > 1:
                    gathering.gather.meet(self._context.world.device)
        if gathering.index > 0 and writers > 1:
            gathering.gather.meet(self._context.world.device)

    def _directory(self, gathering: _Gathering, path: Path, best: Mapping[str, Any] | None) -> ModelDirectory:
        """Return the directory of the model, of which the first rank writes all but weights."""
        if gathering.index > 0:
            return ModelDirectory(path)
        return ModelDirectory(path, self._context.data.tokenizer, self._texts(gathering.model), best)

    def _files(self, gathering: _Gathering, family: str, shard_bytes: float) -> list[SavedFile]:
        shapes = {name: tuple(form.shape) for name, form in gathering.forms.items()}
        bucket_bytes = self._context.plan.spec.sync.bucket_bytes
        return SavedFile.all_of(family, shapes, gathering.dtype.itemsize, bucket_bytes, shard_bytes)

    def _texts(self, model: LoadedModel) -> Mapping[str, str]:
        """Return the files that say how ``model`` is used."""
        plan, data = self._context.plan, self._context.data
        policy = plan.model("actor") if model.placed.role == "actor" else None
        chat = plan.tokenizer.chat()
        template = chat.template if chat.end is None else saved_template(plan.tokenizer.load(), chat)
        return usage_files(template, policy, data.eos_token_ids, data.pad_token_id)


def _write_files(
    gathering: _Gathering,
    files: Sequence[SavedFile],
    writers: int,
    write: Callable[[Mapping[str, Tensor], range | None, str], None] | None,
) -> None:
    """Gather a bucket for a file of each of ``writers``, then the next ones, so that all write at the same time.

    write:  writes weights, with the range of their experts, to a file of this rank; None if it is no writer.
    """
    for first in range(0, len(files), writers):
        side_by_side = files[first : first + writers]
        for buckets in zip_longest(*(file.buckets for file in side_by_side)):
            own: dict[str, Tensor] = {}
            for target, bucket in enumerate(buckets):
                if bucket is not None:
                    found = gathering.bucket(bucket, target)
                    if target == gathering.index:
                        # it waits in host memory: the device's is for the others'
                        own = {name: each.to("cpu") for name, each in found.items()} if writers > 1 else found
                    del found
            if own and write is not None:
                write(own, buckets[gathering.index].experts, side_by_side[gathering.index].name)
