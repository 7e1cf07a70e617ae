"""Execute a Save: gather the trained weights of a model; its first rank writes a directory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexrlhf.comm.weights import WeightGather
from flexrlhf.engines.models import DTYPES
from flexrlhf.plan.run_tokenizer import chat_format, usage_files
from flexrlhf.runs.model_directory import TensorForm, model_writer, save_adapters
from flexrlhf.strategies.instructions import Save
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import Recorder
from flexrlhf.weights.expert_files import is_router_bias
from flexrlhf.weights.lora import shape_of
from flexrlhf.weights.saving import SavedBucket, saved_buckets, saved_type
from flexrlhf.weights.shards import trained_parts


class ModelSaver:
    """Executes Save instructions on this rank."""

    def __init__(self, context: RankContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder

    def save(self, save: Save, step: int) -> None:
        """Write the model of ``save``; a best model only if its metric in ``step`` is better than all before."""
        if save.best is None:
            self._save(save, self._name(save, step))
        elif (value := self._recorder.improved(save, step)) is not None:
            self._save(save, f"{save.model}-best", {"step": step, "metric": save.best, "value": value})

    def _name(self, save: Save, step: int) -> str:
        """Return the name of the directory: one for each step before the last if all are kept."""
        spec = self._context.plan.spec
        return f"{save.model}-step-{step + 1:06d}" if spec.save.keep and step + 1 < spec.steps else save.model

    def _save(self, save: Save, name: str, best: Mapping[str, Any] | None = None) -> None:
        """Gather the weights, by all ranks of ``save``; the first one writes the directory ``name``."""
        model = self._context.models[save.model]
        buckets = self._buckets(model, save.ranks)
        if self._context.rank == save.ranks[0]:
            directory = self._context.directory / name
            self._write(model, directory, buckets, best)
            self._context.files.send_directory(directory)
            return
        for _ in buckets:
            pass

    def _write(
        self,
        model: LoadedModel,
        directory: Path,
        buckets: Iterator[tuple[SavedBucket, dict[str, Tensor]]],
        best: Mapping[str, Any] | None,
    ) -> None:
        tokenizer, placed = self._context.data.tokenizer, model.placed
        plan, data = self._context.plan, self._context.data
        policy = plan.model("actor") if placed.role == "actor" else None
        texts = usage_files(chat_format(plan).template, policy, data.eos_token_ids, data.pad_token_id)
        if placed.settings.lora is not None:
            weights = {name: each.to("cpu", copy=True) for _, found in buckets for name, each in found.items()}
            save_adapters(directory, weights, placed.settings, tokenizer, placed.head, best, texts)
            return
        config = copy.deepcopy(model.engine.config)
        config.dtype = dtype = _saved_dtype(model)
        forms = {
            name: TensorForm(shape, torch.float32 if is_router_bias(name) else dtype)
            for name, shape in shape_of(placed, model.shape).trained
        }
        with model_writer(directory, forms, config, tokenizer, best, texts, plan.spec.save.shard_bytes) as files:
            for bucket, found in buckets:
                files.write(found, bucket.experts)

    def _buckets(self, model: LoadedModel, ranks: tuple[int, ...]) -> Iterator[tuple[SavedBucket, dict[str, Tensor]]]:
        """Yield all trained weights, a bucket at a time in the order of their names. A collective."""
        shards = tuple(trained_parts(model.placed, model.shape, rank) for rank in ranks)
        group = self._context.groups.get(f"gather {model.placed.name}", ranks)
        gather, live = WeightGather(group, ranks, shards, self._context.wait), model.engine.weights()
        dtype = _saved_dtype(model)
        shapes = {name: part.shape for parts in shards for name, part in parts.items()}
        for bucket in saved_buckets(shapes, dtype.itemsize, self._context.plan.spec.sync.bucket_bytes):
            if bucket.experts is None:
                biases = [name for name in bucket.names if is_router_bias(name)]
                others = gather.whole(live, [name for name in bucket.names if name not in biases], dtype)
                yield bucket, others | (gather.whole(live, biases, torch.float32) if biases else {})
            else:
                (name,) = bucket.names
                yield bucket, {name: gather.experts(live, name, bucket.experts, dtype)}


def _saved_dtype(model: LoadedModel) -> torch.dtype:
    return DTYPES[saved_type(model.placed, model.shape)]
