"""Engine name → how to make it for one placed model on this rank. A new engine adds one line here."""

from __future__ import annotations

from collections.abc import Callable

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


ENGINES: dict[str, Callable[[EngineContext], Engine]] = {"torch": _torch, "deepspeed": _deepspeed, "vllm": _vllm}


def make_engine(context: EngineContext) -> Engine:
    return ENGINES[context.placed.engine](context)
