"""Facts of the engine on DeepSpeed."""

from __future__ import annotations

from types import MappingProxyType

from flexrlhf.api import EngineFacts, Package

DEEPSPEED = EngineFacts(
    "deepspeed",
    constructor="flexrlhf.engines.deepspeed.engine:DeepSpeedEngine",
    package=Package("deepspeed", "deepspeed", "deepspeed"),
    zero=(0, 1, 2, 3),
    least_16_bit_zero=1,
    searches_tp=False,
    offload=True,
    config=True,
    cpu_float16=False,
    transformers_modules=True,
    splits=MappingProxyType({3: "flat"}),
    exposes_masters=False,
    averages_gradients=True,
    memory="flexrlhf.engines.deepspeed.memory:DeepSpeedBytes",
    check_config="flexrlhf.engines.deepspeed.config:check_config",
    priced_as="deepspeed",
    published="deepspeed",
    groups_of_one=True,
)
