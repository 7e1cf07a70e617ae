"""One update from a job file: this project's, by the file's translation, and inputs that both sides have.

A peer's side is in a module of its own (``trl_updates.py`` and others): it reads the same file by the peer's own
parser and computes advantages and losses by the peer's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.comparison import LENGTH, ROWS, Alone, Sample, make_sample, with_gradient
from flexrlhf.config.algorithms.base import SampledSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.engines.base import Batch, Outputs, Totals
from flexrlhf.imports.translate import translated
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.functions import COMBINES, make_loss, settings_of
from flexrlhf.operators.columns import Qualifier
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.rollout_engine import with_rollout
from flexrlhf.trainer.controllers import first_state

MINI_BATCHES = (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))
Losses = dict[str, Tensor]
"""Trained role → losses of the mini-batches, and their gradients by the outputs of the model, in one vector."""


@dataclass(frozen=True)
class Job:
    """A job file with a setting whose meaning is compared.

    about:     the setting, as the file has it
    command:   the command that starts the job, or the text of its YAML
    says:      words by which the report of the translation says that the values differ; empty: they are equal
    preset:    settings of ``algorithm`` whose preset is compared with the job; None: the job's translation is
    is_first:  whether it is the first update of a step, whose ratios are 1: gradients are compared, not the losses
    file:      name of the file
    finishes:  whether all responses finish
    """

    about: str
    command: str
    says: str = ""
    preset: Mapping[str, Any] | None = None
    is_first: bool = False
    file: str = "job.sh"
    finishes: bool = False

    @property
    def name(self) -> str:
        """The command, and the preset that is compared with it."""
        return self.command if self.preset is None else f"{self.command} as {dict(self.preset)}"


@dataclass(frozen=True)
class Inputs:
    """Responses, and the outputs of models for them.

    sample:            prompts, scores, log-probs and values; both mini-batches have responses of the same lengths
    rollout_logprobs:  (ROWS, LENGTH), of the engine that generated
    finished:          (ROWS,), 0 of truncated responses
    """

    sample: Sample
    rollout_logprobs: Tensor
    finished: Tensor

    def entropy(self, new: Tensor) -> Tensor:
        """Return an entropy (ROWS, LENGTH) that has a gradient."""
        return self.sample.values[:, :-1].abs() + 0.1 * new

    def router_loss(self, new: Tensor) -> Tensor:
        """Return a value in the place of the loss of a mini-batch's routers."""
        return (new**2).mean()


def make_inputs(job: Job, scale: float = 1.0) -> Inputs:
    """Return random inputs. ``scale``: factor of the scores, which makes a term added to a deviation vanish."""
    generator = torch.Generator().manual_seed(11)
    sample = make_sample(9)
    half = ROWS // 2
    order = torch.randperm(half, generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (half,), generator=generator)
    lengths[0] = LENGTH
    finished = (torch.rand(half, generator=generator) > 0.25) | job.finishes
    lengths, finished = torch.cat([lengths, lengths[order]]), torch.cat([finished, finished[order]])
    noise = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    new = sample.logprobs if job.is_first else sample.new_logprobs.clamp(max=-0.01)
    sample = replace(sample, mask=mask, scores=sample.scores * scale, new_logprobs=new)
    return Inputs(sample, sample.logprobs + 0.4 * noise, finished)


def update_of(spec: Spec, inputs: Inputs) -> Losses:
    """Return the losses of both mini-batches of a step, computed by the operators of the graph that runs."""
    graph = make_graph(spec)
    if isinstance(spec.algorithm, SampledSpec):
        graph = with_rollout(graph, spec, is_remote=False)
    sample, samples = inputs.sample, spec.algorithm.samples_per_prompt
    columns: dict[str, Tensor] = {
        **{name: sample.mask.to(torch.uint8) for name in ("response_mask", "loss_mask")},
        "finished": inputs.finished.to(torch.uint8),
        "scores": sample.scores.float(),
        "logprobs": sample.logprobs,
        "ref_logprobs": sample.ref_logprobs,
        "rollout_logprobs": inputs.rollout_logprobs,
        "values": sample.values,
    }
    if isinstance(spec.algorithm, SampledSpec) and spec.rollout.logprobs == "reuse":
        columns["logprobs"] = inputs.rollout_logprobs
    columns |= {f"{name}.{Qualifier.MISMATCHED}": columns[name] for name in ("logprobs", "ref_logprobs", "loss_mask")}
    state = first_state(spec.algorithm) if isinstance(spec.algorithm, PolicySpec) else {}
    context = CombineContext(MINI_BATCHES, Alone(), state)
    losses: Losses = {}
    for operator in graph.operators:
        known = {name: columns[name] for name in operator.reads if name in columns}
        batch = Batch(known, torch.arange(ROWS), samples)
        if operator.kind == "combine" and operator.writes and operator.function in COMBINES:
            known = {name.removesuffix(operator.suffix): column for name, column in known.items()}
            batch = replace(batch, columns=known)
            columns |= COMBINES[operator.function](settings_of(operator.function, spec), batch, context)[0]
        elif operator.kind == "train":
            losses[operator.role] = _losses(spec, operator, batch, inputs)
    return losses


