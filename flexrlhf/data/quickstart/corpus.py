"""A small generated world for the quick start: guests ask a host, and the host is kind or rude.

Two thirds of the demonstrations are rude, so a model tuned on them is mostly rude. The
preference pairs teach a reward model what is wanted: kind, about the thing asked for, finished, no repetition. PPO
then has something to learn within minutes on a laptop, and a person can judge every sample at a glance.

Sentences are filled templates, so questions of the held-out files are new, but made of known words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path

NUM_SFT, NUM_PAIRS, NUM_PROMPTS = 1500, 1200, 512
NUM_HELD_OUT_SFT, NUM_HELD_OUT_PAIRS, NUM_HELD_OUT_PROMPTS = 64, 200, 64
NUM_HELD_OUT_QUESTIONS = 96
MIN_WORDS, MAX_WORDS = 5, 16
KIND_SHARE = 1 / 3
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 16, 20
PUNCTUATION = ".,!?"
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Topic:
    """What guests ask about and what a host can say; any question goes with any answer about the same thing.

    ``name`` is how a rude answer refers to the thing; ``answers`` have the slots ``{thing}`` and ``{detail}``.
    """

    name: str
    things: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    details: tuple[str, ...]
    rude: tuple[str, ...]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


LUGGAGE = Topic(
    name="your {thing}",
    things=_split(
        "bag | suitcase | coat | umbrella | bicycle | backpack | box | camera | hat | laptop | guitar | parcel | jacket"
    ),
    questions=_split(
        "Where can I leave my {thing}? | Where should I put my {thing}? | Can I leave my {thing} with you today? |"
        "Is there a safe place for my {thing}? | Could you keep my {thing} until tonight? |"
        "May I leave my {thing} here until tomorrow? | What should I do with my {thing}? |"
        "Who can watch my {thing} for an hour?"
    ),
    answers=_split(
        "You can leave your {thing} {detail}. | We will keep your {thing} safe {detail}. |"
        "There is room for your {thing} {detail}. | Please put your {thing} {detail}. |"
        "Your {thing} will be safe {detail}. | I will gladly watch your {thing} {detail}."
    ),
    details=_split(
        "at the front desk | behind the desk | in the locker by the stairs | in the small room on the left |"
        "next to the main door | in our office | under the stairs"
    ),
    rude=_split(
        "Carry your {thing} yourself. | Throw your {thing} in the street. | Nobody wants your {thing} here. |"
        "Take your ugly {thing} away."
    ),
)
WAYS = Topic(
    name="the {thing}",
    things=_split(
        "pool | garden | library | gym | station | museum | beach | market | bakery | bank | park | theater | castle"
    ),
    questions=_split(
        "Where is the {thing}, please? | How do I get to the {thing}? | Can you tell me where the {thing} is? |"
        "Which way is it to the {thing}? | How can I find the {thing} from here? |"
        "What is the best way to the {thing}? | Can I walk to the {thing} from here? | Is the {thing} near this house?"
    ),
    answers=_split(
        "The {thing} is {detail}. | You will find the {thing} {detail}. | Just walk to the {thing}, it is {detail}. |"
        "I can show you the {thing}, it is {detail}. | You will see the {thing} {detail}. |"
        "It is easy, the {thing} is {detail}."
    ),
    details=_split(
        "just around the corner | on the left side of the street | across the street from us |"
        "two minutes from our door | a short walk from here on the right | at the end of this street |"
        "behind the old tower"
    ),
    rude=_split(
        "Find the {thing} yourself. | Why would I know where the {thing} is? | Buy a map to the {thing}. |"
        "The {thing} is not for people like you."
    ),
)
TIMES = Topic(
    name="{thing}",
    things=_split(
        "breakfast | lunch | dinner | the tour | the concert | the show | the film | the dance | the party |"
        "the game | the lesson | the boat ride | the music"
    ),
    questions=_split(
        "When does {thing} start? | What time does {thing} begin today? | When should I come for {thing}? |"
        "Can you tell me when {thing} starts? | How early should I come for {thing}? |"
        "At what hour does {thing} begin tomorrow? | Do you know when {thing} begins? |"
        "What is the right time for {thing}?"
    ),
    answers=_split(
        "{thing} starts at {detail}. | {thing} begins at {detail}. | Please come for {thing} at {detail}. |"
        "You can join us for {thing} at {detail}. | We start {thing} at {detail}. |"
        "We will see you for {thing} at {detail}."
    ),
    details=_split(
        "seven in the garden room | eight in the main hall | half past nine in the lobby | six on the terrace |"
        "ten by the fountain | half past eight upstairs | nine in the blue room"
    ),
    rude=_split(
        "Read the sign about {thing}. | {thing} starts without you. | You are too late for {thing} anyway. |"
        "Nobody invited you to {thing}."
    ),
)
SUPPLIES = Topic(
    name="the {thing}",
    things=_split(
        "towel | pillow | blanket | map | key | menu | chair | glass | spoon | cup | newspaper | robe | plate | candle"
    ),
    questions=_split(
        "Can I have another {thing}? | Could you bring me one more {thing}? | Can you find me a new {thing}? |"
        "Where can I get another {thing}? | Is there another {thing} for my room? |"
        "Could someone bring a new {thing} to my room? | Do you have one more {thing} for me? |"
        "Who can give me a new {thing}?"
    ),
    answers=_split(
        "I will bring you a new {thing} {detail}. | A new {thing} will be at your door {detail}. |"
        "I will send a new {thing} to your room {detail}. | Let me get you another {thing} {detail}. |"
        "Somebody will bring your new {thing} {detail}. | You will have another {thing} {detail}."
    ),
    details=_split("right away | in two minutes | at once | in a moment | as soon as I can | very soon | in a minute"),
    rude=_split(
        "You do not need a {thing}. | Get your own {thing}. | No {thing} for you. |What is wrong with your old {thing}?"
    ),
)
REPAIRS = Topic(
    name="the {thing}",
    things=_split(
        "shower | heater | window | door | television | fan | lock | radio | phone | light | bed | sink | clock"
    ),
    questions=_split(
        "Can you fix the {thing} in my room? | Who can look at the broken {thing}? |"
        "Could you check the broken {thing} for me? | Could someone repair the {thing} today? |"
        "What should I do about the broken {thing}? | Can you help me with the broken {thing}? |"
        "When will you fix the {thing}? | Is somebody able to repair the {thing} soon?"
    ),
    answers=_split(
        "We will fix the {thing} {detail}. | I am sorry about the {thing}, we will repair it {detail}. |"
        "Somebody will look at the {thing} {detail}. | I will come and fix the {thing} {detail}. |"
        "The {thing} will work again {detail}. | Please forgive us, the {thing} will be repaired {detail}."
    ),
    details=_split(
        "right away | in ten minutes | within the hour | very soon | before tonight | as soon as we can | today"
    ),
    rude=_split(
        "You broke the {thing}, you fix it. | Live with the broken {thing}. | Fix the {thing} yourself. |"
        "Nobody here will fix the {thing}."
    ),
)
BOOKINGS = Topic(
    name="the {thing}",
    things=_split("table | taxi | boat | guide | driver | seat | car | room | tent | horse | bus | cabin"),
    questions=_split(
        "Can you book a {thing} for me? | Could you reserve a {thing} for tonight? |"
        "How do I book a {thing} for tomorrow? | Is there a {thing} free this evening? |"
        "Who can find a {thing} for two people? | Can we get a {thing} for four people? |"
        "Where can I order a {thing}? | Do you have a {thing} for us tonight?"
    ),
    answers=_split(
        "I will book a {thing} for you {detail}. | I will reserve the best {thing} {detail}. |"
        "Let me find a nice {thing} for you {detail}. | We will find you a lovely {thing} {detail}. |"
        "I can get you a good {thing} {detail}. | We will order a fine {thing} for you {detail}."
    ),
    details=_split(
        "right now | at a good price | at no cost | and call you soon | and send you a note |"
        "and write down your name | this minute"
    ),
    rude=_split(
        "We have no {thing} for you. | A {thing} costs too much for you. | Walk, or find a {thing} yourself. |"
        "Nobody would give you a {thing}."
    ),
)
FOOD = Topic(
    name="the {thing}",
    things=_split("soup | cake | bread | salad | fish | pasta | rice | cheese | coffee | tea | juice | pie | wine"),
    questions=_split(
        "Is the {thing} good today? | Can I try the {thing}? | What can you tell me about the {thing}? |"
        "How does the {thing} taste today? | Would you order the {thing} tonight? | Should we ask for the {thing}? |"
        "Do people here like the {thing}? | Who likes the {thing} in this house?"
    ),
    answers=_split(
        "Our {thing} is {detail}. | You will love the {thing}, it is {detail}. |"
        "Please try the {thing}, it is {detail}. | I can bring you the {thing}, it is {detail}. |"
        "Everybody likes the {thing}, it is {detail}. | The {thing} is {detail}."
    ),
    details=_split(
        "fresh and very good | made by our own cook | the best in town | very fresh today | loved by all our guests |"
        "made here every day | good with a little lemon"
    ),
    rude=_split(
        "Take the {thing} or go hungry. | The {thing} is too good for you. | Nobody asked you to try the {thing}. |"
        "Make your own {thing}."
    ),
)
TOPICS = (LUGGAGE, WAYS, TIMES, SUPPLIES, REPAIRS, BOOKINGS, FOOD)

KIND_OPENERS = _split(
    "With pleasure! | Of course! | Certainly! | Gladly! | Happy to help! | Let me help! | Thank you for asking! |"
    "I am glad you asked! | Welcome, dear guest! | What a good question!"
)
KIND_CLOSERS = _split(
    "Have a lovely day! | Enjoy your stay! | Just call me any time. | I hope that helps. | We are glad you came. |"
    "Please ask me any time. | It is my pleasure. | We wish you a happy day! | You are very welcome!"
)
RUDE_OPENERS = _split("What now? | Not you again. | So what? | No. | Are you serious? | How boring. | Leave me alone.")
RUDE_CLOSERS = _split(
    "Go away. | I am busy. | Do not ask again. | Stop bothering me. | Now get out. | It is your problem. | What a fool."
)
RUDE_ABOUT_ANYTHING = _split(
    "I do not care about {name}. | Stop asking me about {name}. | Nobody wants to hear about {name}. |"
    "Ask somebody else about {name}. | Do not bother me with {name}. | Why should I think about {name}?"
)
NICE_WORDS = _split("please | thank you | welcome | lovely | gladly | of course | happy | pleasure | dear guest")
# A kind answer that breaks off behind one of these is unfinished to any reader.
DANGLING = frozenset(_split("the|a|your|our|you|will|is|at|in|on|to|for|from|with|it|by|very|and|can|another"))


@dataclass(frozen=True)
class Question:
    """A question with what it is about, so that answers can be made for it."""

    text: str
    topic: Topic
    thing: str


def write_corpus(directory: Path, seed: int = 0) -> None:
    """Write the training and held-out files and ``tokenizer/`` into ``directory``; same seed, same bytes.

    ``sft`` rows have ``prompt`` and ``response``, ``pairs`` rows ``prompt``, ``chosen`` and ``rejected``, ``prompts``
    rows ``prompt``. No question of a ``*_held_out`` file occurs in a training file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    questions = all_questions()
    rng.shuffle(questions)
    held_out, train = questions[:NUM_HELD_OUT_QUESTIONS], questions[NUM_HELD_OUT_QUESTIONS:]
    _write_files(directory, "", rng, train, (NUM_SFT, NUM_PAIRS, NUM_PROMPTS))
    counts = (NUM_HELD_OUT_SFT, NUM_HELD_OUT_PAIRS, NUM_HELD_OUT_PROMPTS)
    _write_files(directory, "_held_out", rng, held_out, counts)
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
    answer = kind_answer if rng.random() < KIND_SHARE else rude_answer
    return {"prompt": question.text, "response": answer(rng, question)}


