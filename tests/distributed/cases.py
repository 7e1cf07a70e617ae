"""The cases of the equality suite: a setting of the algorithm, a shape of placement and schedule, a number of ranks.

A setting changes results and has its own reference; a shape must not, except lag and sync.every by their rule.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import algorithm_settings
import yaml
from algorithm_settings import ALGORITHMS, COMPLETIONS, DEFAULTS, FAST
from assets import PROMPT_TOKENS, RESPONSE_TOKENS, SIZES, write_assets

from flexrlhf.config.algorithms import KINDS
from flexrlhf.config.output_settings import Switches
from flexrlhf.config.spec import Spec

Raw = dict[str, Any]
DEVICE = os.environ.get("FLEXRLHF_TEST_DEVICE", "cpu")
"""Device of all ranks; with cuda they share one GPU."""
GRAPHS = {
    name: kind.model_validate({"name": name, **({"kl": {}} if kind.SAMPLES else {})}).step_graph()
    for name, kind in KINDS.items()
}
ROLES = {name: graph.roles for name, graph in GRAPHS.items()}
"""In vector order; a setting may do without a reference or a model of scores, or have further ones."""
TRAINED = {name: graph.trained for name, graph in GRAPHS.items()}
FILES = {name: {"responses": "sft", "pairs": "reward", "prompts": "ppo"}[graph.data] for name, graph in GRAPHS.items()}
"""Data of each algorithm."""
KIN = {"cost_critic": "critic", "cost": "reward", "reward_second": "reward"}
"""Roles whose placement and settings another role takes if a shape has none for it."""
FOUR, SIX_MODELS = ROLES["ppo"], ("actor.shadow", "critic.shadow", *ROLES["ppo"])
"""Models of the shapes' vectors."""


@dataclass(frozen=True)
class Case:
    setting: str
    shape: str
    ranks: int
    compute: str = "replicas"
    rollout: str = "transformers"

    @property
    def name(self) -> str:
        plain = f"{self.setting}_{self.shape}_{self.ranks}"
        further = [self.compute] * (self.compute != "replicas") + [self.rollout] * self.has_rollout_engine
        return "_".join([plain, *further])

    @property
    def has_rollout_engine(self) -> bool:
        """Whether an engine generates with a copy of the actor."""
        return self.rollout != "transformers"

    @property
    def has_vllm(self) -> bool:
        return self.rollout.startswith("vllm")


def _ppo(**changes: Any) -> Raw:
    return {"algorithm": {"name": "ppo", **changes}}


