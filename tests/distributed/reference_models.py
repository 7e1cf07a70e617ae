"""The models of the reference and their training: one sequence at a time, without padding or batches, and without a
cache but of rows that keep theirs.

Low-rank adapters are peft's own models. Sampling alone takes several sequences at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from reference_terms import Terms
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.core_model_loading import revert_weight_conversion

from flexrlhf.config.model_settings import LoraSpec, ModelSpec, OptimizerSpec
from flexrlhf.config.spec import Spec
from flexrlhf.weights.stored_model import StoredModel

Weights = dict[str, Tensor]


def load(kind: Any, spec: ModelSpec, seed: int, **further: Any) -> Any:
    """A model of transformers, or peft's around it; with the adapters of its path, if it has any.

    By definition of a run the weights that no file contains, such as new adapters, are sampled by torch after its seed
    when the model is loaded and peft then adds its adapters, module by module.
    """
    return deepcopy(_loaded(kind, str(spec.path), spec.lora, seed, **further))


@cache
def _loaded(kind: Any, path: str, lora: LoraSpec | None, seed: int, **further: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        is_whole = not StoredModel(path).has_adapters
        base = path if is_whole else PeftConfig.from_pretrained(path).base_model_name_or_path
        model = kind.from_pretrained(base, dtype=torch.float32, use_cache=False, **further)
        if not is_whole:
            model = PeftModel.from_pretrained(model, path, is_trainable=True)
        elif lora is not None:
            task = TaskType.CAUSAL_LM if kind is AutoModelForCausalLM else TaskType.SEQ_CLS
            model = get_peft_model(model, lora_config(lora, task))
    return model.eval()


def lora_config(lora: LoraSpec, task: TaskType) -> LoraConfig:
    """peft itself trains the head of a sequence classifier in addition to the adapters."""
    experts = ["gate_up_proj", "down_proj"] if "gate_up_proj" in (lora.targets or ()) else []
    targets = "all-linear" if lora.targets is None else [name for name in lora.targets if name not in experts]
    parameters = [f"mlp.experts.{name}" for name in experts] or None
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, target_parameters=parameters, task_type=task
    )


class Policy:
    """A causal language model. ``has_values``: its files contain a scalar head on the same trunk."""

    def __init__(self, spec: ModelSpec, seed: int, temperature: float, has_values: bool = False) -> None:
        self.model = load(AutoModelForCausalLM, spec, seed)
        self.inner, self.temperature = inner_of(self.model), temperature
        self.routers = Routers(self.model, replays=spec.router_replay == "rollout")
        if has_values:
            self.inner.score = value_head(str(spec.path))

    def next_logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Logits (n, vocabulary) after each text. Padding follows the texts, so none of their tokens attends to it."""
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        return self.model(input_ids=ids).logits[range(len(texts)), [len(text) - 1 for text in texts]].double()

    def next_logits_with(self, cache: DynamicCache, text: list[int]) -> Tensor:
        """The same (vocabulary,) of one text, of whose first tokens ``cache`` has keys and values, and then of all."""
        further = torch.tensor([text[cache.get_seq_length() :]])
        return self.model(input_ids=further, past_key_values=cache, use_cache=True).logits[0, -1].double()

    def distributions(self, prompt: list[int], response: list[int], temperature: float | None = None) -> Tensor:
        """Log-probs (len(response), vocabulary) at every position of the response."""
        with self.routers.replaying(prompt + response):
            logits = self.model(input_ids=torch.tensor([prompt + response])).logits[0]
        # of no response there are none
        return (logits[len(prompt) - 1 : -1] / (temperature or self.temperature)).log_softmax(-1)

    def logprobs(
        self, prompt: list[int], response: list[int], temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of every token of the response, and the entropy there; at the temperature of sampling by default."""
        log_p = self.distributions(prompt, response, temperature)
        return log_p.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def everywhere(self, prompt: list[int], response: list[int]) -> Tensor:
        """Values (len(response) + 1): before the response, and after each of its tokens."""
        return _judged(self.inner, prompt, response)


class Routers:
    """Experts that generation has chosen for each text, by layer, which a model may take for the same text again, and
    the tokens of each expert in training."""

    def __init__(self, model: torch.nn.Module, replays: bool = False) -> None:
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        self.replays, self.routers = replays, routers
        # of the texts of a mini-batch: logits, and experts taken
        self.routed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]
        self.number = routers[0].num_experts if routers else 0
        self.of_texts: dict[tuple[int, ...], list[Tensor]] = {}
        self.replayed: list[Tensor] | None = None
        self.recorded: list[Tensor] | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._route, layer))

    @torch.no_grad()
    def experts(self, model: Any, text: list[int]) -> list[Tensor]:
        """Experts (tokens, k) of each layer as ``model``, whose routers these are, chooses them."""
        self.recorded = recorded = []
        model(input_ids=torch.tensor([text]))
        self.recorded = None
        return recorded

    @contextmanager
    def replaying(self, text: list[int]) -> Iterator[None]:
        self.replayed = self.of_texts.get(tuple(text))
        yield
        self.replayed = None

    def _route(self, layer: int, router: Any, _: Any, routed: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, chosen = routed
        if self.recorded is not None:
            self.recorded.append(chosen)
        if self.replayed is not None:
            # generation has not read the last token
            chosen = torch.cat([self.replayed[layer][:-1], chosen[-1:]])
            weights = scores_of(router, logits).gather(1, chosen)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            weights = getattr(router, "routed_scaling_factor", 1.0) * weights
        if torch.is_grad_enabled():
            self.routed[layer].append((logits, chosen))
        return logits, weights, chosen

    def balance(self, rate: float) -> None:
        """Wang et al. 2024, algorithm 1: an expert with fewer tokens than the mean is preferred from now on."""
        for router, layer in zip(self.routers, self.routed, strict=True):
            if rate and layer:
                load = torch.cat([taken.flatten() for _, taken in layer]).bincount(minlength=self.number).double()
                router.e_score_correction_bias += rate * (load.mean() - load).sign().float()

    def fullest(self) -> list[float]:
        """Tokens of the fullest expert over the mean, of the layer where it is fullest; a mini-batch begins anew."""
        loads = [torch.cat([taken.flatten() for _, taken in layer]).bincount() for layer in self.routed if layer]
        self.routed = [[] for _ in self.routed]
        return [max(float(load.max()) * self.number / float(load.sum()) for load in loads)] if loads else []

    def loss(self, role: str, spec: ModelSpec, terms: Terms) -> Tensor | float:
        """Fedus et al. 2021, eq. 4, over the tokens of all layers, and Zoph et al. 2022, eq. 5."""
        every = [text for layer in self.routed for text in layer]
        if not every or not (spec.router_aux_loss_coef or spec.router_z_loss_coef):
            return 0.0
        logits = torch.cat([logits for logits, _ in every])
        taken = torch.cat([taken for _, taken in every]).flatten().bincount(minlength=self.number) / len(logits)
        scores = scores_of(self.routers[0], logits)
        auxiliary = self.number * (taken * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
        squares = logits.logsumexp(-1).square().mean()
        terms.add(f"{role}_router_aux_loss", [float(auxiliary.detach())])
        terms.add(f"{role}_router_z_loss", [float(squares.detach())])
        return spec.router_aux_loss_coef * auxiliary + spec.router_z_loss_coef * squares


def scores_of(router: torch.nn.Module, logits: Tensor) -> Tensor:
    """Of experts, by which their outputs are weighted."""
    return logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)


class Scorer:
    """A language model with a scalar head, whose scores equal plain transformers'."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.model = load(AutoModelForSequenceClassification, spec, seed, num_labels=1)
        self.inner, self.routers = inner_of(self.model), Routers(self.model)

    def everywhere(self, prompt: list[int], response: list[int]) -> Tensor:
        """(len(response) + 1): before the response, and after each of its tokens."""
        return _judged(self.inner, prompt, response)

    def score(self, prompt: list[int], response: list[int]) -> Tensor:
        return self.model(input_ids=torch.tensor([prompt + response])).logits[0, 0]


def inner_of(model: Any) -> Any:
    """The model itself, in which peft may have put its adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _judged(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    hidden = model.model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
    return model.score(hidden[len(prompt) - 1 :])[:, 0]


def value_head(path: str) -> torch.nn.Linear:
    """The scalar head in a causal model's files."""
    weight = load_file(Path(path) / "model.safetensors")["score.weight"]
    head = torch.nn.Linear(weight.shape[1], 1, bias=False)
    head.load_state_dict({"weight": weight})
    return head


def learning_rate(settings: OptimizerSpec, update: int, num_updates: int) -> float:
    """Learning rate of optimizer step ``update`` (from 0): linear warm-up from 0, then constant or decaying."""
    if update < settings.warmup_steps:
        return settings.learning_rate * update / settings.warmup_steps
    left = (num_updates - update) / (num_updates - settings.warmup_steps)
    shares = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return settings.learning_rate * (settings.final_ratio + (1 - settings.final_ratio) * shares[settings.schedule])


def make_optimizer(settings: OptimizerSpec, parameters: list[torch.nn.Parameter]) -> Optimizer:
    decay = settings.weight_decay
    match settings.name:
        case "sgd":
            return SGD(parameters, weight_decay=decay)
        case "adam":
            return Adam(parameters, betas=settings.betas, eps=settings.eps, weight_decay=decay)
        case "adamw":
            return AdamW(parameters, betas=settings.betas, eps=settings.eps, weight_decay=decay)


class Trainee:
    """A model with its optimizer. ``num_updates``: optimizer steps of the whole run, which begins at ``first_step``."""

    def __init__(self, role: str, model: torch.nn.Module, spec: Spec, first_step: int = 0) -> None:
        algorithm = spec.algorithm
        self.role, self.model, self.first_step = role, model, first_step
        self.settings: OptimizerSpec = getattr(spec.models, role).optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.settings, self.parameters)
        self.num_updates = (spec.steps - first_step) * algorithm.num_mini_batches * algorithm.epochs
        self.updates_done = 0
        self.first = copy_of(model)

    def update(self, loss: Tensor, terms: Terms) -> None:
        """One optimizer step; the gradient norm is that before clipping. Of no responses the gradient is 0."""
        self.optimizer.zero_grad()
        (loss + sum(0.0 * parameter.sum() for parameter in self.parameters)).backward()
        limit = math.inf if self.settings.max_grad_norm is None else self.settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        rate = learning_rate(self.settings, self.updates_done, self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates_done += 1
        terms.add(f"{self.role}_grad_norm", [float(norm)])
        terms.add(f"{self.role}_learning_rate", [rate])

    def moved(self) -> float:
        return distance(copy_of(self.model), self.first)


def copy_of(model: torch.nn.Module) -> Weights:
    """Trained parameters, and biases of routers."""
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return trained | {name: b.clone() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}


def saved(model: torch.nn.Module) -> Weights:
    """Contents of the trained model's file: all weights, or the adapters in peft's format."""
    if not isinstance(model, PeftModel):
        return dict(revert_weight_conversion(model, copy_of(model)))
    head = {name: weight for name, weight in copy_of(model).items() if name == "base_model.model.score.weight"}
    return get_peft_model_state_dict(model) | head


def distance(weights: Weights, reference: Weights) -> float:
    """||w - reference|| / ||reference|| over all parameters."""
    assert weights.keys() == reference.keys(), f"parameters {sorted(weights.keys() ^ reference.keys())}"
    square = sum(float((weights[name].double() - w.double()).square().sum()) for name, w in reference.items())
    return math.sqrt(square / sum(float(w.double().square().sum()) for w in reference.values()))
