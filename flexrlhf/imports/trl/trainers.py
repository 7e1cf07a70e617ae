"""Trainers of TRL by the settings of a file that does not name one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from flexrlhf.imports.trl.algorithm import MISSING

_OWN = {
    "grpo": r"num_generations|max_completion_length|reward_funcs|reward_weights|epsilon(_high)?|scale_rewards|"
    r"num_iterations|mask_truncated_completions|vllm_\w+|use_vllm|importance_sampling_level|top_entropy_quantile",
    "rloo": r"rloo_k|normalize_advantages|reward_clip_range",
    "ppo": r"num_ppo_epochs|cliprange\w*|vf_coef|lam|kl_coef|response_length|sft_model_path|reward_model_path",
    "kto": r"(un)?desirable_weight",
    "cpo": r"cpo_alpha|simpo_gamma",
    "reward": r"center_rewards_coefficient",
    "gkd": r"lmbda|teacher_model_name_or_path|seq_kd",
    "dpo": r"precompute_ref_log_probs|rpo_alpha|reference_free|f_divergence_type|label_smoothing|sync_ref_model|"
    r"ref_model_mixup_alpha|ld_alpha",
    "sft": r"packing|dataset_text_field|assistant_only_loss|completion_only_loss|neftune_noise_alpha|max_seq_length",
}
"""Trainers → keys that no other one has."""
_LOSSES = {
    "grpo": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo"),
    "cpo": ("simpo",),
    "sft": ("nll", "dft"),
    "dpo": ("sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down", "sppo_hard"),
}
_COMMON = re.compile(
    r"learning_rate|per_device_train_batch_size|gradient_accumulation_steps|num_train_epochs|max_steps|output_dir|"
    r"lr_scheduler_type|bf16|dataset_name|torch_dtype|dtype|max_length|gradient_checkpointing|logging_steps|"
    + "|".join(_OWN.values())
)
_FOREIGN = re.compile(
    # LLaMA-Factory; axolotl; ms-swift; open-instruct; torchtune and others with sections
    r"stage|finetuning_type|template|cutoff_len|pref_\w+|dataset_dir|base_model|adapter|micro_batch_size|sequence_len|"
    r"train_type|rlhf_type|tuner_type|use_slow_tokenizer|with_tracking|dataset_mixer_list|use_flash_attn|"
    r"(model|lora|training|train|tokenizer|trainer|optimizer|data|peft|actor|worker)\..*|prompt_template"
)
"""Keys of other systems' files that TRL has not."""


def is_missing(trainer: str) -> bool:
    """Whether a name is that of a trainer of TRL without a counterpart."""
    return any(re.fullmatch(names, trainer) for names in MISSING)


def is_of_trl(leaves: Mapping[str, Any], options: Iterable[str]) -> bool:
    """Whether the settings of a file and of a command are TRL's."""
    keys = [*leaves, *options]
    has_model = bool({"model_name_or_path", "sft_model_path", "model_name", "model"} & set(keys))
    return has_model and any(map(_COMMON.fullmatch, keys)) and not any(map(_FOREIGN.fullmatch, leaves))


def trainers_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the trainers that settings can be of, the likeliest first; one alone if a setting is its own."""
    own = [name for name, keys in _OWN.items() if any(re.fullmatch(keys, key) for key in settings)]
    named = [name for name, losses in _LOSSES.items() if settings.get("loss_type") in losses]
    found = named or own
    if found:
        return ["rloo"] if "rloo" in found else found[:1] if found[0] == "grpo" else found
    return ["dpo", "kto", "orpo", "cpo"] if "beta" in settings else ["sft", "reward"]
