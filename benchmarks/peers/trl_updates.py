"""Jobs of TRL 1.16.0, and one update of each by its trainers: their own parser, settings, advantages and loss.

A trainer is constructed around a tiny model; of its model's passes the log-probs are the given ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.peers.comparison import LENGTH, ROWS, SAMPLES
from benchmarks.peers.trl_pairs import supervised
from benchmarks.peers.updates import MINI_BATCHES, Inputs, Job, Losses, make_inputs, of_mini_batches

PACKAGE = "trl"
FIRST_ID, END, PADDING = 10, 2, 0
"""Tokens: of the first row's prompt, from which a row is known; the end token; padding."""
SCALE = 4096.0
"""Factor of scores, next to which the 1e-4 that TRL adds to a deviation are nothing."""
_ROWS = ROWS // len(MINI_BATCHES)
_SAMPLED = f"--reward_funcs accuracy_reward --steps_per_generation 2 --num_generations {SAMPLES}"
_MODEL, _MIXTURE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-30B-A3B"


def _job(trainer: str, about: str, further: str = "", model: str = _MODEL, says: str | bool = "", **others: Any) -> Job:
    """Return the job of a trainer with ``about`` and ``further`` options. ``says``: True: the name of the option."""
    own = _SAMPLED if trainer in ("grpo", "rloo") else ""
    start = f"python examples/scripts/{trainer}.py" if trainer in ("cpo", "orpo") else f"trl {trainer}"
    words = f"{start} --model_name_or_path {model} --dataset_name data --output_dir out --bf16 false"
    text = f"{words} --per_device_train_batch_size {_ROWS if own else _ROWS // 2} {own} {about} {further}"
    key = f"{about[2:].partition(' ')[0]}=" if says is True else says or ""
    title = f"{trainer} {about}" if about else f"{trainer}, defaults"
    return Job(title, " ".join(text.split()), key, is_first=trainer == "rloo", **others)


def jobs() -> Iterator[Job]:
    """Yield the jobs: one for each setting that a loss depends on, and each preset."""
    yield from _sampling_jobs()
    yield from _correction_jobs()
    yield from _supervised_jobs()
    for name in ("grpo", "rloo", "dpo", "reward", "sft"):
        samples = {"samples_per_prompt": SAMPLES} if name in ("grpo", "rloo") else {}
        yield _job(name, "", preset={"name": name, "like": "trl", **samples})
    gspo, penalised = {"name": "gspo", "like": "trl", "samples_per_prompt": SAMPLES}, {"coefficient": 0.04}
    yield _job("grpo", "--importance_sampling_level sequence", preset=gspo)
    yield _job("grpo", "--beta 0.04", preset=gspo | {"name": "grpo", "kl": penalised})


def _sampling_jobs() -> Iterator[Job]:
    yield _job("grpo", "")
    for loss in ("dapo", "grpo", "bnpo", "dr_grpo"):
        further = f"--loss_type {loss} --max_completion_length {LENGTH}"
        yield _job("grpo", further)
        yield _job("grpo", "--importance_sampling_level sequence", further)
        yield _job("grpo", "--entropy_coef 0.01", further)
        yield _job("grpo", "--mask_truncated_completions true", further)
        yield _job("grpo", "--beta 0.04", further)
    yield _job("grpo", "--use_bias_correction_kl false", "--beta 0.04")
    yield _job("grpo", "--use_bias_correction_kl true", "--beta 0.04 --importance_sampling_level sequence")
    for high in (5.0, 1.3, 1.0, 0.28):
        yield _job("grpo", f"--epsilon_high {high}", "--loss_type cispo", says=high <= 1)
    yield _job("grpo", "--loss_type cispo", says=True)
    for loss in ("sapo", "vespo", "luspo"):
        yield _job("grpo", f"--loss_type {loss}", says=True)
    yield _job("grpo", "--epsilon 0.1")
    yield _job("grpo", "--epsilon_high 0.28")
    yield _job("grpo", "--delta 1.5")
    yield _job("grpo", "--delta 1.1", says=True)
    yield _job("grpo", "--delta 1.25", "--epsilon_high 0.3", says=True)
    yield _job("grpo", "--delta 1.1", "--epsilon_high 5.0 --loss_type cispo")
    yield _job("grpo", "--scale_rewards none")
    for about in (
        "--scale_rewards batch",
        "--top_entropy_quantile 0.2",
        "--off_policy_mask_threshold 0.5",
        "--use_adaptive_entropy true",
        "--multi_objective_aggregation normalize_then_sum",
    ):
        yield _job("grpo", about, says=True)
    yield _job("grpo", "--router_aux_loss_coef 0.003", model=_MIXTURE)
    yield _job("grpo", "--router_aux_loss_coef 0", model=_MIXTURE)
    yield _job("grpo", "", model=_MIXTURE)
    yield _job("rloo", "")
    for about in ("--beta 0.1", "--beta 0", "--epsilon_high 0.3"):
        yield _job("rloo", about)
    yield _job("rloo", "--normalize_advantages true", says=True)
    yield _job("rloo", "--mask_truncated_completions true", says="has no KL penalty")
    yield _job("rloo", "--mask_truncated_completions true", "--beta 0")
    yield _job("rloo", "", model=_MIXTURE)


