"""A question to a trained policy through plain transformers."""

from __future__ import annotations

from pathlib import Path

QUESTIONS = {
    "sft": "Give three tips for a good night's sleep.",
    "grpo": "A box has 12 pens. Tom takes 5 of them. How many pens are left?",
}


def converse(name: str, model: Path) -> str:
    """Return a question and the response of ``model`` to it, by the chat pipeline of transformers."""
    from transformers import GenerationConfig, pipeline

    chat = pipeline("text-generation", model=str(model))
    limit = GenerationConfig(max_new_tokens=96, do_sample=False, eos_token_id=chat.tokenizer.eos_token_id)
    question = [{"role": "user", "content": QUESTIONS[name]}]
    reply = chat(question, generation_config=limit)[0]["generated_text"][-1]
    return f"{name}: {QUESTIONS[name]}\n  {reply['content']}"
