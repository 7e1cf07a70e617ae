"""Names of parameters: of transformers' modules, with what peft's adapters add to them."""

from __future__ import annotations

import math
import re
from functools import cached_property, lru_cache

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linear layers that Megatron-Core has in one with another: query, key and value; gate and up."""
Parameters = tuple[tuple[str, tuple[int, ...]], ...]


class ParameterName(str):
    """Name of a parameter, as transformers' modules call it, and peft's layers."""

    __slots__ = ()

    EMBEDDING = ".embed_tokens.weight"
    LANGUAGE_HEAD = "lm_head.weight"
    SCALAR_HEAD = "score.weight"
    EXPERTS_IN, EXPERTS_OUT = ".experts.gate_up_proj", ".experts.down_proj"
    """Ends of the names of a layer's two tensors of experts: gate and up, one behind the other, and down."""
    OF_EXPERTS = (EXPERTS_IN, EXPERTS_OUT, f"{EXPERTS_IN}_bias", f"{EXPERTS_OUT}_bias")
    """Ends of the names of parameters that have the experts of a layer as their first dim."""
    MIXTRAL_BLOCK = (".mlp.", ".block_sparse_moe.")
    """Parts of names of Mixtral's router and experts: in transformers' modules, and in files and other libraries."""
    ROUTER_BIAS = ".e_score_correction_bias"
    """End of the name of the biases by which routers choose: buffers of transformers' modules, always in float32."""
    OF_KEYS = ("k_proj", "v_proj")
    COLUMNWISE = ("q_proj", *OF_KEYS, "gate_proj", "up_proj")
    ROWWISE = ("o_proj", "down_proj")
    """Linear layers that tensor parallelism splits along their outputs, and along their inputs (Shoeybi et al.
    2019)."""
    ADAPTER = "default"
    """The name that peft gives an adapter by itself."""
    START = "start"
    """Name of a frozen copy of adapters that a run goes on training: the policy that its reference is."""
    BASE = ".base_layer."
    MATRICES = ("lora_A", "lora_B")

    @property
    def is_router_bias(self) -> bool:
        """Whether the tensor is whole on every rank and in float32, whatever the layout and type of its model."""
        return self.endswith(self.ROUTER_BIAS)

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter has the experts of a layer as its first dim."""
        return self.without_adapter[0].endswith(self.OF_EXPERTS)

    @property
    def without_adapter(self) -> tuple[str, str]:
        """The name without peft's additions, and ``lora_A`` or ``lora_B`` of a parameter of an adapter, else
        nothing."""
        for matrix in self.MATRICES:
            for adapter in (self.ADAPTER, self.START):
                if (words := f".{matrix}.{adapter}.") in self:
                    return self.replace(words, "."), matrix
        return self.replace(self.BASE, "."), ""

    @property
    def merged_from(self) -> tuple[str, str, str]:
        """Names that the merged weight of this name is computed from: the base weight, A and B."""
        path, _, kind = self.rpartition(".")
        if self.endswith(self.OF_EXPERTS):
            return self, f"{path}.lora_A.{self.ADAPTER}.{kind}", f"{path}.lora_B.{self.ADAPTER}.{kind}"
        first, second = (f"{path}.{matrix}.{self.ADAPTER}.weight" for matrix in self.MATRICES)
        return f"{path}{self.BASE}weight", first, second

    @property
    def last_words(self) -> str:
        """End of the name from that of its layer on."""
        plain, _ = self.without_adapter
        return self[len(plain.rpartition(".")[0].rpartition(".")[0]) :].removeprefix(".")

    @property
    def layer(self) -> int | None:
        """Number of the layer that the parameter is in; None for the embedding, the last norm and heads."""
        match = _LAYER.search(self)
        return None if match is None else int(match[1])

    @property
    def fused(self) -> str:
        """Name of the first parameter that Megatron-Core has in one with this one."""
        return ".".join(_FUSED.get(word, word) for word in self.replace(self.BASE, ".").split("."))


class HashedParameters(tuple[tuple[str, tuple[int, ...]], ...]):
    """Parameters whose hash is computed once: they are keys of many tables, and there are hundreds."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


@lru_cache(maxsize=256)
def count_elements(parameters: Parameters) -> int:
    """Return the number of elements of all ``parameters``."""
    return sum(math.prod(shape) for _, shape in parameters)
