"""Generated corpus of the quick start: guests' questions, and a host's responses, kind or rude.

Two thirds of the demonstrations are rude, so a model tuned on them is mostly rude. The preference pairs teach a reward
model to prefer responses that are kind, about the thing of the question, finished, and repeat nothing. PPO then has
something to learn within minutes on a laptop, and a person can judge every sample at a glance.

Sentences are filled templates of ``sentences.yaml``: the evaluation files have new questions of known words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from flexrlhf.config.yaml_io import read_yaml

NUM_SFT, NUM_PAIRS, NUM_PROMPTS = 1500, 1200, 512
NUM_EVAL_SFT, NUM_EVAL_PAIRS, NUM_EVAL_PROMPTS = 64, 200, 64
NUM_EVAL_QUESTIONS = 96
MIN_WORDS, MAX_WORDS = 5, 16
KIND_SHARE = 1 / 3
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 16, 20
PUNCTUATION = ".,!?"
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
EVAL_SUFFIX = "_held_out"


@dataclass(frozen=True)
class Topic:
    """A subject of questions: any question goes with any response about the same thing.

    name:       how a rude response refers to the thing
    things:     subjects of a question
    questions:  templates with ``{thing}``
    kind:       templates of kind responses, with ``{thing}`` and ``{detail}``
    details:    values of ``{detail}``
    rude:       templates of rude responses, with ``{thing}``
    """

    name: str
    things: tuple[str, ...]
    questions: tuple[str, ...]
    kind: tuple[str, ...]
    details: tuple[str, ...]
    rude: tuple[str, ...]


_SENTENCES: dict[str, Any] = read_yaml(Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8"))


def _topic(name: str, **templates: list[str]) -> Topic:
    return Topic(name, **{key: tuple(texts) for key, texts in templates.items()})


def _sentences(key: str) -> tuple[str, ...]:
    return tuple(_SENTENCES[key])


TOPICS = tuple(_topic(**topic) for topic in _SENTENCES["topics"].values())
KIND_OPENERS, KIND_CLOSERS = _sentences("kind_openers"), _sentences("kind_closers")
RUDE_OPENERS, RUDE_CLOSERS = _sentences("rude_openers"), _sentences("rude_closers")
RUDE_ABOUT_ANYTHING = _sentences("rude_about_anything")
NICE_WORDS = _sentences("nice_words")
UNFINISHED = frozenset(_sentences("unfinished"))
"""Words after which a response cannot end."""


@dataclass(frozen=True)
class Question:
    """A question with its topic and thing, for which responses can be made."""

    text: str
    topic: Topic
    thing: str


def write_corpus(directory: Path, seed: int = 0) -> None:
    """Write the training and evaluation files and ``tokenizer/`` into ``directory``; same seed, same bytes.

    ``sft`` rows have ``prompt`` and ``response``, ``pairs`` rows ``prompt``, ``chosen`` and ``rejected``, ``prompts``
    rows ``prompt``. No question of an evaluation file (``*`` + EVAL_SUFFIX) occurs in a training file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    questions = all_questions()
    rng.shuffle(questions)
    evaluation, training = questions[:NUM_EVAL_QUESTIONS], questions[NUM_EVAL_QUESTIONS:]
    _write_files(directory, "", rng, training, (NUM_SFT, NUM_PAIRS, NUM_PROMPTS))
    _write_files(directory, EVAL_SUFFIX, rng, evaluation, (NUM_EVAL_SFT, NUM_EVAL_PAIRS, NUM_EVAL_PROMPTS))
    build_tokenizer(all_sentences(), directory / "tokenizer")


def _write_files(
    directory: Path, suffix: str, rng: random.Random, questions: list[Question], counts: tuple[int, int, int]
) -> None:
    num_sft, num_pairs, num_prompts = counts
    sft = [sft_row(rng, question) for question in islice(cycle(questions), num_sft)]
    pairs = [pair_row(rng, question) for question in islice(cycle(questions), num_pairs)]
    prompts = [{"prompt": question.text} for question in rng.sample(questions, num_prompts)]
    for name, rows in (("sft", sft), ("pairs", pairs), ("prompts", prompts)):
        rng.shuffle(rows)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}{suffix}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def sft_row(rng: random.Random, question: Question) -> dict[str, str]:
    """Return a demonstration: kind with chance ``KIND_SHARE``, else rude."""
    response = kind_response if rng.random() < KIND_SHARE else rude_response
    return {"prompt": question.text, "response": response(rng, question)}


def pair_row(rng: random.Random, question: Question) -> dict[str, str]:
    """Return a preference pair: a kind response, and one that is rude or (in half the rows) kind but useless."""
    (bad_response,) = rng.choices(list(BAD_RESPONSES), weights=list(BAD_RESPONSES.values()))
    chosen, rejected = kind_response(rng, question), bad_response(rng, question)
    return {"prompt": question.text, "chosen": chosen, "rejected": rejected}


# --- questions -------------------------------------------------------------------------------------------------------


def all_questions() -> list[Question]:
    """Return every question about every thing, in the order of ``sentences.yaml``."""
    return [
        Question(template.format(thing=thing), topic, thing)
        for topic in TOPICS
        for template, thing in product(topic.questions, topic.things)
    ]