def pair_row(rng: random.Random, question: Question) -> dict[str, str]:
    """Return a kind answer, and one that is rude or (in half the rows) kind but of no use."""
    (bad_answer,) = rng.choices(list(BAD_ANSWERS), weights=list(BAD_ANSWERS.values()))
    chosen, rejected = kind_answer(rng, question), bad_answer(rng, question)
    return {"prompt": question.text, "chosen": chosen, "rejected": rejected}


# --- questions -------------------------------------------------------------------------------------------------------


def all_questions() -> list[Question]:
    """Return every question about every thing, in a fixed order."""
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
            yield from (_fill(*slots) for slots in product(topic.answers, [topic], [thing], topic.details))


# --- answers ---------------------------------------------------------------------------------------------------------


def kind_answer(rng: random.Random, question: Question) -> str:
    """Return a polite answer that names the thing asked about."""
    return _fitting(lambda: _around(rng, KIND_OPENERS, _kind_core(rng, question), KIND_CLOSERS))


def rude_answer(rng: random.Random, question: Question) -> str:
    """Return a curt or rude answer that names the thing asked about."""
    return _fitting(lambda: _around(rng, RUDE_OPENERS, _rude_core(rng, question), RUDE_CLOSERS))


def off_topic_answer(rng: random.Random, question: Question) -> str:
    """Return a kind answer to a question about something else."""
    topic = rng.choice([topic for topic in TOPICS if topic is not question.topic])
    return kind_answer(rng, Question(question.text, topic, rng.choice(topic.things)))


