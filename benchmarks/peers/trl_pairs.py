"""Losses of TRL's trainers on given responses: DPO, KTO, CPO, ORPO, reward models, SFT; their models' outputs are
given."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.updates import Inputs, of_mini_batches

TOKEN = 5


def supervised(name: str, arguments: Any, folder: Path, inputs: Inputs) -> Tensor:
    """Return the losses of a trainer on pairs; of SFT every row is a text."""
    trainer, loss = _trainer(name, arguments, folder), _LOSSES[name]

    def of_part(new: Tensor, part: slice) -> Tensor:
        return loss(trainer, Rows(inputs, new, part))

    return of_mini_batches(of_part, inputs.sample.values[:, 0] if name == "reward" else inputs.sample.new_logprobs)


def _trainer(name: str, arguments: Any, folder: Path) -> Any:
    """Return a trainer around a tiny model; of CPO and ORPO, whose losses read little else, its settings alone."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name in ("cpo", "orpo"):
        return _settings(name, arguments)
    text = {"prompt": "w5", "chosen": "w5 w6", "rejected": "w5 w7", "completion": "w6", "label": True}
    columns = {"kto": ("prompt", "completion", "label"), "sft": ("prompt", "completion")}
    kept = columns.get(name, ("prompt", "chosen", "rejected"))
    row = {key: [text[key], text[key]] for key in kept}
    if name == "kto":
        row["label"] = [True, False]
    kind = {"dpo": trl.DPOTrainer, "kto": trl.KTOTrainer, "reward": trl.RewardTrainer, "sft": trl.SFTTrainer}[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = str(folder) if name == "reward" else AutoModelForCausalLM.from_pretrained(folder)
    trainer = kind(model=model, args=arguments, train_dataset=Dataset.from_dict(row), processing_class=tokenizer)
    trainer.model.train()
    return trainer


def _settings(name: str, arguments: Any) -> Any:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    kind = {"cpo": CPOTrainer, "orpo": ORPOTrainer}[name]
    trainer = kind.__new__(kind)
    for key in ("beta", "label_smoothing", "loss_type", "cpo_alpha", "alpha", "simpo_gamma"):
        setattr(trainer, key, getattr(arguments, key, None))
    trainer.aux_loss_enabled = False
    trainer.accelerator = SimpleNamespace(gather_for_metrics=lambda value: value, device=torch.device("cpu"))
    return trainer


class Rows:
    """Rows of a mini-batch in TRL's order: chosen responses, then rejected ones; a prompt of one token."""

    def __init__(self, inputs: Inputs, new: Tensor, part: slice) -> None:
        count = part.stop - part.start
        self.places = torch.cat([torch.arange(part.start, part.stop, 2), torch.arange(part.start + 1, part.stop, 2)])
        self.inputs, self.new, self.half, self.part = inputs, new, count // 2, part
        self.mask = inputs.sample.mask[self.places]

    def ids(self, prefix: str = "") -> dict[str, Tensor]:
        """Return tokens, their mask, and the mask of responses."""
        mask = torch.cat([torch.zeros(len(self.mask), 1, dtype=torch.int64), self.mask], 1)
        whole = mask.clone()
        whole[:, 0] = 1
        return {f"{prefix}input_ids": TOKEN * whole, f"{prefix}attention_mask": whole, f"{prefix}completion_mask": mask}

    def model(self, logprobs: Tensor, routers: bool = False) -> Any:
        """Return a model with given log-probs (ROWS, LENGTH)."""
        own = (logprobs[self.places] * self.mask).clone()
        nothing = torch.zeros_like(own)
        outputs = SimpleNamespace(
            log_probs=own,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
            label_mask=self.mask,
            aux_loss=self.inputs.router_loss(self.new[self.part]),
        )
        return lambda **_: outputs


def _dpo(trainer: Any, rows: Rows) -> Tensor:
    trainer.ref_model = rows.model(rows.inputs.sample.ref_logprobs)
    value: Tensor = trainer._compute_loss(rows.model(rows.new), rows.ids(), False)
    return value


def _kto(trainer: Any, rows: Rows) -> Tensor:
    sample = rows.inputs.sample
    of_texts, of_others = rows.model(rows.new), rows.model(sample.logprobs)
    trainer.ref_model = rows.model(sample.ref_logprobs)
    labels = torch.arange(len(rows.places)) < rows.half
    batch = {**rows.ids(), **rows.ids("KL_"), "label": labels}

    def model(input_ids: Tensor, **_: Any) -> Any:
        # the policy's pass over responses to other prompts has no gradient
        return (of_texts if torch.is_grad_enabled() else of_others)()

    value: Tensor = trainer._compute_loss(model, batch, False)
    return value


def _reward(trainer: Any, rows: Rows) -> Tensor:
    logits = rows.new[rows.places][:, None]
    value: Tensor = trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), rows.ids())
    return value


def _sft(trainer: Any, rows: Rows) -> Tensor:
    value: Tensor = trainer.compute_loss(rows.model(rows.new), {**rows.ids(), "labels": rows.ids()["input_ids"]})
    return value


def _plain_pairs(trainer: Any, rows: Rows) -> Tensor:
    """Return CPO's or ORPO's loss; their own forward averages log-probs of these losses over tokens."""
    own, mask = rows.new[rows.places] * rows.mask, rows.mask
    means = own.sum(1) / (mask.sum(1) if trainer.loss_type != "sigmoid" else 1)
    likelihood = -own[: rows.half].sum() / mask[: rows.half].sum()
    zero = torch.zeros(1)
    forward = (means[: rows.half], means[rows.half :], zero, zero, likelihood)
    trainer.concatenated_forward = lambda *_: forward
    value: Tensor = trainer.get_batch_loss_metrics(None, defaultdict(list))[0]
    return value


_LOSSES = {"dpo": _dpo, "kto": _kto, "reward": _reward, "sft": _sft, "cpo": _plain_pairs, "orpo": _plain_pairs}
