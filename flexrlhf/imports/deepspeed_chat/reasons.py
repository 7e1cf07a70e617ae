"""Settings of DeepSpeed-Chat that have no counterpart, by their keys, and why."""

from __future__ import annotations

WITHOUT_EFFECT = {
    "logs, checkpoints and validation are of a run": r"""
        output_dir print_answers enable_tensorboard tensorboard\w* eval\w* per_device_eval\w* save_\w+ \w*test\w*
        print_loss per_device_mini\w*
    """,
    "how rows are read, kernels and processes": r"""
        data_output\w* num_padding\w* compute_fp32\w* deepspeed
        local_rank master_port only_optimize_lora dtype \w*gradient_checkpointing enable_mixed\w* mixed_precision\w*
        inference_tp_size
        tp_gather\w* release_inference\w* unpin\w* overlap\w*
    """,
    "frozen models go to host memory where a plan needs it": r"offload\w*",
}
WITH_EFFECT = {
    "models are trained without dropout": r"\w*dropout",
    "all rows of a file are for one stage; a token that ends turns is data.end_token": r"""
        data_split data_\w+ add_eot\w* end_of\w*
    """,
    "adapters are on all linear layers, at the actor's learning rate": r"""
        \w*lora_module_name \w*lora_learning_rate \w*learning_rate_lora
    """,
    "a loss of texts in addition is algorithm.ptx": r"unsup\w*",
    "an average of weights is not here": r"\w*ema",
}
