"""Readers of loggers' output: event files, the file of an offline run of Weights & Biases, MLflow's database.

The file of Weights & Biases has records of its protocol, in blocks of LevelDB's log.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BLOCK_BYTES, HEADER_BYTES = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER_BYTES:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        assert kind in (FULL, FIRST, MIDDLE, LAST), kind
        parts += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> Iterator[dict[str, str]]:
    """Yield the values written by each call of ``log``, as JSON."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}


def scalars(directory: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert "reward_mean" in events.Tags()["scalars"] and "rollout_engine" not in events.Tags()["scalars"]
    assert "samples/text_summary" in events.Tags()["tensors"]
    return [(event.step, event.value) for event in events.Scalars("reward_mean")]


def wandb_rows(directory: Path) -> list[tuple[int, float]]:
    pytest.importorskip("wandb")
    files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "a resumed run has the identifier of the first one"
    assert all(map(_is_written, files)), "a separate service writes the files"
    rows = [row for file in files for row in history(file)]
    assert any("samples" in key for row in rows for key in row)
    return [(int(row["step"]), float(row["reward_mean"])) for row in rows if "reward_mean" in row]


def _is_written(file: Path) -> bool:
    """Wait until a run has been written to its end."""
    for _ in range(100):
        if {"run", "exit"} <= {record.WhichOneof("record_type") for record in records(file)}:
            return True
        time.sleep(0.1)
    return False


def mlflow_rows(directory: Path) -> list[tuple[int, float]]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{directory.parent / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("flexrlhf").experiment_id])
    (run,) = [each for each in runs if each.info.run_name == directory.name]
    assert run.info.status == "FINISHED" and run.data.params["algorithm.name"] == "ppo"
    files = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert files >= {"config.yaml", "metrics.jsonl", "samples.jsonl", "samples"}
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward_mean")]


READERS = {"tensorboard": scalars, "wandb": wandb_rows, "mlflow": mlflow_rows}
