"""Host memory of a rank while it loads and saves a model: read in parts and written tensor by tensor, or whole.

    python benchmarks/loading_memory.py [--parameters 1.5e9] [--ranks 1 2 4] [--limit-gb 8] [--rows frozen]

A checkpoint with random weights in bfloat16 is made once, tensor by tensor. Then for every row of the table ranks are
started on this machine, on CPU: each loads its part into an engine, gathers the weights, and the first one writes them.
Printed is the maximum over ranks: the peak of a process (VmHWM, mapped pages of files included) less its memory before
(libraries, process groups; for saving also the loaded model). ``whole`` is loading by transformers: the whole model in
float32 on every rank, which is then sharded or cast; and saving with all gathered tensors on one rank. Rows that would
exceed the limit are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flexrlhf.trainer.restoration import bucket_names
from flexrlhf.weights.parameters import count_elements

SECONDS = 1800.0
BUCKET_BYTES = 100_000_000


@dataclass(frozen=True)
class Case:
    """A row of the table. ``dtype`` bfloat16: a frozen model; float32: a trained one, so with float32 shards."""

    name: str
    engine: str
    zero: int
    dtype: str

    @property
    def trained(self) -> bool:
        return self.dtype == "float32"

    def stored_bytes(self, parameters: float, ranks: int) -> float:
        """Bytes of the weights on all ranks together."""
        return parameters * (4 if self.trained else 2) * (1 if self.zero == 3 else ranks)


CASES = (
    Case("replicas, frozen", "torch", 0, "bfloat16"),
    Case("ZeRO-3 of torch, frozen", "torch", 3, "bfloat16"),
    Case("ZeRO-3 of DeepSpeed, frozen", "deepspeed", 3, "bfloat16"),
    Case("replicas, trained", "torch", 0, "float32"),
    Case("ZeRO-3 of torch, trained", "torch", 3, "float32"),
)


def model_config(parameters: float) -> dict[str, Any]:
    """Config of a Qwen2-like model of about ``parameters``: the shape of Qwen2.5-1.5B, narrower or wider."""
    hidden = max(128, round((parameters / 1.5e9) ** (1 / 3) * 12) * 128)
    layers = 28
    vocabulary = 32_000
    per_layer = 2 * hidden * hidden + 2 * hidden * 256 + 3 * hidden * (5 * hidden)
    layers = max(2, round((parameters - 2 * vocabulary * hidden) / per_layer))
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    }


def write_checkpoint(directory: Path, parameters: float) -> int:
    """Write a random model tensor by tensor; return its number of parameters."""
    import torch
    from transformers import AutoConfig

    from flexrlhf.runs.model_directory import ModelDirectory
    from flexrlhf.weights.families import decoder_shapes

    config = model_config(parameters)
    shapes = decoder_shapes(config)
    forms = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    with ModelDirectory(directory).writer(forms, AutoConfig.for_model(**config)) as files:
        for name in sorted(shapes):
            files.write({name: torch.randn(shapes[name], dtype=torch.bfloat16) * 0.02})
    return count_elements(tuple(shapes.items()))


def peak_bytes() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def begin() -> int:
    """Reset the peak to the process's present memory, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def rank_main(arguments: Mapping[str, Any]) -> None:
    """Load and save as one rank; the peaks are written to a file."""
    import torch

    from flexrlhf.comm.world import open_world
    from flexrlhf.placement.groups import Group

    torch.set_num_threads(1)
    case, directory = Case(**arguments["case"]), Path(arguments["directory"])
    with open_world("cpu", SECONDS) as world, ExitStack() as stack:
        ranks = tuple(range(world.size))
        own = [Group("alone", (rank,), alone=True) for rank in ranks]
        groups = world.make_groups([*([Group("model", ranks)] if len(ranks) > 1 else []), *own], SECONDS)
        if arguments["whole"]:
            _load_whole(stack)
        context = _context(case, directory, world, groups)
        _import_libraries(case)
        before = begin()

        engine = context.make_engine()
        loading = peak_bytes() - before
        world.meet("loaded", SECONDS)
        before = begin()
        _save(engine, context, groups, directory / f"saved-{world.size}", is_whole=arguments["whole"])
        found = {"loading": loading, "saving": peak_bytes() - before, "stored": engine.memory_usage().weights}
        Path(arguments["output"]).with_suffix(f".{world.rank}").write_text(json.dumps(found))
        groups.close()
        world.meet("end", SECONDS)


def _load_whole(stack: ExitStack) -> None:
    """Make engines load as transformers does."""
    from flexrlhf.engines.skeletons import Skeleton

    stack.enter_context(patch.object(Skeleton, "of", Skeleton.of_whole_model))


