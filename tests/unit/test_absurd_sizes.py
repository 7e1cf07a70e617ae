"""Sizes that no plan could take, and texts that readers choke on: each is one sentence, at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_runs import TINY, plan_of, spec_of

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.files import read_rows
from flexrlhf.data.text_rows import TextRows
from flexrlhf.errors import UserError
from flexrlhf.plan import suggestions
from flexrlhf.plan.suggestions import memory_suggestions
from flexrlhf.weights.families import MAX_LAYERS, MAX_SIZE
from flexrlhf.weights.shapes import model_shape

DIGITS = "9" * 5000
LAUGHS = "a: &a [1, 1]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))
"""Short, and more than a million values."""
DEEP = "[" * 100_000


def test_the_largest_sizes_are_valid() -> None:
    spec = spec_of(None, Spec.MAX_DEVICES, f"algorithm.prompts_per_step={Spec.MAX_ROWS}")
    assert (spec.cluster.num_devices, spec.algorithm.prompts_per_step) == (Spec.MAX_DEVICES, Spec.MAX_ROWS)


def test_layers_beyond_any_model_are_refused() -> None:
    with pytest.raises(UserError, match=f"num_hidden_layers 1000000000: use at most {MAX_LAYERS}"):
        model_shape("actor", ModelSpec(init=TINY | {"num_hidden_layers": 10**9}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"intermediate_size": -8}, "intermediate_size -8: expected a whole number from 1 to"),
        ({"hidden_size": 2**40}, f"hidden_size {2**40}: use at most {MAX_SIZE}"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads '2': expected a whole number"),
        ({"num_attention_heads": 16}, "hidden_size 8 is no multiple of num_attention_heads 16"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 8}, "head_dim 1, or hidden_size over num_attention_heads: expected an even number"),
        ({"num_hiden_layers": 2}, "init: unknown key 'num_hiden_layers' (did you mean 'num_hidden_layers'?)"),
        ({"NUM-HIDDEN-LAYERS": 2}, "init: unknown key 'NUM-HIDDEN-LAYERS' (did you mean 'num_hidden_layers'?)"),
        ({"model_type": ["llama"]}, "the config has no model_type"),
    ],
)
def test_sizes_of_no_model_are_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        model_shape("actor", ModelSpec(init=TINY | change))


def test_on_many_ranks_fewer_changes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(None, 4, "cluster.memory_gb=0.00001")
    every = memory_suggestions(plan, 0)
    monkeypatch.setattr(suggestions, "REPLANNED_RANKS", 4 * 5)
    assert 0 < len(memory_suggestions(plan, 0)) < len(every)


# --- texts

YAMLS = {
    f"name: a\nsteps: {DIGITS}\n": "Exceeds the limit (4300 digits)",
    f"name: {DEEP}": "nested too deeply",
    "name: a\nsteps: !!int text\n": "invalid literal for int()",
    "name: a\nsteps: !!float text\n": "could not convert string to float",
    "models: {reward_v1.5: {path: a}}": "models: 'reward_v1.5': a model's name has letters, digits, _ and - alone; "
    "use reward_v1_5",
    "models: {reward_a/b: {path: a}}": "use reward_a_b",
    f"name: a\nsteps: 0x{'f' * 4000}\n": "a whole number is larger than any setting takes",
    f"name: a\nplacement: [1{'0' * 400}]\n": "a whole number is larger than any setting takes",
    "name: a\ndata: &a {path: *a}\n": "nested too deeply",
    LAUGHS: "its anchors repeat more than 100000 values",
    'name: "\\ud800"\n': "a text contains a null character or half of a surrogate pair",
    'name: "a\\0"\n': "a text contains a null character or half of a surrogate pair",
    "name: a\n---\nname: b\n": "expected a single document in the stream, but found another document (line 2",
    "name: !!timestamp x\n": "a tag does not fit its value",
    "name: !!timestamp 2026-01-31\n": "a tag makes a value that no setting takes",
    "steps: !!binary OA==\n": "a tag makes a value that no setting takes",
    "name: !!set {a, b}\n": "a tag makes a value that no setting takes",
    "placement: ['1e999999999']\n": "expected a number such as 0.5 or '1/3', found '1e999999999'",
}


@pytest.mark.parametrize("text", YAMLS, ids=range(len(YAMLS)))
def test_a_yaml_that_its_reader_chokes_on_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load_spec(tmp_path / "a.yaml")
    assert YAMLS[text] in str(error.value)
    assert "\n" not in str(error.value)


ROWS = {
    f'{{"prompt": {DIGITS}}}': "line 1: cannot be read as JSON (Exceeds the limit (4300 digits)",
    f'{{"prompt": {DEEP}': "line 1: cannot be read as JSON (nested too deeply)",
    '{"prompt": "half \\ud800 of a pair"}': "row 1: 'prompt' contains half of a surrogate pair",
    '{"instruction": "a", "output": "\\udfff"}': "row 1: 'output' contains half of a surrogate pair",
}


@pytest.mark.parametrize("text", ROWS, ids=range(len(ROWS)))
def test_a_row_that_its_reader_chokes_on_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError) as error:
        TextRows.usable(tmp_path / "a.jsonl", needs="responses" if "output" in text else "prompts")
    assert ROWS[text] in str(error.value)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}')
    assert read_rows(tmp_path / "a.jsonl") == [{"prompt": "😀"}]
    assert TextRows.usable(tmp_path / "a.jsonl", needs="prompts")[0].prompt == "😀"
