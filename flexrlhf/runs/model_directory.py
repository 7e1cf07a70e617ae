"""Writing of a model as a Hugging Face directory, or of its adapters as peft's, atomically.

Weights are written tensor by tensor as they are gathered: no process needs all of them. Small models are one file;
larger ones are several with an index, named as transformers names them.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.runs.durable_files import replace_directory
from flexrlhf.runs.tensor_files import save_tensors
from flexrlhf.weights.expert_files import FilePiece, file_pieces
from flexrlhf.weights.model_files import BLOCK_BYTES, StoredTensors
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.saving import SavedFile
from flexrlhf.weights.stored_model import StoredModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

BEST = "best.json"
"""File in a directory with the best model so far: the step, the metric and its value."""
SHARD_BYTES = 5_000_000_000
"""Most bytes of weights in a file, unless one tensor has more; as in transformers."""
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
"""The values of a file begin at a multiple of so many bytes."""


@dataclass(frozen=True)
class TensorForm:
    """Shape and type of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFiles:
    """Files of a model in ``directory`` that are being written, in the order of the names of its parameters.

    forms:   tensors of the shapes and types of the parameters, each of which is stored as one tensor or several
             (``weights/expert_files.py``).
    family:  of the model.
    writer:  of the files that several write in turns: its number, and how many they are. The first writes the index.

    Errors of the file system are raised with the path of the file.
    """

    def __init__(
        self,
        directory: Path,
        forms: Mapping[str, Tensor],
        shard_bytes: int = SHARD_BYTES,
        family: str = "",
        writer: tuple[int, int] = (0, 1),
    ) -> None:
        self._directory = directory
        self._pieces = {name: list(file_pieces(family, name, tuple(forms[name].shape))) for name in sorted(forms)}
        self._forms = {
            piece.name: TensorForm(piece.shape, forms[name].dtype)
            for name, pieces in self._pieces.items()
            for piece in pieces
        }
        self._files = SavedFile.split({name: form.nbytes for name, form in self._forms.items()}, shard_bytes)
        self._places = {name: file for file, names in self._files.items() for name in names}
        number, writers = writer
        self._is_first = number == 0
        self._others = [file for index, file in enumerate(self._files) if index % writers != number]
        self._pending = [name for name, file in self._places.items() if file not in self._others]
        self._path = directory
        self._open: BinaryIO | None = None

    def write(self, tensors: Mapping[str, Tensor], experts: range | None = None, only: str | None = None) -> None:
        """Write ``tensors``, the next ones by name, from any device.

        experts:  the next ones of a parameter, which alone is in ``tensors``; None: these are whole.
        only:     the file to write to, where ``tensors`` are in others, too; None: all.
        """
        for name in sorted(tensors):
            for piece in self._pieces[name]:
                written = piece if experts is None else _with_experts(piece, experts)
                file = self._places[piece.name]
                if written is None or only not in (None, file):
                    continue
                assert piece.name == self._pending[0], f"{piece.name} is written before {self._pending[0]}"
                with _named_errors(self._directory / file):
                    stream = self._stream(file)
                    values = _part_of(tensors[name], written, 0 if experts is None else experts.start)
                    for block in _blocks(values, TensorForm(written.shape, self._forms[piece.name].dtype)):
                        stream.write(block)
                if not piece.box or written.box[0].stop == piece.box[0].stop:
                    self._pending.pop(0)

    def close(self, is_complete: bool = True) -> None:
        """Close the last file; the first writer then writes the index of several, once the others have closed."""
        if self._open is not None:
            with _named_errors(self._path):
                self._open.close()
        if is_complete:
            assert not self._pending, f"{len(self._pending)} tensors are not written"
            if self._is_first:
                self._check_others()
                self._write_index()

    def _stream(self, file: str) -> BinaryIO:
        """Return ``file``, opened and begun with its header: sizes are known before the values are."""
        if self._open is None or self._path.name != file:
            if self._open is not None:
                self._open.close()
            self._path = self._directory / file
            self._open = self._path.open("wb")
            self._open.write(_header({name: self._forms[name] for name in self._files[file]}))
        return self._open

    def _check_others(self) -> None:
        """Raise OSError unless the files of other writers are whole in this one's view of the directory."""
        for file in self._others:
            path = self._directory / file
            forms = {name: self._forms[name] for name in self._files[file]}
            if path.stat().st_size != len(_header(forms)) + sum(form.nbytes for form in forms.values()):
                raise OSError(errno.EIO, "another rank has written it, and it is not whole", str(path))

    def _write_index(self) -> None:
        if len(self._files) > 1:
            total = sum(form.nbytes for form in self._forms.values())
            index = {"metadata": {"total_size": total}, "weight_map": self._places}
            (self._directory / StoredModel.INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add the path to errors of the file system, of which writes to an open file have none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _header(forms: Mapping[str, TensorForm]) -> bytes:
    """Return a file's header: its length as 8 bytes, and JSON with the place of each tensor, padded."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, form in forms.items():
        stop = start + form.nbytes
        entries[name] = {"dtype": _TYPES[form.dtype], "shape": list(form.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _with_experts(piece: FilePiece, experts: range) -> FilePiece | None:
    """Return what ``piece`` has of ``experts``, which is all of one expert's or the next rows of all; None: nothing."""
    rows = piece.box[0]
    common = range(max(rows.start, experts.start), min(rows.stop, experts.stop))
    if not common:
        return None
    return piece if common == rows else FilePiece(piece.name, (len(common), *piece.shape[1:]), (common, *piece.box[1:]))


def _part_of(tensor: Tensor, piece: FilePiece, first: int) -> Tensor:
    """Return the tensor of a file that is a part of the parameter ``tensor``, which begins with its row ``first``."""
    starts = (first if dim == 0 else 0 for dim in range(len(piece.box)))
    inside = tuple(slice(side.start - at, side.stop - at) for side, at in zip(piece.box, starts, strict=True))
    return tensor[inside].reshape(piece.shape)


def _blocks(tensor: Tensor, form: TensorForm) -> Iterator[memoryview]:
    """Yield the values of ``tensor``, part by part as copies: weights that numpy has a view of cannot be offloaded."""
    values = tensor.detach().cpu().contiguous()
    assert (tuple(values.shape), values.dtype) == (form.shape, form.dtype), f"{tensor.shape} {tensor.dtype}"
    for block in torch.split(values.view(-1).view(torch.uint8), BLOCK_BYTES):
        yield block.clone().numpy().data


@dataclass(frozen=True)
class ModelDirectory:
    """Directory of a model, filled under another name, which it loses once all is written.

    path:       its final name, also that of the model that it replaces.
    tokenizer:  directory with the tokenizer's files, which are copied; None: none are.
    texts:      further files, in the place of the tokenizer's if they have the same name.
    best:       contents of ``best.json``, for a best model.
    """

    path: Path
    tokenizer: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None

    def save(self, weights: Mapping[str, Tensor], config: Any) -> None:
        """Write config, weights and the other files."""
        with self.writer(weights, config) as files:
            files.write(weights)

    @contextmanager
    def writer(
        self,
        forms: Mapping[str, Tensor],
        config: Any,
        shard_bytes: int = SHARD_BYTES,
        writer: tuple[int, int] = (0, 1),
        mark: str = "",
    ) -> Iterator[ModelFiles]:
        """Yield the files of a model, to write its tensors into, next to its config and the other files.

        forms:        tensors of the shapes and types of all of its, on any device.
        shard_bytes:  most bytes of weights in a file.
        writer:       number of this process among those that write files in turns, and how many they are. The others
                      have closed theirs when the first one's body ends; if one of them fails nothing is left.
        mark:         part of the name that the directory has while it is written.
        """
        number, _ = writer
        with self._replaced(mark) if number == 0 else _removed_on_failure(self._fresh(mark)) as fresh:
            if number == 0:
                config.save_pretrained(fresh)
            with _closing(ModelFiles(fresh, forms, shard_bytes, config.model_type, writer)) as files:
                yield files

    def save_adapters(self, weights: Mapping[str, Tensor], model: ModelSpec, head: Head = "scalar") -> None:
        """Write a directory that ``peft.PeftModel.from_pretrained(base, directory)`` reads, with a scalar head if any.

        ``head`` "both": the scalar head is in the files alone, since peft reads them as a causal model's.
        """
        from peft import LoraConfig

        assert model.lora is not None, "a model without adapters has none to save"
        of_experts = sorted(
            {name.rpartition(".")[2] for name in weights if ".lora_" in name and ParameterName(name).is_of_experts}
        )
        linear = (name for name in weights if ".lora_" in name and not ParameterName(name).is_of_experts)
        targets = sorted({name.split(".lora_")[0].split(".")[-1] for name in linear})
        modules = ["score"] if ParameterName.SCALAR_HEAD in weights and head != "both" else None
        config = LoraConfig(
            r=model.lora.rank,
            lora_alpha=model.lora.alpha,
            target_modules=targets,
            target_parameters=[f"mlp.experts.{name}" for name in of_experts] or None,
            modules_to_save=modules,
            base_model_name_or_path=StoredModel.frozen("", model).path,
            task_type="SEQ_CLS" if modules else "CAUSAL_LM",
            inference_mode=True,
        )
        tensors = dict(_as_peft(name, tensor, of_experts) for name, tensor in weights.items())
        with self._replaced() as fresh:
            config.save_pretrained(fresh)
            save_tensors(tensors, fresh / "adapter_model.safetensors")

    def _fresh(self, mark: str) -> Path:
        """Return the name of the directory while it is filled."""
        return self.path.with_name(f"{self.path.name}{mark}.writing")

    @contextmanager
    def _replaced(self, mark: str = "") -> Iterator[Path]:
        """Yield a directory to fill; it gets the other files and then its final name."""
        fresh = self._fresh(mark)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            yield fresh
            for name in TOKENIZER_FILES:
                if self.tokenizer is not None and (Path(self.tokenizer) / name).is_file():
                    shutil.copy(Path(self.tokenizer) / name, fresh / name)
            for name, text in self.texts.items():
                (fresh / name).write_text(text, encoding="utf-8")
            if self.best is not None:
                (fresh / BEST).write_text(json.dumps(self.best) + "\n")
            replace_directory(fresh, self.path)
        finally:
            # where it has no final name: Ctrl-C, a full disk
            shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _removed_on_failure(fresh: Path) -> Iterator[Path]:
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@contextmanager
def _closing(files: ModelFiles) -> Iterator[ModelFiles]:
    try:
        yield files
    except BaseException:
        files.close(is_complete=False)
        raise
    files.close()


def _as_peft(name: str, tensor: Tensor, of_experts: Sequence[str]) -> tuple[str, Tensor]:
    """Return the name and the tensor of a parameter in peft's file: of all experts A is (experts * rank, inputs) and B
    (outputs, rank * experts), the experts fastest; ``of_experts``: their weights that have adapters, of which peft
    wraps the last one's layer around the others'."""
    if not ParameterName(name).is_of_experts:
        return f"{StoredModel.PREFIX}{name.replace(f'.{ParameterName.ADAPTER}', '')}", tensor
    plain, matrix = ParameterName(name).without_adapter
    path, _, target = plain.rpartition(".")
    wrapped = "base_layer." * (target == "gate_up_proj" and len(of_experts) > 1)
    flat = tensor.flatten(0, 1) if matrix == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
    return f"{StoredModel.PREFIX}{path}.{wrapped}{matrix}.weight", flat.contiguous()


class SavedAdapters:
    """Adapters in a directory that ``ModelDirectory.save_adapters`` has written, by the names of a model's parameters.

    names:         sorted; a scalar head is among them.
    gives_scores:  whether the model has that head in place of a language head.

    Raises UserError for files that cannot be read.
    """

    def __init__(self, role: str, directory: Path) -> None:
        key = f"models.{role}.path {directory}"
        header = StoredTensors.read(key, directory / StoredModel.ADAPTER_WEIGHTS)
        try:
            config = json.loads((directory / StoredModel.ADAPTER_CONFIG).read_bytes())
            self.gives_scores, self._rank = config["task_type"] == "SEQ_CLS", int(config["r"])
            of_experts = sorted(name.rpartition(".")[2] for name in config.get("target_parameters") or ())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{key}: its {StoredModel.ADAPTER_CONFIG} cannot be read ({str(error).splitlines()[0]})"
            ) from None
        self._stored = {_from_peft(name, of_experts): name for name in header}
        self._file = safe_open(directory / StoredModel.ADAPTER_WEIGHTS, framework="pt")
        self.names = sorted(self._stored)

    def tensor(self, name: str) -> Tensor:
        """Return a parameter, whole and in float32."""
        tensor: Tensor = self._file.get_tensor(self._stored[name]).float()
        if not ParameterName(name).is_of_experts:
            return tensor
        if ParameterName(name).without_adapter[1] == "lora_A":
            return tensor.unflatten(0, (-1, self._rank))
        return tensor.unflatten(1, (self._rank, -1)).permute(2, 0, 1).contiguous()


def _from_peft(name: str, of_experts: Sequence[str]) -> str:
    """Return the name of a parameter by its name in peft's file: the inverse of ``_as_peft``."""
    own = name.removeprefix(StoredModel.PREFIX)
    path, _, matrix = own.removesuffix(".weight").rpartition(".")
    if matrix not in ParameterName.MATRICES:
        return own
    plain = path.removesuffix(".base_layer")
    if not of_experts or not plain.endswith(".experts"):
        return f"{path}.{matrix}.{ParameterName.ADAPTER}.weight"
    target = of_experts[-1] if plain != path else of_experts[0]
    return f"{plain}.{matrix}.{ParameterName.ADAPTER}.{target}"