SETTINGS: dict[str, Raw] = {
    "two": _ppo(num_mini_batches=2),
    "four": _ppo(num_mini_batches=4),
    "streaming": _ppo(num_mini_batches=4, whiten="mini_batch"),
    "streaming-two": _ppo(num_mini_batches=2, whiten="mini_batch"),
    "unwhitened": _ppo(whiten="none", prompts_per_step=6, num_mini_batches=4, loss_aggregation="seq-mean-token-sum"),
    "one": _ppo(num_mini_batches=1, temperature=0.7, entropy_coefficient=0.02),
    "still": {
        **_ppo(num_mini_batches=2),
        "models": {role: {"optimizer": {"learning_rate": 0.0, "weight_decay": 0.1}} for role in ("actor", "critic")},
    },
    # over 4 ranks a mini-batch of 3 prompts leaves one rank without rows, one of 1 or 2 prompts leaves more
    "uneven": _ppo(prompts_per_step=7, num_mini_batches=2),
    "scarce": _ppo(prompts_per_step=3, num_mini_batches=2, whiten="mini_batch"),
    "recomputed": {**_ppo(num_mini_batches=2), "rollout": {"logprobs": "recompute"}},
    "samples": _ppo(prompts_per_step=6, num_mini_batches=2, samples_per_prompt=2, loss_aggregation="token-sum"),
    "four-samples": _ppo(prompts_per_step=4, num_mini_batches=2, samples_per_prompt=4),
    "epochs": _ppo(num_mini_batches=2, epochs=2, loss_aggregation="seq-mean-token-mean"),
    "bootstrap": _ppo(num_mini_batches=2, truncation="bootstrap", gamma=0.98, gae_lambda=0.9),
    "penalty": _ppo(num_mini_batches=2, truncation={"penalty": 1.5}, reward_clip=1.0, kl={"coefficient": 0.3}),
    # a null that is not the default must reach the ranks
    "normed": {
        **_ppo(num_mini_batches=2, loss_aggregation="seq-mean-token-sum-norm", temperature=1.3),
        "models": {role: {"optimizer": {"max_grad_norm": None}} for role in ("actor", "critic")},
    },
    # one row fills a micro-batch, so that every mini-batch is a sum of several
    "pieces": {
        **_ppo(num_mini_batches=2),
        "models": {role: {"micro_batch_tokens": 20} for role in ("actor", "critic", "ref", "reward")},
    },
    # a response may take three steps, the last with two tokens, of which the first two train the critic alone; the
    # second setting ends some before their end
    "segments": {**_ppo(num_mini_batches=2, freeze_actor_steps=2), "rollout": {"segment_tokens": 3}, "steps": 6},
    "segments-corrected": {
        **_ppo(num_mini_batches=4, prompts_per_step=8, importance={"cap": 1.05}),
        "rollout": {"segment_tokens": 2, "max_segments": 3},
        "steps": 6,
    },
    # responses of one token have no bigrams
    "short": {**_ppo(num_mini_batches=2), "data": {"max_response_tokens": 1}},
    # caps that bind for stale weights; with fresh ones every importance weight is 1, so rounding never crosses the cap
    "corrected": _ppo(num_mini_batches=2, importance={"cap": 1.05}),
    "corrected-sequences": _ppo(
        num_mini_batches=2,
        importance={"level": "sequence", "cap": 1.1},
        loss_aggregation="seq-mean-token-mean",
        entropy_coefficient=0.02,
    ),
    # each cut removes tokens that the other would leave
    "nucleus": _ppo(num_mini_batches=2, top_p=0.8, top_k=10, min_response_tokens=3, temperature=1.2, importance={}),
    # a text of one word, and two over the border of words
    "stopped": _ppo(num_mini_batches=2, stop=["ta", "o n", "i b"]),
    "stopped-late": _ppo(num_mini_batches=2, stop=["i", "o n"], min_response_tokens=3, importance={"cap": 1.05}),
    # several tokens end a response, none of them at once
    "ends": _ppo(num_mini_batches=2, min_response_tokens=2, truncation={"penalty": 1.5}, importance={}),
    "greedy": {**_ppo(num_mini_batches=2), "eval": {"temperature": 0}},
    "cooler": {**_ppo(num_mini_batches=2, temperature=1.3), "eval": {"temperature": 0.5}},
    "sft": {"algorithm": {"name": "sft", "num_mini_batches": 2}},
    "sft-greedy": {"algorithm": {"name": "sft", "num_mini_batches": 2}, "eval": {"temperature": 0}},
    "sft-epochs": {
        "algorithm": {
            "name": "sft",
            "prompts_per_step": 7,
            "num_mini_batches": 2,
            "epochs": 2,
            "loss_aggregation": "seq-mean-token-mean",
        }
    },
    "reward": {"algorithm": {"name": "reward", "num_mini_batches": 2}},
    # the end token is also padding, or there is none
    "reward-ends": {
        "algorithm": {"name": "reward", "num_mini_batches": 2},
        "models": {"reward": {"path": "assets:models/reward-ends"}},
    },
    "reward-bare": {
        "algorithm": {"name": "reward", "num_mini_batches": 2},
        "models": {"reward": {"path": "assets:models/reward-bare"}},
    },
    "reward-uneven": {"algorithm": {"name": "reward", "prompts_per_step": 7, "num_mini_batches": 4, "epochs": 2}},
    "scheduled": {
        **_ppo(num_mini_batches=2),
        "models": {
            "actor": {"optimizer": {"schedule": "cosine", "warmup_steps": 2, "final_ratio": 0.25}},
            "critic": {"optimizer": {"name": "sgd", "learning_rate": 0.03, "schedule": "linear"}},
        },
    },
    # adapters start at nothing (B = 0), so only a higher rate moves the policy as far as in the other settings; and the
    # gradient of A starts at 0 and stays small, of which the eps of Adam must not make whole steps (see Assets._model)
    "adapters": {
        **_ppo(num_mini_batches=2),
        "models": {
            "actor": {"lora": {"rank": 4, "alpha": 8}, "optimizer": FAST},
            "critic": {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}, "optimizer": FAST},
        },
    },
    # with the adapters of a path, as which the reference stays
    "shared": {
        **_ppo(num_mini_batches=2),
        "models": {"actor": {"lora": {}, "optimizer": FAST}, "ref": {"share": "actor"}},
    },
    "sft-adapters": {
        "algorithm": {"name": "sft", "num_mini_batches": 2},
        "models": {
            "actor": {"lora": {}, "optimizer": {**FAST, "name": "adam", "schedule": "linear", "warmup_steps": 1}}
        },
    },
    # one pass a rank, whose gradients are summed in the same order by all engines
    "sft-adapters-whole": {
        "algorithm": {"name": "sft", "num_mini_batches": 2},
        "models": {"actor": {"lora": {}, "optimizer": {**FAST, "max_grad_norm": None}}},
        "schedule": {"num_blocks": 1},
    },
    "reward-adapters": {
        "algorithm": {"name": "reward", "num_mini_batches": 2},
        "models": {"reward": {"lora": {"rank": 4}, "optimizer": {**FAST, "name": "adam", "warmup_steps": 3}}},
    },
}
SLOW = {"debug": {"run_delay_seconds": 0.3}}
SWITCHES: Raw = {
    **{name: not field.default for name, field in Switches.model_fields.items() if field.annotation is bool},
    "backend": "gloo",
    "communicators": "apart",
}
"""All switches of ``debug``."""
SETTINGS |= {
    # so little memory that models take turns on their devices
    "switched": {**_ppo(num_mini_batches=2), "cluster": {"memory_gb": 0.0003}, "debug": SWITCHES},
    "slow": {**_ppo(num_mini_batches=2), **SLOW},
    "slow-streaming": {**_ppo(num_mini_batches=4, whiten="mini_batch"), **SLOW, "steps": 2},
    # 32 layers, so that no tensor is a large part of the bytes on a rank of four
    # an actor with more embeddings than the tokenizer has tokens and other models have embeddings
    "padded": {**_ppo(num_mini_batches=2), "models": {"actor": {"path": "assets:models/padded-actor"}}},
    # policy and reference start from the same weights
    "start": {
        **_ppo(num_mini_batches=2),
        "models": {"ref": {"path": "assets:models/actor"}},
        "rollout": {"logprobs": "recompute"},
        "steps": 1,
    },
    "dpo-start": {
        "algorithm": {"name": "dpo", "prompts_per_step": 8},
        "models": {"ref": {"path": "assets:models/actor"}},
        "steps": 1,
    },
    "deep": {
        "algorithm": {"name": "sft"},
        "models": {"actor": {"path": None, "init": {**SIZES, "model_type": "llama", "num_hidden_layers": 32}}},
        "steps": 1,
    },
}
_NAMED = {each["algorithm"]["name"] for each in (*SETTINGS.values(), *COMPLETIONS.values(), *ALGORITHMS.values())}
ALGORITHMS |= {name: {"algorithm": {"name": name, "num_mini_batches": 2}} for name in KINDS if name not in _NAMED}
SETTINGS |= COMPLETIONS | ALGORITHMS
BALANCED = {"router_aux_loss_coef": 0.2, "router_z_loss_coef": 0.05}
MOVED = {"router_bias_update_rate": 0.02}
"""Of routers that choose by biases."""
SETTINGS |= {
    # actor and critic are of different families; the first actor has a dense layer, too; models are saved an expert at
    # a time
    name: {
        **_ppo(num_mini_batches=2),
        "sync": {"bucket_mb": 0.004},
        "models": {
            "actor": {"path": f"assets:models/{actor}", **own, **BALANCED},
            "ref": {"path": f"assets:models/{actor}"},
            "critic": {"path": f"assets:models/{critic}", **BALANCED},
        },
    }
    for name, actor, critic, own in (
        ("experts", "experts-actor", "experts-critic", {}),
        ("experts-replayed", "other-experts-actor", "other-experts-critic", {"router_replay": "rollout"}),
        # routers choose groups of experts, and by biases
        ("experts-moved", "balanced-actor", "other-experts-critic", {"router_replay": "rollout", **MOVED}),
        # keys and values are made from a latent, and some experts compute every token
        ("latent", "latent-actor", "latent-critic", MOVED),
        # heads have sinks, every other layer a window
        ("sinks", "sinks-actor", "sinks-critic", {}),
    )
}
# episodes that are carried over updates keep the experts of the tokens that were read before
SETTINGS["experts-episodes"] = {
    **SETTINGS["experts-replayed"],
    **algorithm_settings.in_episodes_of("Game", sequences=2),
    "rollout": {"segment_tokens": 4},
    "steps": 5,
}
SETTINGS["experts-grpo"] = {
    **ALGORITHMS["grpo"],
    "models": {role: {"path": "assets:models/experts-actor"} for role in ("actor", "ref")},
}
SETTINGS["experts-adapters"] = {
    **_ppo(num_mini_batches=2),
    "models": {
        "actor": {
            "path": "assets:models/experts-actor",
            "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "gate_up_proj", "down_proj"]},
            "optimizer": FAST,
        },
        "ref": {"path": "assets:models/experts-actor"},
        "critic": {"path": "assets:models/experts-critic", "lora": {"targets": ["v_proj"]}, "optimizer": FAST},
    },
}
WITH_EXPERTS = (
    *("experts", "experts-replayed", "experts-moved", "experts-episodes", "experts-adapters", "experts-grpo"),
    *("latent", "sinks"),
)
"""Settings whose models have experts, which not every engine serves."""
REPLAYED = ("experts-replayed", "experts-moved", "experts-episodes")
OF_OWN_ATTENTION = ("latent", "sinks")
"""Settings whose rows context-parallel ranks do not share."""
NOT_COMPARED = (
    "episodes-random",
    "episodes-replayed",
    "slow",
    "slow-streaming",
    "switched",
    "deep",
    "start",
    "dpo-start",
    "padded",
)
EVALUATED = (
    *("four", "samples", "short", "nucleus", "stopped", "ends", "greedy", "cooler"),
    *("sft", "sft-greedy", "sft-epochs", "sft-adapters"),
    *("reward", "reward-uneven", "reward-adapters", "reward-ends", "reward-bare"),
    *algorithm_settings.EVALUATED,
)
"""Settings that evaluate after every step."""
LONGER = (
    *("two", "scheduled", "still", "ptx", "grpo-uneven", "grpo-counted"),
    *("episodes", "episodes-random", "episodes-replayed"),
    *("slow", "slow-streaming"),
)
"""Settings of three steps where nothing else is set, which go round an epoch of the data, as shapes whose weights are
copied, and types whose rounding adds up. All others show in two steps that the second one starts from the first."""


def algorithm_of(setting: str) -> str:
    return SETTINGS[setting]["algorithm"]["name"]


