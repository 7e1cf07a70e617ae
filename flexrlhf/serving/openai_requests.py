"""Requests in OpenAI's protocol, read into calls of a model. What they ask for and cannot have is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, NoReturn

from flexrlhf.errors import near_name, shown
from flexrlhf.serving.model_calls import CallRefused, ModelCall

MOST_DEPTH = 64
"""Deepest nesting of a request."""
MOST_MESSAGES = 10_000
MOST_TOOLS = 1024
MOST_STOPS = 16
MOST_PROMPTS = 128
MOST_LIKELIEST = 20
MOST_TOKENS = 1 << 31
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
"""Role of a message → that of chat templates."""
SAMPLING = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, MOST_TOKENS), "seed": (-(1 << 63), (1 << 63) - 1)}
"""Parameters of sampling, with their least and greatest values."""
WHOLE = frozenset({"top_k", "seed"})
HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "stream_options", "parallel_tool_calls", "service_tier", "priority"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
    )
)
"""Parameters that leave a reply as it is; a run's replies follow from its own seed."""
READ = frozenset(("messages", "prompt", "tools", "stop", "max_tokens", "max_completion_tokens", "stream"))
_AS_SET = "the policy samples without it; leave it out"
_ONE = "a call has one reply; call once for each"
_FREE = "a reply is not constrained; leave it out, and reward the form"
_NO_LOGPROBS = "replies have no log-probs; leave it out"
_TEXT = "messages are texts"
_FORCED = (
    "a policy cannot be forced to call; set 'auto', with smolagents OpenAIServerModel(..., tool_choice='auto'), with "
    "pydantic-ai OpenAIChatModel(..., profile={'supports_forced_tool_choice': False})"
)
TAKEN: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "presence_penalty": ((0,), _AS_SET),
    "frequency_penalty": ((0,), _AS_SET),
    "repetition_penalty": ((1,), _AS_SET),
    "length_penalty": ((1,), _AS_SET),
    "min_p": ((0,), _AS_SET),
    "logit_bias": (({},), _AS_SET),
    "min_tokens": ((0,), _AS_SET),
    "ignore_eos": ((False,), _AS_SET),
    "use_beam_search": ((False,), _AS_SET),
    "stop_token_ids": (([],), "stop takes texts"),
    "include_stop_str_in_output": ((False,), _AS_SET),
    "skip_special_tokens": ((True,), _AS_SET),
    "add_generation_prompt": ((True,), _AS_SET),
    "continue_final_message": ((False,), _AS_SET),
    "chat_template_kwargs": (({},), "the chat template is the run's; leave it out"),
    "reasoning_effort": ((), "it would be a variable of the chat template, which is the run's; leave it out"),
    "verbosity": (("medium",), _AS_SET),
    "logprobs": ((False,), _NO_LOGPROBS),
    "top_logprobs": ((0,), _NO_LOGPROBS),
    "prompt_logprobs": ((0,), _NO_LOGPROBS),
    "return_token_ids": ((False,), "replies are texts; leave it out"),
    "echo": ((False,), "a reply does not repeat its prompt"),
    "suffix": (("",), "a reply follows its prompt; leave it out"),
    "response_format": (({"type": "text"},), _FREE),
    "structured_outputs": ((), _FREE),
    "guided_json": ((), _FREE),
    "tool_choice": (("auto", "none"), _FORCED),
    "functions": (([],), "it has become tools"),
    "function_call": (("auto", "none"), "it has become tool_choice"),
    "modalities": ((["text"],), _TEXT),
    "audio": ((), _TEXT),
    "prediction": ((), _AS_SET),
    "web_search_options": ((), "there is no search; give the policy a tool"),
    "moderation": ((), "nothing is moderated; leave it out"),
}
"""Parameter → its values that leave replies as they are, and what to do in place of others."""


