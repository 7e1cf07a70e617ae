"""Engine name → how to make it for one placed model on this rank. A new engine adds one line here."""

from __future__ import annotations

from collections.abc import Callable

from flexrlhf.engines.base import Engine, Wanted


def _torch(wanted: Wanted) -> Engine:
    from flexrlhf.engines.torch.engine import TorchEngine

    return TorchEngine(wanted)


def _deepspeed(wanted: Wanted) -> Engine:
    from flexrlhf.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(wanted)


def _vllm(wanted: Wanted) -> Engine:
    from flexrlhf.engines.vllm.engine import VllmEngine

    return VllmEngine(wanted)


ENGINES: dict[str, Callable[[Wanted], Engine]] = {"torch": _torch, "deepspeed": _deepspeed, "vllm": _vllm}


def make_engine(wanted: Wanted) -> Engine:
    return ENGINES[wanted.placed.engine](wanted)
