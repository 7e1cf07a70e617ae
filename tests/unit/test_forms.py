"""Every form of rows as other tools publish them: its examples, and the sentence for each kind of broken row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexrlhf.data.files import read_rows
from flexrlhf.data.forms import ALPACA_TEMPLATES, Message, TextExample, as_chat, detect_form, needed_text
from flexrlhf.data.known_keys import PART, REFUSED_COLUMNS, REFUSED_KEYS
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_rows import TextRows
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

FORMS = Path(__file__).parents[1] / "fixtures" / "forms"
OWN = RowLayout({"prompt": "problem", "response": "solution"})


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def system(text: str) -> Message:
    return Message("system", text)


def second(name: str, needs: Needs, layout: RowLayout | None = None) -> TextExample:
    texts = TextRows.usable(FORMS / name, needs=needs, layout=layout or RowLayout())
    assert len(texts) == 3
    return texts[1]


@pytest.mark.parametrize(
    ("name", "form", "needs", "prompt", "responses"),
    [
        ("prompt.jsonl", "prompt", "prompts", "Name a number.", ()),
        ("prompt_response.jsonl", "prompt", "responses", "Name a number.", (" four",)),
        ("prompt_response.jsonl", "prompt", "prompts", "Name a number.", ()),
        ("prompt_completion.jsonl", "prompt", "responses", "Grass is", (" green.",)),
        ("pairs.jsonl", "pairs", "pairs", "Snow is", (" white.", " hot.")),
        ("pairs.jsonl", "pairs", "responses", "Snow is", (" white.",)),
        ("question.jsonl", "question", "responses", "One and two?\n", ("That is three. #### 3",)),
        ("openrlhf.jsonl", "input", "prompts", "One and two?", ()),
        ("openrlhf.jsonl", "input", "responses", "One and two?", (" three",)),
        ("text.jsonl", "text", "responses", "", ("Grass is green.",)),
    ],
)
def test_rows_of_text(name: str, form: str, needs: Needs, prompt: str, responses: tuple[str, ...]) -> None:
    assert detect_form(read_rows(FORMS / name)[0], needs) == form
    example = second(name, needs)
    assert (example.prompt, example.responses) == (prompt, responses)
    assert not example.turns and not example.completions


def test_dialogues_and_instructions() -> None:
    dialogue = second("pairs_hh.jsonl", "pairs")
    assert dialogue.prompt.endswith("Monday.\n\nHuman: Thanks\n\nAssistant:")
    assert dialogue.responses == (" You are welcome.", " No.")
    instruction = second("alpaca.json", "responses")
    assert instruction.prompt.endswith("### Instruction:\nName a color.\n\n### Response:")
    assert instruction.responses == ("Red.",)


BRIEF_DAY = (system("Be brief."), user("Name a day."))
LONG_CHAT = (*BRIEF_DAY, assistant("Monday."), user("Another one."))
TWO_TURNS = (assistant("Monday."), user("Another one."), assistant("Friday."))


@pytest.mark.parametrize(
    ("name", "form", "needs", "turns", "completions"),
    [
        ("prompt_chat.jsonl", "prompt", "prompts", BRIEF_DAY, ()),
        ("prompt_chat.jsonl", "prompt", "responses", BRIEF_DAY, ((assistant("Monday."),),)),
        ("messages.jsonl", "messages", "prompts", LONG_CHAT, ()),
        ("messages.jsonl", "messages", "responses", BRIEF_DAY, (TWO_TURNS,)),
        ("sharegpt.jsonl", "conversations", "prompts", LONG_CHAT, ()),
        ("sharegpt.jsonl", "conversations", "responses", BRIEF_DAY, (TWO_TURNS,)),
        ("pairs_chat.jsonl", "pairs", "pairs", BRIEF_DAY, ((assistant("Monday."),), (assistant("Red."),))),
        (
            "pairs_chat_implicit.jsonl",
            "pairs",
            "pairs",
            (user("Name a day."),),
            ((assistant("Monday."),), (assistant("Red."),)),
        ),
        (
            "sharegpt_pairs.json",
            "conversations",
            "pairs",
            (user("Hi"), assistant("Hello!"), user("One and one?")),
            ((assistant("Two."),), (assistant("Three."),)),
        ),
        ("verl.jsonl", "prompt", "prompts", (user("One and two?"),), ()),
    ],
)
def test_rows_of_messages(
    name: str, form: str, needs: Needs, turns: tuple[Message, ...], completions: tuple[tuple[Message, ...], ...]
) -> None:
    assert detect_form(read_rows(FORMS / name)[0], needs) == form
    example = second(name, needs)
    assert (example.turns, example.completions) == (turns, completions)
    assert (example.prompt, example.responses) == ("", ())


def test_a_chat_that_ends_with_the_user_is_a_prompt_as_a_whole() -> None:
    texts = TextRows.usable(FORMS / "messages.jsonl", needs="prompts")
    assert texts[2].turns == (user("Hi"), assistant("Hello!"), user("Bye"))
    trained = TextRows.usable(FORMS / "messages.jsonl", needs="responses")
    assert trained[2].completions == ((assistant("Hello!"),),)


def test_implicit_prompts_end_before_an_assistant_turn() -> None:
    row = {
        "chosen": [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b")]],
        "rejected": [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b")]],
    }
    more = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    other = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "d"}]
    same = needed_text(row, "pairs", "pairs")
    assert (same.turns, same.completions) == ((user("a"),), ((assistant("b"),), (assistant("b"),)))
    apart = needed_text({"chosen": row["chosen"] + more, "rejected": row["rejected"] + other}, "pairs", "pairs")
    assert apart.turns == (user("a"),) and apart.completions[0][1:] == (user("c"), assistant("d"))


def test_parts_of_text_are_joined_and_absent_columns_of_tables_are_no_columns() -> None:
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "a day."}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None}], "completion": None, "response": " x"}
    assert needed_text(row, "prompt", "prompts").turns == (user("Name a day."),)
    assert needed_text(row, "prompt", "responses").completions == ((assistant(" x"),),)
    assert detect_form({"instruction": None, "messages": None, "question": "q"}) == "question"
    pair = {"prompt": None, "question": "q", "chosen": "a", "rejected": "b"}
    assert needed_text(pair, "pairs", "pairs").responses == ("a", "b")


# --- prompts of pairs

PAIR = {"chosen": "a", "rejected": "b"}
TURN = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("needs", ["pairs", "responses", "prompts"])
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q"}, "q\n"),
        ({"query": "q"}, "q"),
        ({"problem": "q"}, "q"),
        ({"context": "q"}, "q"),
        ({"input": "q"}, "q"),
        ({"prompt": "q", "question": "r", "context": "s"}, "q"),
        ({"prompt": "", "problem": "q"}, "q"),
        ({"instruction": "i", "input": "q"}, ALPACA_TEMPLATES["with_input"].format(instruction="i", input="q")),
        ({"instruction": "i", "input": ""}, ALPACA_TEMPLATES["without_input"].format(instruction="i")),
    ],
)
def test_the_prompt_of_a_pair_is_in_any_known_column(row: dict[str, Any], prompt: str, needs: Needs) -> None:
    row = row | PAIR
    assert detect_form(row, needs) == "pairs"
    assert needed_text(row, "pairs", needs).prompt == prompt


def test_messages_next_to_a_pair_are_its_prompt() -> None:
    for column in ("messages", "context"):
        row = {column: [{"role": "user", "content": "q"}], **PAIR}
        example = needed_text(row, detect_form(row, "pairs"), "pairs")
        assert (example.turns, example.completions) == ((user("q"),), ((assistant("a"),), (assistant("b"),)))
    whole = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in "ab"]
    row = {"messages": whole[0], "chosen": whole[0], "rejected": whole[1], "question": "q", "context": "c"}
    assert needed_text(row, "pairs", "pairs").turns == (user("q"),)
    assert detect_form(row, "responses") == "messages"


def test_dialogues_next_to_a_copy_of_their_prompt_are_split() -> None:
    start = "\n\nHuman: q\n\nAssistant:"
    for prompt in ({"question": "q"}, {"prompt": start}, {}):
        example = needed_text({**prompt, "chosen": f"{start} a", "rejected": f"{start} b"}, "pairs", "pairs")
        assert (example.prompt, example.responses) == (start, (" a", " b"))


def test_a_row_with_several_prompts_has_the_one_with_a_response() -> None:
    row = {"prompt": "p", "question": "q", "answer": "a"}
    assert detect_form(row, "responses") == "question" and detect_form(row, "prompts") == "prompt"


# --- broken rows: one sentence each

BROKEN: list[tuple[dict[str, Any], Needs, str]] = [
    ({"messages": "Hi"}, "prompts", "'messages' must be a list of messages, found a string"),
    ({"messages": []}, "prompts", "'messages' has no messages"),
    ({"messages": ["Hi"]}, "prompts", "message 1 of 'messages' must be an object, found a string"),
    ({"messages": [TURN, {"role": "assistant"}]}, "responses", "message 2 of 'messages' needs role and content (or"),
    ({"messages": [{"role": "usr", "content": "Hi"}]}, "prompts", "has the role 'usr' (did you mean 'user'?)"),
    ({"messages": [{"role": 1, "content": "Hi"}]}, "prompts", "the role of message 1 of 'messages' must be a string"),
    ({"messages": [{"role": "user", "content": None}]}, "prompts", "content of message 1 of 'messages' must be a str"),
    ({"messages": [TURN]}, "responses", "'messages' has no assistant turn, so there is no response"),
    ({"messages": [REPLY, TURN, REPLY]}, "responses", "'messages' begins with an assistant turn, so there is no pro"),
    ({"messages": [REPLY]}, "prompts", "'messages' begins with an assistant turn, so there is no prompt"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "prompts",
        "the content of message 1 of 'messages' has a part that is no text ('image')",
    ),
    (
        {"messages": [TURN, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
        "responses",
        "the name of call 1 of message 2 of 'messages' must be a string, found null",
    ),
    ({"conversations": [{"from": "human"}]}, "prompts", "message 1 of 'conversations' needs role and content (or fro"),
    ({"conversations": [{"from": "humman", "value": "Hi"}]}, "prompts", "(did you mean 'human'?)"),
    ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": 1, "rejected": "b"}, "pairs", "'chosen' must be"),
    (
        {"messages": [TURN], "reference": "x"},
        "pairs",
        "row 1: the algorithm needs preference pairs, the columns 'chosen' and 'rejected', but the row has the keys "
        "'messages', 'reference'",
    ),
    ({"conversations": [{"from": "human", "value": "Hi"}]}, "pairs", "the algorithm needs preference pairs, the col"),
    ({"prompt": "p", "chosen": "a", "rejected": None}, "pairs", "the algorithm needs preference pairs, the columns 'c"),
    ({"label": "x"}, "responses", "or 'input', or 'text', but has the keys 'label'"),
    ({"label": "x"}, "prompts", "or 'question', or 'input', but has the keys 'label'"),
    ({"prompt": "p", "chosen": "a", "rejected": [REPLY]}, "pairs", "must be two strings or two lists of messages"),
    (
        {"prompt": [TURN], "chosen": [TURN, REPLY], "rejected": [REPLY]},
        "pairs",
        "must begin with an assistant turn, fo",
    ),
    ({"chosen": [TURN, REPLY], "rejected": [REPLY]}, "pairs", "share no prompt that an assistant turn follows in both"),
    ({"prompt": [TURN, REPLY], "completion": [REPLY]}, "responses", "the prompt ends with an assistant turn, as if"),
    ({"prompt": [TURN], "completion": 3}, "responses", "'completion' must be a string, found a number"),
    ({"input": 3, "label": "x"}, "prompts", "'input' must be a string, found a number"),
    ({"input": "x", "label": "x"}, "responses", "needs the column 'output', but has the keys 'input', 'label'"),
    ({"instruction": "x", "input": 3}, "prompts", "'input' must be a string, found a number"),
    ({"instruction": "x", "history": [["a", "b"]]}, "prompts", "'history' has a value, which is not rendered; make it"),
    (
        {"messages": [TURN], "tools": [{"type": "function"}]},
        "prompts",
        "tool 1 of 'tools' must be an object with a nam",
    ),
    ({"prompt": "half \ud800"}, "prompts", "'prompt' contains half of a surrogate pair"),
    ({"prompt": "  ", "response": "a"}, "responses", "the prompt is empty; the row has the keys 'prompt', 'response'"),
    ({"prompt": "\u200b\n"}, "prompts", "the prompt is empty"),
    ({"prompt": ""}, "prompts", "name the prompt's column as in data.columns={prompt: question}"),
    ({"question": "", "answer": "a"}, "responses", "the prompt is empty"),
    ({"prompt": "\n\nAssistant:", "system": "Be kind."}, "prompts", "the prompt is empty"),
    ({"instruction": "", "input": "", "output": "a"}, "responses", "the prompt is empty"),
    ({"messages": [{"role": "user", "content": "\n"}, REPLY]}, "responses", "the prompt is empty"),
    ({"prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ""}]}, "prompts", "is empty"),
    ({"ask": "q", "chosen": "a", "rejected": "b"}, "pairs", "the prompt is empty; the row has the keys 'ask', 'chos"),
    (
        {"question": "q", "context": "c", "chosen": "a", "rejected": "b"},
        "pairs",
        "each of 'question', 'context' may be the prompt: name one as in data.columns={prompt: question}, or make one",
    ),
    (
        {"messages": [TURN, REPLY | {"weight": 0.5}]},
        "responses",
        "'weight' of message 2 of 'messages' must be 0 or 1",
    ),
    ({"messages": [TURN | {"weight": 1}, REPLY]}, "responses", "only turns of the assistant are trained on"),
    ({"messages": [TURN, REPLY | {"weight": 1, "train": False}]}, "responses", "'weight' and 'train', which differ"),
    ({"messages": [TURN, REPLY | {"weight": 0}]}, "responses", "has no assistant turn that is trained on, so there i"),
    (
        {"prompt": [TURN], "completion": [REPLY | {"loss": False}]},
        "responses",
        "all turns of the assistant are marked as not trained on, so nothing is left to learn",
    ),
    (
        {"prompt": [TURN], "chosen": [REPLY | {"train": False}], "rejected": [REPLY]},
        "pairs",
        "is marked as not trained on, which pairs do not have",
    ),
    ({"messages": [TURN, REPLY | {"thinking": "a", "reasoning": "b"}]}, "responses", "'reasoning' and 'thinking', whi"),
    ({"messages": [TURN | {"reasoning": "a"}, REPLY]}, "responses", "is of the user; only the assistant thinks"),
    (
        {"messages": [TURN, REPLY | {"tool_calls": [1]}]},
        "responses",
        "call 1 of message 2 of 'messages' must be an o",
    ),
    (
        {"messages": [TURN, REPLY | {"function_call": {"name": "f", "arguments": "{"}}]},
        "responses",
        "the arguments of call 1 of message 2 of 'messages' must be JSON, found '{'",
    ),
    ({"prompt": [TURN], "tools": "{"}, "prompts", "'tools' must be JSON, found '{'"),
    ({"prompt": [TURN], "chat_template_kwargs": {"tools": []}}, "prompts", "has 'tools', which the run itself sets"),
    ({"prompt": "p", "system": "a", "system_prompt": "b"}, "prompts", "'system' and 'system_prompt' are two system pr"),
    ({"text": "t", "system": "a"}, "responses", "the row has a system prompt, but is a text of pretraining"),
]
BROKEN += [
    ({"prompt": [TURN], "completion": [REPLY], name: ["x"]}, "responses", f"{name!r} has a value, which is not render")
    for name in REFUSED_COLUMNS
]
BROKEN += [
    ({"messages": [TURN, REPLY | {name: ["x"]}]}, "responses", f"message 2 of 'messages' has {name!r}, which is not re")
    for name in REFUSED_KEYS
    if not name.startswith(PART)
]


@pytest.mark.parametrize(("row", "needs", "expected"), BROKEN, ids=[expected[:50] for *_, expected in BROKEN])
def test_a_broken_row_is_one_sentence_with_its_number(
    tmp_path: Path, row: dict[str, Any], needs: Needs, expected: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(UserError) as caught:
        TextRows.usable(path, needs=needs)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}, row 1: ")


def test_a_form_that_is_named_asks_for_the_columns_of_pairs() -> None:
    with pytest.raises(UserError, match="^needs the columns 'chosen' and 'rejected', but has the keys 'conv"):
        needed_text({"conversations": [TURN, REPLY]}, "conversations", "pairs")
    with pytest.raises(UserError, match="^needs the column 'rejected', but has the keys 'conversations', 'chosen'$"):
        needed_text({"conversations": [TURN, REPLY], "chosen": "a"}, "conversations", "pairs")


# --- columns, template and system prompt of one's own


def test_columns_of_ones_own() -> None:
    example = second("own_columns.csv", "responses", OWN)
    assert (example.prompt, example.responses) == ("One, and two?", ("three",))
    assert example.columns == {
        "problem": "One, and two?",
        "solution": "three",
        "level": "2",
        "prompt": "One, and two?",
        "response": "three",
    }


def test_names_of_ones_own_are_preferred_to_forms_of_their_columns() -> None:
    """A column that is given another name does not make its row one of another form."""
    layout = RowLayout({"prompt": "question", "response": "answer"})
    assert detect_form({"question": "q", "answer": "a"}, "responses", layout) == "prompt"
    assert needed_text({"question": "q", "answer": "a"}, "prompt", "responses", layout).prompt == "q"


def test_nested_columns_are_reached_by_dotted_names() -> None:
    example = second("verl.jsonl", "prompts", RowLayout({"solution": "reward_model.ground_truth"}))
    assert example.columns["reward_model.ground_truth"] == example.columns["solution"] == "3"
    assert example.columns["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert example.columns["extra_info.index"] == 1


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    for columns, expected in [
        ({"prompt": "problm"}, "data.columns has prompt: problm, no column of the rows (did you mean 'problem'?)"),
        ({"prompt": "problem", "x": "y"}, "data.columns has x: y, no column of the rows; there are problem, solution,"),
    ]:
        with pytest.raises(UserError) as caught:
            TextRows.usable(FORMS / "own_columns.csv", needs="prompts", layout=RowLayout(columns))
        assert expected in str(caught.value)
    unused = RowLayout({"prompt": "problem", "response": "reply"})
    assert TextRows.usable(FORMS / "own_columns.csv", needs="prompts", layout=unused)[0].prompt == "One and one?"


def test_template_of_ones_own() -> None:
    layout = RowLayout(template="{question}\nEnd with #### and {{the}} number.")
    example = second("question.jsonl", "responses", layout)
    assert example.prompt == "One and two?\nEnd with #### and {the} number."
    assert example.responses == ("That is three. #### 3",)
    plain = second("own_columns.csv", "prompts", RowLayout(template="Level {level}: {problem}"))
    assert plain.prompt == "Level 2: One, and two?"
    pair = second("pairs.jsonl", "pairs", RowLayout(template="Say it: {prompt}"))
    assert (pair.prompt, pair.responses) == ("Say it: Snow is", (" white.", " hot."))
    assert second("openrlhf.jsonl", "prompts", RowLayout(template="{input} ({label})")).prompt == "One and two? (3)"


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("question.jsonl", "{query}", "row 1: needs the column 'query', but has the keys 'question', 'answer'"),
        ("verl.jsonl", "{extra_info}", "row 1: 'extra_info' must be a string, found an object"),
        ("messages.jsonl", "{messages}", "row 1: data.template makes a prompt of columns, but form 'messages' has"),
    ],
)
def test_a_template_needs_columns_of_text(name: str, template: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        TextRows.usable(FORMS / name, needs="responses", form="auto", layout=RowLayout(template=template))
    assert expected in str(caught.value)


def test_a_template_makes_no_prompt_of_chats() -> None:
    with pytest.raises(UserError, match="data.template makes a prompt of columns, but form 'messages' has chats"):
        needed_text({"messages": [TURN, REPLY]}, "messages", "responses", RowLayout(template="{a}"))
    with pytest.raises(UserError, match="form 'conversations' has chats; remove one of them"):
        second("sharegpt_pairs.json", "prompts", RowLayout(template="{system}"))


def test_system_prompts_make_chats_unless_rows_have_their_own() -> None:
    layout = RowLayout(system="Be kind.")
    assert second("question.jsonl", "prompts", layout).turns == (system("Be kind."), user("One and two?\n"))
    assert second("messages.jsonl", "prompts", layout).turns == LONG_CHAT
    pair = second("pairs.jsonl", "pairs", layout)
    assert pair.turns == (system("Be kind."), user("Snow is"))
    assert pair.completions == ((assistant(" white."),), (assistant(" hot."),))
    dialogue = second("pairs_hh.jsonl", "pairs", layout)
    assert dialogue.turns == (
        system("Be kind."),
        user("Name a day."),
        assistant("Monday."),
        user("Thanks"),
    )
    assert dialogue.completions == ((assistant("You are welcome."),), (assistant("No."),))
    assert second("text.jsonl", "responses", layout).responses == ("Grass is green.",)


def test_texts_as_chats() -> None:
    goes_on = TextExample("\n\nHuman: a\n\nAssistant:", (" b\n\nHuman: c\n\nAssistant: d", ""))
    chat = as_chat(goes_on)
    assert chat.turns == (user("a"),)
    assert chat.completions == ((assistant("b"), user("c"), assistant("d")), (assistant(""),))
    assert as_chat(TextExample("a\n\nHuman: b", (" c ",))).turns == (user("a\n\nHuman: b"),)
    assert as_chat(TextExample("", ("x",), is_text=True)).responses == ("x",)


# --- real data, where present
