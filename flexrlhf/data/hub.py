"""Names on the Hugging Face Hub, and the directories of the local cache that they stand for.

A name is ``org/name``, or ``org/name@revision`` for a branch, a tag or a commit. A snapshot in the cache is taken
without a connection; anything else is downloaded once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from flexrlhf.config.proxies import Address, check_proxies
from flexrlhf.config.secrets import without_secrets
from flexrlhf.errors import UserError

HubKind = Literal["model", "dataset"]
ENDPOINT = "HF_ENDPOINT"
"""Variable with the address of the Hub."""
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(?P<parts>(:[\w.-]+)*)", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
"""Files of a model's repository that are downloaded: no pickled weights, nor other formats."""


@dataclass(frozen=True)
class HubName:
    """Name of a repository on the Hub.

    name:      ``org/name``
    revision:  branch, tag or commit; None: the main branch
    parts:     further parts of a data set's name, each after a colon
    """

    name: str
    revision: str | None = None
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the Hub's name in ``text``; None for a path: where a file or a folder ``org`` is here, too, unless the
        name has a commit."""
        found = _NAME.fullmatch(text)
        if found is None or Path(text).exists():
            return None
        if not _COMMIT.fullmatch(found["revision"] or "") and Path(found["name"]).parent.is_dir():
            return None
        return cls(found["name"], found["revision"], tuple(found["parts"].split(":")[1:]))

    def cached(self, kind: HubKind) -> Path | None:
        """Return the directory of the cache with its files; None if it has none."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.name, repo_type=kind, revision=self.revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None

    def download(self, kind: HubKind, key: str) -> Path:
        """Download its files into the cache, and return its directory there. ``key``: the setting, for the message."""
        endpoint = _endpoint()
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

        if not constants.HF_HUB_OFFLINE:
            check_proxies()
        files = list(MODEL_FILES) if kind == "model" else None
        # of the library of HTTP, which is another one in other versions
        http = import_module(HTTPError.__module__.partition(".")[0])
        try:
            return Path(snapshot_download(self.name, repo_type=kind, revision=self.revision, allow_patterns=files))
        except (http.HTTPError, http.InvalidURL, http.StreamError, OSError, HFValidationError) as error:
            reason = without_secrets(str(error).strip().partition("\n")[0])
            is_reply = isinstance(error, HfHubHTTPError) or constants.HF_HUB_OFFLINE
            is_lost = isinstance(error, http.TransportError | LocalEntryNotFoundError) and not is_reply
            raise UserError(
                f"{key} {self}: neither a path here, nor in the Hub's cache, nor a {kind} that can be downloaded "
                f"({reason}{Address(endpoint).unreachable() if is_lost else ''})"
            ) from None


def check_endpoint() -> None:
    """Raise UserError for an address of the Hub that its library cannot even be loaded with."""
    if not Address(os.environ.get(ENDPOINT, "")).has_port:
        _endpoint()


def _endpoint() -> str:
    """Return the address of the Hub. Raises UserError for a variable that is none."""
    found = os.environ.get(ENDPOINT, "https://huggingface.co")
    if not found:
        raise UserError(f"{ENDPOINT}: empty; unset it, or give an address such as https://huggingface.co")
    # without a port that can exist an address need not have any parts
    if not Address(found).has_port or not found.startswith(("http://", "https://")) or not urlsplit(found).hostname:
        hint = f"; write https://{found}" if "://" not in found else ""
        raise UserError(
            f"{ENDPOINT}: expected an address with https:// in front, such as https://huggingface.co, found "
            f"{without_secrets(found)!r}{without_secrets(hint)}"
        )
    return found
