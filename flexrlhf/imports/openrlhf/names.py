"""Options of OpenRLHF before 0.11 and their names since."""

from __future__ import annotations

_SECTIONS = {
    "actor": """model_name_or_path=pretrain num_nodes=actor_num_nodes num_gpus_per_node=actor_num_gpus_per_node
        gradient_checkpointing_enable=gradient_checkpointing adam.lr=actor_learning_rate eps_clip eps_clip_low_high
        aux_loss_coef entropy_coef=entropy_loss_coef policy_loss_type dual_clip loss_agg_mode freeze_visual_encoder
        gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant""",
    "adam": "lr=learning_rate weight_decay=l2 betas=adam_betas",
    "algo": """kl.init_coef=init_kl_coef kl.target=kl_target kl.estimator=kl_estimator kl.use_loss=use_kl_loss
        advantage.estimator=advantage_estimator advantage.gamma=gamma advantage.lambd=lambd
        advantage.no_std_norm=no_advantage_std_norm advantage.is_correction_enable=enable_vllm_is_correction
        advantage.is_correction_type=vllm_is_correction_type kl.horizon=kl_horizon
        advantage.is_correction_threshold=vllm_is_truncated_threshold dynamic_filtering_enable=dynamic_filtering
        dynamic_filtering_range=dynamic_filtering_reward_range""",
    "ckpt": """output_dir=save_path path=ckpt_path save_steps load_enable=load_checkpoint max_num=max_ckpt_num
        max_mem=max_ckpt_mem save_hf=save_hf_ckpt disable_ds=disable_ds_ckpt""",
    "critic": """model_name_or_path=critic_pretrain num_nodes=critic_num_nodes
        num_gpus_per_node=critic_num_gpus_per_node adam.lr=critic_learning_rate value_clip
        freezing_steps=freezing_actor_steps save_value_network""",
    "data": """prompt_max_len max_len max_samples prompt_dataset=prompt_data dataset input_key output_key prompt_key
        chosen_key rejected_key label_key apply_chat_template input_template tokenizer_chat_template multiturn
        prompt_probs=prompt_data_probs dataset_probs prompt_split dataset_split disable_fast_tokenizer""",
    "ds": """zero_stage param_dtype=bf16 adam_offload lora.rank=lora_rank lora.alpha=lora_alpha
        lora.target_modules=target_modules lora.dropout=lora_dropout load_in_4bit ring_attn_head_stride=ring_head_stride
        zpg grad_accum_dtype overlap_comm use_liger_kernel deepcompile
        ring_attn_size tensor_parallel_size=ds_tensor_parallel_size packing_samples
        attn_implementation=flash_attn attn_implementation enable_sleep=deepspeed_enable_sleep""",
    "eval": """steps=eval_steps dataset=eval_dataset split=eval_split temperature=eval_temperature
        n_samples_per_prompt=eval_n_samples_per_prompt""",
    "logger": """logging_steps wandb.key=use_wandb wandb.org=wandb_org wandb.group=wandb_group
        wandb.project=wandb_project wandb.run_name=wandb_run_name tensorboard_dir=use_tensorboard""",
    "model": "beta ipo_enable=ipo label_smoothing nll_loss_coef loss_type=loss margin_loss_enable=margin_loss",
    "ref": """model_name_or_path=ref_pretrain num_nodes=ref_num_nodes num_gpus_per_node=ref_num_gpus_per_node
        offload=ref_reward_offload""",
    "reward": """model_name_or_path=reward_pretrain remote_url=remote_rm_url num_nodes=reward_num_nodes
        num_gpus_per_node=reward_num_gpus_per_node normalize_enable=normalize_reward overlong_buffer_len
        overlong_penalty_factor clip_range=reward_clip_range stop_properly_penalty_coef""",
    "rollout": """micro_batch_size=micro_rollout_batch_size batch_size=rollout_batch_size n_samples_per_prompt
        max_new_tokens=generate_max_len temperature top_p max_tokens_per_gpu=rollout_max_tokens_per_gpu
        vllm_generate_batch_size""",
    "train": """colocate_all=colocate_all_models colocate_actor_ref colocate_critic_reward async_enable=async_train
        micro_batch_size=micro_train_batch_size batch_size=train_batch_size max_epochs num_episodes
        dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu=train_max_tokens_per_gpu agent_func_path
        seed async_queue_size
        full_determinism_enable=full_determinism partial_rollout_enable=partial_rollout enable_ema ema_beta""",
    "vllm": """num_engines=vllm_num_engines tensor_parallel_size=vllm_tensor_parallel_size
        gpu_memory_utilization=vllm_gpu_memory_utilization sync_backend=vllm_sync_backend
        enable_sleep=vllm_enable_sleep enforce_eager enable_prefix_caching sync_with_ray=vllm_sync_with_ray""",
}
"""Section of the options → ``name=NAME_BEFORE``, or the name alone if it was the same without the section."""
OLD_NAMES = {
    before or name: f"{section}.{name}"
    for section, names in _SECTIONS.items()
    for name, _, before in (each.partition("=") for each in names.split())
}
"""Options before 0.11 → their names since."""
