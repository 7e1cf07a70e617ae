"""JSON schemas of tools: made by transformers in another process, with a sentence for each tool that has none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of
from transformers.utils import get_json_schema

from benchmarks.peers.chat_tokenizers import build_chat_tokenizer
from benchmarks.peers.trl_turns import add, look_up
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.class_checks import class_facts
from flexrlhf.environments.tool_schemas import EnvironmentTools, make_schemas
from flexrlhf.errors import UserError

OWN = '''
import os
from pathlib import Path
Path(__file__).with_name("loaded").write_text(str(os.getpid()))

async def now(zone: str = "utc") -> str:
    """Return the time.

    Args:
        zone: A time zone.
    """
    return zone

class Game:
    """In TRL's form."""
    def reset(self, **row): ...
    def get_reward(self): return 1.0
    def _hidden(self): ...
    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The guess.
        """

class Steps:
    def reset(self, row, seed): ...
    def step(self, reply): ...
    def helper(self): ...

def undocumented(a: int): ...
def untyped(a):
    """Do it.

    Args:
        a: A value.
    """
def unexplained(a: int):
    """Do it."""
'''


def names(tools: tuple[Any, ...]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_schemas_are_made_elsewhere_once(tmp_path: Path) -> None:
    """Of functions, one of them async, of a module, and of a class in TRL's form; another class has no tools."""
    file = tmp_path / "own_tools.py"
    file.write_text(OWN)
    module = "benchmarks.peers.trl_turns"
    settings = EnvironmentSpec(path=f"{file}:Game", tools=(f"{module}:add", f"{file}:now", f"{module}:look_up"))
    assert EnvironmentTools(settings).has_code
    tools = EnvironmentTools(settings).schemas()
    assert names(tools) == ["add", "now", "look_up", "guess"]
    assert (tools[0], tools[2]) == (get_json_schema(add), get_json_schema(look_up))
    loader = (tmp_path / "loaded").read_text()
    assert int(loader) != os.getpid()
    (tmp_path / "loaded").unlink()
    assert EnvironmentTools(settings).schemas() == tools and not (tmp_path / "loaded").exists()
    assert EnvironmentTools(EnvironmentSpec(path="verifiers:wordle")).schemas() == ()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("undocumented", "Cannot generate JSON schema for undocumented because it has no docstring!"),
        ("untyped", "Argument a is missing a type hint in function untyped"),
        ("unexplained", "because the docstring has no description for the argument 'a'"),
    ],
)
def test_a_tool_without_a_schema_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    file = tmp_path / f"{name}_tools.py"
    file.write_text(OWN)
    made, none = make_schemas((f"{file}:{name}", f"{file}:Steps"))
    assert none == []
    assert isinstance(made, str) and sentence in made and "\n" not in made


