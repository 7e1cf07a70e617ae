"""Constructors of engines by name. A new engine adds one line to ``ENGINES``."""

from __future__ import annotations

from collections.abc import Callable
from warnings import filterwarnings

from flexrlhf.engines.base import Engine, EngineContext


def _torch(context: EngineContext) -> Engine:
    from flexrlhf.engines.torch.engine import TorchEngine

    return TorchEngine(context)


def _deepspeed(context: EngineContext) -> Engine:
    from flexrlhf.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(context)


def _vllm(context: EngineContext) -> Engine:
    from flexrlhf.engines.vllm.engine import VllmEngine

    return VllmEngine(context)


def _megatron(context: EngineContext) -> Engine:
    # its modules recommend libraries and settings
    filterwarnings("ignore", category=UserWarning, module="megatron")
    from flexrlhf.engines.megatron.engine import MegatronEngine

    return MegatronEngine(context)


ENGINES: dict[str, Callable[[EngineContext], Engine]] = {
    "torch": _torch,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "vllm": _vllm,
}


def make_engine(context: EngineContext) -> Engine:
    """Construct the engine of a placed model on this rank; all ranks of the model call it."""
    return ENGINES[context.placed.engine](context)
