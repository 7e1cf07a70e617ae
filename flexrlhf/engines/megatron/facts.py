"""Facts of the engine on Megatron-Core."""

from __future__ import annotations

from flexrlhf.api import EngineFacts, Package

MEGATRON = EngineFacts(
    "megatron",
    constructor="flexrlhf.engines.megatron.engine:MegatronEngine",
    package=Package("megatron.core", "megatron", "megatron-core"),
    kinds=frozenset({"forward", "train"}),
    zero=(0, 1),
    axes=frozenset({"tp", "pp", "cp"}),
    float16=False,
    sharded_optimizers=("adamw",),
    both_heads=False,
    sequence_parallel=True,
    cpu_module="megatron_cpu",
    fused_layers=True,
    separate_tensors=(0,),
    vocabulary_multiple=1,
    memory="flexrlhf.engines.megatron.memory:MegatronBytes",
    priced_as="torch",
    groups_of_one=True,
    model_group=True,
    one_queue=True,
    communicators=12,
)
