"""Settings of verl that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.model_parts import ADAPTERS

WITHOUT_EFFECT = {
    "logs": r"""
        trainer\.(logger|project_name|experiment_name|log_\w+|rollout_data_dir|validation_data_dir|rollout_dump\w*)
        .*(profile|tensorboard|wandb|swanlab)\w*
    """,
    "checkpoints and validation are of a run: save, checkpoint, eval, flexrlhf run --resume": r"""
        trainer\.(save_freq|test_freq|val_\w+|default_\w+|resume\w*|max_\w+_ckpt\w*|del_local\w*|esi\w*|remove_p\w*)
        .*checkpoint\..* .*\.val_kwargs\..* data\.val_\w+ data\.validation_shuffle checkpoint\..*
    """,
    "profiling": r".*profil.* global_profiler.* .*\.trace\..* .*prometheus.*",
    "Ray and processes": r"""
        ray_kwargs.* ray_init.* .*nccl_timeout trainer\.(device|use_legacy\w*|ray_wait\w*|use_v1) hydra.*
        transfer_queue.*
    """,
    "kernels and loading, which follow from the engine here": r"""
        .*(use_remove_padding|use_fused_kernels|use_torch_compile|use_shm|use_liger|fused_kernel\w*)
        .*(entropy_from_logits\w*|entropy_checkpointing|forward_prefetch|use_orig_params|attn_implementation|pad_mode)
        .*(optim\.total_training_steps|balance_batch|load_format|layered_summon|disable_log_stats|use_mbridge|vanilla_mbridge)
        .*(use_dist_checkpointing|dist_checkpointing_path|logits_processor|use_fsdp|wrap_policy.*)
    """,
    "limits of vLLM's scheduler, which rollout.config takes by vLLM's names": r"""
        .*(max_num_seqs|max_num_batched_tokens|enable_chunked_prefill|max_model_len|cudagraph\w*|engine_kwargs.*)
        .*(enforce_eager|enable_prefix_caching|free_cache_engine|calculate_log_probs|multi_stage_wake_up)
        .*\.dtype (?!.*multi_turn).*(prompt_length|response_length)
        .*(update_weights_bucket\w*|logprobs_mode|skip_tokenizer_init)
        .*agent\.num_workers
    """,
    "how rows are read: data.form, columns and long_prompts": r"""
        data\.(\w*_key|return_\w+|num_workers|dataloader\w*|filter_overlong\w*|trust_remote_code|truncation)
        data\.(ignore_input\w*|image_patch\w*|reward_fn_key)
    """,
    "passes without gradients have the micro-batches of models.actor": r"""
        .*(ref|log_prob|forward|infer)\w*(_micro_batch_size|_max_token_len|_use_dynamic_bsz)(_per_gpu)? .*log_prob_\w+
    """,
    "models go to host memory between their calls where a plan needs it, and not without need": r"""
        .*(param_offload|optimizer_offload|grad_offload|offload_policy|optimizer_cpu_offload)
        .*(optimizer_offload_fraction|overlap_cpu_optimizer\w*)
    """,
    "of another algorithm, or as the actor is trained here": r"""
        critic\.(rollout_n|strategy|enable|ppo_micro_batch_size|forward_\w+|optim\.(total_train\w*|num_cycles|zero_ind\w*))
        critic\.(megatron|fsdp\w*)\.(?!.*(?:ulysses|expert|context|dtype|seed|moe|router)).*
        critic\.model\.(trust\w*|use_\w+|tokenizer_path|external_lib|fused\w*.*|tiled\w*.*|hf_config\w*)
        .*ref\..*reshard_after\w* algorithm\.(gamma|lam)
    """,
    "of transformers' modules, which Megatron has not": r".*\.(enable_activation_offload|tiled_mlp\.\w+)",
    "of an engine that is not here": r"""
        optim model actor@.* .*\.model_engine .*\.trust_remote_code .*turbo_config.* .*\.veomni\..*
    """,
    "how scores are computed is the source's": r"""
        reward\.num_workers reward_model\.(launch\w*|num_workers).*
    """,
    "follows from the engine": r"""
        .*rollout\.(mode|name) .*\.strategy .*hybrid_engine model_engine engine actor_rollout_ref\.nccl\w*
    """,
}
WITH_EFFECT = {
    "a chat template is a file: data.chat_template": r".*custom_chat_template",
    "all rows are read, in an order of this run's own": r"""
        data\.(max_samples|train_max_samples|shuffle|sampler.*|custom_cls.*|datagen.*|train_multiturn\w*)
        .*data_loader_seed actor_rollout_ref\.actor\.shuffle critic\.shuffle .*\.seed
    """,
    "code that scores responses is a function of reward: docs/rewards.md": r"""
        .*sandbox_fusion.* reward\.(sandbox|custom)\w*.* reward_model\.(?!.*(micro|model)).* custom_reward_function.*
        .*reward_kwargs.*
    """,
    "the number of prompts of a run follows from its steps": r"rollout\.total_rollout_steps",
    ADAPTERS: r".*\blora\w*(\..*)? .*(target|exclude)_modules",
    "the critic is trained in the actor's mini-batches and epochs": r"critic\.(ppo_epochs|ppo_mini_batch_size)",
    "a schedule ends at the last step, at a share of the peak: final_ratio": r"""
        .*(lr_decay_steps|\.min_lr|lr_warmup_init)
    """,
    "a sequence is on one device, or with engine torch on context-parallel ranks (cp)": r"""
        .*ulysses\w* .*context_parallel_size .*cp_size .*sp_size
    """,
    "experts are split over ranks by models.actor.ep alone": r".*(expert\w*_parallel\w*|ep_size|etp_size)",
    "settings of Megatron's experts and routers": r".*(moe\w*|router\w*|aux_loss\w*|freeze_moe\w*)",
    "stages have equally many layers, one part each": r"""
        .*virtual_pipeline\w* .*num_layers_in_\w* .*account_for_\w+ .*pipeline_model_parallel_layout
    """,
    "activations of whole layers are recomputed": r".*override_transformer_config\.recompute.*",
    "settings of Megatron and transformers": r"""
        .*override_(transformer|optimizer|ddp|mcore)\w*config.* .*override_config.*
    """,
    "environments and tools are named in environment here: docs/environments.md": r".*(multi_turn|tool|agent)\b.*",
    "there is no teacher of a distillation": r"distillation\..*",
    "a lag is in whole steps here": r"async_training\.\w+ trainer\.v1\..*",
    "prompts are sampled anew where groups are left out: algorithm.dynamic_sampling": r"data\.gen_batch_size",
    "tokens are generated one by one": r".*(mtp|speculative)\b.*",
    "weights are of 16 or 32 bits": r".*(quantization|fp8|qat)\b.*",
}
