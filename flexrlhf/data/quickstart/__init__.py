"""The quick start: SFT, reward model and PPO on a generated corpus, with no download."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path("runs") / "quickstart-corpus"
STAGES = ("sft", "reward", "ppo")


def config_paths() -> list[Path]:
    """Return the paths of the three configs, in the order in which they run."""
    return [Path(__file__).parent / f"{stage}.yaml" for stage in STAGES]


def prepare_corpus() -> None:
    """Write the corpus below the current directory; the same bytes every time."""
    from flexrlhf.data.quickstart.corpus import write_corpus

    write_corpus(CORPUS)
