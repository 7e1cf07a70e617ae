"""Options of OpenRLHF before 0.11 and their names since."""

from __future__ import annotations

_SECTIONS = {
    "actor": """model_name_or_path=pretrain num_nodes=actor_num_nodes num_gpus_per_node=actor_num_gpus_per_node
        gradient_checkpointing_enable=gradient_checkpointing adam.lr=actor_learning_rate eps_clip eps_clip_low_high
        aux_loss_coef""",
    "adam": "lr=learning_rate weight_decay=l2",
    "algo": """kl.init_coef=init_kl_coef kl.target=kl_target kl.estimator=kl_estimator kl.use_loss=use_kl_loss
        advantage.estimator=advantage_estimator advantage.gamma=gamma advantage.lambd=lambd
        dynamic_filtering_enable=dynamic_filtering""",
    "ckpt": "output_dir=save_path path=ckpt_path save_steps load_enable=load_checkpoint",
    "critic": """model_name_or_path=critic_pretrain num_nodes=critic_num_nodes
        num_gpus_per_node=critic_num_gpus_per_node adam.lr=critic_learning_rate value_clip
        freezing_steps=freezing_actor_steps""",
    "data": """prompt_max_len max_len max_samples prompt_dataset=prompt_data dataset input_key output_key chosen_key
        rejected_key label_key apply_chat_template""",
    "ds": """zero_stage param_dtype=bf16 adam_offload lora.rank=lora_rank lora.alpha=lora_alpha
        lora.target_modules=target_modules ring_attn_size tensor_parallel_size=ds_tensor_parallel_size packing_samples
        attn_implementation=flash_attn attn_implementation enable_sleep=deepspeed_enable_sleep""",
    "eval": "steps=eval_steps",
    "logger": "logging_steps wandb.key=use_wandb",
    "model": "beta",
    "ref": "num_nodes=ref_num_nodes num_gpus_per_node=ref_num_gpus_per_node",
    "reward": """model_name_or_path=reward_pretrain remote_url=remote_rm_url num_nodes=reward_num_nodes
        num_gpus_per_node=reward_num_gpus_per_node normalize_enable=normalize_reward overlong_buffer_len
        overlong_penalty_factor""",
    "rollout": """micro_batch_size=micro_rollout_batch_size batch_size=rollout_batch_size n_samples_per_prompt
        max_new_tokens=generate_max_len temperature top_p""",
    "train": """colocate_all=colocate_all_models colocate_actor_ref colocate_critic_reward async_enable=async_train
        micro_batch_size=micro_train_batch_size batch_size=train_batch_size max_epochs num_episodes
        dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu=train_max_tokens_per_gpu agent_func_path seed""",
    "vllm": """num_engines=vllm_num_engines tensor_parallel_size=vllm_tensor_parallel_size
        gpu_memory_utilization=vllm_gpu_memory_utilization sync_backend=vllm_sync_backend
        enable_sleep=vllm_enable_sleep enforce_eager enable_prefix_caching""",
}
"""Section of the options → ``name=NAME_BEFORE``, or the name alone if it was the same without the section."""
OLD_NAMES = {
    before or name: f"{section}.{name}"
    for section, names in _SECTIONS.items()
    for name, _, before in (each.partition("=") for each in names.split())
}
"""Options before 0.11 → their names since."""
