"""The systems of the field: their engines, placements, and the few constants that are theirs, one set for each.

The constants are fitted on published steps (``benchmarks/calibration``), never on one row of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flexrlhf.guideline.costs.cost_model import Recompute

Gathers = Literal["every step", "at once", "tensor parallel", "own copy", "reshard"]
"""How weights come to generation: ZeRO-3 gathers them for every token, or once for all; DeepSpeed's hybrid engine cuts
them into the slices of a node; an engine of its own has a copy that is sent; 3D meshes exchange their parts."""
Layout = Literal["ZeRO", "symmetric", "smallest", "searched"]
"""How a model's devices share its work: replicas alone; tensor parallel in the node, a pipeline as short as fits;
as little of both as fits; each call its best mesh."""


@dataclass(frozen=True)
class System:
    """``trainer``, ``generator``: engine profiles. Fitted on the published steps of the system, one set for all:

    ``passes``, ``decode``: shares that it reaches, in a step, of its trainer's and generator's speed alone; ``tensor``:
    of collectives of tensor parallelism; ``gather``: of ZeRO-3's collectives between nodes, ``gather_within``: inside
    one. ``launch_seconds``: of one layer in one decoding step on the host, where kernels are launched one by one, in
    nodes with PCIe 5; ``launch_tp_seconds``: besides, with tensor parallelism; 0: the generator's own. ``gaps``: share
    of a step in which nothing is done. ``decode_rows``: the most that a replica decodes together. ``sync_seconds``,
    ``sync_gb_s``: of sending the weights to a copy; 0: as fast as the links.

    What it does: ``scores_again``: the actor computes the log-probs of what it has generated. ``offloads``: gradients
    and optimizer go to host memory where nothing else fits. ``ahead``: it generates the next batch while it trains.
    ``sleeps``: trained states and the copy that generates leave the device for each other. ``all_heads``: its planner
    counts keys and values of all heads. ``stages``: of ZeRO, in order of preference. ``rests``: False where memory of
    one call is not given back before the next.
    """

    name: str
    trainer: str = "deepspeed"
    generator: str = "transformers"
    layout: Layout = "ZeRO"
    gathers: Gathers = "at once"
    placements: tuple[str, ...] = ("co-located",)
    passes: float = 1.0
    decode: float = 1.0
    tensor: float = 1.0
    gather: float = 1.0
    gather_within: float = 1.0
    decode_rows: int | None = None
    launch_seconds: float = 0.0
    launch_tp_seconds: float = 0.0
    gaps: float = 0.0
    sync_seconds: float = 0.0
    sync_gb_s: float = 0.0
    scores_again: bool = True
    offloads: bool = False
    ahead: bool = False
    sleeps: bool = False
    all_heads: bool = False
    stages: tuple[int, ...] = (2, 3)
    rests: bool = True
    recompute: Recompute = "full"


_REAL: dict[str, Any] = {
    "trainer": "megatron",
    "generator": "megatron",
    "gathers": "reshard",
    "scores_again": False,
    "all_heads": True,
}
_REAL_GRAPHS: dict[str, Any] = _REAL | {"passes": 0.75, "tensor": 0.32, "decode_rows": 64, "gaps": 0.065}
_NO_GRAPHS: dict[str, Any] = {"launch_seconds": 0.4e-3, "launch_tp_seconds": 0.5e-3}
_REAL_EAGER: dict[str, Any] = _REAL | {
    "passes": 0.65,
    "tensor": 0.67,
    "launch_seconds": 0.21e-3,
    "launch_tp_seconds": 0.38e-3,
    "gaps": 0.23,
}
# The placements on DeepSpeed that FlexRLHF's paper compares. They train adapters, faster than the trainer's profile,
# which was fitted on whole weights: hence a share above 1.
_FLEX: dict[str, Any] = {
    "generator": "megatron",
    "gathers": "at once",
    "rests": False,
    "passes": 1.5,
    "gather": 0.32,
    "gather_within": 0.5,
}
_TRLX: dict[str, Any] = {
    "stages": (3,),
    "gathers": "every step",
    "rests": False,
    "scores_again": False,
    "passes": 1.35,
    "gather": 0.7,
}
_OPENRLHF: dict[str, Any] = {"gathers": "own copy", "placements": ("standalone",), "offloads": True, "sync_gb_s": 1.6}

SYSTEMS = {
    system.name: system
    for system in (
        System("deepspeed-chat", **_FLEX),
        System("flexrlhf, interleaving 1", placements=("interleaved",), **_FLEX),
        System("flexrlhf, interleaving 2", placements=("split",), **_FLEX),
        System(
            "flexrlhf, disaggregated",
            generator="megatron",
            gathers="own copy",
            placements=("disaggregated",),
            passes=0.45,
        ),
        System("deepspeed-chat, no hybrid engine", gathers="at once", passes=0.3, offloads=True),
        System(
            "deepspeed-chat 0.9, hybrid engine",
            generator="megatron",
            launch_seconds=0.13e-3,
            gathers="tensor parallel",
            passes=0.55,
            offloads=True,
        ),
        System(
            "deepspeed-chat, hybrid engine",
            generator="megatron",
            gathers="tensor parallel",
            stages=(3,),
            passes=0.26,
            gather=0.055,
            launch_seconds=0.3e-3,
            launch_tp_seconds=0.55e-3,
            offloads=True,
        ),
        System("trlx", decode_rows=16, **_TRLX),
        System("trlx, reward alone", placements=("reward alone",), decode_rows=16, **_TRLX),
        System("openrlhf", generator="vllm", passes=0.75, decode=1.9, decode_rows=64, **_OPENRLHF),
        System(
            "openrlhf, untuned",
            generator="vllm-0.6",
            passes=0.4,
            gather=0.015,
            launch_seconds=2e-3,
            stages=(3,),
            **{**_OPENRLHF, "sync_gb_s": 0.0},
        ),
        System(
            "openrlhf, no vllm",
            gathers="every step",
            placements=("standalone without rollout",),
            passes=0.75,
            offloads=True,
        ),
        System("hybridflow", "megatron", "vllm-0.3", "smallest", "reshard", ("co-located", "split", "standalone")),
        System(
            "verl",
            "torch",
            "vllm",
            gathers="own copy",
            passes=0.7,
            decode=0.8,
            sleeps=True,
            sync_seconds=3.2,
            sync_gb_s=6.0,
        ),
        # four steps of it are published, without meshes and prompts: one constant for all that is slow
        System("nemo-aligner", "megatron", "tensorrt-llm", "smallest", "reshard", ("split",), passes=0.09),
        System(
            "nemo-rl",
            "megatron",
            "vllm",
            "smallest",
            "own copy",
            passes=0.87,
            sleeps=True,
            sync_seconds=24.0,
            sync_gb_s=6.0,
        ),
        System("real, heuristic", layout="symmetric", **_REAL_GRAPHS),
        System("real", layout="searched", placements=("co-located", "halves"), **_REAL_GRAPHS),
        System("real, no graphs", layout="searched", placements=("co-located", "halves"), **_REAL_GRAPHS, **_NO_GRAPHS),
        System("real v1, heuristic", layout="symmetric", **_REAL_EAGER),
        System("real v1", layout="searched", placements=("co-located", "halves"), **_REAL_EAGER),
    )
}