@dataclass(frozen=True)
class CallRequest:
    """Request for replies.

    calls:      one, or one for each prompt.
    is_stream:  whether the reply is sent as server-sent events.
    has_usage:  whether these end with the numbers of tokens.
    """

    calls: tuple[ModelCall, ...]
    is_stream: bool
    has_usage: bool


@dataclass(frozen=True)
class RequestReader:
    """Reader of the requests for one model.

    model:     its name in requests.
    sampling:  values of ``SAMPLING`` that are the run's, so that no request can have others; None: a request has its
               own, and may have several prompts, token ids, and log-probs of them.
    """

    model: str
    sampling: Mapping[str, float] | None

    def read(self, body: bytes, is_chat: bool) -> CallRequest:
        """Return the call of a body. Raises CallRefused."""
        content = _parsed(body)
        # of a prompt a server can have log-probs, with sampling of the request
        is_scored = self.sampling is None and not is_chat
        self._check_parameters(content, ("echo", "logprobs") if is_scored else ())
        needed, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
        if needed not in content or other in content:
            has = f"has {other}" if other in content else f"has no {needed}"
            paths = "messages go to /v1/chat/completions, a prompt to /v1/completions"
            _refuse(f"the request {has}: {paths}", needed)
        if not isinstance(is_stream := content.get("stream", False), bool):
            _refuse(f"stream: expected true or false, found {_shown(is_stream)}", "stream")
        tools = () if content.get("tool_choice") == "none" else _tools(content.get("tools", []))
        likeliest = _likeliest(content) if is_scored else None
        messages = _messages(content["messages"]) if is_chat else ()
        call = ModelCall(
            messages,
            tools=tools if is_chat else (),
            stop=_stops(content.get("stop", [])),
            most_tokens=_most_tokens(content, least=1 if likeliest is None else 0),
            sampling={} if self.sampling is not None else {name: content[name] for name in SAMPLING if name in content},
            likeliest=likeliest,
        )
        calls = [call]
        if not is_chat:
            prompts = _prompts(content["prompt"], is_one=self.sampling is not None)
            parts = [(each, ()) if isinstance(each, str) else ("", each) for each in prompts]
            calls = [replace(call, prompt=text, prompt_ids=ids) for text, ids in parts]
        options = content.get("stream_options")
        has_usage = isinstance(options, dict) and options.get("include_usage") is True
        return CallRequest(tuple(calls), is_stream, has_usage)

    def _check_parameters(self, content: Mapping[str, Any], read: Collection[str]) -> None:
        """Raise CallRefused for a parameter that would change what is sampled, or that is not known.

        read:  further ones, which are read.
        """
        model = content.get("model", self.model)
        if model != self.model:
            raise not_served(model, self.model)
        for name, value in content.items():
            if name in SAMPLING:
                self._check_sampling(name, value)
            elif name in TAKEN and name not in read:
                values, advice = TAKEN[name]
                if value not in values:
                    _refuse(f"{name}: {_shown(value)} cannot be had here: {advice}", name, "unsupported_value")
            elif name not in HARMLESS | READ | TAKEN.keys():
                meant = near_name(name, {*SAMPLING, *TAKEN, *HARMLESS, *READ})
                advice = "leave it out" if meant is None else f"did you mean {meant}?"
                _refuse(f"{name}: a parameter that is not known here; {advice}", name, "unknown_parameter")

    def _check_sampling(self, name: str, value: Any) -> None:
        """Raise CallRefused for no value of a parameter of sampling, or another one than the run's."""
        (least, greatest), kinds = SAMPLING[name], int if name in WHOLE else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= greatest:
            kind = "whole number" if name in WHOLE else "number"
            _refuse(f"{name}: expected a {kind} from {least} to {greatest}, found {_shown(value)}", name)
        if self.sampling is None or name not in self.sampling:
            return
        # -1 is vLLM's value for all tokens
        if (0 if name == "top_k" and value == -1 else value) != self.sampling[name]:
            set_one = self.sampling[name]
            sentence = f"the run samples at {set_one} (algorithm.{name}); leave it out, or set that"
            _refuse(f"{name}: {_shown(value)} cannot be had here: {sentence}", name, "unsupported_value")


