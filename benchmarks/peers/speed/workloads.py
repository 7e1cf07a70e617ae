"""Workloads of the comparison: models, batch and lengths of both sides' steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

RANKS = 2
SAMPLES = {"ppo": 1, "grpo": 8}
"""Responses to each prompt."""
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 480,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
}
"""3.3 million parameters."""
MEDIUM: dict[str, Any] = SMALL | {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1216,
    "num_hidden_layers": 8,
}
"""19 million parameters."""


@dataclass(frozen=True)
class PeerWorkload:
    """One comparison.

    name:         of the workload, without the algorithm
    algorithm:    that both sides train by
    model:        a Hugging Face config, for random weights; None: the pretrained model of the command line
    texts:        prompts: random words, all of one length, or dialogues of hh-rlhf
    prompt:       tokens of the longest prompt
    response:     tokens of every response
    rows:         responses of a step
    mini_batches: optimizer steps of a step
    dtype:        float32, or bfloat16 as each side does it: flexrlhf's passes, TRL's autocast
    """

    name: str
    algorithm: Literal["ppo", "grpo"]
    model: dict[str, Any] | None
    texts: Literal["words", "dialogues"]
    prompt: int
    response: int
    rows: int
    mini_batches: int
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def samples(self) -> int:
        """Responses to each prompt."""
        return SAMPLES[self.algorithm]

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.rows // self.samples

    @property
    def least_rows(self) -> int:
        """Rows that ``rows`` is a multiple of: for each rank and mini-batch one, of GRPO all samples of a prompt."""
        return RANKS * self.mini_batches * self.samples

    @property
    def label(self) -> str:
        """Name in the table."""
        return f"{self.algorithm} {self.name}" + (" bfloat16" if self.dtype == "bfloat16" else "")


def workloads() -> tuple[PeerWorkload, ...]:
    """Return all workloads, in float32."""
    plain = [
        PeerWorkload("fixed-3M", "ppo", SMALL, "words", 64, 64, 64, 4),
        PeerWorkload("fixed-19M", "ppo", MEDIUM, "words", 64, 64, 32, 2),
        PeerWorkload("hh-19M", "ppo", MEDIUM, "dialogues", 384, 40, 32, 2),
        PeerWorkload("hh-135M", "ppo", None, "dialogues", 384, 40, 8, 1),
    ]
    groups = {"fixed-3M": 2, "fixed-19M": 2, "hh-19M": 2, "hh-135M": 1}
    of_groups = [
        replace(one, algorithm="grpo", rows=max(one.rows, RANKS * SAMPLES["grpo"]), mini_batches=groups[one.name])
        for one in plain
    ]
    return tuple(plain + of_groups)


@dataclass(frozen=True)
class PeerJob:
    """One workload with its files, as a trainer reads it.

    workload:  models, batch and lengths
    directory: of ``policy`` (model and tokenizer), ``scored`` (the same with a scalar head) and ``prompts.jsonl``,
               whose rows are in the order of the steps
    steps:     of a run, the first of which is a warm-up
    """

    workload: PeerWorkload
    directory: Path
    steps: int
