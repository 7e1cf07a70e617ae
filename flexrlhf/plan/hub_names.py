"""Models and tokenizers that are names on the Hub: the directories of the cache that take their place in a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.data.hub import cached_snapshot, commit_of, download_snapshot, hub_name
from flexrlhf.errors import UserError
from flexrlhf.plan.run_data import DataSource
from flexrlhf.plan.tokenizers import has_tokenizer
from flexrlhf.weights.adapter_files import has_adapters
from flexrlhf.weights.model_files import weight_files


def with_snapshots(spec: Spec) -> Spec:
    """Return ``spec`` with directories in the place of names on the Hub; ``snapshots`` has the names with commits.

    Raises UserError for a name that is neither in the cache nor can be downloaded.
    """
    directories = _Directories(spec.snapshots)
    models = {
        role: model and model.model_copy(update={"path": directories.of(f"models.{role}.path", model.path, _is_model)})
        for role, model in spec.models
    }
    tokenizer = directories.of("data.tokenizer", spec.data.tokenizer, has_tokenizer)
    if directories.used == spec.snapshots and models == dict(spec.models) and tokenizer == spec.data.tokenizer:
        return spec
    data = spec.data.model_copy(update={"tokenizer": tokenizer})
    return spec.with_models(models).model_copy(update={"data": data, "snapshots": directories.used})


def with_names(spec: Spec) -> Spec:
    """Return ``spec`` with names on the Hub, and their commits, in the place of directories of the cache."""
    names = spec.snapshots
    models = {
        role: model and model.model_copy(update={"path": names.get(model.path or "", model.path)})
        for role, model in spec.models
    }
    data = spec.data.model_copy(update={"tokenizer": names.get(spec.data.tokenizer or "", spec.data.tokenizer)})
    return spec.with_models(models).model_copy(update={"data": data, "snapshots": {}})


def commits(spec: Spec, sources: list[DataSource]) -> dict[str, str]:
    """Return the setting of each name on the Hub that a plan uses, with the name and its commit on this machine."""
    paths = {f"models.{role}.path": model.path for role, model in spec.models if model is not None}
    paths["data.tokenizer"] = spec.data.tokenizer
    found = {key: spec.snapshots[path] for key, path in paths.items() if path in spec.snapshots}
    for source in sources:
        name = hub_name(source.path)
        snapshot = None if name is None else cached_snapshot(name, "dataset")
        if name is not None and snapshot is not None:
            found[source.setting] = f"{name.name}@{commit_of(snapshot)}"
    return found


class _Directories:
    """Directories of the cache in the place of names. ``names``: of those that a spec has already, by directory."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self.used: dict[str, str] = {}

    def of(self, key: str, path: str | None, is_whole: Callable[[Path], bool]) -> str | None:
        """Return ``path``, or the directory of the name that it is; ``used`` then has its name and commit."""
        if path is None:
            return None
        if Path(path).is_dir():
            self.used |= {path: self._names[path]} if path in self._names else {}
            return path
        # a directory of another machine's cache has a name, too
        name = hub_name(self._names.get(path, path))
        if name is None:
            return path
        directory = cached_snapshot(name, "model")
        # an earlier download may have left out files
        if directory is None or not is_whole(directory):
            directory = download_snapshot(name, "model", key)
        self.used[str(directory)] = f"{name.name}@{commit_of(directory)}"
        return str(directory)


def _is_model(directory: Path) -> bool:
    if has_adapters(str(directory)):
        return True
    try:
        return (directory / "config.json").is_file() and bool(weight_files("", directory))
    except UserError:
        return False