def not_served(name: Any, model: str) -> CallRefused:
    """Return the refusal of another ``name`` than that of the ``model``."""
    sentence = f"model: {_shown(name)} is not served here; it is called {model!r}"
    return CallRefused(HTTPStatus.NOT_FOUND, sentence, "model", "model_not_found")


def _refuse(sentence: str, param: str | None = None, code: str | None = None) -> NoReturn:
    raise CallRefused(HTTPStatus.BAD_REQUEST, sentence, param, code)


def _shown(value: Any) -> str:
    """Return the beginning of a value in one line."""
    return f"{shown(value):.80}"


def _parsed(body: bytes) -> dict[str, Any]:
    """Return a request without keys that are null. Raises CallRefused."""
    try:
        content = json.loads(body.decode(), parse_constant=_no_number)
    except RecursionError:
        _refuse(f"the request has more than {MOST_DEPTH} levels")
    except ValueError:
        _refuse(f"the request is not JSON: {body[:60].decode(errors='replace')!r}")
    if not isinstance(content, dict):
        _refuse(f"expected an object, found {_shown(content)}")
    _check_values(content, MOST_DEPTH)
    return {name: value for name, value in content.items() if value is not None}


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


def _check_values(value: Any, levels: int) -> None:
    """Raise CallRefused for too many levels and for halves of surrogate pairs, which no file can store."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(f"a text has half of a surrogate pair: {value[:60]!a}")
    elif isinstance(value, dict | list):
        if not levels:
            _refuse(f"the request has more than {MOST_DEPTH} levels")
        for each in value:
            _check_values(each, levels - 1)
        if isinstance(value, dict):
            for each in value.values():
                _check_values(each, levels - 1)


def _is_list(value: Any, kind: type, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(isinstance(each, kind) for each in value)


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not (_is_list(value, dict, MOST_MESSAGES) and value):
        _refuse(f"messages: expected a list of 1 to {MOST_MESSAGES} objects, found {_shown(value)}", "messages")
    return tuple(_message(each, f"messages[{place}]") for place, each in enumerate(value))


def _message(message: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a message with the keys that chat templates read."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{key}.role: expected one of {', '.join(ROLES)}, found {_shown(role)}", f"{key}.role")
    for other, advice in (("audio", _TEXT), ("function_call", "it has become tool_calls")):
        if message.get(other) is not None:
            _refuse(f"{key}.{other}: {advice}", f"{key}.{other}")
    content = message.get("content")
    text = message.get("refusal") or "" if content is None else content
    read: dict[str, Any] = {"role": ROLES[role], "content": _text(text, f"{key}.content")}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = _calls(message.get("tool_calls") or [], f"{key}.tool_calls")
        read |= {"reasoning_content": _text(reasoning, f"{key}.reasoning_content")} if reasoning else {}
        read |= {"tool_calls": calls} if calls else {}
    elif content is None:
        _refuse(f"{key}.content: a message of {role} has a text", f"{key}.content")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            read[name] = _text(message[name], f"{key}.{name}")
    if role == "tool" and "tool_call_id" not in read:
        _refuse(f"{key}.tool_call_id: a message of tool names the call that it replies to", f"{key}.tool_call_id")
    return read


def _text(value: Any, key: str) -> str:
    """Return a text, of a list of texts one with line breaks between, as vLLM does."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(f"{key}: expected a text, found {_shown(value)}", key)
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            _refuse(f"{key}[{place}]: expected a part of type text, found {_shown(kind or part)}", f"{key}[{place}]")
        texts.append(text)
    return "\n".join(texts)


