"""Settings of an environment: the code that replies to the policy's turns, and the limits of its processes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from flexrlhf.config.plugins import SHIPPED, named_reference
from flexrlhf.config.proxies import is_address
from flexrlhf.config.secrets import hidden
from flexrlhf.config.strict_model import LEAST_SECONDS, StrictModel
from flexrlhf.config.user_paths import UserPath, user_path
from flexrlhf.errors import nearest, shown

_SERVER = "openenv:"
_FILE = re.compile(r"\.py:\w+$")
"""End of a reference to code in a file."""
_PROGRAMS = ("verifiers:",)
"""Beginnings of the paths of packages whose episodes are programs that call the policy."""


def _environment_path(path: str) -> str:
    """Return ``path``, of which the address of a server is no path; that of a file is none of a server."""
    is_server = path.startswith(_SERVER) or (is_address(path) and not _FILE.search(path))
    return path if is_server else named_reference("environments", user_path(path))


class EnvironmentSpec(StrictModel):
    """Replies to the turns of the policy: an environment, or tools that it may call.

    A response is then an episode: turns of the policy, of which it is trained on the tokens that it sampled, with the
    replies between them. It ends when the environment ends it, after ``max_turns``, or at
    ``data.max_response_tokens``, replies included.
    """

    path: Annotated[str, AfterValidator(_environment_path)] | None = Field(
        None,
        description="path/to/file.py:Name or module:Name of a class with reset and step, or a plug-in's name; "
        "verifiers:NAME, openenv:URL (openenv:URL,URL: of equal servers), reasoning-gym:TASK or gymnasium:ID; null: "
        "tools alone",
    )
    api: Literal["openai"] | None = Field(
        None,
        description="openai: path is a program run(row, api) that calls the policy as a model of OpenAI's API at "
        "api.base_url, and returns the episode's reward, or http://HOST:PORT/PATH of servers that run it, with commas "
        "between; null: a class",
    )
    python: UserPath | None = Field(
        None, description="interpreter of the program, which may have other libraries; null: this one"
    )
    tools: tuple[UserPath, ...] = Field(
        (), description="functions that the policy may call, path/to/file.py:name or module:name"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the class, by name; ${NAME} is an environment variable's value, here and in path",
    )
    max_turns: int = Field(8, ge=1, le=1024, description="turns of the policy in an episode")
    turn_tokens: int | None = Field(None, ge=1, description="tokens that a turn may have; null: what is left")
    tool_format: str = Field(
        "hermes",
        description="how calls of tools are written: hermes (Qwen's), qwen3_coder, llama3, pythonic (Llama 4, LFM2, "
        "Olmo 3), mistral, deepseek_v3, glm45, kimi_k2, functiongemma, gemma4, phi4_mini, harmony (gpt-oss), "
        "auto (the one in which the chat template writes calls), or a regular expression with the group name (not "
        "needed for an only tool) and the group arguments (JSON), or one for each argument (text)",
    )
    processes: int = Field(4, ge=1, le=16384, description="processes of all ranks; an episode has one at a time")
    timeout_seconds: float = Field(30.0, ge=LEAST_SECONDS, description="limit of one reply; its process is then ended")
    seconds: float = Field(0.0, ge=0, description="time of one reply that simulate and advise assume")
    memory_mb: int | None = Field(None, ge=64, description="limit of a process's memory; null: none")
    open_files: int = Field(256, ge=16, description="limit of a process's open files")
    max_failures: int = Field(
        100,
        ge=1,
        description="so many failed episodes in a row, over steps, stop the run; others are left out of training",
    )
    sequences: int = Field(
        1,
        ge=1,
        le=64,
        description="conversations of an episode that a program may begin, each of them a row that is trained on",
    )
    train_sequences: Literal["all", "first"] = Field(
        "all",
        description="first: rows of further conversations of an episode are sampled and left out of training",
    )
    bridge: bool = Field(
        False,
        description="also with a chat template that renders turns in another way once others follow: what stands "
        "around a reply is then rendered behind a short chat; false: such a template is refused",
    )

    @property
    def has_known_format(self) -> bool:
        """Whether calls of tools are written in a form of ``ToolFormat``, be it the chat template's."""
        return self.tool_format in (*get_args(ToolFormat), BY_TEMPLATE)

    @property
    def name(self) -> str:
        """The environment, or its tools, as written."""
        return self.path or ", ".join(self.tools)

    def processes_of(self, replica: int, replicas: int) -> int:
        """Return the processes in which the episodes of one of ``replicas`` run: its share, and at least one."""
        first, last = (self.processes * each // replicas for each in (replica, replica + 1))
        return max(1, last - first)

    @model_validator(mode="before")
    @classmethod
    def _packages_have_programs(cls, given: Any) -> Any:
        """Return settings of a package's program with its ``api``."""
        is_program = isinstance(given, dict) and str(given.get("path")).startswith(_PROGRAMS)
        return {**given, "api": "openai"} if is_program else given

    @model_validator(mode="after")
    def _replies_exist(self) -> Self:
        if self.path is None and not self.tools:
            raise ValueError("path or tools: missing; give a class, a package's environment, or functions")
        if self.api is None and is_address(self.path or ""):
            raise ValueError(
                f"path: {shown(hidden(self.path))} is a server of programs that call the policy; add api: openai, or "
                f"write {_SERVER} in front of it if it is one of OpenEnv"
            )
        if self.api is None and self.python is not None:
            raise ValueError(
                f"python is of a program that calls the policy, found {shown(self.python)}; add api: openai"
            )
        if self.python is not None and is_address(self.path or ""):
            raise ValueError(
                f"python is of a program on this machine, found {shown(self.python)} and path "
                f"{shown(hidden(self.path))}; remove it"
            )
        prefix = (self.path or "").partition(":")[0]
        if self.api is not None and prefix in SHIPPED["environments"] and not f"{prefix}:".startswith(_PROGRAMS):
            raise ValueError(f"api: {self.api} is of a program, and {shown(hidden(self.path))} has classes; remove it")
        if self.api is not None and (self.path is None or self.tools):
            tools = f"the tools {', '.join(self.tools)}; the program gives its own with each call" if self.tools else ""
            raise ValueError(f"api: {self.api} is of a program in path, found {tools or 'no path'}")
        if self.path is None and self.options:
            raise ValueError(
                f"options are of the class in path, found {shown(hidden(self.options))} and no path; remove them"
            )
        return self

    @field_validator("tool_format")
    @classmethod
    def _is_form(cls, value: str) -> str:
        forms: tuple[str, ...] = (*get_args(ToolFormat), BY_TEMPLATE)
        if value in forms:
            return value
        expected = f"expected {', '.join(forms)} or a regular expression with groups such as name and arguments"
        try:
            groups = re.compile(value, re.DOTALL).groupindex
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{expected}, found {shown(value)}: {error}") from None
        if not groups:
            raise ValueError(f"{expected}, found {shown(value)}{nearest(value, forms)}")
        return value


BY_TEMPLATE = "auto"
"""Form of the chat template's own calls."""
ToolFormat = Literal[
    "hermes",
    "qwen3_coder",
    "llama3",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "glm45",
    "kimi_k2",
    "functiongemma",
    "gemma4",
    "phi4_mini",
    "harmony",
]
"""Known forms of calls of tools."""
