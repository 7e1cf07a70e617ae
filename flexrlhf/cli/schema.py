"""``flexrlhf schema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.config.json_schema import TITLE, json_schema
from flexrlhf.config.user_paths import check_output

Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write; without it the schema is printed")]


def schema(output: Output = None) -> None:
    """Write the JSON Schema of the YAML, for editors.

    A comment in the first line of a YAML makes an editor with a YAML language server complete and check it:
    # yaml-language-server: $schema=flexrlhf.schema.json
    """
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
        return
    check_output(output, "--output", "flexrlhf.schema.json", is_schema)
    output.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"wrote {output}; in the first line of a YAML: # yaml-language-server: $schema={output}")


def is_schema(text: str) -> bool:
    """Return whether a file is one that this command may replace."""
    return f'"title": "{TITLE}"' in text
