"""Settings of OpenRLHF that have no counterpart, by their keys, and why."""

from __future__ import annotations

WITHOUT_EFFECT = {
    "logs, checkpoints and validation are of a run": r"""
        logger\..* .*wandb.* .*tensorboard.* ckpt\..* eval\..* save_\w+ use_\w*_ckpt critic\.save\w+
    """,
    "how rows are read: data.form, columns and template": r"""
        data\.(?!image_key|max_images).* \w+_key .*template.* .*_probs .*_split multiturn train\.num_episodes
    """,
    "kernels and processes, which follow from the engine here": r"""
        vllm\..*
        ds\.(enable_sleep|packing_samples|attn\w*|overlap_comm|use_liger\w*|deepcompile|zpg|grad_accum\w*|experts\w*)
        ds\.value_head\w* .*reentrant packing_\w+ master_\w+ local_rank use_ms .*seed
    """,
    "passes without gradients have the micro-batches of models.actor": r"""
        rollout\.(micro_batch_size|max_tokens_per_gpu|vllm_generate_batch_size)
    """,
    "models go to host memory between their calls where a plan needs it": r"(ref|reward)\.offload ds\.offload.*",
    "of the launcher": r"--\w+",
}
WITH_EFFECT = {
    "images are not read": r"data\.(image_key|max_images\w*) actor\.freeze_visual\w*",
    "DeepSpeed here has neither ring attention nor tensor parallelism: engine torch has tp": r"""
        ds\.(ring_attn\w*|tensor_parallel_size)
    """,
    "a term of the loss, or an average of weights, that is not here": r".*nll_loss.* .*(ema|EMA).*",
    "responses in segments are of rollout.segment_tokens tokens": r"train\.partial_rollout\w*",
    "weights are of 16 or 32 bits": r".*load_in_4bit",
    "optimizers are adamw, adam and sgd": r".*muon.*",
}
