"""Model shapes by name, as Hugging Face configs, and from a ``config.json``.

Sizes come from the models' own config files; ``tests/unit/test_model_names.py`` counts their parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flexrlhf.config.model_families import Families
from flexrlhf.errors import UserError, nearest, shown

Config = dict[str, Any]


_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_OPTIONAL = ("num_key_value_heads", "head_dim")
"""Follow from the others where a config has none."""


def _config(model_type: str, *sizes: int, head_dim: int | None = None, tied: bool = False, **others: Any) -> Config:
    """Return a config with ``sizes``, in the order of ``_KEYS``, and ``others``: of experts, or of sliding attention,
    which transformers gives Mistral's family where a config leaves it out."""
    config: Config = {"model_type": model_type, **dict(zip(_KEYS, sizes, strict=True))}
    if head_dim is not None:
        config["head_dim"] = head_dim
    return {**config, "tie_word_embeddings": tied, **others}


def _experts(number: int, active: int, **sizes: int) -> dict[str, Any]:
    """Return the settings of ``number`` experts, of which ``active`` compute a token, under Qwen's names."""
    return {"num_experts": number, "num_experts_per_tok": active, **sizes}


def _with_shared(number: int, active: int, shared: int, *, dense: int, **sizes: int | None) -> Config:
    """Return the settings of experts of which ``shared`` ones compute every token, behind ``dense`` layers without any,
    under DeepSeek's names."""
    experts = {"n_routed_experts": number, "num_experts_per_tok": active, "n_shared_experts": shared}
    return {**experts, "first_k_dense_replace": dense, **sizes}