def test_wrong_tools_are_named(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def add(a: int):\n    pass\nraise SystemExit('stop here')\n")

    def refused(*tools: str) -> str:
        with pytest.raises(UserError) as caught:
            EnvironmentTools(EnvironmentSpec(tools=tuple(f"{tmp_path}/{tool}" for tool in tools))).schemas()
        return str(caught.value)

    assert "environment.tools.1: " in refused("tools.py:now", "tools.py:untypd")
    assert "defines no 'untypd' (did you mean 'untyped'?)" in refused("tools.py:untypd")
    assert "no file" in refused("tool.py:now") and "tools.py" in refused("tool.py:now")
    assert not EnvironmentTools(EnvironmentSpec(tools=(f"{tmp_path}/tool.py:now",))).has_code
    assert make_schemas((f"{tmp_path}/broken.py:add",)) == [
        "could not be loaded: SystemExit: stop here (broken.py, line 3)"
    ]
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\ndef add(a: int): ...\n")
    assert refused("ends.py:add") == "environment: its code ended the process that called it, exit code 3"
    again = f"{tmp_path}/tools.py:now: there is another tool named 'now'"
    assert refused("tools.py:now", "tools.py:now").startswith(f"environment.tools.1: {again}")


CLASSES = '''
import gymnasium
from flexrlhf.environments.base import Turn

class Own:
    def __init__(self, level=1, *, depth=2): ...
    def reset(self, row, seed): ...
    def step(self, reply): ...
class Needs(Own):
    def __init__(self, level): ...
class TakesAll(Own):
    def __init__(self, **options): ...
class Declared:
    def reset(self, example, number): ...
    def step(self, text) -> Turn: ...
class StaticReset(Own):
    @staticmethod
    def reset(row, seed): ...
class TwoReplies(Own):
    def step(self, reply, other): ...
class NoSeed(Own):
    def reset(self, row): ...
class NoStep:
    def reset(self, row, seed): ...
class NoReset:
    def step(self, reply): ...
class Walk:
    """In TRL's form, with a tool named step."""
    def reset(self, prompt, *, board="empty"): ...
    def step(self, direction: str) -> str:
        """Go one step.

        Args:
            direction: Where to.
        """
class Rewarded(Walk):
    def get_reward(self, of): ...
'''
FITTING: list[tuple[str, dict[str, Any]]] = [
    *(("Own", options) for options in ({}, {"level": 3, "depth": 4})),
    *((name, {}) for name in ("Declared", "StaticReset", "Walk")),
    *(("Needs", {"level": 0}), ("TakesAll", {"level": 0, "nope": 1})),
]
UNFIT: list[tuple[str, dict[str, Any], str, str]] = [
    ("Own", {"nope": 1}, "options", "got an unexpected keyword argument 'nope'; it takes level, depth"),
    ("Needs", {}, "options", "missing a required argument: 'level'; it takes level"),
    ("TakesAll", {"self": 1}, "options", "multiple values for argument 'self'; it takes options"),
    ("Declared", {"level": 1}, "options", "got an unexpected keyword argument 'level'; it takes none"),
    ("TwoReplies", {}, "path", "TwoReplies.step(reply, other): it is called with (reply)"),
    ("NoSeed", {}, "path", "NoSeed.reset(row): it is called with (row, seed)"),
    (
        "NoStep",
        {},
        "path",
        "NoStep has reset(row, seed) and no step; give it step(reply), or a reset that takes columns",
    ),
    ("Rewarded", {}, "path", "Rewarded.get_reward(of): it is called with ()"),
    ("NoReset", {}, "path", "NoReset is a class without reset, not a class with reset and step"),
    ("gymnasium", {}, "path", "classes.py:gymnasium is <module 'gymnasium'"),
]
PACKAGES = [
    (
        "gymnasium:Nope-v3",
        {},
        "could not be made: raised gymnasium.error.NameNotFound: Environment `Nope` doesn't exist",
    ),
    ("gymnasium:CartPole-v1", {"nope": 1}, "got an unexpected keyword argument 'nope'"),
    ("gymnasium:CartPole-v1", {"action": "("}, "could not be made: raised re.error: missing )"),
]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("classes") / "classes.py"
    file.write_text(CLASSES)
    return file


@pytest.mark.parametrize(("name", "options"), FITTING)
def test_a_class_that_can_run_episodes_has_no_problem(classes: Path, name: str, options: dict[str, Any]) -> None:
    found = class_facts(f"{classes}:{name}", options)
    assert found == ({"needed": ["prompt"], "taken": ["prompt", "board"]} if name == "Walk" else {})


@pytest.mark.parametrize(("name", "options", "setting", "sentence"), UNFIT)
def test_a_class_that_can_run_no_episode_is_one_sentence(
    classes: Path, name: str, options: dict[str, Any], setting: str, sentence: str
) -> None:
    found, text = class_facts(f"{classes}:{name}", options)["problem"]
    assert found == setting and sentence in text


@pytest.mark.parametrize(("path", "options", "sentence"), PACKAGES)
def test_environments_of_gymnasium_are_made_once(path: str, options: dict[str, Any], sentence: str) -> None:
    assert class_facts("gymnasium:CartPole-v1", {}) == {}
    assert sentence in class_facts(path, options)["problem"][1]


def test_classes_are_checked_elsewhere_with_the_columns_of_the_data(classes: Path) -> None:
    """``step`` of TRL's form is a tool; what is wrong is named by its setting."""
    walk = EnvironmentSpec(path=f"{classes}:Walk")
    assert names(EnvironmentTools(walk).schemas()) == ["step"]
    EnvironmentTools(walk).check_class(("prompt", "board"))
    for columns, sentence in (
        (("board",), "takes 'prompt', no column of the data; there are board"),
        (("prompt", "answer"), "does not take the column 'answer' of the data; add it, or **columns"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            EnvironmentTools(walk).check_class(columns)
    with pytest.raises(UserError, match="^environment.options: .*:Own: got an unexpected keyword argument 'nope'"):
        EnvironmentTools(EnvironmentSpec(path=f"{classes}:Own", options={"nope": 1})).check_class()
    EnvironmentTools(EnvironmentSpec(tools=("benchmarks.peers.trl_turns:add",))).check_class()
    with pytest.raises(ValueError, match="options are of the class in path, found .* and no path; remove them"):
        EnvironmentSpec(tools=("benchmarks.peers.trl_turns:add",), options={"level": 1})


def test_the_prompts_of_a_run_have_its_tools(tmp_path: Path) -> None:
    """In its examples, in its episodes, and in the counts of its plan, which has none before the tools are there."""
    tokenizer = build_chat_tokenizer("qwen2_5", tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "What is 2 + 3?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
    settings = (
        f"data.path={tmp_path}/rows.jsonl",
        f"data.tokenizer={tmp_path}/tokenizer",
        "data.max_prompt_tokens=2000",
    )
    sizes = "models.{}={{init: {{model_type: llama, vocab_size: 400, hidden_size: 8, num_attention_heads: 1}}}}"
    models = [sizes.format(role) for role in ("actor", "reward")]

    def plan(tool: str) -> Any:
        return plan_of(None, 1, *settings, *models, f"environment={{tools: ['{tool}']}}")

    expected = tokenizer.apply_chat_template(turns, tools=[add], add_generation_prompt=True)["input_ids"]
    run = plan("benchmarks.peers.trl_turns:add")
    (example,) = run.data.load().examples
    assert list(example.prompt) == expected and example.turns
    assert list(run.data.turn_tokens(tokenizer).prompt(example, ())) == expected
    ((_, found),) = run.data.inspections(())
    assert found.counts.prompts == (len(expected),)
    assert list(plan(f"{tmp_path}/later.py:add").data.inspections(())) == []