def _losses(spec: Spec, operator: Operator, batch: Batch, inputs: Inputs) -> Tensor:
    loss, model = make_loss(operator.function, spec.algorithm), spec.models.of(operator.role)
    routers = (model.router_aux_loss_coef if model is not None else None) or 0.0
    point = outputs_of(inputs.sample)[loss.quantity]

    def of_part(new: Tensor, part: slice) -> Tensor:
        rows = batch.select(part)
        outputs = Outputs(new[part], inputs.entropy(_tokens(new))[part] if loss.entropy != "none" else None)
        value = loss.function(outputs, rows, Totals.of(rows, Alone()))[0]  # type: ignore[arg-type]
        return value + routers * inputs.router_loss(new[part])

    return of_mini_batches(of_part, point)


def _tokens(new: Tensor) -> Tensor:
    return new[:, :LENGTH]


def outputs_of(sample: Sample) -> Mapping[str, Tensor]:
    """Return the outputs of the trained model by quantity."""
    return {"logprobs": sample.new_logprobs, "values": sample.new_values, "scores": sample.values[:, 0]}


def of_mini_batches(loss: Callable[[Tensor, slice], Tensor], point: Tensor) -> Tensor:
    """Return the losses of both mini-batches, and the gradients of each at its rows of ``point``."""
    parts = [with_gradient(lambda new, part=part: loss(new, part), point) for part in MINI_BATCHES]  # type: ignore[misc]
    return torch.stack(parts).reshape(-1)


def settings_of_job(job: Job) -> tuple[Spec, str]:
    """Return the settings of a job as this project has them, and the report of their translation. Raises UserError."""
    if job.preset is not None:
        algorithm = {"num_mini_batches": len(MINI_BATCHES), "prompts_per_step": ROWS, **job.preset}
        models = {role: {"init": "qwen2.5-0.5b"} for role in ("actor", "reward")}
        raw = {"name": "a", "algorithm": algorithm, "models": models, "data": {"path": "data"}}
        return Spec.parse(raw, "a"), ""
    with TemporaryDirectory() as folder:
        file = Path(folder, job.file)
        file.write_text(job.command + "\n")
        found = translated(file)
    return Spec.parse(read_yaml(found.text()), found.file), found.report()


def effects(report: str) -> str:
    """Return the part of a report on assumptions and on settings whose loss has an effect."""
    return report.partition("without such an effect")[0]


def difference(job: Job, ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of losses and gradients, over the largest number of the role's."""
    if ours.keys() != theirs.keys():
        return float("inf")
    pairs = [(_compared(job, ours[role]), _compared(job, each)) for role, each in theirs.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _compared(job: Job, vector: Tensor) -> Tensor:
    """Return losses and gradients, a row for each mini-batch; of a first update the gradients alone."""
    rows = vector.reshape(len(MINI_BATCHES), -1)
    return rows[:, 1:] if job.is_first else rows


Digest = dict[str, list[float]]
"""Trained role → losses, and numbers that tell their gradients from others."""


def digest(job: Job, losses: Losses) -> Digest:
    """Return the losses, and of their gradients the norms and the products with fixed random vectors."""
    return {role: _digest(_compared(job, each)) for role, each in losses.items()}


def _digest(rows: Tensor) -> list[float]:
    generator = torch.Generator().manual_seed(12)
    others = torch.randn(rows.shape[1], 4, generator=generator, dtype=torch.float64)
    numbers = torch.cat([rows[:, 0], rows.norm(dim=1), (rows @ others).reshape(-1)])
    return [float(f"{number:.10g}") for number in numbers.tolist()]


def digests_apart(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> float:
    """Return the largest difference of two digests, over the largest number of a role's."""
    if ours.keys() != theirs.keys():
        return float("inf")
    pairs = [(torch.tensor(ours[role]), torch.tensor(each)) for role, each in theirs.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