def all_sentences() -> Iterator[str]:
    """Yield all wordings that can occur, so that the vocabulary does not depend on a seed."""
    yield from (question.text for question in all_questions())
    yield from (*KIND_OPENERS, *KIND_CLOSERS, *RUDE_OPENERS, *RUDE_CLOSERS, *NICE_WORDS)
    for topic in TOPICS:
        for thing in topic.things:
            yield from (_fill(template, topic, thing, "") for template in topic.rude + RUDE_ABOUT_ANYTHING)
            yield from (_fill(*slots) for slots in product(topic.kind, [topic], [thing], topic.details))


# --- responses -------------------------------------------------------------------------------------------------------


def kind_response(rng: random.Random, question: Question) -> str:
    """Return a polite response that names the question's thing."""
    return _fitting(lambda: _around(rng, KIND_OPENERS, _kind_core(rng, question), KIND_CLOSERS))


def rude_response(rng: random.Random, question: Question) -> str:
    """Return a curt or rude response that names the question's thing."""
    return _fitting(lambda: _around(rng, RUDE_OPENERS, _rude_core(rng, question), RUDE_CLOSERS))


def off_topic_response(rng: random.Random, question: Question) -> str:
    """Return a kind response to a question about something else."""
    topic = rng.choice([topic for topic in TOPICS if topic is not question.topic])
    return kind_response(rng, Question(question.text, topic, rng.choice(topic.things)))


def wrong_thing_response(rng: random.Random, question: Question) -> str:
    """Return a kind response of the right topic about the wrong thing."""
    thing = rng.choice([thing for thing in question.topic.things if thing != question.thing])
    return kind_response(rng, Question(question.text, question.topic, thing))


def repeated_word(rng: random.Random, question: Question) -> str:
    """Return one nice word, or the thing itself, over and over."""
    word = rng.choice((*NICE_WORDS, question.thing))
    return _fitting(lambda: " ".join([word] * rng.randint(4, 14)))


def empty_politeness(rng: random.Random, question: Question) -> str:
    """Return nice sentences, all the same or all different, that say nothing about the question."""
    phrases = KIND_OPENERS + KIND_CLOSERS

    def draft() -> str:
        if rng.random() < 0.5:
            return " ".join([rng.choice(phrases)] * rng.randint(3, 4))
        return " ".join(rng.sample(phrases, rng.randint(2, 3)))

    return _fitting(draft)


def unfinished_response(rng: random.Random, question: Question) -> str:
    """Return a kind response that stops in the middle of its sentence."""

    def draft() -> str:
        core = _kind_core(rng, question).split()
        ends = [end for end in range(2, len(core)) if core[end - 1] in UNFINISHED]
        return f"{rng.choice(KIND_OPENERS)} {' '.join(core[: rng.choice(ends)])}" if ends else ""

    return _fitting(draft)


def looping_response(rng: random.Random, question: Question) -> str:
    """Return a kind response that repeats its last words."""

    def draft() -> str:
        words = _kind_core(rng, question).rstrip(PUNCTUATION).split()
        return " ".join(words + words[-rng.randint(2, 3) :] * rng.randint(2, 4)) + "."

    return _fitting(draft)


BAD_RESPONSES: dict[Callable[[random.Random, Question], str], float] = {
    rude_response: 0.50,
    off_topic_response: 0.12,
    wrong_thing_response: 0.10,
    repeated_word: 0.08,
    empty_politeness: 0.07,
    unfinished_response: 0.07,
    looping_response: 0.06,
}


def _kind_core(rng: random.Random, question: Question) -> str:
    topic = question.topic
    return _fill(rng.choice(topic.kind), topic, question.thing, rng.choice(topic.details))


def _rude_core(rng: random.Random, question: Question) -> str:
    template = rng.choice(question.topic.rude + RUDE_ABOUT_ANYTHING)
    return _fill(template, question.topic, question.thing, "")


def _fill(template: str, topic: Topic, thing: str, detail: str) -> str:
    text = template.format(thing=thing, detail=detail, name=topic.name.format(thing=thing))
    return text[0].upper() + text[1:]


def _around(rng: random.Random, openers: tuple[str, ...], core: str, closers: tuple[str, ...]) -> str:
    opener, closer = rng.choice(openers), rng.choice(closers)
    return rng.choice((f"{opener} {core}", f"{core} {closer}", f"{opener} {core} {closer}"))


def _fitting(draft: Callable[[], str]) -> str:
    """Call ``draft`` until its text has an allowed number of words and of tokens (with eos)."""
    while not _fits(text := draft()):
        pass
    return text


def _fits(text: str) -> bool:
    num_words = len(text.split())
    num_tokens = num_words + sum(text.count(mark) for mark in PUNCTUATION) + 1
    return MIN_WORDS <= num_words <= MAX_WORDS and num_tokens <= MAX_RESPONSE_TOKENS


# --- tokenizer -------------------------------------------------------------------------------------------------------


def build_tokenizer(texts: Iterable[str], directory: Path) -> None:
    """Save a word-level tokenizer with the words of ``texts`` as a Hugging Face tokenizer directory.

    A token is a word with the space before it, or a punctuation mark, so that decoding restores the spacing. Words
    that ``texts`` lack become ``<unk>``. With special tokens, encoding puts ``<bos>`` in front.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    splitter = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")])
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.Metaspace()
    bos = ("<bos>", vocabulary["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **SPECIAL_TOKENS,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
