"""Settings of TRL that have no counterpart, by their keys, and why."""

from __future__ import annotations

WITHOUT_EFFECT = {
    "logs, checkpoints and validation are of a run": r"""
        report_to log\w* output_dir overwrite_output_dir run_name push_to_hub hub_\w+ save_\w+ eval_\w+ do_eval
        do_train \w*eval_strategy trackio\w* wandb\w* resume\w* load_best\w* metric_\w+ num_completions_to_print
        project
    """,
    "how rows are read: data.form, columns and template; passes over them are epochs or steps here": r"""
        dataset_\w+ \w*_split chat_template\w* packing\w* dataloader\w* remove_unused\w* eos_token pad_token
        dataset_kwargs assistant_only\w* completion_only\w* num_train_epochs total_episodes datasets preprocessing\w*
        label_names shuffle\w*
    """,
    "kernels and processes, which follow from the engine here": r"""
        attn_implementation use_liger\w* gradient_checkpointing_kwargs bf16\w* fp16 tf32 torch_\w+ ddp_\w+ optim seed
        config_file main_process_port num_machines num_processes machine_rank trust_remote_code model_revision
        ds3_gather\w* vllm_(server\w*|model_impl|max_model\w*|enable\w*|group_port|guided\w*|structured\w*) deepspeed
        fsdp\w* model_init_kwargs\w* dtype torch_dtype cast_lm\w* use_cache disable_dropout 
        padding_free pad_to\w* config
    """,
    "of Python": r"""
        eval_dataset ref_model reward_model args processing_class tokenizer callbacks train_dataset compute_metrics
        optimizers value_model formatting_func data_collator
    """,
}
WITH_EFFECT = {
    "weights are of 16 or 32 bits": r"load_in_\w*bit bnb_\w+ use_bnb\w* quantization_config",
    "adapters have rank, alpha and targets": r"""
        lora_(dropout|task_type|modules\w*|target_param\w*) use_rslora use_dora peft_config bias task_type
    """,
    "corrections for another policy are algorithm.importance": r"(vllm_importance|off_policy)\w*",
    "environments and tools are named in environment here: docs/environments.md": r"""
        max_tool\w* tools environment\w* rollout_func
    """,
    "messages are text": r"\w*image\w* \w*vlm\w*",
}
