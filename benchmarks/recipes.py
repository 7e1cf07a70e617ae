"""Settings chosen for a YAML that leaves them out, next to results of ``advise`` and public recipes of the peers.

    python -m benchmarks.recipes

Prints two tables of predicted steps, at the longest prompts and responses. The first has YAMLs with only algorithm,
models, data and cluster. The second has runs of public recipes: each with the recipe's batch, lengths and GPUs, planned
once with the recipe's execution settings and once without any.

A recipe's micro-batch of n sequences on a GPU is ``micro_batch_tokens`` of n times the longest prompt and response.
vLLM's GPU memory fraction becomes a cache of the memory that the weights leave in it. Ranks that share a sequence are
data-parallel ranks here. Weights and optimizer states that a recipe offloads between phases are offloaded here if the
plan needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.plan.choice import planned
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.weights.shapes import model_shape

Section = Mapping[str, Any]
A100, H100, H800, RTX4090, V100 = "A100-80G", "H100-80G", "H800-80G", "RTX4090-24G", "V100-32G"
PER_NODE = 8


@dataclass(frozen=True)
class Run:
    """Run whose YAML has no execution settings.

    title:      algorithm and size.
    algorithm:  its section.
    model:      name of the sizes of every model.
    devices:    number and class.
    lora:       rank of the adapters; None: all weights are trained.
    tokens:     longest prompt and response.
    roles:      models that the YAML names.
    lag:        batches by which generation is ahead.
    """

    title: str
    algorithm: Section
    model: str
    devices: tuple[tuple[int, str], ...]
    lora: int | None = None
    tokens: tuple[int, int] = (1024, 1024)
    roles: tuple[str, ...] = ("actor",)
    lag: int = 0

    @property
    def sections(self) -> dict[str, Any]:
        """Sections of the YAML."""
        has_rule = self.algorithm["name"] in ("ppo", "grpo") and "reward" not in self.roles
        shared = {"init": self.model, **({"lora": {"rank": self.lora}} if self.lora else {})}
        return {
            "name": self.title.lower().replace(", ", "-").replace(" ", "-"),
            "algorithm": self.algorithm,
            "models": dict.fromkeys(self.roles, shared),
            **({"reward": {"rule": "math"}} if has_rule else {}),
            "data": {"path": "rows.jsonl", "max_prompt_tokens": self.tokens[0], "max_response_tokens": self.tokens[1]},
            "cluster": {"nodes": [_nodes(*each) for each in self.devices]},
            **({"schedule": {"lag": self.lag}} if self.lag else {}),
        }

    @property
    def hardware(self) -> str:
        return " + ".join(f"{number} {name.partition('-')[0]}" for number, name in self.devices)


def _nodes(number: int, name: str) -> Section:
    """Return nodes of at most eight devices."""
    return {"count": max(1, number // PER_NODE), "devices": min(number, PER_NODE), "class": name}


@dataclass(frozen=True)
class Recipe:
    """Public recipe of a peer.

    run:        algorithm, models, batch and lengths.
    source:     key in ``REPOSITORIES``.
    file:       path there.
    models:     settings by role.
    note:       differences from the file.
    vllm:       vLLM's tensor-parallel ranks and its GPU memory fraction; None: nothing is generated.
    placement:  section of that name; None: every model on all devices.
    """

    run: Run
    source: str
    file: str
    models: Section
    note: str = ""
    vllm: tuple[int, float] | None = None
    placement: Section | None = None

    @property
    def sections(self) -> dict[str, Any]:
        """Sections of the YAML with the recipe's settings."""
        sections = self.run.sections
        own = sections["models"]
        models = {role: {**own.get(role, {}), **self.models.get(role, {})} for role in {**own, **self.models}}
        return {**sections, "models": models, "placement": self.placement, "rollout": self._rollout}

    @property
    def _rollout(self) -> Section:
        """Engine that generates, with a cache of the memory that its weights leave in its fraction."""
        if self.vllm is None:
            return {}
        (tp, share), shape = self.vllm, model_shape("actor", ModelSpec.model_validate({"init": self.run.model}))
        assert shape is not None and shape.sizes is not None, "models by name have sizes"
        token = 4 * shape.sizes.layers * shape.sizes.kv_heads * shape.sizes.head_dim
        memory = share * DeviceClass.KNOWN[self.run.devices[0][1]].memory_gb * 2**30
        return {"engine": "vllm", "tp": tp, "kv_tokens": int((tp * memory - 2 * shape.num_parameters) / token)}