def _correction_jobs() -> Iterator[Job]:
    served = "--use_vllm true --vllm_mode colocate"
    yield _job("grpo", "--use_vllm true", "--vllm_mode colocate")
    yield _job("grpo", "--vllm_importance_sampling_correction false", served)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        mixed = f"{served} --vllm_importance_sampling_mode {mode}"
        yield _job("grpo", f"--vllm_importance_sampling_mode {mode}", served)
        yield _job("grpo", "--vllm_importance_sampling_clip_max 1.5", mixed)
        yield _job("grpo", "--vllm_importance_sampling_clip_min 0.5", mixed, says=mode.endswith("truncate"))
    yield _job("grpo", "--vllm_importance_sampling_clip_max 0.9", served, says=True)
    yield _job("grpo", "--beta 0.04", served)
    yield _job("grpo", "--mask_truncated_completions true", served)


def _supervised_jobs() -> Iterator[Job]:
    for loss in ("sigmoid", "sigmoid_norm", "ipo", "robust"):
        yield _job("dpo", f"--loss_type {loss}", "--label_smoothing 0.1")
    for loss in ("hinge", "aot", "exo_pair", "sft"):
        yield _job("dpo", f"--loss_type {loss}", "--label_smoothing 0.1", says=True)
    yield _job("dpo", "--beta 0.3")
    yield _job("dpo", "--ld_alpha 0.5", says=True)
    yield _job("dpo", "--router_aux_loss_coef 0.003", model=_MIXTURE)
    yield _job("dpo", "", model=_MIXTURE)
    yield _job("kto", "")
    yield _job("kto", "--beta 0.3")
    yield _job("kto", "--desirable_weight 1.5", "--undesirable_weight 0.7")
    yield _job("kto", "--loss_type apo_zero_unpaired", says=True)
    yield _job("cpo", "--loss_type simpo", "--cpo_alpha 0")
    yield _job("cpo", "--simpo_gamma 1.0", "--loss_type simpo --cpo_alpha 0 --beta 2.5")
    for about in ("--label_smoothing 0.1", "--cpo_alpha 0.5", "--alpha 0.1"):
        yield _job("cpo", about, "--loss_type simpo" + ("" if "cpo" in about else " --cpo_alpha 0"), says=True)
    yield _job("cpo", "", "--loss_type simpo", says="cpo_alpha")
    yield _job("orpo", "", says=_LIKELIHOOD)
    yield _job("orpo", "--beta 0.3", says=_LIKELIHOOD)
    yield _job("reward", "")
    yield _job("reward", "--center_rewards_coefficient 0.01", says=True)
    yield _job("sft", "")
    yield _job("sft", "--loss_type dft", says=True)
    yield _job("sft", "", model=_MIXTURE)


_LIKELIHOOD = "likelihood"
"""ORPO's of TRL is a mean over the tokens of all chosen texts with their prompts, here of responses' own means."""


def scale_of(job: Job) -> float:
    """Return the factor of the scores."""
    return SCALE if _words(job)[0] == "grpo" else 1.0