_OF_DATA = [(name, ROLES[algorithm_of(name)]) for name in SETTINGS if not KINDS[algorithm_of(name)].SAMPLES]
SUPERVISED = tuple(name for name, roles in _OF_DATA if len(roles) == 1)
"""Settings with one model."""
PREFERENCES = tuple(name for name, roles in _OF_DATA if len(roles) > 1)
"""Settings with two, and no shadows."""

SIX = [0.5] * 6
MIXED = {
    "cluster": {
        "nodes": [{"count": 1, "devices": 2, "class": "A100-80G"}, {"count": 1, "devices": 2, "class": "V100-32G"}]
    }
}
ON_V100 = {"ratio": 0.5, "on": "V100-32G"}
SHAPES: dict[str, Raw] = {
    "co-located": {"placement": [1, 1, 1, 1]},
    "halves": {"placement": [1, 1, 0.5, 0.5]},
    "pairs": {"placement": [0.5] * 4},
    "six": {"placement": SIX},
    "six-chunks": {"placement": SIX, "schedule": {"num_chunks": 2}},
    # many small buckets, so that back-pressure is at work
    "six-overlap": {"placement": SIX, "sync": {"overlap": True, "bucket_mb": 0.004}},
    "six-rounded": {"placement": SIX, "sync": {"dtype": "bfloat16", "bucket_mb": 0.004}},
    # from one node to a rank there and two of another, which send on to each other
    "six-uneven": {
        "placement": [0.75, 0.25, 0.25, 0.25, 0.25, 0.5],
        "sync": {"bucket_mb": 0.004, "overlap": False},
        "cluster": {"nodes": [{"count": 2, "devices": 2}]},
    },
    # five steps, since the version by the rule of sync.every 3 changes first at the fourth
    "lag": {"placement": SIX, "schedule": {"lag": 1}, "steps": 5},
    "lag-chunks": {"placement": SIX, "schedule": {"lag": 1, "num_chunks": 2}, "sync": {"overlap": False}},
    "lag-2": {"placement": SIX, "schedule": {"lag": 2}, "steps": 6},
    # generation alone is apart: values, log-probs of the reference and advantages come with training
    "lag-2-alone": {
        "placement": {
            "actor.shadow": {"ranks": [1]},
            "reward": {"ranks": [1]},
            **{name: {"ranks": [0]} for name in ("actor", "critic", "ref")},
        },
        "schedule": {"lag": 2},
        "steps": 6,
    },
    "lag-4-every-2": {
        "placement": SIX,
        "schedule": {"lag": 4, "num_chunks": 2},
        "sync": {"every": 2},
        "steps": 8,
    },
    "every-3": {"placement": SIX, "sync": {"every": 3}, "steps": 5},
    "lag-every-3": {"placement": SIX, "schedule": {"lag": 1}, "sync": {"every": 3}, "steps": 5},
    "classes": {**MIXED, "placement": {"actor": 1, "critic": 1, "ref": ON_V100, "reward": ON_V100}},
    "shares": {
        **MIXED,
        "placement": {
            "actor": {"ranks": [0, 2], "row_shares": [2, 1]},
            "critic": {"ranks": [1, 3], "row_shares": [2, 1]},
            "ref": {"ratio": 1, "on": "V100-32G"},
            "reward": {"ranks": [0, 1, 2, 3], "row_shares": [2, 2, 1, 1]},
        },
    },
    "classes-six": {
        **MIXED,
        "placement": {
            "actor.shadow": {"ratio": 1, "on": "V100-32G"},
            "critic.shadow": ON_V100,
            "actor": {"ranks": [0, 1], "row_shares": [2, 1]},
            "critic": {"ranks": [0, 1]},
            "ref": ON_V100,
            "reward": ON_V100,
        },
    },
    "span": {**MIXED, "placement": {"span_classes": True, **{r: 1 for r in ("actor", "critic", "ref", "reward")}}},
    # generation on one rank, every forward model on another
    "six-apart": {
        "placement": {
            "actor.shadow": {"ranks": [2]},
            **{name: {"ranks": [3]} for name in ("critic.shadow", "ref", "reward")},
            "actor": {"ranks": [0]},
            "critic": {"ranks": [1]},
        },
        "schedule": {"num_chunks": 4},
    },
    # two engines that share no rank
    "apart": {
        "placement": {
            **{role: {"ranks": [0, 1]} for role in ("actor", "ref")},
            **{role: {"ranks": [2, 3]} for role in ("critic", "reward")},
        }
    },
    # so little memory that models take turns on their devices (CPU ranks, so only the plan has the size)
    "tight": {"placement": [1, 1, 1, 1], "cluster": {"memory_gb": 0.0004}},
    "six-tight": {"placement": SIX, "cluster": {"memory_gb": 0.00025}, "schedule": {"lag": 1}, "sync": {"every": 2}},
    "quarter": {"placement": [0.25] * 4},
    "all": {"placement": [1]},
    "half": {"placement": [0.5]},
}
SPLIT, SPLITS = ("shares", "lag-chunks"), Path(__file__).parents[1] / "fixtures" / "splits.py"
"""Shapes in which functions split the rows of some operators over replicas, and their file."""
ALL, LEFT, RIGHT = ({"ranks": ranks} for ranks in ("0-3", "0-1", "2-3"))
OPERATORS: dict[str, Raw] = {
    # generation in tensor-parallel replicas, training in ZeRO-3 shards, everything on all ranks
    "operators-resharded": {
        "generate": {**ALL, "tp": 2},
        "ref_logprobs": {**ALL, "zero": 3},
        "values": {**LEFT, "zero": 3},
        "scores": ALL,
        "train_actor": {**ALL, "zero": 3},
        "train_critic": {**ALL, "zero": 3},
    },
    # inference next to each other, then training next to each other, of other copies
    "operators-lanes": {
        "generate": {**ALL, "tp": 2},
        "ref_logprobs": RIGHT,
        "values": LEFT,
        "scores": {**RIGHT, "tp": 2},
        "train_actor": LEFT,
        "train_critic": {**RIGHT, "zero": 2},
    },
    # no copy has ranks of the one that it follows
    "operators-apart": {
        "generate": RIGHT,
        "ref_logprobs": LEFT,
        "values": LEFT,
        "scores": RIGHT,
        "train_actor": {"ranks": [0]},
        "train_critic": {**RIGHT, "zero": 3},
    },
    # each engine fills copies of the other one
    "operators-engines": {
        "generate": {**LEFT, "tp": 2},
        "ref_logprobs": {**ALL, "engine": "deepspeed", "zero": 3},
        "values": {**ALL, "engine": "deepspeed", "zero": 3},
        "scores": RIGHT,
        "train_actor": {**ALL, "engine": "deepspeed", "zero": 3},
        "train_critic": {**LEFT, "zero": 3},
    },
}
# copies of shards on two nodes, from which weights go to slices and to shards of all ranks
IN_NODE = {**ALL, "zero": 3, "shard": "node"}
OPERATORS["operators-nodes"] = {
    "generate": {**ALL, "tp": 2},
    "ref_logprobs": IN_NODE,
    "values": {**ALL, "zero": 3},
    "scores": {**ALL, "zero": 2, "shard": "node"},
    "train_actor": IN_NODE,
    "train_critic": {**ALL, "zero": 2, "shard": "node"},
}
STAGED = {"engine": "megatron", "pp": 2}
OPERATORS["operators-stages"] = {
    # weights go from stages to slices, from stages to stages and from parts to stages
    "generate": {**ALL, "tp": 2},
    "ref_logprobs": {**RIGHT, **STAGED},
    "values": {**LEFT, **STAGED},
    "scores": ALL,
    "train_actor": {**ALL, **STAGED, "tp": 2},
    "train_critic": {**RIGHT, "engine": "megatron", "tp": 2},
}
"""Placements of PPO's operators, on four ranks."""
SHAPES |= {name: {"placement": {"operators": entries}} for name, entries in OPERATORS.items()}
FIRST, SECOND = ({"ranks": [rank]} for rank in (0, 1))
SHADOW = {**SECOND, "shadow": True}
TRAINED_FIRST: Raw = {"ref_logprobs": SECOND, "scores": SECOND, "train_actor": FIRST, "train_critic": FIRST}
ON_TWO: dict[str, Raw] = {
    # ReaL's searched plan of 7B models, with a rank for each of its nodes and a pass for each row of some calls
    "operators-two": {
        "generate": {"ranks": [0, 1]},
        "ref_logprobs": FIRST,
        "values": {"ranks": [0, 1], "micro_batch_tokens": 20},
        "scores": SECOND,
        "train_actor": {**FIRST, "micro_batch_tokens": 20},
        "train_critic": SECOND,
    },
    "operators-lag": {"generate": SHADOW, "values": SHADOW, **TRAINED_FIRST},
    # values come with training, from a copy that exists for them
    "operators-lag-alone": {"generate": SHADOW, "values": {**FIRST, "zero": 3}, **TRAINED_FIRST, "ref_logprobs": FIRST},
    "operators-every-3": {"generate": SHADOW, "values": SHADOW, **TRAINED_FIRST},
}
"""Placements of PPO's operators, on two ranks."""
SHAPES |= {name: {"placement": {"operators": entries}} for name, entries in ON_TWO.items()}
SHAPES["operators-lag"] |= {"schedule": {"lag": 1}, "steps": 5}
SHAPES["operators-lag-alone"] |= {"schedule": {"lag": 2}, "steps": 6}
SHAPES["operators-every-3"] |= {"sync": {"every": 3}, "steps": 5}
# copies that are made anew in every step: the second one shows it
SHAPES["operators-engines"]["steps"] = SHAPES["operators-nodes"]["steps"] = 2
SHAPES["operators-nodes"]["cluster"] = {"nodes": [{"count": 2, "devices": 2}]}
SHAPES["operators-chunks"] = {**SHAPES["operators-lanes"], "schedule": {"num_chunks": 2}}
CONFIGS = Path(__file__).parents[2] / "configs"
HALF = {"0-7": "0-3", "0-3": "0-1", "4-7": "2-3"}


