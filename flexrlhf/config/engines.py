"""Facts of the engines: calls and settings that each supports, how it stores weights, and needs of its library.

Planning, costs and checks read them, so that a new engine is a plug-in: its facts, and the class that they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from flexrlhf.config.code_loading import NamedErrors
from flexrlhf.config.plugins import Plugin, load_plugin
from flexrlhf.errors import UserError, nearest

Split = Literal["whole", "rows", "flat"]
"""How replicas store weights between passes: each all of them, rows of every tensor, or a range of its elements."""

PublishedSteps = Literal["deepspeed", "torch and megatron", "figures"]
"""Published steps by which predictions are judged: of an engine, or those of all."""


@dataclass(frozen=True)
class Package:
    """A library that is not installed by default.

    module:     its name for ``import``.
    extra:      the extra of flexrlhf that installs it.
    name:       its name for pip.
    cpu_build:  name of a build for CPUs, and of the extra that installs it.
    """

    module: str
    extra: str
    name: str
    cpu_build: str = ""


@dataclass(frozen=True)
class EngineFacts:
    """Facts of one engine.

    Calls and settings that it supports:

    name:               as ``engine`` in the YAML.
    constructor:        the class that ranks construct, ``module:Class``: a ``flexrlhf.api.engine.Engine``.
    package:            the library that it needs; None: one that is always installed.
    kinds:              kinds of operators that it runs: generate, forward, train.
    zero:               ZeRO stages.
    least_16_bit_zero:  first ZeRO stage at which it trains weights of 16 bits.
    node:               whether it can shard over the ranks of one node.
    axes:               axes along which its ranks can share a model (``config/axes.py``).
    searches_tp:        whether advice tries tensor parallelism: published steps, which costs are fitted to, have it.
    routers:            whether it records and replays the experts of tokens.
    offload:            whether it can keep the optimizer's state or the parameters in host memory while it computes.
    config:             whether ``models.*.config`` passes settings on to its library.
    float16:            whether it computes in float16 on GPUs.
    cpu_float16:        whether it computes in float16 on CPUs.
    sharded_optimizers: optimizers whose states it shards (zero 1); empty: all.
    both_heads:         whether one trunk can have a language head and a scalar head.
    sequence_parallel:  whether tensor-parallel ranks share the hidden states between layers.
    cpu_head_dims:      head dimensions of its attention on CPUs; empty: any.
    cpu_module:         module that stands in for CUDA on CPUs, where it needs one.
    least_capability:   least CUDA compute capability of a GPU that its library supports; 0: any.

    How it stores and computes:

    transformers_modules:  whether its models are made of transformers' modules: kernels of attention, Liger's, MLPs in
                           tiles and compiled layers can be chosen, and all such engines decode alike.
    plain_modules:         whether a model with whole weights is plain modules: their tensors may be another copy's,
                           CUDA graphs replay their decoding, and slots keep rows between turns.
    separate_tensors:      ZeRO stages at which each tensor of a trained model has memory of its own.
    fused_layers:          whether a trained model has query, key and value in one linear layer, gate and up in another.
    splits:                how replicas store weights by ZeRO stage; whole at others.
    vocabulary_multiple:   tensor-parallel ranks split the vocabulary, padded to a multiple of so many rows; 0: all have
                           the whole embedding.
    loads_whole:           whether every rank loads all of a model, in float32, before it is sharded.
    copies_keys:           whether several tensor-parallel ranks have the same key-value head, where there are fewer.
    exposes_masters:       whether it exposes the float32 master weights of a model in 16 bits.
    averages_gradients:    whether its library takes the mean over ranks, which is multiplied back and so rounds more.
    memory:                class of the bytes of its states and passes, ``module:Class``; empty: those of torch.
    check_config:          function that raises UserError for settings of ``config`` that do not go with it,
                           ``module:name``; it takes the model's place in the YAML and the settings. Empty: none.
    priced_as:             engine of this package as which its calls are timed; empty: none, and nothing is predicted.
    published:             published steps by which predictions of its calls are judged.

    As ``rollout.engine``:

    rollout_settings:   settings of ``rollout`` that it has; empty: it is no rollout engine.
    on_trained_ranks:   whether it generates on the ranks that train the actor alone (a hybrid engine).
    cache_block:        tokens of a block of its cache of keys and values; 0: a call allocates them.
    one_in_process:     whether a process can have one of them alone.
    least_temperature:  temperatures above 0 and below are raised to it.
    by_requests:        whether it decodes a changing set of requests (continuous batching): it reads a prompt once for
                        all of its samples, and texts without padding.
    renews_latent:      whether a sync renews weights from which latent attention is computed.
    is_auto:            whether ``auto`` chooses it where devices and models allow it.
    sampler:            class that samples for ``serve-model``, a ``TokenSampler``, ``module:Class``; empty: none.

    Communication:

    groups_of_one:  whether its library requires a group where a rank is alone.
    model_group:    whether it has a group of all ranks of a model.
    one_queue:      whether collectives of its tensor-parallel ranks overlap products as planned only where a GPU begins
                    all work in one order.
    communicators:  communicators that a rank of a run with it usually has, until a plan counts them.
    """

    ALL_KINDS: ClassVar = frozenset({"generate", "forward", "train"})

    name: str
    constructor: str = ""
    package: Package | None = None
    kinds: frozenset[str] = ALL_KINDS
    zero: tuple[int, ...] = (0,)
    least_16_bit_zero: int = 0
    node: bool = False
    axes: frozenset[str] = frozenset({"tp"})
    searches_tp: bool = True
    routers: bool = False
    offload: bool = False
    config: bool = False
    float16: bool = True
    cpu_float16: bool = True
    sharded_optimizers: tuple[str, ...] = ()
    both_heads: bool = True
    sequence_parallel: bool = False
    cpu_head_dims: tuple[int, ...] = ()
    cpu_module: str = ""
    least_capability: float = 0.0

    transformers_modules: bool = False
    plain_modules: bool = False
    separate_tensors: tuple[int, ...] = ()
    fused_layers: bool = False
    splits: Mapping[int, Split] = field(default_factory=lambda: MappingProxyType({}))
    vocabulary_multiple: int = 0
    loads_whole: bool = False
    copies_keys: bool = False
    exposes_masters: bool = True
    averages_gradients: bool = False
    memory: str = ""
    check_config: str = ""
    priced_as: str = ""
    published: PublishedSteps = "figures"

    rollout_settings: tuple[str, ...] = ()
    on_trained_ranks: bool = False
    cache_block: int = 0
    one_in_process: bool = False
    least_temperature: float = 0.0
    by_requests: bool = False
    renews_latent: bool = True
    is_auto: bool = False
    sampler: str = ""

    groups_of_one: bool = False
    model_group: bool = False
    one_queue: bool = False
    communicators: int = 5

    @classmethod
    @cache
    def of(cls, engine: str) -> EngineFacts:
        """Return the facts of ``engine``; of an unknown one, which the checks of a plan refuse, those without features.

        Raises UserError for one whose package cannot be used.
        """
        if not cls.is_engine(engine):
            return cls(engine)
        facts: EngineFacts = load_plugin("engines", engine)
        return facts

    @staticmethod
    def is_engine(name: str) -> bool:
        """Return whether there is an engine of that name, rather than a word of ``rollout.engine``."""
        return name not in ("auto", "transformers") and Plugin.find("engines", name) is not None

    @classmethod
    def check_name(cls, key: str, name: str) -> None:
        """Raise UserError for an unknown engine. ``key``: its place in the YAML, for the message."""
        if not cls.is_engine(name):
            names = [facts.name for facts in cls.all_engines()]
            known = ", ".join(cls.model_engines())
            raise UserError(f"{key}: unknown engine {name!r}{nearest(name, names)}; known: {known}")

    @classmethod
    @cache
    def all_engines(cls) -> tuple[EngineFacts, ...]:
        """Return the facts of all engines that can be used."""
        found = []
        for name in Plugin.of_group("engines"):
            with suppress(UserError):
                found.append(cls.of(name))
        return tuple(found)

    @classmethod
    def full_engines(cls) -> tuple[str, ...]:
        """Return the engines with all kinds of calls, of which one serves a role alone."""
        return tuple(facts.name for facts in cls.all_engines() if facts.kinds == cls.ALL_KINDS)

    @classmethod
    def model_engines(cls) -> tuple[str, ...]:
        """Return the engines of ``models``; the others are for ``rollout`` alone."""
        return tuple(facts.name for facts in cls.all_engines() if facts.trains)

    @classmethod
    def offloading_engine(cls) -> str:
        """Return an engine whose optimizer states can be in host memory; empty: there is none."""
        return next((facts.name for facts in cls.all_engines() if facts.offload), "")

    @classmethod
    def of_auto(cls) -> EngineFacts:
        """Return the facts of the engine that ``rollout.engine: auto`` may choose."""
        return next(facts for facts in cls.all_engines() if facts.is_auto)

    @classmethod
    def cpu_builds(cls) -> dict[str, str]:
        """Return the libraries whose build for CPUs has a name of its own, and that name."""
        packages = (facts.package for facts in cls.all_engines())
        return {package.name: package.cpu_build for package in packages if package is not None and package.cpu_build}

    @property
    def trains(self) -> bool:
        """Whether it trains models."""
        return "train" in self.kinds

    @property
    def is_installed(self) -> bool:
        """Whether its library can be imported."""
        return self.package is None or find_spec(self.package.module) is not None

    def part(self, reference: str) -> Any:
        """Load ``constructor``, ``memory`` or ``check_config``. Raises UserError."""
        module, _, name = reference.partition(":")
        with NamedErrors(f"engine {self.name}: {reference}"):
            return getattr(import_module(module), name)

    def split(self, zero: int) -> Split:
        """Return how several replicas store weights at ZeRO stage ``zero``."""
        return self.splits.get(zero, "whole")


TORCH = EngineFacts(
    "torch",
    constructor="flexrlhf.engines.torch.engine:TorchEngine",
    zero=(0, 2, 3),
    node=True,
    axes=frozenset({"tp", "cp", "ep"}),
    routers=True,
    transformers_modules=True,
    plain_modules=True,
    separate_tensors=(0, 2, 3),
    splits=MappingProxyType({2: "rows", 3: "rows"}),
    priced_as="torch",
    published="torch and megatron",
    rollout_settings=("tp", "dtype", "kv_tokens", "sleep", "parity"),
    on_trained_ranks=True,
)
PEFT = Package("peft", "lora", "peft")
"""Library of adapters, of all engines that train them."""
