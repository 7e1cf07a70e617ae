"""Models and tokenizers that are names on the Hub: the directories of the cache that take their place in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.data.hub import HubName
from flexrlhf.errors import UserError
from flexrlhf.plan.tokenizers import has_tokenizer
from flexrlhf.weights.stored_model import StoredModel


def with_snapshots(spec: Spec) -> Spec:
    """Return ``spec`` with directories in the place of names on the Hub, which ``hub_names`` has with their commits.

    Raises UserError for a name that is neither in the cache nor can be downloaded.
    """
    directories = _Directories(spec.hub_names)
    found = spec.with_paths(directories.of, directories.used)
    return spec if found == spec else found


def in_cache(spec: Spec) -> Spec:
    """Return ``spec`` with directories in the place of names that the cache has; others stay."""

    def directory(_: str, path: str) -> str:
        name = HubName.parse(path)
        found = None if name is None else name.cached("model")
        return path if found is None else str(found)

    return spec.with_paths(directory, {})


class _Directories:
    """Directories of the cache in the place of names. ``names``: of those that a spec has already, by directory."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self.used: dict[str, str] = {}

    def of(self, key: str, path: str) -> str:
        """Return ``path``, or the directory of the name that it is; ``used`` then has its name and commit."""
        if path in self._names:
            self.used[path] = self._names[path]
            return path
        name = HubName.parse(path)
        if name is None:
            return path
        directory = name.cached("model")
        # an earlier download may have left out files
        if directory is None or not (_is_model if key.startswith("models.") else has_tokenizer)(directory):
            directory = name.download("model", key)
        self.used[str(directory)] = f"{name.name}@{directory.name}"
        return str(directory)


def _is_model(directory: Path) -> bool:
    stored = StoredModel(str(directory))
    if stored.has_adapters:
        return True
    try:
        return (directory / "config.json").is_file() and bool(stored.files)
    except UserError:
        return False
