"""Settings of DeepSpeed-Chat that have no counterpart, by their keys, and why."""

from __future__ import annotations

from flexrlhf.imports.translation import Reason

REASONS = (
    Reason(
        (
            "output_dir",
            "print_answers",
            "enable_tensorboard",
            r"tensorboard\w*",
            r"eval\w*",
            r"per_device_eval\w*",
            r"save_\w+",
            r"\w*test\w*",
            "print_loss",
            r"per_device_mini\w*",
        ),
        "logs, checkpoints and validation are of a run",
        False,
    ),
    Reason(
        (
            r"data_\w+",
            "num_train_epochs",
            r"num_padding\w*",
            r"add_eot\w*",
            r"end_of\w*",
            r"compute_fp32\w*",
            r"\w*dropout",
            "seed",
            "deepspeed",
            "local_rank",
            "master_port",
            "lora_module_name",
            r"\w*lora_module_name",
            "only_optimize_lora",
            r"\w*lora_learning_rate",
            r"\w*learning_rate_lora",
            "dtype",
            r"\w*gradient_checkpointing",
            r"enable_mixed\w*",
            r"mixed_precision\w*",
            "inference_tp_size",
            r"tp_gather\w*",
            r"release_inference\w*",
            r"unpin\w*",
            r"overlap\w*",
        ),
        "how rows are read, kernels and processes",
        False,
    ),
    Reason((r"offload\w*",), "frozen models go to host memory where a plan needs it", False),
    Reason((r"unsup\w*",), "a loss of texts in addition is algorithm.ptx"),
    Reason((r"\w*ema",), "an average of weights is not here"),
)
