"""Settings of NeMo-RL that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.translation import Reason

REASONS = (
    Reason(
        (
            r"checkpointing\..*",
            r"logger\..*",
            r".*\.val_\w+",
            ".*max_val_samples",
            r".*val_at\w+",
            r"data\.validation.*",
            r".*stop_at_validation\w*",
            r"eval\..*",
        ),
        "checkpoints, logs and validation are of a run",
        False,
    ),
    Reason(
        (
            r"data\..*",
            r"policy\.tokenizer\..*",
            r"env\..*",
            r"\w+\.max_num_epochs",
            r".*(chat_template|prompt_file)\w*",
            ".*data_plane.*",
        ),
        "how rows are read and scored: data, reward",
        False,
    ),
    Reason(
        (
            r"policy\.(dtensor_cfg\.(_v2|env_vars.*|automodel_kwargs.*|custom_parallel_plan|clear_cache\w*|"
            r"defer\w*)|logprob_\w+|generation_batch_size|make_sequence_length\w*|(dynamic_batching|"
            r"sequence_packing)\..*|refit_\w+|offload_\w+|hf_config_overrides\.rope.*|"
            r"megatron_cfg\.(env_vars.*|checkpoint.*|empty_unused\w*|\w*fusion\w*|pipeline_dtype|"
            r"converter_type|distributed_data\w*.*|scheduler\.(start|end|weight)\w*|optimizer\.(bf16|fp16|"
            r"params_dtype|use_\w+|overlap\w*|optimizer|clip_grad|sgd\w*)|use_gloo\w*|cuda_graph\w*|"
            r"recompute_granularity|attention_backend|apply_rope\w*|gradient_acc\w*|fused_linear\w*|"
            r"use_fused\w*|defer\w*|sequence_parallel|enabled|bias_\w+|freeze\w*|moe_permute\w*|"
            r"moe_router_bias\w*|moe_router_load\w*|moe_router_dtype|moe_token_disp\w*|moe_enable\w*|"
            r"moe_shared\w*|moe_per_layer\w*|mtp_loss\w*))",
        ),
        "kernels and loading, which follow from the engine here",
        False,
    ),
    Reason(
        (
            r"policy\.dtensor_cfg\.sequence_parallel",
            r".*worker_extension\w*",
            r".*port_range\w*",
            ".*_worker_cls",
        ),
        "follows from the engine here",
        False,
    ),
    Reason(
        (
            r"policy\.generation\.(vllm_cfg|vllm_kwargs|sglang_cfg|sglang_kwargs|trtllm_cfg|mcore\w*|"
            r"stop_token_ids|refit\w*|real_quant\w*|val_\w+|model_name|pad_token_id|port\w*|colocated|"
            r"colocate\w*|async_engine|max_new_tokens|top_\w)\b.*",
        ),
        "limits of the scheduler of vLLM and others, which rollout.config takes by vLLM's names",
        False,
    ),
    Reason((".*context_parallel_size",), "a sequence is on one device, or on tensor-parallel ranks"),
    Reason(
        (
            r".*expert\w*_parallel_size",
            r".*\bmoe_\w+",
        ),
        "experts are not placed by themselves",
    ),
    Reason(
        (
            r".*num_layers_in_\w+",
            r".*virtual_pipeline\w*",
            ".*pipeline_model_parallel_layout",
        ),
        "stages have equally many layers",
    ),
    Reason(
        (
            ".*cpu_offload",
            r".*optimizer_offload\w*",
            r".*offload\w*",
        ),
        "models go to host memory between their calls where a plan needs it",
        False,
    ),
    Reason(
        (
            ".*fp8.*",
            ".*quant.*",
            ".*kv_cache_dtype",
            r".*precision\w*",
        ),
        "weights and caches are of 16 or 32 bits",
    ),
    Reason(
        (
            ".*max_rollout_turns",
            r"env\.nemo_gym.*",
            ".*nemo_gym.*",
            ".*gym.*",
        ),
        "responses are of one turn",
    ),
    Reason(
        (
            r".*reward_scaling\..*",
            ".*reward_penalt.*",
            r".*advantage_clip\w*",
            r".*seq_logprob_error\w*",
            ".*overlong_filtering",
            r".*positive_example\w*",
        ),
        "scores and advantages are changed in other ways here: docs/algorithms.md",
    ),
    Reason(
        (
            r".*mtp\w*.*",
            r"draft\..*",
            r"policy\.draft\..*",
            ".*speculative.*",
        ),
        "tokens are generated one by one",
    ),
    Reason((r"cluster\..*",), "of the launcher", False),
    Reason(
        (
            r".*async_\w+\.(max_generation\w*|warmup\w*|drop\w*)",
            r".*skip_reference\w*",
            ".*trtllm_kwargs.*",
            ".*dynamo.*",
        ),
        "of its server",
        False,
    ),
    Reason((r".*async_\w+\..*",), "weights change between steps alone, and a lag is in whole steps"),
    Reason(
        (r"value_loss_fn\.scale",), "the critic has an optimizer of its own, in which AdamW cancels a factor", False
    ),
    Reason(
        (
            ".*profil.*",
            ".*nsys.*",
        ),
        "profiling",
        False,
    ),
)
