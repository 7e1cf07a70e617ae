"""Loading of configs by transformers before any weights are, with its errors as one sentence.

Its libraries are loaded in functions, so that planning starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.errors import UserError, is_exhaustion, nearest
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.stored_model import StoredModel


@contextmanager
def one_sentence_errors(key: str, library: str = "transformers") -> Iterator[None]:
    """Turn errors of a library about a config or files into a UserError about ``key``."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        with _BareExceptions(key, library):
            yield
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        ImportError,
        re.error,
    ) as error:
        raise UserError(f"{key}: {library} cannot load it ({_one_line(error)})") from None
    except (RuntimeError, AssertionError, StrictDataclassError, SafetensorError) as error:
        if is_exhaustion(error):
            raise
        raise UserError(f"{key}: {library} cannot load it ({_one_line(error)})") from None


class _BareExceptions:
    """Context that turns errors of the class Exception itself, and panics, of a library into UserErrors about ``key``.

    The library of tokenizers, which is written in Rust, raises them for files that it refuses.
    """

    def __init__(self, key: str, library: str) -> None:
        self.key, self._library = key, library

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and (kind is Exception or type(error).__name__ == "PanicException"):
            raise UserError(f"{self.key}: {self._library} cannot load it ({_one_line(error)})") from None


def load_config(role: str, model: ModelSpec) -> Any:
    """Return the config of a role as an object of transformers.

    Raises UserError for a family that transformers lacks, for code in the model's directory that is not trusted, and
    for a config that transformers refuses.
    """
    from transformers import AutoConfig

    model = model.model_copy(update={"path": StoredModel.of(role, model).whole.path})
    raw, key = read_config(role, model), StoredModel.of(role, model).where
    if not is_native(raw["model_type"]):
        _check_code(role, model, raw)
    with one_sentence_errors(key), quiet():
        if model.path is None:
            return AutoConfig.for_model(**(model.init or {}))
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log of a config's type and of further settings, which no run uses."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def is_read_in_parts(model: ModelSpec, family: str) -> bool:
    """Whether ranks read their parts of a model from its files; else transformers loads it whole on every rank.

    They do so for a model in files of its own, without adapters that are merged, of a family whose parameters and
    buffers follow from its config. ``family``: of its config.
    """
    files = StoredModel.frozen("", model)
    if files.path is None or files.has_adapters or family not in Families.KNOWN:
        return False
    may_have_code = model.trust_remote_code and (Path(files.path) / "config.json").is_file()
    return not (may_have_code and read_config("", model).get("auto_map"))


def is_native(model_type: str) -> bool:
    """Whether transformers itself has a family; one that a script registers is not in the ranks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _check_code(role: str, model: ModelSpec, config: dict[str, Any]) -> None:
    """Raise UserError for a family that transformers lacks, unless its directory has code, which is trusted."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    key, kind, code = StoredModel.of(role, model).where, config["model_type"], config.get("auto_map")
    if code and model.trust_remote_code:
        return
    if code:
        names = sorted({str(name) for name in (code.values() if isinstance(code, dict) else [code])})
        raise UserError(
            f"{key}: needs Python code from its own directory ({', '.join(names)}), which is run only with "
            f"models.{role}.trust_remote_code: true"
        )
    raise UserError(
        f"{key}: transformers {__version__} has no model_type {kind!r}{nearest(str(kind), CONFIG_MAPPING_NAMES)}; "
        f"ranks are processes of their own, so what a script registers is not in them"
    )


def _one_line(error: BaseException) -> str:
    text = re.sub(r"<class '([\w.]+)'>", r"\1", " ".join(str(error).split()))
    text = text.replace("NoneType", "null").partition(". Errors: ")[0]
    return f"{text:.300}" or type(error).__name__
