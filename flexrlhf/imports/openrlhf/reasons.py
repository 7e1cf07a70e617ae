"""Settings of OpenRLHF that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.translation import Reason

REASONS = (
    Reason(
        (
            r"logger\..*",
            ".*wandb.*",
            ".*tensorboard.*",
            r"ckpt\..*",
            r"eval\..*",
            r"save_\w+",
            r"use_\w*_ckpt",
            r"critic\.save\w+",
        ),
        "logs, checkpoints and validation are of a run",
        False,
    ),
    Reason(
        (
            r"data\.(image_key|max_images\w*)",
            r"actor\.freeze_visual\w*",
        ),
        "images are not read",
    ),
    Reason(
        (
            r"data\..*",
            ".*_key",
            ".*template.*",
            ".*_probs",
            ".*_split",
            "multiturn",
            r"train\.num_episodes",
        ),
        "how rows are read: data.form, columns and template",
        False,
    ),
    Reason(
        (
            r"vllm\..*",
            r"ds\.(enable_sleep|packing_samples|attn\w*|overlap_comm|use_liger\w*|deepcompile|zpg|"
            r"grad_accum\w*|experts\w*|value_head\w*)",
            ".*reentrant",
            r"packing_\w+",
            r"master_\w+",
            "local_rank",
            "use_ms",
            r".*full_determinism\w*",
            ".*seed",
        ),
        "kernels and processes, which follow from the engine here",
        False,
    ),
    Reason(
        (r"rollout\.(micro_batch_size|max_tokens_per_gpu|vllm_generate_batch_size)",),
        "passes without gradients have the micro-batches of models.actor",
        False,
    ),
    Reason(
        (
            r"(ref|reward)\.offload",
            r"ds\.offload.*",
        ),
        "models go to host memory between their calls where a plan needs it",
        False,
    ),
    Reason(
        (r"ds\.(ring_attn\w*|tensor_parallel_size)",),
        "DeepSpeed here has neither ring attention nor tensor parallelism: engine torch has tp",
    ),
    Reason(
        (
            ".*aux_loss.*",
            ".*nll_loss.*",
            ".*(ema|EMA).*",
        ),
        "a term of the loss, or an average of weights, that is not here",
    ),
    Reason((r"train\.partial_rollout\w*",), "responses in segments are of rollout.segment_tokens tokens"),
    Reason((".*load_in_4bit",), "weights are of 16 or 32 bits"),
    Reason((".*muon.*",), "optimizers are adamw, adam and sgd"),
    Reason((r"--\w+",), "of the launcher", False),
)
