"""A question to a trained policy through plain transformers."""

from __future__ import annotations

from pathlib import Path

QUESTIONS = {
    "sft": "Give three tips for a good night's sleep.",
    "grpo": "A box has 12 pens. Tom takes 5 of them. How many pens are left?",
}


def converse(name: str, model: Path) -> str:
    """Return a question and the response of ``model`` to it, by the chat pipeline of transformers."""
    from transformers import pipeline

    chat = pipeline("text-generation", model=str(model))
    reply = chat([{"role": "user", "content": QUESTIONS[name]}], max_new_tokens=96, do_sample=False)
    return f"{name}: {QUESTIONS[name]}\n  {reply[0]['generated_text'][-1]['content']}"