def _import_libraries(case: Case) -> None:
    """Import the engine's later imports, also transformers' classes of the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**model_config(1e7), "num_hidden_layers": 1}))
    if case.engine == "deepspeed":
        from flexrlhf.engines.deepspeed.engine import _import_deepspeed

        _import_deepspeed(torch.device("cpu"))


def _context(case: Case, directory: Path, world: Any, groups: Any) -> Any:
    import torch
    import torch.distributed as dist

    from flexrlhf.comm.reduce import RankGroup
    from flexrlhf.config.model_settings import ModelSpec
    from flexrlhf.engines.base import EngineContext
    from flexrlhf.engines.model_ranks import ModelRanks
    from flexrlhf.operators.columns import Lengths
    from flexrlhf.placement.layout import Layout
    from flexrlhf.placement.placed import ModelName, PlacedModel

    def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
        work.wait()

    ranks = tuple(range(world.size))
    spec = ModelSpec(path=str(directory / "model"), engine=case.engine, zero=case.zero, dtype=case.dtype)
    alone = RankGroup(None, (world.rank,), wait)
    return EngineContext(
        placed=PlacedModel(ModelName("actor" if case.trained else "ref"), Layout(ranks), case.trained, spec),
        lengths=Lengths(16, 16),
        temperature=1.0,
        seed=0,
        num_updates=1,
        ranks=ModelRanks(
            dp=RankGroup(groups.get("model", ranks), ranks, wait) if len(ranks) > 1 else alone,
            tp=alone,
            alone=groups.alone(world.rank),
        ),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=dist.PrefixStore("model", world.store),
    )


def _save(engine: Any, context: Any, groups: Any, directory: Path, is_whole: bool) -> None:
    """Gather the weights bucket by bucket; the first rank writes them, all at the end if ``is_whole``."""
    import torch

    from flexrlhf.comm.weights import WeightGather
    from flexrlhf.runs.model_directory import ModelDirectory
    from flexrlhf.weights.shapes import model_shape

    placed, live = context.placed, engine.weights()
    shape = model_shape("actor", placed.settings)
    ranks = next(ranks for ranks in placed.gather_sets if placed.ranks[0] in ranks)
    if context.ranks.alone is None or context.ranks.dp.ranks[0] != placed.ranks[0]:
        raise AssertionError("the first rank writes")
    rank = int(os.environ["RANK"])
    if rank not in ranks:
        return
    shards = tuple(shape.parts_on(placed, each) for each in ranks)
    group = groups.get("model", ranks) if len(ranks) > 1 else None
    gather, dtype = WeightGather(group, ranks, shards, context.ranks.dp.wait), next(iter(live.values())).dtype
    names = bucket_names(shards[0], dtype.itemsize, BUCKET_BYTES)
    buckets = (gather.whole(live, each, dtype) for each in names)
    if rank != 0:
        for _ in buckets:
            pass
    elif is_whole:
        kept = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}
        ModelDirectory(directory).save(kept, engine.config)
    else:
        forms = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shape.parameters}
        with ModelDirectory(directory).writer(forms, engine.config) as files:
            for bucket in buckets:
                files.write(bucket)


def measured(case: Case, ranks: int, whole: bool, directory: Path) -> list[dict[str, int]]:
    """Start the ranks of one row and return their measurements."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = directory / "peak"
    arguments = {"case": vars(case), "directory": str(directory), "whole": whole, "output": str(output)}
    address = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # without this glibc keeps freed tensors, and the peak includes the gaps between them
    address["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    command = [sys.executable, __file__, "--rank", json.dumps(arguments)]
    with (directory / "log").open("a") as log:
        started = [
            subprocess.Popen(command, env={**os.environ, **address, "RANK": rank, "LOCAL_RANK": rank}, stderr=log)
            for rank in map(str, range(ranks))
        ]
        codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"ranks ended with {codes}:\n{(directory / 'log').read_text()[-3000:]}")
    return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]


def print_table(parameters: float, rank_counts: Sequence[int], limit: float, rows: str, directory: Path) -> None:
    """Measure every row, and print it as soon as it is measured."""
    count = write_checkpoint(directory / "model", parameters)
    print(f"{count / 1e9:.2f} B parameters, bfloat16 files of {2 * count / 1e9:.2f} GB; GB of host memory a rank\n")
    print("| model | ranks | its part | loading, whole | in parts | saving, whole | by tensor |")
    print("|---|---|---|---|---|---|---|")
    for case in [case for case in CASES if rows in case.name]:
        for ranks in rank_counts:
            cells: dict[bool, tuple[str, str]] = {}
            part = "-"
            for whole in (True, False):
                need = case.stored_bytes(count, ranks) + (4 * count * ranks if whole else 0)
                if need > limit:
                    cells[whole] = ("-", "-")
                    continue
                found = measured(case, ranks, whole, directory)
                part = f"{max(each['stored'] for each in found) / 1e9:.2f}"
                cells[whole] = tuple(f"{max(each[key] for each in found) / 1e9:.2f}" for key in ("loading", "saving"))
            row = [case.name, str(ranks), part]
            row += [cells[whole][place] for place in (0, 1) for whole in (True, False)]
            print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--limit-gb", type=float, default=64.0, help="rows that need more are left out")
    parser.add_argument("--rows", default="", help="rows with these words in their name; all without it")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank)
        return
    with tempfile.TemporaryDirectory(prefix="loading-") as directory:
        print_table(arguments.parameters, arguments.ranks, arguments.limit_gb * 1e9, arguments.rows, Path(directory))


if __name__ == "__main__":
    main()
