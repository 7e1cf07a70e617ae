"""Settings of AReaL that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.model_parts import ADAPTERS

WITHOUT_EFFECT = {
    "the critic is trained as the actor is": r"critic\.ppo_n_minibatches",
    "names, logs, checkpoints and validation are of a run": r"""
        experiment_name trial_name .*\.(experiment_name|trial_name|fileroot)
        (saver|recover|evaluator|stats_logger|perf_tracer|scheduler|launcher|valid_dataset|logging|session_tracer)\..*
        enable_offload cluster\.(fileroot|name_resolve|cluster_name).* async_training workflow\w* eval_\w+
    """,
    "limits of the server that generates, which rollout.config takes by vLLM's names": r"""
        .*scheduling\w*.* .*port\w*
        rollout\.(queue_size|consumer_batch\w*|max_concurrent\w*|dump_to_file|enable_rollout\w*|setup_timeout)
        rollout\.(request_\w+|tokenizer_path|return_routed\w*|agent.*|openai.*|use_lora|admin\w*|pause\w*|check\w*)
        (sglang|vllm|vllm_server|server)\..* rollout\.(sglang|vllm).*
    """,
    "follows from the engine or the actor here": r"""
        (actor|critic|ref)\.(disable_dropout|init_from_scratch|weight_update_mode|max_new_tokens|temperature|path|dtype)
        (actor|critic|ref)\.(recompute_logprob|prox_\w+|log_agent\w*|is_critic|packing\w*|pad_\w+|attn_impl|group_size)
        (actor|critic|ref)\.(use_kernel\w*|fsdp.*|megatron.*|archon.*|mb_spec\..*|grad_reduce\w*|gradient_checkpointing)
        (actor|critic|ref)\.(optimizer\..*|backend|use_lora|tree\w*|weight_sync\w*|engine_\w+|type)
        (critic|ref)\.(entropy\w*|aent\w*) ref\.(peft_type|lora_\w+|target_modules)
    """,
    "how rows are read: data": r"(train_dataset(?!\.shuffle)|tokenizer_path)\b.* gconfig\.(max_tokens|lora_name)",
}
WITH_EFFECT = {
    "a bonus of entropy is algorithm.entropy_coefficient": r"actor\.(entropy\w*|aent\w*)(\..*)?",
    ADAPTERS: r"(actor|critic)\.(lora_\w+|peft_type|target_modules)",
    "how tokens are sampled: algorithm.temperature, min_response_tokens and stop; cuts need importance weights": r"""
        gconfig\..*
    """,
    "rows are read in an order of this run's own": r"train_dataset\.shuffle",
    "environments and tools are named in environment here: docs/environments.md": r"""
        econfig\..* .*max_turns tir\..* n_trajs agent\w* judge\w*.* max_llm\w* max_tokens_per_trajectory
        reward_fn_path
    """,
    "scores and advantages are changed in other ways here: docs/algorithms.md": r"""
        actor\.(reward_scaling|reward_bias|reward_clip|overlong\w*|mask_no_eos\w*|.*reward_norm.*|.*adv_norm.*)\b.*
        actor\.(group_adv_norm|dynamic_sampling|dynamic_bs|behav\w+)\b.* dynamic_bs .*dynamic_\w+
    """,
    "rejection here has other bounds: algorithm.importance.reject": r"actor\.(rejection_sampling|behav_imp\w*).*",
    "this loss is not here; PPO's stands for it": r"actor\.(use_sapo\w*|sapo\w*|m2\w*|use_m2\w*|use_decoupled\w*)",
}
