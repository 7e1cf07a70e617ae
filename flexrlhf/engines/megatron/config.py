"""Settings of Megatron-Core for a placed model, and parts of it that a process has once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as optimizers
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from flexrlhf.api import ModelFamily, ModelSpec, PlacedModel, Sizes
from flexrlhf.api.engine import DTYPES

KERNELS = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}
"""Fused kernels, which need further libraries or compile at the first call."""


def transformer_config(placed: PlacedModel, sizes: Sizes, config: Any) -> TransformerConfig:
    """Return the settings of the model of ``placed``. ``config``: its Hugging Face config."""
    settings, layout = placed.settings, placed.layout
    dtype = DTYPES[settings.dtype]
    recomputes = settings.activation_checkpointing and placed.trained
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=ModelFamily.of(sizes.family).is_biased,
        qk_layernorm=sizes.head_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.dims.tp,
        pipeline_model_parallel_size=layout.dims.pp,
        sequence_parallel=layout.dims.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # weights are read into the model afterwards
        perform_initialization=False,
        # rows of a pass are as long as their sequences (``_Pipeline`` in passes.py)
        variable_seq_lengths=layout.dims.pp > 1,
        # required with that, also of models without experts
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=True,
        # that would wait for everything on the device, also for rows of other models that are on their way
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=layout.dims.pp > 1,
        # losses are divided by the counts of a whole mini-batch, so that gradients add up
        calculate_per_token_loss=True,
        recompute_granularity="full" if recomputes else None,
        recompute_method="uniform" if recomputes else None,
        recompute_num_layers=1 if recomputes else None,
        **KERNELS,
    )


def gradient_config(settings: ModelSpec) -> DistributedDataParallelConfig:
    """Return the settings of gradients, which are summed in float32."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.zero == 1,
        overlap_grad_reduce=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )


def optimizer_config(settings: ModelSpec) -> OptimizerConfig:
    """Return the settings of the optimizer; the engine clips gradients, and sets the learning rate of each update."""
    optimizer = settings.optimizer
    return OptimizerConfig(
        optimizer="sgd" if optimizer.name == "sgd" else "adam",
        decoupled_weight_decay=optimizer.name == "adamw",
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        sgd_momentum=0.0,
        clip_grad=0.0,
        bf16=settings.dtype == "bfloat16",
        params_dtype=DTYPES[settings.dtype],
        use_distributed_optimizer=settings.zero == 1,
    )


RANDOM_STATE = "model-parallel-rng"
"""Name of the random state that layers fork under sequence parallelism."""


def prepare_process(seed: int) -> None:
    """Make the buffer for gathered activations, and a random state, on which no number depends: dropout is off."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if RANDOM_STATE not in tracker.get_states():
        tracker.add(RANDOM_STATE, seed)


@contextmanager
def torch_optimizers() -> Iterator[None]:
    """Make Megatron construct torch's optimizers, also where TransformerEngine or apex are installed.

    Theirs count updates elsewhere, and round in other places than the other engines' do.
    """
    before = optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD = True, torch.optim.SGD
    try:
        yield
    finally:
        optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD = before
