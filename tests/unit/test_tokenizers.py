"""Roles whose tokenizers do not agree are refused at planning; a reward model may read responses by its own instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, plan_of, spec_of

from flexrlhf.data.examples import Example
from flexrlhf.data.forms import Message
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.inputs import lengths_for
from flexrlhf.guideline.simulation.model_free_costs import RETOKENIZED, source_section
from flexrlhf.operators.columns import TEXT, Lengths
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.tokenizers import Vocabulary, read_vocabulary
from flexrlhf.strategies.instructions import Move

WORDS = ["<pad>", "</s>", "the", "answer", "is", "yes"]
OTHERS = ["<pad>", "</s>", "yes", "is", "answer", "the"]


def write_model(directory: Path, words: list[str] | None, added: dict[str, int] | None = None, **config: Any) -> str:
    """A model directory without weights; ``words``: of its tokenizer, None: it has none."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **config}))
    if words is not None:
        vocabulary = {word: number for number, word in enumerate(words)}
        entries = [{"id": number, "content": token, "special": True} for token, number in (added or {}).items()]
        content = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": entries}
        (directory / "tokenizer.json").write_text(json.dumps(content))
    return str(directory)


def overrides(**paths: str) -> list[str]:
    return [f"models.{role}={{path: {path}}}" for role, path in paths.items()]


@pytest.fixture
def actor(tmp_path: Path) -> str:
    return write_model(tmp_path / "actor", WORDS)


def test_one_tokenizer_and_further_tokens_at_other_ids_agree(tmp_path: Path, actor: str) -> None:
    paths = {
        "same": write_model(tmp_path / "same", WORDS),
        "more": write_model(tmp_path / "more", WORDS, {"<extra>": 6}),
        "fewer": write_model(tmp_path / "fewer", WORDS[:5]),
        "none": write_model(tmp_path / "none", None),
    }
    for path in paths.values():
        plan_of(None, 1, *overrides(actor=actor, reward=path))


def test_another_vocabulary_is_one_sentence_with_the_remedy(tmp_path: Path, actor: str) -> None:
    reward = write_model(tmp_path / "reward", OTHERS)
    expected = (
        f"models.reward: its tokenizer ({reward}) has other ids than that of models.actor (token 'answer' is 3 there "
        "and 4 here), so it would read other texts; set models.reward.retokenize: true, or give a model with the "
        "tokenizer of models.actor"
    )
    with pytest.raises(UserError) as error:
        plan_of(None, 1, *overrides(actor=actor, reward=reward))
    assert str(error.value) == expected
    critic = [*overrides(actor=actor, reward=reward), "models.reward.retokenize=true"]
    with pytest.raises(UserError, match="^models.critic: its tokenizer .* give a model with the tokenizer of models.a"):
        plan_of(None, 1, *critic)
    plan_of(None, 1, *critic, f"models.critic={{path: {actor}}}")


def test_the_runs_tokenizer_is_compared_with_the_actors(tmp_path: Path, actor: str) -> None:
    other = write_model(tmp_path / "other", OTHERS)
    with pytest.raises(UserError, match=f"^models.actor: .* of data.tokenizer .*; set data.tokenizer to {actor}"):
        plan_of(None, 1, *overrides(actor=actor), f"data.tokenizer={other}")
    plan_of(None, 1, *overrides(actor=actor), f"data.tokenizer={actor}")


def test_an_id_with_two_tokens_is_a_conflict(tmp_path: Path, actor: str) -> None:
    reward = write_model(tmp_path / "reward", [*WORDS[:5], "no"])
    with pytest.raises(UserError, match=r"\(id 5 is 'yes' there and 'no' here\)"):
        plan_of(None, 1, *overrides(actor=actor, reward=reward))
    special = write_model(tmp_path / "special", WORDS, {"<end>": 1})
    with pytest.raises(UserError, match=r"\(id 1 is '</s>' there and '<end>' here\)"):
        plan_of(None, 1, *overrides(actor=actor, reward=special))


def test_without_a_tokenizer_the_size_is_compared(tmp_path: Path, actor: str) -> None:
    small = write_model(tmp_path / "small", None, vocab_size=5)
    with pytest.raises(UserError, match="^models.reward: vocab_size 5 is smaller than the 6 tokens of the tokenizer$"):
        plan_of(None, 1, *overrides(actor=actor, reward=small))