MODELS: dict[str, Config] = {
    "llama-7b": _config("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _config("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama-33b": _config("llama", 6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _config("llama", 8192, 22016, 80, 64, 64, 32000),
    "llama-2-7b": _config("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _config("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _config("llama", 8192, 28672, 80, 64, 8, 32000),
    "codellama-34b": _config("llama", 8192, 22016, 48, 64, 8, 32000),
    "llama-3-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _config("llama", 16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tied=True),
    "llama-3.2-3b": _config("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, tied=True),
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    "mistral-7b-v0.1": _config("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    "mistral-7b-v0.2": _config("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=None),
    "mistral-nemo-12b": _config("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    "mistral-large-123b": _config("mistral", 12288, 28672, 88, 96, 8, 32768, sliding_window=None),
    "deepseek-llm-7b": _config("llama", 4096, 11008, 30, 32, 32, 102400),
    "smollm2-1.7b": _config("llama", 2048, 8192, 24, 32, 32, 49152, tied=True),
    "qwen2.5-0.5b": _config("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _config("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _config("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _config("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _config("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "r1-distill-qwen-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936),
    "qwen3-0.6b": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tied=True),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128, tied=True),
    "qwen3-4b": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, **_experts(128, 8, moe_intermediate_size=768)
    ),
    "qwen3-235b-a22b": _config(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 151936, head_dim=128, **_experts(128, 8, moe_intermediate_size=1536)
    ),
    "qwen1.5-moe-a2.7b": _config(
        *("qwen2_moe", 2048, 5632, 24, 16, 16, 151936),
        **_experts(60, 4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    ),
    "olmoe-1b-7b": _config("olmoe", 2048, 1024, 16, 16, 16, 50304, **_experts(64, 8)),
    "mixtral-8x7b": _config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "glm-4.5-air": _config("glm4_moe", 4096, 10944, 46, 96, 8, 151552, head_dim=128)
    | _with_shared(128, 8, 1, dense=1, moe_intermediate_size=1408, attention_bias=True),
    "deepseek-v2-lite": _config("deepseek_v2", 2048, 10944, 27, 16, 16, 102400)
    | _with_shared(64, 6, 2, dense=1, moe_intermediate_size=1408, q_lora_rank=None, kv_lora_rank=512),
    "deepseek-v3": _config("deepseek_v3", 7168, 18432, 61, 128, 128, 129280)
    | _with_shared(256, 8, 1, dense=3, moe_intermediate_size=2048, q_lora_rank=1536, kv_lora_rank=512),
    "gpt-oss-20b": _config("gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64)
    | {"num_local_experts": 32, "num_experts_per_tok": 4},
    "gpt-oss-120b": _config("gpt_oss", 2880, 2880, 36, 64, 8, 201088, head_dim=64)
    | {"num_local_experts": 128, "num_experts_per_tok": 4},
    "mixtral-8x22b": _config("mixtral", 6144, 16384, 56, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2),
}

_NAMED = (
    (r"r1-distill-qwen-1\.5b", "r1-distill-qwen-1.5b"),
    (r"r1-distill-qwen-(7|14|32)b", "qwen2.5-{}b"),
    (r"qwen-?2(?:\.5)?-(?:math-|coder-)?(0\.5|1\.5|3|7|14|32|72)b", "qwen2.5-{}b"),
    (r"qwen-?3-(0\.6|1\.7|4|8|14|32)b", "qwen3-{}b"),
    (r"llama-?3\.[13]-?(8|70|405)b", "llama-3.1-{}b"),
    (r"r1-distill-llama-(8|70)b", "llama-3.1-{}b"),
    (r"llama-?3\.2-?(1|3)b", "llama-3.2-{}b"),
    (r"llama-?3-?(8|70)b", "llama-3-{}b"),
    (r"llama-?2-?(7|13|70)b", "llama-2-{}b"),
    (r"codellama-34b", "codellama-34b"),
    (r"mistral-7b(?:-instruct)?-v0\.1|zephyr-7b", "mistral-7b-v0.1"),
    (r"mistral-7b(?:-instruct)?-v0\.2", "mistral-7b-v0.2"),
    (r"mistral-7b(?:-instruct)?-v0\.3", "mistral-7b"),
    (r"mistral-nemo", "mistral-nemo-12b"),
    (r"deepseek-llm-7b", "deepseek-llm-7b"),
    (r"smollm2-1\.7b", "smollm2-1.7b"),
)
"""Names on the Hub by a part of theirs → the name here, with the size in it."""
_NAMED_WITH_EXPERTS = (
    (r"mixtral-8x(7|22)b", "mixtral-8x{}b"),
    (r"qwen-?3-(?:coder-)?(30b-a3|235b-a22)b", "qwen3-{}b"),
    (r"qwen1\.5-moe-a2\.7b", "qwen1.5-moe-a2.7b"),
    (r"olmoe-1b-7b", "olmoe-1b-7b"),
    (r"glm-4\.5-air", "glm-4.5-air"),
    (r"deepseek-v2-lite", "deepseek-v2-lite"),
    (r"deepseek-(?:v3|r1)", "deepseek-v3"),
    (r"gpt-oss-(20|120)b", "gpt-oss-{}b"),
)
"""The same of models with experts."""
_OTHER_SIZES = re.compile(r"-vl|vision|omni|audio|moe|-a\d+(\.\d+)?b|eagle|embedding|reranker|next|nemotron")
"""Parts of names of models that share a part of a name with dense ones, but not their sizes."""


def known_family(model: Mapping[str, Any]) -> str | None:
    """Return the family of a model, by its settings, whose sizes are known by its name; None for another."""
    init, path = model.get("init"), model.get("path")
    name = init if isinstance(init, str) else FoundModel.named(path) if isinstance(path, str) else None
    return str(MODELS[name]["model_type"]) if name in MODELS else None


@dataclass(frozen=True)
class FoundModel:
    """A model whose config is known.

    config:   its Hugging Face config
    weights:  its source, as settings of a role: a directory with weights, or the config alone
    """

    config: Config
    weights: dict[str, Any]

    @staticmethod
    def named(name: str) -> str | None:
        """Return the known model with the sizes of one whose name, path or address ends with its family and size.

        None if there is none. ``Qwen/Qwen2.5-Math-7B-Instruct`` is ``qwen2.5-7b``; so is ``Qwen2___5-Math-7B``, a
        folder of ModelScope's cache.
        """
        last = name.rstrip("/").rpartition("/")[2].lower().replace("___", ".").replace("_", "-")
        if last in MODELS:
            return last
        named = _NAMED_WITH_EXPERTS if _OTHER_SIZES.search(last) else (*_NAMED, *_NAMED_WITH_EXPERTS)
        matches = ((re.search(rf"(?<![a-z0-9.]){pattern}(?![0-9])", last), key) for pattern, key in named)
        return next((key.format(*found.groups()) for found, key in matches if found is not None), None)

    @classmethod
    def known(cls, name: str | None) -> Self | None:
        """Return the model of a known name; None for another one."""
        config = MODELS.get(name or "")
        return None if config is None else cls(config, {"init": config})

    @property
    def is_llama_like(self) -> bool:
        """Whether it has the linear layers of Llama, so no experts."""
        return self.config["model_type"] in Families.LLAMA_LIKE

    @classmethod
    def find(cls, text: str, option: str = "--model") -> Self:
        """Return the model of a known name, of a Hugging Face model directory, or of a ``config.json``.

        ``option``: the option or setting with the text, for errors. Raises UserError with the nearest known names.
        """
        known = cls.known(text.lower().removesuffix("-hf"))
        if known is not None:
            return known
        path = Path(text)
        is_directory = path.is_dir()
        if is_directory:
            path = path / "config.json"
        if not path.is_file():
            same_size = [name for name in MODELS if name.rpartition("-")[2] in text.lower().split("-")]
            raise UserError(
                f"{option} {text}: no known model{nearest(text.lower(), same_size or MODELS)} and no model directory "
                f"or config.json; known: {', '.join(MODELS)}"
            )
        config = _read_config(path, option)
        return cls(config, {"path": text} if is_directory else {"init": config})


def _read_config(path: Path, option: str) -> Config:
    try:
        config = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: not a JSON config ({error})") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise UserError(f"{option} {path}: no Hugging Face config: it has no model_type")
    if config["model_type"] not in Families.KNOWN:
        raise UserError(
            f"{option} {path}: sizes of {config['model_type']!r} cannot be read from its config; "
            f"known families: {', '.join(Families.KNOWN)}"
        )
    for key in dict.fromkeys((*_KEYS, *_OPTIONAL)):
        _check_size(config, key, f"{option} {path}")
    return config


def _check_size(config: Config, key: str, where: str) -> None:
    """Raise UserError for a size that is missing or no whole number: its default would be that of another model."""
    value = config.get(key)
    if value is None and key in _OPTIONAL:
        return
    if value is None:
        others = [other for other in config if other not in _KEYS]
        raise UserError(f"{where}: no {key} in it{nearest(key, others)}, such as {MODELS['llama-7b'][key]} of llama-7b")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {shown(value)}; expected a whole number above 0")
