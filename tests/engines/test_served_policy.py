"""``flexrlhf serve-model`` by the openai client: replies as transformers samples them, and scores of prompts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from small_models import TINY
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.engines.base import Sampling
from flexrlhf.errors import UserError
from flexrlhf.runs.served_policy import ServedPolicy, TransformersSampler, load_policy
from flexrlhf.serving.model_calls import ModelCall
from flexrlhf.serving.policy_server import PolicyServer

SECRET = "a secret"
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{%- for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{%- if add_generation_prompt %}assistant{% endif %}"
)
WORDS = "one two three four five six system user assistant tool weather"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model with a tokenizer and a chat template, which samples at 0.1 unless a request says so."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    torch.manual_seed(1)
    build_tokenizer([WORDS], directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        **TINY | {"vocab_size": len(tokenizer)}, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=32
    )
    policy = LlamaForCausalLM(config).eval()
    policy.generation_config.update(temperature=0.1, top_k=1, do_sample=True, eos_token_id=[tokenizer.eos_token_id])
    policy.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[str, ServedPolicy]]:
    policy = load_policy(model, "auto", "cpu", 4, None, "hermes", SECRET)
    server = PolicyServer(policy, "tiny", None)
    with server.serving():
        yield f"http://127.0.0.1:{server.port}/v1", policy


@pytest.fixture
def client(served: tuple[str, ServedPolicy]) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=served[0], api_key=SECRET)


def greedy(directory: Path, prompt: str, number: int) -> str:
    """Text that transformers itself generates behind a prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, do_sample=False)
    whole: str = tokenizer.decode(found[0], skip_special_tokens=True)
    return whole.removeprefix(tokenizer.decode(ids[0], skip_special_tokens=True))


def test_prompts_and_chats_are_replied_to_as_transformers_does(client: Any, model: Path) -> None:
    prompts = ["one two", "three", "six five four one two"]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in found.choices] == [greedy(model, prompt, 6) for prompt in prompts]
    assert found.usage.prompt_tokens == 3 + 2 + 6 and found.usage.completion_tokens >= 3
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two <eos> three"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # a control token of a message is text
    text = tokenizer.encode("<eos>", split_special_tokens=True, add_special_tokens=False)
    assert tokenizer.eos_token_id not in text and chat.usage.prompt_tokens == 1 + 1 + 1 + 1 + len(text) + 1 + 1
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    other = {"type": "function", "function": {"name": "climate", "parameters": {}}}
    for tools in ([weather], [weather, other]):
        found = client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=1)
        assert found.usage.prompt_tokens == chat.usage.prompt_tokens + len(tools)


def test_sampling_follows_from_the_request_alone(client: Any, served: tuple[str, ServedPolicy]) -> None:
    """The same alone and among others, at the same time."""

    def sample(seed: int, **options: Any) -> str:
        found = client.completions.create(model="tiny", prompt="one", max_tokens=12, seed=seed, **options)
        return str(found.choices[0].text)

    alone = [sample(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(sample, range(8)))
    assert alone == together and len(set(alone)) > 4
    assert sample(3, top_p=1e-6) == sample(4, temperature=0) == sample(5, extra_body={"top_k": 1})
    whole = sample(0)
    words = whole.split()
    assert len(words) > 2
    stopped = client.completions.create(model="tiny", prompt="one", max_tokens=12, seed=0, stop=[words[2], "nothing"])
    assert stopped.choices[0].text == whole[: whole.index(words[2])] and stopped.choices[0].finish_reason == "stop"
    assert served[1].num_calls > 16


def test_a_long_and_a_short_prompt_are_served_together() -> None:
    """By a model with learned positions, behind the last of which none of them goes."""
    torch.manual_seed(0)
    served = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=32, n_embd=8, n_layer=1, n_head=1)).eval()
    sampling = Sampling(3, 0, 1.0, (), 0, num_ids=20)
    prompts = [(range(1, 9), 24), ([5] * 30, 2)]
    together = TransformersSampler(served, 0, 4)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda each: together.sample(list(each[0]), sampling, each[1]), prompts))
    assert [len(each) for each in found] == [24, 2]
    assert found == [TransformersSampler(served, 0, 1).sample(list(ids), sampling, most) for ids, most in prompts]


