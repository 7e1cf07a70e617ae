"""Several runs in one command share the job's ranks and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import Case, make_assets
from commands import children, read_until, start

NUM_RUNS = 3


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.full
def test_groups_end_with_their_run(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Each group has its own threads and sockets; hundreds of runs would use up both."""
    spec = make_assets(tmp_path_factory.mktemp("several")).spec(Case("two", "halves", 2))
    paths = [tmp_path / f"{index}.yaml" for index in range(NUM_RUNS)]
    for index, path in enumerate(paths):
        path.write_text(spec.model_copy(update={"name": f"run{index}", "steps": 5}).dump())
    process = start(["run", *map(str, paths)], tmp_path)
    threads = []
    for index in range(NUM_RUNS):
        read_until(process, f"run{index}  step 2/")
        threads.append(num_threads(children(process)[0]))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out[-2000:]
    assert threads[-1] <= threads[1], threads