def test_models_have_an_embedding_for_every_token(tmp_path: Path, actor: str) -> None:
    """Also with the tokenizer of the run. Further embeddings are padding, whose ids are not sampled."""
    small = write_model(tmp_path / "small", WORDS, vocab_size=5)
    with pytest.raises(UserError, match="^models.reward: vocab_size 5 is smaller than the 6 tokens of the tokenizer$"):
        plan_of(None, 1, *overrides(actor=actor, reward=small))
    padded = write_model(tmp_path / "padded", WORDS, vocab_size=48)
    plan = plan_of(None, 1, *overrides(actor=padded, reward=actor))
    assert plan.sampled_ids == plan.shapes["reward"].sizes.vocabulary == 32
    assert "that all models embed" in format_plan(plan)
    assert plan_of(None, 1, *overrides(actor=actor, reward=padded)).sampled_ids is None


def test_adapters_have_the_tokenizer_of_their_base_model(tmp_path: Path, actor: str) -> None:
    base = write_model(tmp_path / "base", OTHERS)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (adapters / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match=f"^models.reward: its tokenizer \\({base}\\) has other ids"):
        plan_of(None, 1, *overrides(actor=actor, reward=str(adapters)))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}}, {"a": 0, "b": 1}),
        ({"vocab.json": {"a": 0}, "added_tokens.json": {"<x>": 1}}, {"a": 0, "<x>": 1}),
        ({"vocab.txt": "[PAD]\na\n"}, {"[PAD]": 0, "a": 1}),
        ({"tokenizer.json": {"model": {"vocab": "no"}}}, None),
        ({"tokenizer.model": "binary"}, None),
    ],
)
def test_forms_of_vocabularies(tmp_path: Path, files: dict[str, Any], ids: dict[str, int] | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    read = read_vocabulary("models.actor.path", tmp_path)
    assert (None if read is None else read.ids) == ids


def test_a_broken_tokenizer_file_is_one_sentence(tmp_path: Path, actor: str) -> None:
    broken = write_model(tmp_path / "broken", WORDS)
    (Path(broken) / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=f"^models.reward.path {broken}: tokenizer.json cannot be read as JSON"):
        plan_of(None, 1, *overrides(actor=actor, reward=broken))


def test_an_example_is_a_word_where_there_is_one() -> None:
    first, second = Vocabulary({"Ġ!": 0, "▁hello": 1, "x": 2}), Vocabulary({"Ġ!": 1, "▁hello": 2, "x": 0})
    assert first.conflict(second) == "token '▁hello' is 1 there and 2 here"
    assert first.conflict(first) is None


# --- retokenize


def retokenizing(tmp_path: Path, actor: str, *further: str) -> list[str]:
    reward = write_model(tmp_path / "reward", OTHERS, max_position_embeddings=100)
    own = f"models.reward={{path: {reward}, retokenize: true}}"
    return [f"models.actor={{path: {actor}}}", f"models.critic={{path: {actor}}}", own, *further]


def by_name(operators: tuple[Operator, ...]) -> dict[str, Operator]:
    return {operator.name: operator for operator in operators}


def test_an_operator_where_the_responses_are_writes_columns_of_their_own_width(tmp_path: Path, actor: str) -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 2, *retokenizing(tmp_path, actor))
    found = by_name(plan.graph.operators)
    texts = ("tokens.reward", "attention_mask.reward")
    made = found["scores_texts"]
    assert (made.kind, made.role, made.call) == ("retokenize", "actor", None)
    assert (made.reads, made.writes) == ((*TEXT, "response_mask", "finished"), texts)
    assert (found["scores"].reads, found["scores"].suffix) == (texts, ".reward")
    evaluation = by_name(plan.graph.evaluation)
    assert evaluation["scores"].reads == texts and evaluation["scores_texts"].writes == texts
    # twice a prompt of 4 and a response of 8; by default no more than the model's positions
    assert plan.lengths == Lengths(4, 8, (("reward", 24),))
    assert [plan.lengths.row_bytes(name) for name in (*TEXT, *texts)] == [48, 12, 96, 24]
    assert plan.lengths.of_role("reward") == Lengths(23, 1) and plan.lengths.of_role("actor") is plan.lengths
    (move,) = [i for i in plan.schedule.instructions if isinstance(i, Move) and "tokens.reward" in i.columns]
    assert set(move.columns) == set(texts)
    assert "tokens per text            24 of reward, by its own tokenizer" in format_plan(plan)


