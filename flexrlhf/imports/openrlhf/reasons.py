"""Settings of OpenRLHF that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.model_parts import ADAPTERS

WITHOUT_EFFECT = {
    "logs, checkpoints and validation are of a run": r"""
        logger\..* .*wandb.* .*tensorboard.* ckpt\..* eval\..* save_\w+ use_\w*_ckpt critic\.save\w+
    """,
    "how rows are read: data.form, columns and template": r"""
        data\.(\w+_key|disable_fast\w*|dataloader\w*|multiturn|\w*split) \w+_key .*_split
    """,
    "kernels and processes, which follow from the engine here": r"""
        vllm\..*
        ds\.(enable_sleep|packing_samples|attn\w*|overlap_comm|use_liger\w*|deepcompile|zpg|grad_accum\w*|experts\w*)
        ds\.value_head\w* .*reentrant packing_\w+ master_\w+ local_rank use_ms
    """,
    "passes without gradients have the micro-batches of models.actor": r"""
        rollout\.(micro_batch_size|max_tokens_per_gpu|vllm_generate_batch_size)
    """,
    "models go to host memory between their calls where a plan needs it": r"(ref|reward)\.offload ds\.offload.*",
    "of the launcher": r"--\w+",
}
WITH_EFFECT = {
    "a chat template is a file, data.chat_template, and a template of texts has one field: data.template": r"""
        data\.(tokenizer_chat_template|input_template) .*template.*
    """,
    "all rows are read, mixed by the weights of data.sources": r"data\.(max_samples|\w*probs) .*_probs",
    ADAPTERS: r"ds\.lora\..*",
    "scores by code are a function of reward: docs/rewards.md": r"reward\.(?!offload).*",
    "images are not read": r"data\.(image_key|max_images\w*) actor\.freeze_visual\w*",
    "DeepSpeed here has neither ring attention nor tensor parallelism: engine torch has tp": r"""
        ds\.(ring_attn\w*|tensor_parallel_size)
    """,
    "a term of the loss, or an average of weights, that is not here": r".*nll_loss.* .*(ema|EMA).*",
    "responses in segments are of rollout.segment_tokens tokens": r"train\.partial_rollout\w*",
    "weights are of 16 or 32 bits": r".*load_in_4bit",
    "optimizers are adamw, adam and sgd": r".*muon.*",
}