def test_prompts_are_scored_as_lm_eval_reads_them(client: Any, model: Path) -> None:
    """As ``local-completions`` of lm-eval sends them: token ids, log-probs of these, and one token more."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode("one two three"), tokenizer.encode("six")]
    found = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    for ids, choice in zip(prompts, found.choices, strict=True):
        with torch.no_grad():
            expected = policy(torch.tensor([ids])).logits[0].log_softmax(1)
        scored = choice.logprobs
        assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
        assert len(scored.tokens) == len(ids) + 1 and choice.text == "".join(scored.tokens)
        own = [expected[place, token].item() for place, token in enumerate(ids[1:])]
        assert scored.token_logprobs[1:-1] == pytest.approx(own, abs=1e-5)
        best = expected.max(1).values.tolist()
        assert [max(each.values()) for each in scored.top_logprobs[1:]] == pytest.approx(best, abs=1e-5)
        assert scored.token_logprobs[-1] == max(scored.top_logprobs[-1].values())


def test_requests_that_a_model_cannot_serve_are_refused(
    client: Any, served: tuple[str, ServedPolicy], model: Path
) -> None:
    openai = pytest.importorskip("openai")
    for options, sentence in (
        ({"prompt": " ".join(["one"] * 40)}, "the prompt has 41 tokens, and the model 32 positions"),
        ({"prompt": [40]}, "id 40 is not below 15, the model's vocabulary"),
        ({"prompt": "one", "logprobs": 1}, "prompts are scored with echo: true, and logprobs from 0 to 20"),
        ({"prompt": "one", "echo": True, "logprobs": 1, "max_tokens": 5}, "echo: goes with max_tokens: 0, or 1"),
        ({"prompt": "one", "n": 2}, "a call has one reply"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.completions.create(model="tiny", **options)
    messages = [{"role": "user", "content": "one"}]
    with pytest.raises(openai.BadRequestError, match="replies have no log-probs"):
        client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
    with pytest.raises(openai.NotFoundError, match="it is called 'tiny'"):
        client.completions.create(model="other", prompt="one")
    assert httpx.get(f"{served[0]}/models").status_code == 401
    (model.parent / "none").mkdir()
    with pytest.raises(UserError, match="neither a run nor a model in it"):
        load_policy(model.parent / "none", "auto", "cpu", 4, None, "hermes", None)
    refused = CliRunner().invoke(app, ["serve-model", str(model), "--tool-format", "herms"])
    assert refused.exit_code == 2 and "(did you mean 'hermes'?)" in refused.stderr


def test_without_a_secret_nobody_needs_a_key_and_without_a_template_a_prompt(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    policy = load_policy(tmp_path, "auto", "cpu", 4, 3, "hermes", None)
    server = PolicyServer(policy, "tiny", None)
    with server.serving():
        url = f"http://127.0.0.1:{server.port}/v1"
        found = httpx.post(f"{url}/completions", json={"prompt": "one", "seed": 1}).json()
        assert found["usage"]["completion_tokens"] <= 3
        refused = httpx.post(f"{url}/chat/completions", json={"messages": [{"role": "user", "content": "one"}]})
    assert refused.status_code == 400 and "has no chat template; call /v1/completions" in refused.text


def test_the_command_serves_until_it_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_KEY", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call() -> httpx.Response:
        transport = httpx.HTTPTransport(retries=20)
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Authorization": f"Bearer {SECRET}"}
        try:
            with httpx.Client(transport=transport, headers=headers) as client:
                return client.post(url, json={"prompt": "one", "max_tokens": 2})
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        ended = CliRunner().invoke(app, ["serve-model", str(model), "--port", str(port), "--secret", "SERVED_KEY"])
    for number, handler in before.items():
        signal.signal(number, handler)
    assert called.result().status_code == 200 and called.result().json()["model"] == "tiny"
    first, last = ended.stdout.splitlines()
    place = f"http://127.0.0.1:{port}/v1"
    assert first == f"serves {model} as model tiny at {place} to requests with the secret of SERVED_KEY; Ctrl-C ends it"
    assert last == "ended after 1 call" and ended.exit_code == 0


def test_vllm_serves_as_transformers_does(model: Path, tmp_path: Path) -> None:
    """Tokens at temperature 0 and log-probs of prompts; a seed repeats a reply."""
    pytest.importorskip("vllm")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(2)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": len(tokenizer), "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**TINY | sizes, pad_token_id=tokenizer.pad_token_id)).save_pretrained(tmp_path)
    prompt = tokenizer.encode("one two three")
    greedy = ModelCall(prompt="", prompt_ids=tuple(prompt), most_tokens=8, sampling={"temperature": 0})
    sampled = replace(greedy, sampling={"seed": 3})
    scored = replace(greedy, likeliest=2, most_tokens=1)
    replies = {}
    for engine in ("transformers", "vllm"):
        policy = load_policy(tmp_path, engine, "cpu", 4, None, "hermes", None)
        try:
            assert policy.reply("", sampled) == policy.reply("", sampled)
            replies[engine] = policy.reply("", greedy), policy.reply("", scored)
        finally:
            policy.close()
    (one, scores), (other, others) = replies.values()
    assert one == other and one.content
    for each, also in zip(scores.scored, others.scored, strict=True):
        assert each.text == also.text and list(each.likeliest) == list(also.likeliest)
        assert list(each.likeliest.values()) == pytest.approx(list(also.likeliest.values()), abs=1e-3)