def test_texts_of_episodes_have_the_turns_of_their_own_response(tmp_path: Path, actor: str) -> None:
    settings = [each for each in retokenizing(tmp_path, actor) if "critic" not in each]
    plan = plan_of(None, 2, *settings, "algorithm.name=remax", "environment={path: game.py:Game}", "models.critic=null")
    reads = {each.function + each.suffix: each.reads for each in plan.graph.operators if each.kind == "retokenize"}
    assert "turn_ends" in reads["reward"] and "turn_ends.greedy" not in reads["reward"]
    assert "turn_ends.greedy" in reads["reward.greedy"] and "turn_ends" not in reads["reward.greedy"]


def test_memory_is_planned_for_the_longest_text(tmp_path: Path, actor: str) -> None:
    settings = retokenizing(tmp_path, actor, "models.reward.micro_batch_tokens=1000000")
    sizes = []
    for limit in (12, 24):
        plan = plan_of([1, 1, 0.5, 0.5], 2, *settings, f"models.reward.max_text_tokens={limit}")
        (phase,) = [each for each in plan.memories[1].phases if (each.kind, each.model) == ("forward", "reward")]
        sizes.append(phase.part_bytes)
    assert sizes[1] >= 2 * sizes[0] > 0


def test_remax_and_costs_have_their_own_texts(tmp_path: Path, actor: str) -> None:
    raw = retokenizing(tmp_path, actor)
    raw = [each for each in raw if "critic" not in each]
    graph = make_graph(spec_of(None, 1, "algorithm={name: remax, prompts_per_step: 8}", *raw))
    found = by_name(graph.operators)
    assert found["greedy_scores_texts"].writes == ("tokens.reward.greedy", "attention_mask.reward.greedy")
    assert found["greedy_scores"].suffix == ".reward.greedy" and found["greedy_scores"].writes == ("scores.greedy",)
    assert source_section(found["greedy_scores_texts"]) == RETOKENIZED
    assert lengths_for(spec_of(None, 1), None).width == 12


def test_limits_of_texts(tmp_path: Path, actor: str) -> None:
    settings = retokenizing(tmp_path, actor, "data.max_response_tokens=90")
    assert plan_of(None, 1, *settings).lengths.texts == (("reward", 100),)


@pytest.mark.parametrize(
    ("further", "sentence"),
    [
        ("models.critic.retokenize=true", "^models.critic.retokenize: ppo trains this model"),
        ("models.actor.retokenize=true", "^models.actor.retokenize: ppo trains this model"),
        (
            "models.ref={init: {model_type: llama}, retokenize: true}",
            "^models.ref.retokenize: ppo reads tokens of",
        ),
        ("reward={model: reward, level: token}", "^models.reward.retokenize: level token needs a score for each token"),
        ("models.reward={init: {model_type: llama}, retokenize: true}", "a model without a path has no tokenizer"),
    ],
)
def test_models_that_cannot_retokenize(tmp_path: Path, actor: str, further: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan_of(None, 1, *retokenizing(tmp_path, actor), further)


class Letters:
    """A tokenizer with an id for every letter, bos 1 in front, and end token 2."""

    bos_token_id, eos_token_id = 1, 2
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system role")
        return "".join(f"<{each['role'][0]}>{each['content']}" for each in messages)


def encoded(example: Example, response: str, is_finished: bool, limit: int = 50) -> tuple[str, bool]:
    """The tokens as text: bos is ^, the end $."""
    ids, is_cut = TextEncoder("models.reward.retokenize", Letters(), limit).encode(
        example, (Message("assistant", response),), is_finished
    )
    return "".join({1: "^", 2: "$"}.get(token, chr(token)) for token in ids), is_cut


def row(text: str = "", *turns: tuple[str, str]) -> Example:
    return Example((1,), (), (), text=text, turns=tuple(Message(*turn) for turn in turns))


def test_a_sequence_gets_the_special_tokens_of_its_tokenizer_and_an_end() -> None:
    assert encoded(row("hi"), " you", True) == ("^hi you$", False)
    assert encoded(row("hi"), " you", False) == ("^hi you", False)
    assert encoded(row("hi"), " you", True, limit=4) == ("you$", True)


def test_a_chat_is_rendered_by_the_models_own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = row("ignored", ("user", "hi"))
    with pytest.raises(UserError, match="^models.reward.retokenize: the data is chat, and its tokenizer has no"):
        encoded(chat, "you", True)
    monkeypatch.setattr(Letters, "chat_template", "given")
    assert encoded(chat, "you", True) == ("<u>hi<a>you", False)
    assert encoded(row("", ("user", "hi"), ("assistant", "so ")), "you", True) == ("<u>hi<a>so you", False)
    with pytest.raises(UserError, match=r"^models.reward.retokenize: the chat template refuses the turns: no system"):
        encoded(row("", ("system", "be good"), ("user", "hi")), "you", True)
