"""Settings of verl that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.translation import Reason

REASONS = (
    Reason(
        (r"trainer\.(logger|project_name|experiment_name|log_\w+|rollout_data_dir|validation_data_dir)",), "logs", False
    ),
    Reason(
        (
            r"trainer\.(save_freq|test_freq|val_\w+|default_\w+|resume\w*|max_\w+_ckpt\w*|del_local\w*|esi\w*)",
            r".*checkpoint\..*",
            r".*\.val_kwargs\..*",
            r"data\.val_\w+",
            r"checkpoint\..*",
        ),
        "checkpoints and validation are of a run; see save, checkpoint and eval",
        False,
    ),
    Reason(
        (
            ".*profil.*",
            "global_profiler.*",
            r".*\.trace\..*",
            ".*prometheus.*",
        ),
        "profiling",
        False,
    ),
    Reason(
        (
            "ray_kwargs.*",
            "ray_init.*",
            ".*nccl_timeout",
            r"trainer\.(device|use_legacy\w*|ray_wait\w*|v1.*)",
            "hydra.*",
            "transfer_queue.*",
        ),
        "Ray and processes",
        False,
    ),
    Reason(
        (
            r".*(use_remove_padding|use_fused_kernels|use_torch_compile|use_shm|use_liger|fused_kernel\w*|"
            r"entropy_from_logits\w*|entropy_checkpointing|forward_prefetch|use_orig_params|"
            r"attn_implementation|pad_mode|balance_batch|load_format|layered_summon|disable_log_stats|"
            r"use_mbridge|vanilla_mbridge|use_dist_checkpointing|dist_checkpointing_path|logits_processor|"
            r"use_fsdp|wrap_policy.*|seed|full_determinism)",
        ),
        "kernels and loading, which follow from the engine here",
        False,
    ),
    Reason(
        (
            r".*(max_num_seqs|max_num_batched_tokens|enable_chunked_prefill|max_model_len|cudagraph\w*|"
            r"engine_kwargs.*|enforce_eager|enable_prefix_caching|free_cache_engine|calculate_log_probs|"
            r"multi_stage_wake_up|dtype|prompt_length|response_length|update_weights_bucket\w*|"
            r"logprobs_mode|skip_tokenizer_init|agent\.num_workers)",
        ),
        "limits of vLLM's scheduler, which rollout.config takes by vLLM's names",
        False,
    ),
    Reason(
        (
            r"data\.(\w*_key|return_\w+|shuffle|num_workers|dataloader\w*|filter_overlong\w*|"
            r"trust_remote_code|truncation|apply_chat\w*|gen_batch_size|seed|custom_cls.*|ignore_input\w*|"
            r"tool_config_path|max_samples|train_max_samples|sampler.*|datagen.*|reward_fn_key|"
            r"enable_thinking\w*|train_multiturn\w*)",
        ),
        "how rows are read: data.form, columns and long_prompts",
        False,
    ),
    Reason(
        (
            r".*(ref|log_prob|forward|infer)\w*(_micro_batch_size|_max_token_len|_use_dynamic_bsz)(_per_gpu)?",
            r".*log_prob_\w+",
        ),
        "passes without gradients have the micro-batches of models.actor",
        False,
    ),
    Reason(
        (
            r".*(param_offload|optimizer_offload|grad_offload|offload_policy|optimizer_cpu_offload|"
            r"optimizer_offload_fraction|overlap_cpu_optimizer\w*)",
        ),
        "models go to host memory between their calls where a plan needs it, and not without need",
        False,
    ),
    Reason(
        (r"critic\.(ppo_epochs|ppo_mini_batch_size)",), "the critic is trained in the actor's mini-batches and epochs"
    ),
    Reason(
        (
            r"critic\.(?!.*(?:ulysses|expert|context)).*",
            r".*ref\..*reshard_after\w*",
            r"algorithm\.(gamma|lam)",
        ),
        "of another algorithm, or as the actor is trained here",
        False,
    ),
    Reason(
        (
            "optim",
            "model",
            "actor@.*",
            r".*\.model_engine",
            r".*\.trust_remote_code",
            ".*turbo_config.*",
            r".*\.veomni\..*",
        ),
        "of an engine that is not here",
        False,
    ),
    Reason(
        (r".*(lr_decay_steps|\.min_lr|lr_warmup_init)",),
        "a schedule ends at the last step, at a share of the peak: final_ratio",
    ),
    Reason((r"rollout\.total_rollout_steps",), "the length of the run: write steps", False),
    Reason(
        (
            r".*ulysses\w*",
            ".*context_parallel_size",
            ".*cp_size",
            ".*sp_size",
        ),
        "a sequence is on one device, or on tensor-parallel ranks",
    ),
    Reason(
        (
            r".*(expert\w*_parallel\w*|ep_size|moe\w*|router\w*|aux_loss\w*|enable_rollout_routing_replay|"
            r"freeze_moe\w*)",
        ),
        "experts are not placed by themselves",
    ),
    Reason(
        (
            r".*virtual_pipeline\w*",
            r".*num_layers_in_\w*",
            r".*account_for_\w+",
            ".*pipeline_model_parallel_layout",
        ),
        "stages have equally many layers, one part each",
    ),
    Reason((r".*override_transformer_config\.recompute.*",), "activations of whole layers are recomputed"),
    Reason(
        (
            r".*override_(transformer|optimizer|ddp|mcore)\w*config.*",
            ".*override_config.*",
        ),
        "settings of Megatron and transformers",
    ),
    Reason((r".*(multi_turn|tool|agent)\b.*",), "responses are of one turn"),
    Reason((r"distillation\..*",), "there is no teacher of a distillation"),
    Reason(
        (
            r"reward\.(num_workers|sandbox\w*.*|custom\w*.*)",
            ".*sandbox_fusion.*",
            r"reward_model\.(launch\w*|num_workers).*",
        ),
        "how scores are computed is the source's",
        False,
    ),
    Reason((r"async_training\.\w+",), "a lag is in whole steps here"),
    Reason((r".*(profile|tensorboard|wandb|swanlab)\w*",), "logs", False),
    Reason(
        (
            r".*rollout\.(mode|name)",
            r".*\.strategy",
            ".*hybrid_engine",
            "model_engine",
            "engine",
            r"actor_rollout_ref\.nccl\w*",
        ),
        "follows from the engine",
        False,
    ),
    Reason((r".*(mtp|speculative)\b.*",), "tokens are generated one by one"),
    Reason((r".*(quantization|fp8|qat)\b.*",), "weights are of 16 or 32 bits"),
)