def _calls(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the calls of functions of a message."""
    if not _is_list(value, dict, MOST_TOOLS):
        _refuse(f"{key}: expected a list of calls, found {_shown(value)}", key)
    calls: list[Mapping[str, Any]] = []
    for place, call in enumerate(value):
        function = call.get("function")
        named = function if isinstance(function, dict) else {}
        name, arguments, number = named.get("name"), named.get("arguments"), call.get("id")
        if call.get("type", "function") != "function" or not all(isinstance(x, str) for x in (name, arguments, number)):
            form = "an id and a function with name and arguments, which are texts"
            _refuse(f"{key}[{place}]: expected {form}, found {_shown(call)}", f"{key}[{place}]")
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of functions, without what only constrained sampling reads."""
    if not _is_list(value, dict, MOST_TOOLS):
        _refuse(f"tools: expected a list of at most {MOST_TOOLS} objects, found {_shown(value)}", "tools")
    tools = []
    for place, tool in enumerate(value):
        function, key = tool.get("function"), f"tools[{place}]"
        if tool.get("type") != "function" or not isinstance(function, dict):
            _refuse(f"{key}: expected a tool of type function, found {_shown(tool)}", key)
        parameters = function.get("parameters")
        if not isinstance(function.get("name"), str) or not (parameters is None or isinstance(parameters, dict)):
            _refuse(f"{key}.function: expected a name, and parameters in JSON schema, found {_shown(function)}", key)
        read = {name: each for name, each in function.items() if each is not None and name != "strict"}
        tools.append({"type": "function", "function": read})
    return tuple(tools)


def _prompts(value: Any, is_one: bool) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a request: one text, or else several texts or lists of token ids."""
    values = [value] if isinstance(value, str) or (not is_one and _is_ids(value)) else value
    if is_one:
        if not _is_list(values, str, 1) or not values:
            _refuse(f"prompt: expected one text, found {_shown(value)}", "prompt")
        return tuple(values)
    if not (isinstance(values, list) and 0 < len(values) <= MOST_PROMPTS):
        _refuse(f"prompt: expected 1 to {MOST_PROMPTS} texts or lists of ids, found {_shown(value)}", "prompt")
    for place, each in enumerate(values):
        if not isinstance(each, str) and not _is_ids(each):
            _refuse(f"prompt[{place}]: expected a text or a list of ids, found {_shown(each)}", "prompt")
    return tuple(each if isinstance(each, str) else tuple(each) for each in values)


def _is_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)


def _likeliest(content: Mapping[str, Any]) -> int | None:
    """Return the number of likeliest tokens at each place of a prompt that is scored; None if it is not."""
    echo, number = content.get("echo", False), content.get("logprobs")
    if echo is False and number in (None, False):
        return None
    if echo is not True or type(number) is not int or not 0 <= number <= MOST_LIKELIEST:
        form = f"prompts are scored with echo: true, and logprobs from 0 to {MOST_LIKELIEST}"
        _refuse(f"echo: {_shown(echo)} with logprobs: {_shown(number)}: {form}", "logprobs", "unsupported_value")
    if content.get("max_tokens") not in (0, 1) or (content["max_tokens"] and content.get("temperature") != 0):
        _refuse("echo: goes with max_tokens: 0, or 1 with temperature: 0", "max_tokens", "unsupported_value")
    return number


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not (_is_list(texts, str, MOST_STOPS) and all(texts)):
        _refuse(f"stop: expected a text or a list of at most {MOST_STOPS}, found {_shown(value)}", "stop")
    return tuple(texts)


def _most_tokens(content: Mapping[str, Any], least: int) -> int | None:
    """Return the smaller limit of a reply's tokens; None without any."""
    limits = {name: content[name] for name in ("max_tokens", "max_completion_tokens") if name in content}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
            _refuse(f"{name}: expected a number of tokens from {least}, found {_shown(value)}", name)
    return min(limits.values(), default=None)
