"""Base of every section of the YAML."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from flexrlhf.config.descriptions import meaning, plain_text
from flexrlhf.errors import nearest


class StrictModel(BaseModel):
    """One mapping of the YAML, as a frozen pydantic model that refuses unknown keys and names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if not cls._is_known(str(key)):
                    hint = nearest(str(key), cls._keys()) or f"; known: {', '.join(sorted(cls._keys()))}"
                    raise ValueError(f"unknown key {key!r}{hint}")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of this mapping, in which every setting has a description."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["description"] = plain_text(cls.__doc__)
        for name, field in cls.model_fields.items():
            described = schema.get("properties", {}).get(field.alias or name, {})
            if text := meaning(cls, name):
                described.setdefault("description", text)
        return schema

    @classmethod
    @cache
    def _keys(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _is_known(cls, key: str) -> bool:
        return key in cls._keys()