PPO = ("actor", "reward")
STEP = {"prompts_per_step": 64, "num_mini_batches": 4}
RUNS = (
    Run("SFT 7B", {"name": "sft", **STEP}, "qwen2.5-7b", ((8, A100),)),
    Run("SFT 7B, LoRA", {"name": "sft", **STEP}, "qwen2.5-7b", ((1, RTX4090),), lora=8),
    Run("SFT 1.5B", {"name": "sft", **STEP}, "qwen2.5-1.5b", ((1, RTX4090),)),
    Run("SFT 32B", {"name": "sft", **STEP}, "qwen2.5-32b", ((8, H100),)),
    Run("DPO 7B", {"name": "dpo", **STEP}, "qwen2.5-7b", ((8, A100),)),
    Run("DPO 32B, LoRA", {"name": "dpo", **STEP}, "qwen2.5-32b", ((8, H100),), lora=8),
    Run("reward 7B", {"name": "reward", **STEP}, "qwen2.5-7b", ((8, A100),), roles=("reward",)),
    Run("GRPO 1.5B", {"name": "grpo", **STEP}, "qwen2.5-1.5b", ((1, A100),)),
    Run("GRPO 7B, LoRA", {"name": "grpo", **STEP}, "qwen2.5-7b", ((1, H100),), lora=8),
    Run("GRPO 7B", {"name": "grpo", **STEP}, "qwen2.5-7b", ((8, H100),)),
    Run("DAPO 32B", {"name": "grpo", "like": "dapo", **STEP}, "qwen2.5-32b", ((64, A100),), tokens=(1024, 4096)),
    Run("PPO 1.5B", {"name": "ppo", **STEP}, "qwen2.5-1.5b", ((1, H100),), roles=PPO),
    Run("PPO 7B", {"name": "ppo", **STEP}, "qwen2.5-7b", ((8, H100),), roles=PPO),
    Run("PPO 7B", {"name": "ppo", **STEP}, "qwen2.5-7b", ((16, A100),), roles=PPO),
    Run("PPO 32B", {"name": "ppo", **STEP}, "qwen2.5-32b", ((64, H100),), roles=PPO),
    Run("PPO 7B", {"name": "ppo", **STEP}, "qwen2.5-7b", ((8, A100), (8, V100)), roles=PPO),
)

REPOSITORIES = {
    "verl": "volcengine/verl@b178a3cd",
    "verl 0.6.1": "volcengine/verl@d62da495",
    "OpenRLHF": "OpenRLHF/OpenRLHF@3c3be623",
    "alignment-handbook": "huggingface/alignment-handbook@925acdfe",
    "open-r1": "huggingface/open-r1@1416fa0c",
    "open-instruct": "allenai/open-instruct@e6c3044a",
    "LLaMA-Factory": "hiyouga/LLaMA-Factory@ff6d4d12",
}


def _all(zero: int, tokens: int, **others: Any) -> Section:
    """Return settings of every model: ZeRO stage, tokens of a pass, and recomputation, which all recipes have."""
    return {"zero": zero, "micro_batch_tokens": tokens, "activation_checkpointing": True, **others}


def _step(name: str, prompts: int, mini_batches: int = 1, samples: int | None = None, **others: Any) -> Section:
    """Return the section of an algorithm."""
    sizes = {"prompts_per_step": prompts, "num_mini_batches": mini_batches}
    return {"name": name, **sizes, **({} if samples is None else {"samples_per_prompt": samples}), **others}


