"""Data files of a run: of training, evaluation and pretraining rows, and how the rows of each are read."""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.data_settings import DataSpec, RowsSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.order import whole_parts
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.operators.graph import Needs
from flexrlhf.plan.plan import Plan


@dataclass(frozen=True)
class DataSource:
    """A data file.

    key:          section of the YAML that names it
    path:         the file
    form:         form of its rows, or ``auto``
    needs:        responses that each row must have
    layout:       settings by which its rows are read
    is_training:  whether it has training rows
    parts:        its share of the training prompts, in parts of the sum over the files
    """

    key: str
    path: str
    form: str
    needs: Needs
    layout: RowLayout = RowLayout()
    is_training: bool = False
    parts: int = 1

    @property
    def setting(self) -> str:
        """Setting that names the file."""
        return f"{self.key}.path"


def data_sources(plan: Plan) -> list[DataSource]:
    """Return the training files, and the files of evaluation rows and pretraining texts, if there are any."""
    spec, needs = plan.spec, plan.graph.data
    sources = training_sources(spec, needs)
    if spec.eval is not None:
        sources.append(DataSource("eval", spec.eval.path, _form(spec.eval, spec.data), needs, _layout(spec, spec.eval)))
    if isinstance(spec.algorithm, PolicySpec) and spec.algorithm.ptx is not None:
        ptx = spec.algorithm.ptx
        sources.append(DataSource("algorithm.ptx", ptx.path, ptx.form, "responses", RowLayout(ptx.columns)))
    return sources


def training_sources(spec: Spec, needs: Needs) -> list[DataSource]:
    """Return the files with training rows. Raises UserError for weights that no whole numbers stand for."""
    data = spec.data
    if data.path is not None:
        return [DataSource("data", data.path, data.form, needs, _layout(spec), is_training=True)]
    parts = whole_parts([source.weight for source in data.sources])
    return [
        DataSource(f"data.sources.{index}", each.path, _form(each, data), needs, _layout(spec, each), True, part)
        for index, (each, part) in enumerate(zip(data.sources, parts, strict=True))
    ]


def _form(rows: RowsSpec, data: DataSpec) -> str:
    return data.form if rows.form is None else rows.form


def _layout(spec: Spec, rows: RowsSpec | None = None) -> RowLayout:
    """Return how rows are read: by their own settings, else by ``data``."""
    data = spec.data
    if rows is None:
        return RowLayout(data.columns, data.template, data.system)
    return RowLayout(
        data.columns if rows.columns is None else rows.columns,
        data.template if rows.template is None else rows.template,
        data.system if rows.system is None else rows.system,
    )
