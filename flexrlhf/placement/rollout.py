"""Settings of a rollout engine's copy of the weights, and the rows and tokens that caches have room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import SettingError
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import PlacedModel

_OF_MODULES = (
    *("trust_remote_code", "attention", "liger", "tiled_mlp", "compile", "share_prompts", "cuda_graphs"),
    "router_replay",
)


@dataclass(frozen=True)
class PagedCache:
    """Cache of a rollout engine in pages, as vLLM's, and the rows that it has room for.

    tokens:            whose keys and values it stores.
    prompt, response:  tokens of a row, at most.
    block:             tokens of a page.
    """

    tokens: int
    prompt: int
    response: int
    block: int

    FREE: ClassVar = 0.05
    """Share of the cache that vLLM keeps free when it admits a row, into which rows grow that are already decoded."""
    PREFILL_TOKENS: ClassVar = 8192
    """Most tokens of one step of vLLM, unless one prompt is longer or there are more rows."""
    MOST_ROWS: ClassVar = 1024
    """Most rows that vLLM decodes at a time; its weights are then a small part of what a step reads."""
    BEGUN: ClassVar = 16
    """One of so many parts of the longest response, with which a row is counted when it is admitted."""

    @classmethod
    def of(cls, model: PlacedModel, prompt: int, response: int) -> PagedCache:
        """Return the cache of a model that decodes rows of so many tokens."""
        return cls(model.settings.generate_tokens, prompt, response, model.facts.cache_block)

    @property
    def most_rows(self) -> int:
        """Most rows that vLLM decodes at a time: as many as its cache has pages for when they begin.

        vLLM gives a row a page whenever it has filled one. When no page is left, the row that was admitted last is put
        back; later its tokens are computed again in one pass, and it goes on with the same tokens.
        """
        blocks_of_row = -(-(self.prompt + self.response // self.BEGUN) // self.block)
        return min(self.MOST_ROWS, max(1, self.tokens // self.block // blocks_of_row))

    @property
    def most_step_tokens(self) -> int:
        """Most tokens of one step of vLLM: of whole prompts, of rows that are computed again, or one of each."""
        return max(self.prompt, self.most_rows, min(self.tokens, self.PREFILL_TOKENS))


@dataclass(frozen=True)
class KeptSlots:
    """Slots of one rank whose rows keep their keys and values from step to step (``rollout.caches: kept``).

    rows:      one slot for each row that may be under way, so that none is lost for want of a slot.
    segments:  steps of a row at most.
    lag:       batches by which training is behind generation.
    every:     steps between two checkpoints; None: the run writes none.
    """

    rows: int
    segments: int
    lag: int
    every: int | None

    def period(self, step: int) -> int:
        """Return a number that changes with the first batch that is generated behind a checkpoint.

        Keys and values of another number are dropped, so that a run that goes on from the checkpoint, which has none,
        repeats the one that was not interrupted.
        """
        return 0 if self.every is None else max(0, step - self.lag) // self.every


def rollout_settings(model: ModelSpec, layout: Layout, spec: Spec) -> ModelSpec:
    """Return the settings of ``model`` for an engine that only generates.

    ``generate_tokens`` is the capacity of its cache, at most all rows of a step on one rank. plan/cache_size.py lowers
    it to the memory that is left once all models are placed. Raises UserError for a cache smaller than one row.
    """
    rollout, row, facts = spec.rollout, spec.padded_row, spec.rollout.facts
    if rollout.kv_tokens is not None and rollout.kv_tokens < row:
        blocks = f", in blocks of {facts.cache_block}" if facts.cache_block else ""
        raise SettingError.of(
            "rollout",
            "kv_tokens",
            f"{rollout.kv_tokens} are less than one row of {row} tokens (prompt and response"
            f"{blocks}); use at least {row}",
        )
    tokens = rollout.kv_tokens or max(model.generate_tokens, row)
    settings = ModelSpec(
        path=model.path,
        init=model.init,
        lora=rollout.own_adapters(model),
        engine=rollout.engine,
        **{name: getattr(rollout, name) for name in rollout.AXES},
        dtype=rollout.dtype or model.dtype,
        generate_tokens=min(tokens, spec.padded_row * BatchShape.of(spec).most_rows(layout)),
    )
    return settings.model_copy(update=_kept(model)) if facts.transformers_modules else settings


def _kept(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of ``model`` that change how transformers' modules compute, which a copy of it shares."""
    return {name: getattr(model, name) for name in _OF_MODULES}


def rollout_warnings(spec: Spec, role: str) -> list[str]:
    """Return warnings for an engine that samples in another dtype than the policy has."""
    model, dtype = spec.models.of(role), spec.rollout.dtype
    if model is None or dtype in (None, model.dtype) or spec.algorithm.importance is not None:
        return []
    return [
        f"rollout.dtype {dtype} with {model.dtype} of models.{role} samples from a policy that differs by rounding; "
        f"algorithm.importance: {{}} corrects for it"
    ]