def _ranks(first: int, end: int) -> Section:
    return {"ranks": list(range(first, end))}


DEEPSPEED: Section = {"engine": "deepspeed"}
UNSTATED = "class of GPUs not stated"
RECIPES = (
    Recipe(
        Run("SFT 7B", _step("sft", 128), "mistral-7b", ((8, A100),)),
        "alignment-handbook",
        "recipes/zephyr-7b-beta/sft/config_full.yaml",
        {"all": _all(3, 16 * 2048, **DEEPSPEED)},
        "8 GPUs of 80 GB",
    ),
    Recipe(
        Run("SFT 8B", _step("sft", 256), "llama-3-8b", ((8, A100),)),
        "OpenRLHF",
        "examples/scripts/train_sft.sh",
        {"all": _all(2, 2 * 2048, **DEEPSPEED)},
        f"number and {UNSTATED}",
    ),
    Recipe(
        Run("SFT 70B", _step("sft", 128), "llama-3.1-70b", ((64, H100),), tokens=(2048, 2048)),
        "open-instruct",
        "docs/tulu3.md",
        {"all": _all(3, 4096, **DEEPSPEED)},
    ),
    Recipe(
        Run("SFT 4B, LoRA", _step("sft", 8), "qwen3-4b", ((1, RTX4090),), lora=8),
        "LLaMA-Factory",
        "examples/train_lora/qwen3_lora_sft.yaml",
        {"all": _all(0, 2048)},
        UNSTATED,
    ),
    Recipe(
        Run("DPO 7B", _step("dpo", 128), "mistral-7b", ((8, A100),), tokens=(512, 512)),
        "alignment-handbook",
        "recipes/zephyr-7b-beta/dpo/config_full.yaml",
        {"all": _all(3, 16 * 1024, **DEEPSPEED)},
        "8 GPUs of 80 GB",
    ),
    Recipe(
        Run("DPO 32B", _step("dpo", 128), "qwen2.5-32b", ((64, H100),), tokens=(4096, 4096)),
        "open-instruct",
        "scripts/train/olmo3/32b_instruct_dpo.sh",
        {"all": _all(3, 2 * 8192, **DEEPSPEED)},
        "there OLMo 3 32B, and the reference's log-probs from a pass before",
    ),
    Recipe(
        Run("DPO 4B, LoRA", _step("dpo", 8), "qwen3-4b", ((1, RTX4090),), lora=8),
        "LLaMA-Factory",
        "examples/train_lora/qwen3_lora_dpo.yaml",
        {"all": _all(0, 2 * 2048)},
        UNSTATED,
    ),
    Recipe(
        Run("reward 8B", _step("reward", 256), "llama-3-8b", ((8, A100),), tokens=(4096, 4096), roles=("reward",)),
        "OpenRLHF",
        "examples/scripts/train_rm.sh",
        {"all": _all(3, 2 * 8192, **DEEPSPEED)},
        f"number and {UNSTATED}",
    ),
    Recipe(
        Run("GRPO 1.5B, LoRA", _step("grpo", 128, 1, 5), "qwen2.5-1.5b", ((1, H100),), lora=32, tokens=(512, 1024)),
        "verl",
        "examples/tuning/1.5b/qwen2-1.5b_grpo-lora_1_h100_fsdp_vllm.sh",
        {"all": _all(0, 128 * 1536)},
        vllm=(1, 0.1),
    ),
    Recipe(
        Run("GRPO 1.5B", _step("grpo", 32, 1, 16), "qwen2.5-1.5b", ((8, H100),), tokens=(512, 1024)),
        "open-r1",
        "recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml",
        {"all": _all(3, 16 * 1536, **DEEPSPEED)},
        "--vllm_mode colocate, as in its README",
        vllm=(1, 0.3),
    ),
    Recipe(
        Run("GRPO 7B, LoRA", _step("grpo", 16, 1, 5), "qwen2.5-7b", ((1, H100),), lora=32, tokens=(512, 1024)),
        "verl",
        "examples/tuning/7b/qwen2-7b_grpo-lora_1_h100_fsdp_vllm.sh",
        {"all": _all(0, 16 * 1536)},
        vllm=(1, 0.2),
    ),
    Recipe(
        Run("GRPO 7B", _step("grpo", 1024, 4, 5), "qwen2.5-7b", ((8, H100),), tokens=(512, 1024)),
        "verl",
        "examples/grpo_trainer/run_qwen2-7b.sh",
        {"all": _all(3, 40 * 1536)},
        UNSTATED,
        vllm=(2, 0.6),
    ),
    Recipe(
        Run("GRPO 32B, LoRA", _step("grpo", 180, 1, 5), "qwen2.5-32b", ((4, H100),), lora=32, tokens=(512, 1024)),
        "verl",
        "examples/tuning/32b/qwen2-32b_grpo-lora_4_h100_fsdp_vllm.sh",
        {"all": _all(3, 45 * 1536)},
        vllm=(4, 0.3),
    ),
    Recipe(
        Run("DAPO 7B", _step("grpo", 512, 16, like="dapo"), "qwen2.5-7b", ((32, H100),), tokens=(2048, 2048)),
        "verl 0.6.1",
        "recipe/dapo/test_dapo_7b.sh",
        {"all": _all(3, 4096)},
        UNSTATED,
        vllm=(1, 0.85),
    ),
    Recipe(
        Run("DAPO 32B", _step("grpo", 512, 16, like="dapo"), "qwen2.5-32b", ((128, H800),), tokens=(2048, 20480)),
        "verl 0.6.1",
        "recipe/dapo/run_dapo_qwen2.5_32b.sh",
        {"all": _all(3, 22528)},
        vllm=(4, 0.8),
    ),
    Recipe(
        Run(
            "GRPO 32B",
            _step("grpo", 256, 1, 64, kl=None),
            "qwen2.5-32b",
            ((64, H100),),
            tokens=(2048, 6144),
            lag=1,
        ),
        "open-instruct",
        "scripts/train/qwen/grpo_fast_32b.sh",
        {"all": _all(3, 16384, **DEEPSPEED)},
        "there up to 8 steps ahead",
        vllm=(1, 0.9),
        placement={"actor": _ranks(0, 24), "actor.rollout": _ranks(24, 64)},
    ),
    Recipe(
        Run(
            "PPO 0.5B",
            _step("ppo", 256, 4, kl=None),
            "qwen2.5-0.5b",
            ((1, H100),),
            tokens=(512, 512),
            roles=("actor", "critic"),
        ),
        "verl",
        "docs/start/quickstart.rst",
        {"all": _all(0, 4 * 1024)},
        UNSTATED,
        vllm=(1, 0.4),
    ),
    Recipe(
        Run("PPO 8B", _step("ppo", 1024, 8), "llama-3-8b", ((8, A100),), roles=PPO),
        "OpenRLHF",
        "examples/scripts/train_ppo_ray_hybrid_engine.sh",
        {"all": _all(3, 16384, **DEEPSPEED)},
        UNSTATED,
        vllm=(2, 0.5),
    ),
    Recipe(
        Run("PPO 8B", _step("ppo", 1024, 8), "llama-3-8b", ((16, A100),), roles=PPO),
        "OpenRLHF",
        "examples/scripts/train_ppo_ray_slurm.sh",
        {"all": _all(3, 8 * 2048, **DEEPSPEED, offload_optimizer=True)},
        f"{UNSTATED}; there the frozen models are on the GPUs of the trained ones",
        vllm=(2, 0.95),
        placement={
            "actor": _ranks(0, 4),
            "critic": _ranks(4, 8),
            **dict.fromkeys(("actor.rollout", "critic.shadow", "ref", "reward"), _ranks(8, 16)),
        },
    ),
    Recipe(
        Run("PPO 32B", _step("ppo", 1024, 4, kl=None), "qwen2.5-32b", ((32, H100),), roles=("actor", "critic")),
        "verl",
        "examples/ppo_trainer/run_qwen2.5-32b.sh",
        {"all": _all(3, 8 * 2048), "critic": {"activation_checkpointing": False}},
        UNSTATED,
        vllm=(4, 0.5),
    ),
)


