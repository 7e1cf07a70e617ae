"""The quick start: SFT, reward model and PPO on a generated corpus, with no download."""

from __future__ import annotations

import json
from pathlib import Path

from flexrlhf.config.spec_file import load_spec

CORPUS = Path("runs") / "quickstart-corpus"
STAGES = ("sft", "reward", "ppo")


def config_paths() -> list[Path]:
    """Return the paths of the three configs, in the order in which they run."""
    return [Path(__file__).parent / f"{stage}.yaml" for stage in STAGES]


def prepare_corpus() -> None:
    """Write the corpus below the current directory; the same bytes every time."""
    from flexrlhf.data.quickstart.corpus import write_corpus

    write_corpus(CORPUS)


def random_weights() -> tuple[str, ...]:
    """Return overrides of the last config: random weights of the same shape, for models that are not trained yet."""
    sft, *_, last = config_paths()
    actor, models = load_spec(sft).models.actor, load_spec(last).models
    assert actor is not None, "the quick start trains an actor"
    shape = json.dumps(actor.init)
    absent = [role for role, model in models if model and model.path is not None and not Path(model.path).is_dir()]
    return tuple(f"models.{role}.{setting}" for role in absent for setting in ("path=null", f"init={shape}"))
