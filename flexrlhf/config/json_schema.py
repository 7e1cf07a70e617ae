"""JSON Schema of the YAML, by which editors complete and check it."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.spec import Spec

TITLE = "flexrlhf run"
"""Title of the schema, by which a file of it is recognised."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a YAML: keys, types, choices, bounds, defaults and descriptions.

    What follows from several settings together (vectors and models, chunks and mini-batches, ...) is checked by
    ``flexrlhf plan`` alone.
    """
    schema = Spec.model_json_schema(by_alias=True)
    for algorithm in schema["properties"]["algorithm"]["discriminator"]["mapping"].values():
        definition = schema["$defs"][algorithm.rpartition("/")[2]]
        definition["required"] = sorted({"name", *definition.get("required", ())})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": TITLE}
