"""``flexrlhf settings`` and ``schema``: the settings of the YAML as a list, and as a JSON Schema."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.output_path import OutputPath
from flexrlhf.config.setting_list import format_settings, keys_from
from flexrlhf.config.spec import Spec

TITLE = "flexrlhf run"
"""Title of the JSON Schema, by which a file of it is recognised."""


def complete_settings_text(incomplete: str) -> list[str]:
    """Return the keys and the algorithms that begin as ``incomplete``."""
    keys = [key.removesuffix("=") for key in keys_from(incomplete)]
    return [*keys, *(name for name in ALGORITHMS if name.startswith(incomplete))]


Text = Annotated[
    str | None,
    typer.Argument(
        help="a key or the start of one, an algorithm, or a word in a key; default: all",
        autocompletion=complete_settings_text,
    ),
]

Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write; without it the schema is printed")]


def settings(text: Text = None) -> None:
    """List the settings of the YAML: values, default, meaning.

    All of them, or those of a section (`models.actor.optimizer`), of an algorithm (`grpo`), or with a word in their
    keys (`learning_rate`).
    """
    width = shutil.get_terminal_size((100, 24)).columns
    typer.echo(format_settings(text, width))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a YAML: keys, types, choices, bounds, defaults and descriptions.

    Rules for several settings together (vectors and models, chunks and mini-batches, ...) are checked by
    ``flexrlhf plan`` alone.
    """
    schema = Spec.model_json_schema(by_alias=True)
    for algorithm in schema["properties"]["algorithm"]["discriminator"]["mapping"].values():
        definition = schema["$defs"][algorithm.rpartition("/")[2]]
        definition["required"] = sorted({"name", *definition.get("required", ())})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": TITLE}


def schema(output: Output = None) -> None:
    """Write the JSON Schema of the YAML, for editors.

    A comment in the first line of a YAML makes an editor with a YAML language server complete and check it:
    # yaml-language-server: $schema=flexrlhf.schema.json
    """
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
        return
    OutputPath(output, "--output").check_file("flexrlhf.schema.json", lambda text: f'"title": "{TITLE}"' in text)
    output.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"wrote {output}; in the first line of a YAML: # yaml-language-server: $schema={output}")