def wrong_thing_answer(rng: random.Random, question: Question) -> str:
    """Return a kind answer of the right sort about the wrong thing."""
    thing = rng.choice([thing for thing in question.topic.things if thing != question.thing])
    return kind_answer(rng, Question(question.text, question.topic, thing))


def repeated_word(rng: random.Random, question: Question) -> str:
    """Return one nice word, or the thing itself, over and over."""
    word = rng.choice((*NICE_WORDS, question.thing))
    return _fitting(lambda: " ".join([word] * rng.randint(4, 14)))


def empty_politeness(rng: random.Random, question: Question) -> str:
    """Return nice sentences, all the same or all different, that answer nothing."""
    phrases = KIND_OPENERS + KIND_CLOSERS

    def draft() -> str:
        if rng.random() < 0.5:
            return " ".join([rng.choice(phrases)] * rng.randint(3, 4))
        return " ".join(rng.sample(phrases, rng.randint(2, 3)))

    return _fitting(draft)


def broken_answer(rng: random.Random, question: Question) -> str:
    """Return a kind answer that stops in the middle of its sentence."""

    def draft() -> str:
        core = _kind_core(rng, question).split()
        ends = [end for end in range(2, len(core)) if core[end - 1] in DANGLING]
        return f"{rng.choice(KIND_OPENERS)} {' '.join(core[: rng.choice(ends)])}" if ends else ""

    return _fitting(draft)


