"""Settings of AReaL that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.translation import Reason

REASONS = (
    Reason(
        (
            r"econfig\..*",
            ".*max_turns",
            r"tir\..*",
            "n_trajs",
            r"agent\w*",
            r"judge\w*.*",
            r"max_llm\w*",
            "max_tokens_per_trajectory",
            "reward_fn_path",
        ),
        "responses are of one turn",
    ),
    Reason((r"critic\.ppo_n_minibatches",), "the critic is trained as the actor is", False),
    Reason(
        (
            "experiment_name",
            "trial_name",
            r".*\.(experiment_name|trial_name|fileroot)",
            r"(saver|recover|evaluator|stats_logger|perf_tracer|scheduler|launcher|valid_dataset|logging|"
            r"session_tracer)\..*",
            "enable_offload",
            r"cluster\.(fileroot|name_resolve|cluster_name).*",
            "async_training",
            r"workflow\w*",
            r"eval_\w+",
        ),
        "names, logs, checkpoints and validation are of a run",
        False,
    ),
    Reason(
        (
            r".*scheduling\w*.*",
            r".*port\w*",
            r"rollout\.(queue_size|consumer_batch\w*|max_concurrent\w*|dump_to_file|enable_rollout\w*|"
            r"setup_timeout|request_\w+|tokenizer_path|return_routed\w*|agent.*|openai.*|use_lora|admin\w*|"
            r"pause\w*|check\w*)",
            r"(sglang|vllm|vllm_server|server)\..*",
            r"rollout\.(sglang|vllm).*",
        ),
        "limits of the server that generates, which rollout.config takes by vLLM's names",
        False,
    ),
    Reason(
        (
            r"(actor|critic|ref)\.(disable_dropout|init_from_scratch|weight_update_mode|max_new_tokens|"
            r"temperature|recompute_logprob|prox_\w+|log_agent\w*|is_critic|packing\w*|pad_\w+|attn_impl|"
            r"use_kernel\w*|fsdp.*|megatron.*|archon.*|mb_spec\..*|grad_reduce\w*|gradient_checkpointing|"
            r"dtype|optimizer\..*|path|group_size|backend|use_lora|peft_type|lora_\w+|target_modules|"
            r"tree\w*|weight_sync\w*|engine_\w+|entropy\w*|aent\w*|type)",
        ),
        "follows from the engine or the actor here",
        False,
    ),
    Reason(
        (
            r"(train_dataset|tokenizer_path|total_train_epochs|total_train_steps|gconfig\.(min_new_tokens|"
            r"stop\w*|greedy|max_tokens|lora_name|\w*penalty))\b.*",
            r"gconfig\..*",
        ),
        "how rows are read and sampled: data; epochs are steps here",
        False,
    ),
    Reason(
        (
            r"actor\.(reward_scaling|reward_bias|reward_clip|overlong\w*|mask_no_eos\w*|.*reward_norm.*|"
            r".*adv_norm.*|group_adv_norm|dynamic_sampling|dynamic_bs|behav\w+)\b.*",
            "dynamic_bs",
            r".*dynamic_\w+",
        ),
        "scores and advantages are changed in other ways here: docs/algorithms.md",
    ),
    Reason(
        (r"actor\.(rejection_sampling|behav_imp\w*).*",), "rejection here has other bounds: algorithm.importance.reject"
    ),
    Reason(
        (r"actor\.(use_sapo\w*|sapo\w*|m2\w*|use_m2\w*|use_decoupled\w*)",),
        "this loss is not here; PPO's stands for it",
    ),
)
