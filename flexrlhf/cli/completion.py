"""Completion of words in a shell: configs, keys of settings, algorithms. Nothing else is read."""

from __future__ import annotations

from pathlib import Path

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.setting_search import keys_from
from flexrlhf.config.user_paths import is_yaml


def complete_config(incomplete: str) -> list[str]:
    """Return the YAML files and the directories that ``incomplete`` may go on to."""
    folder, slash, start = incomplete.rpartition("/")
    directory = Path(folder + slash or ".")
    if not directory.is_dir():
        return []
    entries = [each for each in sorted(directory.iterdir()) if each.name.startswith(start) and each.name[:1] != "."]
    return [f"{folder}{slash}{each.name}{'/' * each.is_dir()}" for each in entries if each.is_dir() or is_yaml(each)]


def complete_setting(incomplete: str) -> list[str]:
    """Return the keys of ``KEY=VALUE`` that begin as ``incomplete``, part by part."""
    return list(keys_from(incomplete))


def complete_settings_text(incomplete: str) -> list[str]:
    """Return the keys and the algorithms that ``flexrlhf settings`` takes."""
    keys = [key.removesuffix("=") for key in keys_from(incomplete)]
    return [*keys, *(name for name in ALGORITHMS if name.startswith(incomplete))]