@dataclass(frozen=True)
class Chosen:
    """Plan of a run whose YAML leaves its settings out.

    plan:     the plan.
    text:     settings that were chosen.
    seconds:  time to plan.
    """

    plan: Plan
    text: str
    seconds: float


def chosen(run: Run) -> Chosen:
    """Plan ``run`` with its missing settings chosen."""
    began = perf_counter()
    ((plan, text),) = planned([Spec.parse(run.sections, run.title)])
    seconds = perf_counter() - began
    vector, settings = text.partition(" written, is ")[2].partition(", ")[0], text.partition("\n  with ")[2]
    return Chosen(plan, f"`{vector}`" + "".join(f"; `{each}`" for each in settings.split("; ") if each), seconds)


def recipe_plan(recipe: Recipe) -> Plan:
    """Plan ``recipe`` with its settings and no others."""
    return make_plan(Spec.parse(recipe.sections, recipe.run.title))


def step_seconds(plan: Plan) -> float:
    """Return the predicted time of a step at the longest lengths."""
    return simulate(plan, AnalyticCosts(), TextLengths(plan.lengths.prompt, (plan.lengths.response,))).seconds


def _text(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"


def fits(plan: Plan) -> bool:
    """Return whether every rank has room for ``plan``."""
    rank = plan.tightest_rank
    size = plan.device_bytes(rank)
    return size is None or plan.memories[rank].peak_bytes <= size


def run_row(run: Run) -> str:
    """Return a row of the first table."""
    found, advice = chosen(run), advise(Spec.parse(run.sections, run.title), AnalyticCosts(), explains=False)
    if not advice.feasible:
        return f"| {run.title} | {run.hardware} | fits nowhere | | | {found.seconds:.1f} |"
    advised = f"{_text(advice.best.seconds)} ({_text(advice.comparable[0].seconds)})"
    step = _text(step_seconds(found.plan))
    return f"| {run.title} | {run.hardware} | {found.text} | {step} | {advised} | {found.seconds:.1f} |"


def recipe_row(recipe: Recipe) -> str:
    """Return a row of the second table; a star marks a recipe that needs more memory than planned for."""
    run, plan, found = recipe.run, recipe_plan(recipe), chosen(recipe.run)
    batch = plan.batch
    rows = f"{batch.num_prompts} x {batch.samples_per_prompt} of {run.tokens[0]} + {run.tokens[1]}"
    theirs, ours = step_seconds(plan), step_seconds(found.plan)
    source = f"{recipe.source}: {recipe.file}" + (f" ({recipe.note})" if recipe.note else "")
    mark = "" if fits(plan) else " *"
    times = f"{_text(theirs)}{mark} | {_text(ours)} | {ours / theirs:.2f} | {found.seconds:.1f}"
    return f"| {run.title} | {run.hardware} | {rows} | {source} | {times} |"


def main() -> None:
    print("| run | devices | chosen, in addition to bfloat16 and vLLM | step, s | advised | plan, s |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        print(run_row(run), flush=True)
    print("\n| run | devices | batch | recipe | its step, s | chosen, s | ratio | plan, s |")
    print("|---|---|---|---|---|---|---|---|")
    for recipe in RECIPES:
        print(recipe_row(recipe), flush=True)
    print(f"\n{', '.join(f'{name}: {commit}' for name, commit in REPOSITORIES.items())}")


if __name__ == "__main__":
    main()
