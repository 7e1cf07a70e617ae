"""A hotel's porter, a program that calls a model: it acts by what that says, as "I will bring you a new candle"."""

import re
from functools import cache
from typing import Any

from openai import OpenAI

CALL = re.compile(r"\b(?:bring|fix) (?:you )?(?:a|the) (?:new )?(\w+)")


def serve(client: OpenAI, model: str, question: str) -> bool:
    """Answer a guest; return whether the guest has got what the question is about."""
    text, has_served = question, False
    for _ in range(2):
        reply = client.completions.create(model=model, prompt=text, max_tokens=14).choices[0].text
        things = CALL.findall(reply)
        for thing in things:
            has_served |= thing in question
            reply += " Thank you!" if thing in question else " I do not need that."
        text += reply
        if not things:
            break
    return has_served


def run(row: dict[str, Any], api: Any) -> float:
    """Return the reward of an episode with a row of the data: what flexrlhf calls."""
    return float(serve(shared(api.base_url).with_options(api_key=api.api_key), api.model, row["prompt"]))


@cache
def shared(base_url: str) -> OpenAI:
    """Return a client whose connections all episodes share: to make one takes as long as some turns."""
    return OpenAI(base_url=base_url, api_key="of the episode")


if __name__ == "__main__":
    print(serve(OpenAI(), "policy", input("guest: ")))
