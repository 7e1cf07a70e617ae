"""Models before their weights are read: an engine shards a skeleton, and then reads this rank's parts from the files.

A parameter that the files contain is a placeholder: of its shape and type, on the CPU, without memory. All others
(adapters, new heads) and the buffers have their values. A model that cannot be made so is loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.language_head import LanguageHead, use_language_head
from flexrlhf.engines.models import add_parts, empty_model, load_model, may_lack_head, seeded, settle, use_kernels
from flexrlhf.engines.offloaded_activations import checkpoint_layers
from flexrlhf.engines.router_biases import router_biases
from flexrlhf.engines.tensor_parallel import TensorParallelNames
from flexrlhf.engines.weight_files import TORCH_TYPES, PartReader, StoredPieces
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.expert_files import file_pieces
from flexrlhf.weights.loading import is_read_in_parts
from flexrlhf.weights.model_files import StoredTensor
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.shards import Part
from flexrlhf.weights.stored_model import StoredModel


@dataclass(frozen=True)
class Skeleton:
    """A model and where its weights are.

    model:   with placeholders for the parameters that ``stored`` names.
    stored:  tensors in files of which each parameter consists; none: the model has been loaded whole.
    parts:   part of every parameter on this rank.
    reader:  of the files.
    """

    model: PreTrainedModel
    stored: Mapping[str, StoredPieces]
    parts: Mapping[str, Part]
    reader: PartReader = field(default_factory=PartReader)

    @classmethod
    def of(cls, context: EngineContext) -> Skeleton:
        """Return the skeleton of the model of ``context``, or the whole model in float32 where none can be made."""
        placed, pad_token_id = context.placed, context.pad_token_id
        with seeded(context.seed):
            made = _with_placeholders(placed)
        if made is None:
            return cls.of_whole_model(context)
        model, stored = made
        settle(model, placed, pad_token_id)
        skeleton = cls(model, stored, {})
        return replace(skeleton, parts=skeleton.planned_parts(context))

    @classmethod
    def of_whole_model(cls, context: EngineContext) -> Skeleton:
        """Return the model of ``context`` whole and in float32, on the CPU."""
        return cls(load_model(context.placed, context.seed, context.pad_token_id), {}, {})

    def planned_parts(self, context: EngineContext) -> Mapping[str, Part]:
        """Return the part of every parameter of the model that this rank stores, by name."""
        shapes = tuple(sorted((name, tuple(each.shape)) for name, each in self.model.named_parameters()))
        shape = ModelShape(shapes, is_tied=context.is_tied(self.model.config))
        return shape.parts_on(context.placed, context.ranks.number)

    def use_kernels(self, context: EngineContext) -> LanguageHead | None:
        """Give the model the kernels of its settings, and a language head of ours; None: it has its own, or none."""
        settings = context.placed.settings
        head = use_language_head(self.model, settings.logits_at_a_time)
        use_kernels(self.model, settings, context.switches)
        return head

    def split_layers(self, head: LanguageHead | None, group: dist.ProcessGroup | None) -> TensorParallelNames:
        """Leave this rank its tensor-parallel parts of the layers and of ``head``; all of them if there is no group.

        Placeholders may be on the meta device.
        """
        return TensorParallelNames() if group is None else TensorParallelNames.apply(self.model, head, group)

    def checkpoint_layers(self, context: EngineContext) -> None:
        """Have the layers compute their activations again where a training recomputes, as the settings say."""
        checkpoint_layers(self.model, context)

    def cast_placeholders(self, dtype: torch.dtype) -> None:
        """Give the placeholders another type."""
        self.replace_placeholders(lambda parameter: placeholder(parameter.shape, dtype))

    def replace_placeholders(self, make: Callable[[nn.Parameter], Tensor]) -> None:
        """Replace the values of each placeholder by the result of ``make`` for it."""
        for name, parameter in self.model.named_parameters():
            if name in self.stored:
                swap_values(parameter, make(parameter))

    def read(self, name: str, target: Tensor) -> None:
        """Read this rank's part of a parameter into ``target``, in its type."""
        self.reader.read_pieces(self.stored[name], self.parts[name], target)


def swap_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Replace the values of ``parameter``, which stays the same object for modules that share it.

    Assigning ``.data`` would neither leave the meta device nor change the local part of a DTensor.
    """
    torch.utils.swap_tensors(parameter, nn.Parameter(values.detach(), requires_grad=parameter.requires_grad))


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU whose elements are all the same one."""
    return torch.zeros((), dtype=dtype).expand(shape)


def _with_placeholders(placed: PlacedModel) -> tuple[PreTrainedModel, dict[str, StoredPieces]] | None:
    """Return a model with placeholders, and the stored tensors of each; None where its files do not give all of it.

    A scalar head that they may lack gets random numbers, as transformers initialises it.
    """
    settings = placed.settings
    if settings.path is None:
        return None
    family = read_config(placed.role, settings)["model_type"]
    if not is_read_in_parts(settings, family):
        return None
    model, files = empty_model(placed), StoredModel.of(placed.role, settings)
    pieces = {name: tuple(file_pieces(family, name, tuple(p.shape))) for name, p in model.named_parameters()}
    shapes = {each.name: each.shape for of_parameter in pieces.values() for each in of_parameter}
    shapes |= {name: tuple(bias.shape) for name, bias in router_biases(model).items()}
    found = files.whole.tensors.named_as(shapes)
    if settings.goes_on_adapters and ParameterName.SCALAR_HEAD in files.adapter_tensors:
        found.pop(ParameterName.SCALAR_HEAD, None)
    missing = set(shapes) - set(found)
    if missing - ({ParameterName.SCALAR_HEAD} if may_lack_head(placed) else set()) or not _fit(model, shapes, found):
        return None
    _replace_meta(model, found)
    if missing:
        random = torch.empty(shapes[ParameterName.SCALAR_HEAD]).normal_(0.0, model.config.initializer_range)
        swap_values(model.score.weight, random)
    add_parts(model, placed)
    plain = {name: name.replace(ParameterName.BASE, ".") for name, _ in model.named_parameters()}
    return model, {
        name: tuple((piece, found[piece.name]) for piece in pieces[old])
        for name, old in plain.items()
        if old in pieces and old not in missing
    }


def _fit(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, StoredTensor]) -> bool:
    """Whether stored tensors have the shapes and types of the parameters.

    A tied head that is stored too may differ from the embedding, so transformers decides whether to tie it.
    """
    stored = {name: found[name] for name in shapes if name in found}
    tied = model.config.tie_word_embeddings and ParameterName.LANGUAGE_HEAD in found and hasattr(model, "lm_head")
    return not tied and all(each.shape == shapes[name] and each.dtype in TORCH_TYPES for name, each in stored.items())


def _replace_meta(model: PreTrainedModel, found: Mapping[str, StoredTensor]) -> None:
    """Replace parameters on the meta device by placeholders, and modules with buffers there by new ones.

    ``found``: stored tensors, of which biases of routers are read whole.
    """
    reader = PartReader()
    for name, bias in router_biases(model).items():
        owner, _, own = name.rpartition(".")
        values = torch.empty(bias.shape)
        reader.read(found[name], Part.whole(tuple(bias.shape)), values)
        model.get_submodule(owner).register_buffer(own, values)
    for parameter in list(model.parameters()):
        swap_values(parameter, placeholder(parameter.shape, parameter.dtype))
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # rotary embeddings, whose frequencies follow from the config
            model.set_submodule(name, type(module)(module.config))
    assert not any(buffer.is_meta for buffer in model.buffers()), f"{type(model).__name__} has further buffers"