def losses_of(job: Job) -> tuple[Losses, Inputs]:
    """Return the losses of a job as TRL computes them, and the inputs."""
    name, words = _words(job)
    arguments, model = _parsed(name, words)
    inputs = make_inputs(job, scale_of(job))
    with _tiny(model, arguments) as folder:
        if name in ("grpo", "rloo"):
            return {"actor": _sampled(name, arguments, folder, inputs)}, inputs
        return {"reward" if name == "reward" else "actor": supervised(name, arguments, folder, inputs)}, inputs


def _words(job: Job) -> tuple[str, list[str]]:
    """Return the trainer's name and the options of a command: of a trainer without a command its script's name."""
    words = shlex.split(job.command)
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    return Path(words[first - 1]).stem, words[first:]


def _parsed(name: str, words: list[str]) -> tuple[Any, str]:
    """Return the trainer's settings and the model's name, as the trainer's own script reads the command."""
    _, arguments, model, *_ = _parser(name).parse_args_and_config([*words, "--use_cpu", "true", "--report_to", "none"])
    return arguments, model.model_name_or_path


def _parser(name: str) -> Any:
    from trl import ModelConfig, ScriptArguments, TrlParser
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    if name in ("cpo", "orpo"):
        return TrlParser((ScriptArguments, CPOConfig if name == "cpo" else ORPOConfig, ModelConfig))
    return import_module(f"trl.scripts.{name}").make_parser()


@contextmanager
def _tiny(name: str, arguments: Any) -> Iterator[Path]:
    """Yield the folder of a tiny model of the family of ``name``; vLLM is not started."""
    with patch("trl.trainer.grpo_trainer.VLLMGeneration"), patch("trl.trainer.rloo_trainer.VLLMGeneration"):
        arguments.output_dir = str(_folder(name))
        yield _folder(name)


@cache
def _folder(name: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(mkdtemp())
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    kind = Qwen3MoeConfig if name == _MIXTURE else Qwen2Config
    config = kind(**sizes, max_position_embeddings=64, eos_token_id=END, pad_token_id=PADDING)
    if kind is Qwen3MoeConfig:
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size = 4, 2, 8
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END}", pad_token=f"w{PADDING}")
    fast.save_pretrained(folder)
    return folder


def _sampled(name: str, arguments: Any, folder: Path, inputs: Inputs) -> Tensor:
    """Return the losses of a trainer that samples: it gets responses, scores and log-probs, and does the rest."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.utils import split_tensor_dict

    kind = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[name]
    rows = Dataset.from_dict({"prompt": [f"w{FIRST_ID}"] * ROWS})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = kind(
        model=str(folder), reward_funcs=_no_reward, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    sample = inputs.sample
    current: dict[str, Tensor] = {}

    def logprobs(model: Any, ids: Tensor, *_: Any, **asked: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = ids[:, 0] - FIRST_ID
        if model is trainer.ref_model:
            return sample.ref_logprobs[rows], None, None
        if not asked.get("compute_entropy"):
            return sample.logprobs[rows], None, None
        new = current["new"]
        return new[rows], inputs.entropy(new)[rows], inputs.router_loss(new[rows])

    responses = [
        [5] * (count - 1) + [END if ends else 5]
        for count, ends in zip(sample.mask.sum(1).tolist(), inputs.finished, strict=True)
    ]
    sampled = [each[: len(ids)].tolist() for each, ids in zip(inputs.rollout_logprobs, responses, strict=True)]
    prompts = [[FIRST_ID + row] for row in range(ROWS)]
    generated: tuple[Any, ...] = (prompts, responses, [""] * ROWS)
    if name == "grpo":
        generated = (prompts, responses, None, [""] * ROWS, sampled, {}, None, None)
    trainer._generate = lambda _: generated
    trainer._calculate_rewards = lambda *_: sample.scores[:, None]
    trainer._get_per_token_logps_and_entropies = logprobs
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    whole = trainer._generate_and_score_completions([{"prompt": f"w{FIRST_ID}"}] * ROWS)
    parts = split_tensor_dict(whole, len(MINI_BATCHES))

    def loss(new: Tensor, part: slice) -> Tensor:
        current["new"] = new
        value: Tensor = trainer._compute_loss(trainer.model, parts[MINI_BATCHES.index(part)])
        return value

    return of_mini_batches(loss, sample.new_logprobs)


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("scores are given")
