"""Settings of NeMo-RL that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.model_parts import ADAPTERS

WITHOUT_EFFECT = {
    "checkpoints, logs and validation are of a run": r"""
        checkpointing\..* logger\..* .*\.val_\w+ .*max_val_samples .*val_at\w+ data\.validation.*
        .*stop_at_validation\w* eval\..*
    """,
    "how rows are read and scored: data, reward": r"""
        data\.(?!.*(prompt_file|shuffle|seed|template|num_samples|limit|ratio)).*
        policy\.tokenizer\.(name|use_\w+|video) env\.(?!.*(nemo_gym|gym)).* .*data_plane.*
    """,
    "kernels and loading, which follow from the engine here": r"""
        policy\.dtensor_cfg\.(_v2|env_vars.*|automodel_kwargs.*|custom_parallel_plan|force_reconvert\w*|clear_cache\w*|defer\w*)
        policy\.(logprob_\w+|generation_batch_size|make_sequence_length\w*|(dynamic_batching|sequence_packing)\..*)
        policy\.(refit_\w+|offload_\w+|hf_config_overrides\.rope.*)
        policy\.megatron_cfg\.(force_reconvert\w*|env_vars.*|checkpoint.*|empty_unused\w*|\w*fusion\w*|pipeline_dtype|converter_type)
        policy\.megatron_cfg\.(distributed_data\w*.*|scheduler\.(start|end|weight)\w*)
        policy\.megatron_cfg\.optimizer\.(bf16|fp16|params_dtype|use_\w+|overlap\w*|optimizer|clip_grad|sgd\w*)
        policy\.megatron_cfg\.(use_gloo\w*|cuda_graph\w*|recompute_granularity|attention_backend|apply_rope\w*)
        policy\.megatron_cfg\.(gradient_acc\w*|fused_linear\w*|use_fused\w*|defer\w*|sequence_parallel|enabled)
        policy\.megatron_cfg\.(bias_\w+|freeze\w*|moe_permute\w*|moe_router_bias\w*|moe_router_load\w*)
        policy\.megatron_cfg\.(moe_router_dtype|moe_token_disp\w*|moe_enable\w*|moe_shared\w*|moe_per_layer\w*)
        policy\.megatron_cfg\.mtp_loss\w*
    """,
    "follows from the engine here": r"""
        policy\.dtensor_cfg\.sequence_parallel .*worker_extension\w* .*port_range\w* .*_worker_cls
    """,
    "limits of the scheduler of vLLM and others, which rollout.config takes by vLLM's names": r"""
        policy\.generation\.(vllm_cfg|vllm_kwargs|sglang_cfg|sglang_kwargs|trtllm_cfg|mcore\w*|stop_token_ids)\b.*
        policy\.generation\.(refit\w*|real_quant\w*|val_\w+|model_name|pad_token_id|port\w*|colocated|colocate\w*)\b.*
        policy\.generation\.(async_engine|max_new_tokens|top_\w)\b.*
    """,
    "models go to host memory between their calls where a plan needs it": r"""
        (?!.*(activation_offload|offload_modules)).*offload\w*
    """,
    "of the launcher": r"cluster\..*",
    "of its server": r"""
        .*async_\w+\.(max_generation\w*|warmup\w*|drop\w*) .*skip_reference\w* .*trtllm_kwargs.* .*dynamo.*
    """,
    "the critic has an optimizer of its own, in which AdamW cancels a factor": r"value_loss_fn\.scale",
    "profiling": r".*profil.* .*nsys.*",
}
WITH_EFFECT = {
    ADAPTERS: r".*(lora_cfg|peft)\..*",
    "a chat template is a file: data.chat_template": r".*chat_template\w*",
    "a prompt is made by data.template or data.system, and all rows are read in an order of this run's own": r"""
        .*prompt_file\w* data\..*(shuffle|seed|num_samples|limit|ratio)\w*
    """,
    "a sequence is on one device, or with engine torch on context-parallel ranks (cp)": r".*context_parallel_size",
    "experts are split over ranks by models.actor.ep alone": r".*expert\w*_parallel_size",
    "settings of Megatron's experts and routers": r".*\bmoe_\w+",
    "activations of Megatron stay on the device: engine torch has offload_activations": r"""
        .*activation_offload\w* .*offload_modules
    """,
    "stages have equally many layers": r".*num_layers_in_\w+ .*virtual_pipeline\w* .*pipeline_model_parallel_layout",
    "weights and caches are of 16 or 32 bits": r".*fp8.* .*quant.* .*kv_cache_dtype .*precision\w*",
    "environments and tools are named in environment here: docs/environments.md": r"""
        .*max_rollout_turns env\.nemo_gym.* .*nemo_gym.* .*gym.*
    """,
    "scores and advantages are changed in other ways here: docs/algorithms.md": r"""
        .*reward_scaling\..* .*reward_penalt.* .*advantage_clip\w* .*seq_logprob_error\w* .*overlong_filtering
        .*positive_example\w*
    """,
    "tokens are generated one by one": r".*mtp\w*.* draft\..* policy\.draft\..* .*speculative.*",
    "weights change between steps alone, and a lag is in whole steps": r".*async_\w+\..*",
}
