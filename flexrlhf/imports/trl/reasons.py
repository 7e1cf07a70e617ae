"""Settings of TRL that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.model_parts import ADAPTERS

WITHOUT_EFFECT = {
    "logs, checkpoints and validation are of a run": r"""
        report_to log\w* output_dir overwrite_output_dir run_name push_to_hub hub_\w+ save_\w+ eval_\w+ do_eval
        per_device_eval\w* do_train \w*eval_strategy trackio\w* wandb\w* resume\w* load_best\w* metric_\w+
        num_completions_to_print project
    """,
    "how rows are read: data.form, columns and template": r"""
        dataset_(num_proc|batch_size|streaming|test_split) dataloader_(?!drop_last).* remove_unused\w* pad_token
        eval_packing label_names preprocessing\w*
    """,
    "kernels and processes, which follow from the engine here": r"""
        attn_implementation use_liger\w* gradient_checkpointing_kwargs.* bf16\w* fp16 tf32 torch_\w+ ddp_\w+
        config_file main_process_port num_machines num_processes machine_rank trust_remote_code model_revision
        ds3_gather\w* vllm_(server\w*|model_impl|max_model\w*|enable\w*|group_port) deepspeed
        fsdp\w* model_init_kwargs\w* dtype torch_dtype cast_lm\w* use_cache disable_dropout
        padding_free pad_to\w* config
    """,
    "of Python": r"""
        eval_dataset ref_model reward_model args processing_class tokenizer callbacks train_dataset compute_metrics
        optimizers value_model formatting_func data_collator
    """,
}
WITH_EFFECT = {
    "rows are not packed into longer ones: a step has prompts_per_step rows": r"packing\w*",
    "tokens are sampled from all that the model gives": r"vllm_(guided|structured)\w*",
    "weights are of 16 or 32 bits": r"load_in_\w*bit bnb_\w+ use_bnb\w* quantization_config",
    ADAPTERS: r"""
        lora_(dropout|task_type|modules\w*|target_\w+|bias) use_rslora use_dora peft_config bias task_type
        exclude_modules modules_to_save layers_to_transform layers_pattern rank_pattern alpha_pattern init_lora_weights
        target_parameters
    """,
    "a chat template is a file: data.chat_template": r"chat_template(_path|_name_or_path)?",
    "rows are read whole, in an order of this run's own": r"""
        dataset_\w+ datasets.* \w*_split train_sampling\w* shuffle\w* dataloader_drop_last group_by_length
    """,
    "the loss is on the tokens of responses: docs/chat.md": r"assistant_only\w* completion_only\w*",
    "scores have weights in reward": r"reward_weights",
    "corrections for another policy are algorithm.importance": r"(vllm_importance|off_policy)\w*",
    "environments and tools are named in environment here: docs/environments.md": r"""
        max_tool\w* tools environment\w* rollout_func
    """,
    "messages are text": r"\w*image\w* \w*vlm\w*",
}
