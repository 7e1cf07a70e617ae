"""Files of data, split into rows for training and rows for evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from flexrlhf.data.files import read_rows
from flexrlhf.errors import UserError

FILES = {"alpaca.json": 16, "dpo_pairs.json": 16, "hh_pairs.jsonl.gz": 32, "gsm8k.jsonl": 16}
"""Each file with the number of last rows that are kept for evaluation."""


def split_files(source: Path, target: Path) -> None:
    """Write each file's rows to ``NAME.jsonl`` in ``target``, its last ones to ``NAME-evaluation.jsonl``."""
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        raise UserError(f"--data {source}: has no {', '.join(missing)}; docs/real.md describes these files")
    target.mkdir(parents=True, exist_ok=True)
    for name, kept in FILES.items():
        rows, stem = read_rows(source / name), name.partition(".")[0]
        for file, part in ((stem, rows[:-kept]), (f"{stem}-evaluation", rows[-kept:])):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (target / f"{file}.jsonl").write_text("".join(lines))