ROLE_OF = {
    "generate": "actor",
    "ref_logprobs": "ref",
    "values": "critic",
    "scores": "reward",
    "train_actor": "actor",
    "train_critic": "critic",
}


def _halved(name: str) -> Raw:
    """The placement of one of ReaL's plans, in ``configs`` on 8 devices, on 4: by the rule that its first lines state,
    the largest degree is halved, of equal ones dp, then pp, then tp."""
    raw = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    entries = {}
    for operator, entry in raw["placement"]["operators"].items():
        first, last = map(int, entry["ranks"].split("-"))
        tp, pp = entry.get("tp", 1), entry.get("pp", 1)
        dp = (last - first + 1) // (tp * pp)
        if dp < max(tp, pp):
            tp, pp = (tp, pp // 2) if pp >= tp else (tp // 2, pp)
        engine = entry.get("engine") or raw["models"][ROLE_OF[operator]].get("engine", "torch")
        entries[operator] = {"ranks": HALF[entry["ranks"]], "engine": engine, "tp": tp, "pp": pp}
    return {"operators": entries}


REAL = ("real-7b-heuristic", "real-7b-searched", "real-70b-heuristic", "real-70b-searched")
SHAPES |= {name: {"placement": _halved(name)} for name in REAL}


def _names(shape: Raw) -> tuple[str, ...]:
    """The placed models that a shape names, of PPO's."""
    placement = shape["placement"]
    return tuple(placement) if isinstance(placement, dict) else (FOUR if len(placement) == 4 else SIX_MODELS)


ON_FOUR_ONLY = ("six-uneven", "six-apart", "classes", "shares", "classes-six", "span", "apart", "quarter")


def _has_copies(shape: str) -> bool:
    """Whether weights are copied from one step to the next."""
    placement = SHAPES[shape]["placement"]
    return len(placement) == len(SIX) or not {"operators", "actor.shadow"}.isdisjoint(placement)


def _everywhere(**settings: Any) -> Raw:
    return {role: dict(settings) for role in ("actor", "critic", "ref", "reward")}


def _on_experts(**settings: Any) -> Raw:
    return {role: dict(settings) for role in ("actor", "critic", "ref")}


OFFLOADED = {"activation_checkpointing": True, "offload_activations": True}
LONG = OFFLOADED | {"tiled_mlp": True}
"""Settings with which sequences may be longest."""
COMPUTE: dict[str, Raw] = {
    "replicas": {},
    "torch-2": _everywhere(zero=2),
    "torch-3": _everywhere(zero=3),
    **{
        f"deepspeed-{stage}": _everywhere(engine="deepspeed", zero=stage)
        | {"actor": {"engine": "deepspeed", "zero": stage, **LONG}}
        for stage in range(4)
    },
    "recomputed": _everywhere(zero=3) | {role: {"zero": 3, **LONG} for role in ("actor", "critic")},
    "unpacked": _everywhere(pack_texts=False),
    "unshared": _everywhere(share_prompts=False),
    "tp": _everywhere(tp=2) | {"actor": {"tp": 2, **LONG}},
    "tp-3": _everywhere(tp=2, zero=3),
    "ep": _on_experts(ep=2),
    "ep-3": _on_experts(ep=2, zero=3),
    # experts on all four ranks; of three on a rank a half of each
    "ep-tp": {"actor": {"ep": 2, "tp": 2}, "critic": {"ep": 2, "zero": 3}, "ref": {"tp": 2}},
    "experts-tp": {"actor": {"ep": 2, "zero": 3}, "critic": {"tp": 2, "zero": 3}, "ref": {"tp": 2}},
    "ep-recomputed": _on_experts(ep=2) | {"actor": {"ep": 2, "activation_checkpointing": True}},
    # weights go to and from shards of all experts
    "ep-apart": {"actor": {"engine": "deepspeed", "zero": 3}, "critic": {"ep": 2}, "ref": {"zero": 3}},
    **{f"experts-deepspeed-{stage}": _on_experts(engine="deepspeed", zero=stage) for stage in range(4)},
    "cp": _everywhere(cp=2),
    "cp-3": _everywhere(cp=2, zero=3),
    "cp-ring": _everywhere(cp=2, context_parallel="ring"),
    "cp-ring-2": _everywhere(cp=2, context_parallel="ring", zero=2),
    "cp-tp-3": _everywhere(cp=2, tp=2, zero=3),
    # more parts than heads of keys and values
    "cp-4": _everywhere(cp=4),
    "cp-ring-4": _everywhere(cp=4, context_parallel="ring", zero=3),
    **{f"deepspeed-{stage}-tp": _everywhere(engine="deepspeed", zero=stage, tp=2) for stage in (0, 2, 3)},
    # as many parts as it has heads of keys and values
    "tp-4": _everywhere() | {"actor": {"path": "assets:models/even-actor", "tp": 4}},
    # each side in its own way
    "mixed": {
        "actor": {"engine": "deepspeed", "zero": 3},
        "critic": {"zero": 3},
        "ref": {"zero": 2},
        "reward": {"engine": "deepspeed", "zero": 3},
    },
    # every shadow of another layout than its source
    "crossed": {
        "actor": {"engine": "deepspeed", "zero": 3, "shadow": {"engine": "torch", "zero": 0, "tp": 2}},
        "critic": {"zero": 3, "shadow": {"engine": "deepspeed"}},
        "ref": {"tp": 2},
        "reward": {"zero": 2},
    },
    "uncrossed": {
        "actor": {"tp": 2, "shadow": {"tp": 1, "zero": 3}},
        "critic": {"engine": "deepspeed", "zero": 2, "shadow": {"engine": "torch", "zero": 2}},
        "ref": {"engine": "deepspeed", "zero": 3},
        "reward": {"tp": 2, "zero": 2},
    },
    # Megatron-Core serves no generation: shadows or rollout engines generate
    "megatron-tp": {
        "actor": {"engine": "megatron", "tp": 2, "zero": 1, "shadow": {"engine": "torch", "tp": 1}},
        "critic": {"engine": "megatron", "pp": 2, "shadow": {"tp": 2, "pp": 1}},
        "ref": {"engine": "megatron", "pp": 2},
        "reward": {"engine": "megatron", "zero": 1},
    },
    "megatron-pp": {
        "actor": {"engine": "megatron", "pp": 2, "shadow": {"engine": "deepspeed", "zero": 3}},
        "critic": {"engine": "megatron", "shadow": {"engine": "torch"}},
        "ref": {"engine": "deepspeed", "zero": 3},
        "reward": {"engine": "megatron", "tp": 2},
    },
    "megatron-cp": {
        "actor": {"engine": "megatron", "cp": 2, "context_parallel": "ring", "shadow": {"engine": "torch", "cp": 1}},
        "critic": {"engine": "megatron", "cp": 2, "zero": 1, "shadow": {"engine": "torch"}},
        "ref": {"engine": "megatron", "cp": 2},
        "reward": {"engine": "megatron", "cp": 2, "context_parallel": "ring"},
    },
    # on four ranks, next to a rollout engine
    "megatron-tp-pp": {
        "actor": {"engine": "megatron", "tp": 2, "pp": 2},
        "critic": {"engine": "megatron", "tp": 2, "zero": 1},
        "ref": {"engine": "megatron", "pp": 2, "zero": 1},
        "reward": {"zero": 3},
    },
    "megatron-pp-dp": {
        "actor": {"engine": "megatron", "pp": 2, "zero": 1, "activation_checkpointing": True},
        "critic": {"engine": "megatron", "tp": 2, "pp": 2},
        "ref": {"engine": "megatron", "tp": 2},
        "reward": {"engine": "deepspeed", "zero": 3},
    },
    # for the shape of this name: DeepSpeed on two ranks, FSDP2 on the other two
    "apart": {
        "actor": {"engine": "deepspeed", "zero": 2},
        "ref": {"engine": "deepspeed", "zero": 3},
        "critic": {"zero": 3},
        "reward": {"zero": 2},
    },
}
"""How models compute: changes no number."""
PRECISION: dict[str, Raw] = {
    "bf16": _everywhere(dtype="bfloat16"),
    "bf16-torch-3": _everywhere(dtype="bfloat16", zero=3),
    **{f"bf16-deepspeed-{z}": _everywhere(dtype="bfloat16", engine="deepspeed", zero=z) for z in (2, 3)},
    # the shadows pad other rows together than the trained copies
    "bf16-pieces": _everywhere(dtype="bfloat16")
    | {role: {"dtype": "bfloat16", "shadow": {"micro_batch_tokens": 20}} for role in ("actor", "critic")},
    "bf16-tp": _everywhere(dtype="bfloat16", tp=2),
    **{f"bf16-deepspeed-{z}-tp": _everywhere(dtype="bfloat16", engine="deepspeed", zero=z, tp=2) for z in (1, 2)},
    "fp16-tp": _everywhere(dtype="float16", tp=2),
    # trained in shards, generated with by slices
    "bf16-tp-shadow": _everywhere(dtype="bfloat16")
    | {role: {"dtype": "bfloat16", "zero": 3, "shadow": {"zero": 0, "tp": 2}} for role in ("actor", "critic")},
    "fp16": _everywhere(dtype="float16"),
    "fp16-torch-3": _everywhere(dtype="float16", zero=3),
    "fp16-frozen": {role: {"dtype": "float16"} for role in ("ref", "reward")},
    "fp16-frozen-torch-3": {role: {"dtype": "float16", "zero": 3} for role in ("ref", "reward")},
    "bf16-frozen": {role: {"dtype": "bfloat16"} for role in ("ref", "reward")},
    "bf16-frozen-torch-3": {role: {"dtype": "bfloat16", "zero": 3} for role in ("ref", "reward")},
}
"""Other types: change results by their rounding."""


def _rollout(engine: str, **settings: Any) -> Raw:
    """The gate is as tight as float32 allows, in every step in which both sides have the same weights."""
    parity = {"every": 1, "max_difference": 1e-4, "mean_difference": 2e-5}
    return {"engine": engine, "parity": parity, **settings}


_vllm, _torch = partial(_rollout, "vllm"), partial(_rollout, "torch")


ADAPTERS = "vllm-adapters"
"""For settings with adapters alone."""
ROLLOUTS: dict[str, Raw] = {
    "transformers": {},
    "vllm": _vllm(),
    "vllm-tp": _vllm(tp=2),
    "vllm-pp": _vllm(pp=2),
    "vllm-child": _vllm(process="child"),
    "vllm-tp-pp": _vllm(tp=2, pp=2),
    # one row at a time, without a cache for the next sample of its prompt
    "vllm-narrow": _vllm(kv_tokens=32),
    "vllm-awake": _vllm(sleep=False),
    # some layers that vLLM fuses have no adapters, and the LoRA rank is padded
    ADAPTERS: _vllm(adapters="separate", tp=2),
    # the hybrid engine: in another layout on the same ranks
    "torch": _torch(),
    "torch-tp": _torch(tp=2),
    "torch-narrow": _torch(kv_tokens=16, tp=2),
    "torch-awake": _torch(sleep=False),
    # its own generators sample other tokens, so that there is no reference
    "vllm-engine": _vllm(noise="engine"),
}
"""Rollout engines: change no results."""
STAGES = ("torch-2", "torch-3", *(f"deepspeed-{stage}" for stage in range(4)))
"""Engine and ZeRO stage, but torch's stage 0, which is "replicas"."""
SLICED = ("tp", "tp-3", "deepspeed-2-tp", "deepspeed-3-tp")
"""Two tensor-parallel ranks, and stages."""
PPO_SHAPES = {
    1: ("co-located",),
    2: tuple(name for name, raw in SHAPES.items() if len(raw["placement"]) > 1 and name not in ON_FOUR_ONLY),
    4: tuple(name for name, raw in SHAPES.items() if len(raw["placement"]) > 1),
}
SUPERVISED_SHAPES = {1: ("all",), 2: ("all", "half"), 4: ("all", "half")}
PREFERENCE_SHAPES = {
    ranks: tuple(name for name in shapes if "actor.shadow" not in _names(SHAPES[name]))
    for ranks, shapes in PPO_SHAPES.items()
}


def shapes_of(setting: str, ranks: int) -> tuple[str, ...]:
    """Shapes that may place the setting's models on so many ranks."""
    if setting in SUPERVISED:
        return SUPERVISED_SHAPES[ranks]
    shapes = (PREFERENCE_SHAPES if setting in PREFERENCES else PPO_SHAPES)[ranks]
    # a frozen model is pinned to the second device class
    has_frozen = set(roles_of(setting)) > set(TRAINED[algorithm_of(setting)])
    shapes = tuple(shape for shape in shapes if has_frozen or shape != "classes")
    limit = (SETTINGS[setting]["algorithm"].get("importance") or {}).get("max_staleness")
    return tuple(shape for shape in shapes if limit is None or _lag_of(shape) <= limit)


def _lag_of(shape: str) -> int:
    return SHAPES[shape].get("schedule", {}).get("lag", 0)


SWITCHED = Case("switched", "operators-two", 2)
KILLED = Case("segments", "lag-4-every-2", 2, rollout="vllm-child")
"""Its vLLM process is killed while the run goes on."""
DEFAULT = [
    Case("two", "co-located", 1),
    Case("two", "halves", 2),
    Case("streaming", "six-overlap", 2),
    Case("one", "co-located", 2),
    Case("recomputed", "halves", 2),
    Case("short", "halves", 2),
    Case("nucleus", "co-located", 2),
    Case("ends", "co-located", 2, rollout="torch"),
    Case("two", "operators-lag-alone", 2),
    Case("grpo-as-ended", "co-located", 2),
    Case("segments-corrected", "lag-2-alone", 2),
    Case("segments", "halves", 2, "torch-3", "torch"),
    Case("grpo-segments", "co-located", 2, "deepspeed-3"),
    Case("episodes", "co-located", 2),
    Case("grpo-episodes-segments", "halves", 2, "deepspeed-3"),
    Case("grpo-episodes-dynamic", "co-located", 2),
    Case("grpo-episodes-dynamic", "operators-lag", 2, rollout="vllm"),
    Case("four-samples", "operators-two", 2),
    SWITCHED,
    Case("one-trunk-adapters", "lag-4-every-2", 2),
    Case("grpo-process-models", "tight", 2),
    Case("safe-retokenized", "lag-4-every-2", 2),
    Case("sft", "half", 2),
    Case("reward", "all", 2),
    Case("reward-ends", "all", 2),
    Case("reward-bare", "half", 2),
    Case("reward-uneven", "all", 2),
    Case("sft-adapters", "half", 2),
    Case("adapters", "co-located", 2, "tp", "torch"),
    Case("shared", "co-located", 2, "deepspeed-2-tp"),
    Case("adaptive", "six-chunks", 2),
    Case("normalised", "six", 2),
    Case("frozen", "lag", 2),
    Case("ptx", "halves", 2),
    Case("ptx-adapters", "six-tight", 2),
    Case("rule", "operators-every-3", 2),
    Case("one-trunk-recomputed", "co-located", 2, rollout="torch"),
    Case("one-trunk-streaming", "six-chunks", 2),
    Case("grpo-alone", "six", 2),
    Case("one-trunk-alone", "halves", 2),
    Case("corrected-alone", "lag-2", 2),
    Case("grpo-recomputed", "six", 2),
    Case("grpo-rule", "co-located", 2, rollout="torch"),
    Case("grpo-dapo", "lag-chunks", 2),
    Case("grpo-dynamic", "every-3", 2),
    Case("grpo-dynamic-segments", "lag-2", 2),
    Case("grpo-counted", "halves", 2),
    Case("grpo-uneven", "co-located", 2),
    Case("greedy", "co-located", 2),
    Case("gspo", "six", 2),
    Case("grpo-masked", "lag", 2),
    Case("fresh", "lag-every-3", 2),
    Case("reinforce", "co-located", 2),
    Case("reinforce-as-ended", "halves", 2),
    Case("remax", "tight", 2),
    Case("remax", "lag-chunks", 2),
    Case("remax-episodes", "lag-4-every-2", 2),
    Case("remax-masked", "pairs", 2),
    Case("safe-ptx", "six-tight", 2),
    Case("dpo-smoothed", "tight", 2),
    Case("kto", "pairs", 2),
    Case("dpo-shared", "pairs", 2),
    Case("simpo", "half", 2),
    Case("orpo", "all", 2),
    Case("sft-chats", "all", 2),
    Case("dpo-chats", "halves", 2),
    Case("retokenized-second", "co-located", 2, "deepspeed-3", "torch-tp"),
    Case("thirds", "co-located", 2, "tp-3", "torch"),
    Case("scarce", "halves", 2, "torch-3", "torch-narrow"),
    Case("tokens-mixed", "halves", 2, "unpacked"),
    Case("epochs", "halves", 2, "recomputed"),
    Case("adapters", "six-chunks", 2, "deepspeed-0"),
    Case("reward-adapters", "all", 2, "deepspeed-3"),
    Case("one-trunk-epochs", "six-tight", 2, "deepspeed-0"),
    Case("one-trunk-uneven", "co-located", 2, "tp"),
    Case("raft", "halves", 2, "torch-2"),
    Case("rloo", "co-located", 2, "tp"),
    Case("one-trunk-uneven", "halves", 2, "torch-2"),
    Case("grpo-pieces", "co-located", 2, "mixed"),
    Case("grpo-shared", "halves", 2, "deepspeed-1"),
    Case("safe-called", "co-located", 2, "torch-2"),
    Case("safe", "co-located", 2, "tp"),
    Case("safe", "halves", 2, "deepspeed-2"),
    Case("unknown", "real-7b-searched", 4),
    Case("stopped", "operators-engines", 4),
    Case("uneven", "operators-nodes", 4),
    Case("bootstrap", "six-uneven", 4),
    Case("normed", "shares", 4),
    Case("tokens-called", "operators-chunks", 4),
    Case("pieces", "apart", 4, "apart"),
    Case("two-rewards", "lag-chunks", 4, "torch-3"),
    Case("episodes", "lag-chunks", 4, "tp"),
    Case("adapters", "co-located", 4, "megatron-tp-pp", "torch"),
    Case("unwhitened", "halves", 4, "tp-4", "torch"),
    Case("uneven", "halves", 4, "megatron-pp-dp", "torch"),
    Case("samples", "six", 2, "unshared"),
    Case("penalty", "six", 4, "crossed"),
    Case("grpo-corrected", "lag", 4, "megatron-pp"),
    Case("safe", "six", 4, "megatron-tp"),
    KILLED,
    Case("grpo", "co-located", 2, "cp"),
    Case("steps-models", "co-located", 2, "cp-ring"),
    Case("experts-episodes", "six", 2),
    Case("experts", "co-located", 2, "experts-tp", "vllm-tp"),
    Case("experts-adapters", "co-located", 2, "ep-apart"),
    Case("still", "co-located", 2),
    Case("adapters", "halves", 2, "deepspeed-3", "vllm"),
    Case("adapters", "co-located", 2, "torch-3", ADAPTERS),
]
_FOUND = {algorithm_of(case.setting) for case in DEFAULT}
DEFAULT += [Case(name, "halves" if len(ROLES[name]) > 1 else "half", 2) for name in KINDS if name not in _FOUND]
"""Cases of `make test`: each shape and engine once, and the pairs of covering.py, on as few ranks as show them. Runs
that test_resume.py resumes are compared with the reference, too: their settings do without a case here."""


def every_case() -> list[Case]:
    """Every setting under every shape; engines, stages, tensor parallel and rollouts with the hardest settings."""
    further = ("one-trunk", "one-trunk-uneven", "grpo-rule", "safe")
    with_adapters = ("adapters", "shared", "one-trunk-adapters", "grpo-shared")
    computed = {stage: ("two", "uneven", "scheduled", *further, *with_adapters) for stage in STAGES}
    computed["mixed"] = ("two", "uneven", *further)
    computed |= {way: ("two", "uneven", *further, *with_adapters) for way in (*SLICED, "deepspeed-0-tp")}
    engines = [
        Case(setting, shape, 4, compute)
        for compute, settings in computed.items()
        for shape in ("co-located", "halves", "six")
        for setting in settings
    ]
    placed = [
        Case(setting, shape, 4)
        for setting in ("two", "uneven", "samples", "epochs", "scheduled", "greedy", "corrected", "grpo-alone")
        for shape in (*OPERATORS, "operators-chunks", *REAL)
        if _chunks_divide(setting, shape)
    ]
    placed += [
        Case(setting, shape, ranks, rollout=rollout)
        for setting in ("two", "uneven", "corrected", "four-samples")
        for ranks, shapes, rollout in ((2, ON_TWO, "transformers"), (2, ON_TWO, "vllm"), (4, REAL, "vllm"))
        for shape in shapes
    ]
    return list(
        dict.fromkeys(
            [
                *_every_shape(),
                *engines,
                *placed,
                *_every_rollout(),
                *_every_hybrid(),
                *_every_megatron(),
                *_every_part_of_rows(),
                *_every_split_of_experts(),
            ]
        )
    )


def _every_part_of_rows() -> list[Case]:
    """Rows split over two and four ranks, packed and with shared prompts, alone and next to replicas."""
    settings = ("two", "uneven", "pieces", "samples", "segments", "episodes", "grpo", "one-trunk", "safe", "dpo")
    settings += ("sft", "reward-uneven")
    two, four = ("cp", "cp-3", "cp-ring", "cp-ring-2"), ("cp-3", "cp-ring", "cp-tp-3", "cp-4", "cp-ring-4")
    shapes = {"sft": "all", "reward-uneven": "all"}
    return [
        Case(setting, shapes.get(setting, "co-located"), ranks, way)
        for ranks, ways in ((2, two), (4, four))
        for setting, way in product(settings, ways)
    ]


def _every_split_of_experts() -> list[Case]:
    """Models with experts in every shape without tensor-parallel copies, their experts on one rank or on several."""
    ways = ("replicas", "torch-2", "torch-3", "unpacked", "ep", "ep-3", "ep-recomputed", "ep-apart", "cp")
    ways += tuple(f"experts-deepspeed-{stage}" for stage in range(4))
    shapes = ("co-located", "halves", "six", "lag-chunks", "six-overlap")
    # no stages: the only layer without experts would be one of two
    rollouts = [("co-located", "vllm-tp"), ("halves", "vllm-tp"), ("six", "vllm-child")]
    sampled = [
        Case(setting, shape, 4, way, rollout)
        for setting in WITH_EXPERTS
        # vLLM returns no experts to replay, and has neither latent attention nor routers with biases here
        if setting not in ("latent", *REPLAYED)
        for shape, rollout in rollouts
        for way in ("torch-3", "ep", "ep-3")
    ]
    sampled += [Case("experts", shape, 4, "experts-tp") for shape in ("co-located", "halves", "six")]
    sampled += [Case("experts", "co-located", 4, "ep-tp", rollout) for rollout in ("transformers", "vllm-tp")]
    sampled += [Case("experts-adapters", "co-located", 4, way) for way in ("ep-tp", "experts-tp")]
    # Megatron has no losses of routers
    sampled += [Case("experts-grpo", "lag", 4, way) for way in ("megatron-tp", "megatron-pp")]
    return sampled + [
        Case(setting, shape, ranks, way)
        for setting in WITH_EXPERTS
        for shape in shapes
        for ranks in (2, 4)
        for way in ways
        # a half of two ranks is one
        if ranks == 4 or shape == "co-located" or way not in ("ep", "ep-3", "ep-recomputed", "ep-apart", "cp")
        if setting not in OF_OWN_ATTENTION or way != "cp"
        if setting != "experts-grpo" or shape == "co-located"
        # DeepSpeed's engine records none
        if setting not in REPLAYED or ("deepspeed" not in way and way != "ep-apart")
    ]


def _every_megatron() -> list[Case]:
    """Parts, stages and replicas of actor and critic, next to other engines."""
    # none that evaluates, for which Megatron's copy would generate
    settings = ("two", "uneven", "pieces", "scarce", "scheduled", "epochs", "grpo", "safe", "adapters", "shared")
    sides = [
        Case(*names, 4, way) for names in product(settings, ("six", "lag")) for way in ("megatron-tp", "megatron-pp")
    ]
    four = [
        Case(*names, 4, way, "vllm")
        for names in product(settings, ("co-located", "halves"))
        for way in ("megatron-tp-pp", "megatron-pp-dp")
    ]
    sides += [Case(setting, "lag", 4, "megatron-cp") for setting in ("two", "grpo")]
    sides += [
        Case("grpo-episodes-segments", "lag", 4, "megatron-pp"),
        Case("grpo-episodes-dynamic", "six", 4, "megatron-tp"),
    ]
    # Megatron's distributed optimizer has no sgd
    return sides + [case for case in four if (case.setting, case.compute) != ("scheduled", "megatron-tp-pp")]


def _every_shape() -> list[Case]:
    """The product of settings and shapes, but for weights that are rounded, which other tests compare."""
    return [
        Case(setting, shape, ranks)
        for ranks in (1, 2, 4)
        for setting in SETTINGS
        for shape in shapes_of(setting, ranks)
        if setting not in (*NOT_COMPARED, *WITH_EXPERTS) and shape != "six-rounded" and _chunks_divide(setting, shape)
    ]


def _every_rollout() -> list[Case]:
    """vLLM for all settings that generate and in all shapes; its variants, and the layouts of its source."""
    settings = [name for name in SETTINGS if name not in (*SUPERVISED, *PREFERENCES, *NOT_COMPARED, *WITH_EXPERTS)]
    plain = [(setting, shape) for setting in settings for shape in ("co-located", "six", "lag-every-3")]
    plain += [
        (setting, shape)
        for setting in ("two", "corrected")
        for shape in PPO_SHAPES[4]
        if not shape.endswith(("tight", "rounded"))
    ]
    cases = [Case(*names, 4, rollout="vllm") for names in plain]
    cases.append(Case("episodes", "lag-chunks", 2, rollout="vllm-child"))
    for shape in ("co-located", "halves", "six", "six-chunks", "lag"):
        for setting in ("two", "uneven", "four-samples", "corrected"):
            cases += [Case(setting, shape, 4, rollout=rollout) for rollout in _rollouts_of(shape)]
        for compute in (*STAGES, "tp", "tp-3", "mixed"):
            cases += [Case(setting, shape, 4, compute, "vllm") for setting in ("two", "one-trunk", "grpo")]
            cases.append(Case("two", shape, 4, compute, "vllm-pp"))
        for compute in ("replicas", *STAGES, *SLICED):
            settings = ("adapters", "shared", "one-trunk-adapters")
            cases += [Case(setting, shape, 4, compute, way) for setting in settings for way in ("vllm", ADAPTERS)]
    return [case for case in cases if _chunks_divide(case.setting, case.shape) and not _lacks_copy(case)]


def _lacks_copy(case: Case) -> bool:
    """Whether the log-probs of sampled tokens have to be recomputed, on ranks without another copy of the actor."""
    is_recomputed = SETTINGS[case.setting].get("rollout", {}).get("logprobs") == "recompute"
    return is_recomputed and "actor.shadow" in _names(SHAPES[case.shape])


def _every_hybrid() -> list[Case]:
    """Torch on the ranks that train the actor, in its layouts and under each way to train it."""
    ways = (*STAGES, "tp", "tp-3", "tp-4", "megatron-tp-pp", "megatron-pp-dp")
    rollouts = [name for name in ROLLOUTS if name.startswith("torch")]
    settings = ("ends", "corrected", "one-trunk", "grpo-rule", "retokenized")
    cases = [Case(setting, "co-located", 4, rollout=rollout) for setting in settings for rollout in rollouts]
    for rollout in ("torch", "torch-tp"):
        cases += [Case("uneven", shape, 4, way, rollout) for shape in ("co-located", "halves") for way in ways]
        adapted = ("adapters", "shared", "one-trunk-adapters")
        cases += [Case(setting, "co-located", 4, way, rollout) for setting in adapted for way in (*STAGES, *SLICED)]
        # Megatron puts one head on a trunk
        cases += [Case("shared", "co-located", 4, way, rollout) for way in ("megatron-tp-pp", "megatron-pp-dp")]
    return cases


def _rollouts_of(shape: str) -> list[str]:
    """Variants of vLLM with a reference; on the trained actor's ranks none has a process of its own."""
    left_out = ("vllm-engine", ADAPTERS, *(("vllm-child",) if shape in ("co-located", "halves") else ("vllm-tp-pp",)))
    return [name for name in ROLLOUTS if name.startswith("vllm") and name not in left_out]


def _chunks_divide(setting: str, shape: str) -> bool:
    """Whether the chunks of the shape divide the mini-batches of the setting."""
    chunks = SHAPES[shape].get("schedule", {}).get("num_chunks", 1)
    return SETTINGS[setting]["algorithm"]["num_mini_batches"] % chunks == 0


@dataclass(frozen=True)
class Assets:
    """Models, tokenizer and data of a session."""

    directory: Path

    def model(self, name: str) -> str:
        return str(self.directory / "models" / name)

    def spec(self, case: Case) -> Spec:
        algorithm, roles = algorithm_of(case.setting), roles_of(case.setting)
        file = FILES[algorithm]
        base: Raw = {
            "name": case.name,
            "algorithm": DEFAULTS[algorithm],
            "models": {role: self._model(case, role, role in TRAINED[algorithm]) for role in roles},
            "data": {
                "path": str(self.directory / f"{file}.jsonl"),
                "tokenizer": str(self.directory / "tokenizer"),
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": RESPONSE_TOKENS,
            },
            "steps": 3 if case.setting in LONGER or case.compute in PRECISION or _has_copies(case.shape) else 2,
            "seed": 7,
            "cluster": {"devices": case.ranks, "device": DEVICE},
            "debug": {"record_columns": True},
            "samples": {"every": 1, "count": 3},
            "runs": str(self.directory / "runs"),
            # another vLLM process starts while other ranks wait
            "timeout_seconds": 240 if case == KILLED else 60,
        }
        if case.setting in EVALUATED:
            base["eval"] = {"path": str(self.directory / f"{file}-evaluation.jsonl"), "every": 1}
        shape = SHAPES[case.shape]
        if "nodes" in shape.get("cluster", {}):
            del base["cluster"]["devices"]
        computes = (COMPUTE | PRECISION)[case.compute]
        compute = {"models": {role: computes[kin] for role in roles if (kin := KIN.get(role, role)) in computes}}
        raw = _merged(_merged(_merged(base, SETTINGS[case.setting]), shape), compute)
        raw["placement"] = placement_of(shape["placement"], roles, TRAINED[algorithm], raw.get("reward"))
        if case.shape in SPLIT:
            raw["algorithm"] = {**raw["algorithm"], "protocols": _protocols(algorithm, roles)}
        if case.has_rollout_engine:
            raw = _with_rollout(raw, ROLLOUTS[case.rollout])
        return Spec.parse(self._in_place(raw), case.name)

    def _model(self, case: Case, role: str, trained: bool) -> Raw:
        limits = {"actor": 1.0, "critic": 2.0, "cost_critic": 2.0, "reward": None}
        # Adam's first step of a weight is g / (|g| + eps): if a gradient is near 0, eps divides its rounding
        # (1e-8 to 5e-8), and one such weight of a model this small is seen in the values
        optimizer = {"learning_rate": 1e-3, "eps": 1e-4, "weight_decay": 0.01, "max_grad_norm": limits.get(role)}
        name = "wide-actor" if case.has_vllm and role == "actor" else role
        if role == "actor" and algorithm_of(case.setting) == "ac-share":
            name = f"{name}-with-values"
        if role == "actor" and (
            case.setting == "ends" or any(word in case.setting for word in ("as-ended", "segments"))
        ):
            name = f"{name}-with-ends"
        if role == "actor" and case.setting == "shared":
            name = f"{name}-adapters"
        return {"path": self.model(name), **({"optimizer": optimizer} if trained else {})}

    def _in_place(self, raw: Any) -> Any:
        """``raw`` with the paths of these assets."""
        if isinstance(raw, dict):
            return {key: self._in_place(value) for key, value in raw.items()}
        if isinstance(raw, list):
            return [self._in_place(value) for value in raw]
        return raw.replace("assets:", f"{self.directory}/") if isinstance(raw, str) else raw


def _protocols(algorithm: str, roles: tuple[str, ...]) -> dict[str, str]:
    """A function that splits the rows of each operator of some roles."""
    names = {"ref": ("ref_logprobs",), "critic": ("values", "train_critic"), "actor": ("train_actor",)}
    operators = ["generate"] * KINDS[algorithm].SAMPLES + [name for role in roles for name in names.get(role, ())]
    return dict(zip(operators, cycle(f"{SPLITS}:{name}" for name in ("scattered", "round_robin", "last_alone"))))


def roles_of(setting: str) -> tuple[str, ...]:
    """The roles that are placed, in vector order."""
    raw = SETTINGS[setting]
    algorithm = {**DEFAULTS[algorithm_of(setting)], **raw["algorithm"]}
    kl = KINDS[algorithm["name"]].model_fields.get("kl")
    has_no_ref = kl is not None and algorithm.get("kl", kl.default) is None
    is_shared = "share" in raw.get("models", {}).get("ref", {})
    roles: list[str] = []
    for role in ROLES[algorithm_of(setting)]:
        if role in raw:
            roles += [source["model"] for source in raw[role] if "model" in source]
        elif role == "reward" and "environment" in raw:
            continue
        elif role != "ref" or not (has_no_ref or is_shared):
            roles.append(role)
    return tuple(roles)


def placement_of(placement: Any, roles: tuple[str, ...], trained: tuple[str, ...], sources: Any = None) -> Any:
    """``placement`` of PPO's models for ``roles``, in the same form; other roles are placed like their kin.

    ``sources``: of the reward, whose models have an operator each.
    """
    if isinstance(placement, list) and len(placement) == 1:
        return placement
    if "operators" in placement:
        placed = {name: at for name, at in placement["operators"].items() if ROLE_OF[name] in roles}
        if sources is not None and "scores" in placed:
            at = placed.pop("scores")
            placed |= {f"scores_{source['model']}": at for source in sources if "model" in source}
        return {"operators": placed}
    is_vector = isinstance(placement, list)
    given = dict(zip(_names({"placement": placement}), placement, strict=True)) if is_vector else placement
    has_shadows = "actor.shadow" in given
    names = [(f"{role}.shadow", f"{KIN.get(role, role)}.shadow") for role in roles if role in trained and has_shadows]
    names += [(role, KIN.get(role, role)) for role in roles]
    entries = {name: given[kin] for name, kin in names if kin in given}
    if is_vector:
        return list(entries.values())
    return entries | {name: value for name, value in given.items() if name == "span_classes"}


def _merged(base: Raw, changes: Raw) -> Raw:
    """``changes`` over ``base``, mapping by mapping; a placement is taken whole."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and key != "placement"
        out[key] = _merged(out[key], value) if both else value
    return out


def _with_rollout(raw: Raw, rollout: Raw) -> Raw:
    """``raw`` with a rollout engine, instead of the actor's shadow if there is one."""
    placement, algorithm = raw["placement"], raw["algorithm"]
    if isinstance(placement, dict):
        placement = {name.replace("actor.shadow", "actor.rollout"): entry for name, entry in placement.items()}
    if not {"top_p", "top_k", "min_response_tokens"}.isdisjoint(algorithm):
        rollout = rollout | {"parity": None}
    if "operators" in placement and "importance" not in algorithm:
        # without a pass of their own, for which the shapes have no place
        rollout = {"logprobs": "reuse"} | rollout
    if "operators" in placement:
        entries = placement["operators"]
        own = {name: value for name, value in entries["generate"].items() if name in ("ranks", "tp", "shadow")}
        placement = {"operators": {**entries, "generate": own}}
    return {**raw, "placement": placement, "rollout": raw.get("rollout", {}) | rollout}


def make_assets(directory: Path) -> Assets:
    write_assets(directory)
    return Assets(directory)