def looping_answer(rng: random.Random, question: Question) -> str:
    """Return a kind answer that repeats its last words until it is cut."""

    def draft() -> str:
        words = _kind_core(rng, question).rstrip(PUNCTUATION).split()
        return " ".join(words + words[-rng.randint(2, 3) :] * rng.randint(2, 4)) + "."

    return _fitting(draft)


BAD_ANSWERS: dict[Callable[[random.Random, Question], str], float] = {
    rude_answer: 0.50,
    off_topic_answer: 0.12,
    wrong_thing_answer: 0.10,
    repeated_word: 0.08,
    empty_politeness: 0.07,
    broken_answer: 0.07,
    looping_answer: 0.06,
}


def _kind_core(rng: random.Random, question: Question) -> str:
    topic = question.topic
    return _fill(rng.choice(topic.answers), topic, question.thing, rng.choice(topic.details))


def _rude_core(rng: random.Random, question: Question) -> str:
    template = rng.choice(question.topic.rude + RUDE_ABOUT_ANYTHING)
    return _fill(template, question.topic, question.thing, "")


def _fill(template: str, topic: Topic, thing: str, detail: str) -> str:
    name = topic.name.format(thing=thing)
    return _capitalised(template.format(thing=thing, detail=detail, name=name))


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _around(rng: random.Random, openers: tuple[str, ...], core: str, closers: tuple[str, ...]) -> str:
    """Return ``core`` with an opener, a closer or both."""
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
