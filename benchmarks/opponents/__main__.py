"""Advice of ``flexrlhf advise`` against opponents outside its search, all planned and simulated by the same costs.

    python -m benchmarks.opponents --output FILE [--subset] [--only WORDS] [--part 1/2] [--seconds 8]

Each request of ``requests.txt`` is advised on with ``--tie 0``. Opponents: the guideline's and the usual rows; up to 50
random changes of the recommended YAML that plan and fit; a climb from it by single changes. For a refused request
random settings are sampled until a plan fits. Rows of the ranking are written and planned again from their files. A
line for each request is added to FILE; requests that it has are left out. YAMLs and the worst cases are written next to
it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.opponents.cases import Case, cases
from benchmarks.opponents.comparison import METHODS, Comparison, Record
from benchmarks.opponents.moves import shown
from flexrlhf.errors import UserError

WORST = 0.02
"""Loss above which a request is among the worst cases."""
SHARES = (0.01, 0.02, 0.05, 0.1)
LONGEST = 30.0
"""CPU seconds that a request may take."""
FAULTS = ("refused", "memory", "untrue")
"""Faults of a row that is planned again."""


def line(record: Record) -> str:
    """Return one line on a request."""
    if "error" in record:
        return f"{record['name']:44} {record['error']}"
    head, changes = f"{record['name']:44} {record['cpu']:6.1f} s CPU ", shown(record.get("changes", {}))
    if "refusal" in record:
        found = f"REFUSED, but it fits with {changes}" if changes else f"refused, {record['tried']} samples find none"
        return f"{head} {found}: {record['refusal'][:160]}"
    if "loss" not in record:
        return f"{head} {record['pick']}: its YAML is refused: {record['s']}"
    wrong = _wrong(record)
    cells = [f"{record['s']:9.5g} s {record['pick']}"]
    cells += [f"loss {record['loss']:6.1%} to {record['by'] or 'none'} [{changes}]"]
    cells += [" ".join(f"{name} {value:.5g}" for name, value in record["opponents"].items() if value is not None)]
    cells += [
        f"random {record['random'][:2]} climb {record['climb']}",
        f"tie {record['tie']} {record['tie cost']:+.1%}",
    ]
    cells += [f"rows {len(record['rows'])}{f', WRONG {wrong}' if wrong else ''}"]
    return f"{head} {'; '.join(cells)}"


def _wrong(record: Record) -> list[Record]:
    return [row for row in record.get("rows", ()) if len(row) > 1]


def worst(record: Record, folder: Path) -> Iterator[str]:
    """Yield lines on a request with a faster opponent, a needless refusal or a wrong row."""
    is_refused = "refusal" in record and "changes" in record
    if record.get("loss", 0) > WORST or is_refused or isinstance(record.get("s"), str) or _wrong(record):
        path = folder / Case(record["name"], "", False).file_name
        yield f"* **{record['name']}**: `flexrlhf advise {record['command']} --tie 0`"
        yield f"  {line(record)}"
        yield f"  {path}.pick.yaml (recommended), .best.yaml (opponent), .txt (printed by advise)"


def summary(records: Sequence[Record]) -> Iterator[str]:
    """Yield lines on all requests."""
    compared = [each for each in records if "loss" in each]
    refused = [each for each in records if "refusal" in each]
    others = len(records) - len(compared) - len(refused)
    yield f"{len(records)} requests: {len(compared)} with a placement, {len(refused)} refused, {others} with an error"
    if compared:
        yield _shares("loss with --tie 0", [each["loss"] for each in compared])
        yield _shares("loss against rows of the ranking", list(map(_to_rows, compared)))
        kinds = [max(each.get("kinds", {"": 0.0}).values(), default=0.0) for each in compared]
        yield _shares("loss of a search's row against others of its kind", kinds)
        yield _shares("loss by the tie", [each["tie cost"] for each in compared])
    yield f"refused, though a plan fits: {', '.join(each['name'] for each in refused if 'changes' in each) or 'none'}"
    times = [each["cpu"] for each in records if "cpu" in each]
    if times:
        above = sum(each > LONGEST for each in times)
        yield f"CPU: mean {mean(times):.1f} s, most {max(times):.1f} s, above {LONGEST:g} s: {above}"
    rows = [row for each in records for row in each.get("rows", ())]
    faults = ", ".join(f"{fault} {sum(fault in row for row in rows)}" for fault in FAULTS)
    yield f"{len(rows)} rows planned again: {faults}"


def _shares(title: str, losses: Sequence[float]) -> str:
    above = ", ".join(f"{share:.0%}: {sum(loss > share for loss in losses)}" for share in SHARES)
    return f"{title}: mean {mean(losses):.2%}, most {max(losses):.1%}; above {above}"


def _to_rows(record: Record) -> float:
    rows = [value for name, value in record["opponents"].items() if name in METHODS and value is not None]
    return max(0.0, record["s"] / min(rows) - 1)


def read(path: Path) -> list[Record]:
    return [json.loads(each) for each in path.read_text().splitlines()] if path.is_file() else []


def record_of(case: Case, folder: Path, seconds: float) -> Record:
    try:
        return Comparison(case, folder, seconds).record()
    except UserError as error:
        return {"name": case.name, "command": case.command, "error": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of records, with a folder of YAMLs next to it")
    parser.add_argument("--subset", action="store_true", help="the requests with a star")
    parser.add_argument("--only", default="", help="requests whose name has these words")
    parser.add_argument("--part", default="1/1", help="such as 2/3: every third request, from the second on")
    parser.add_argument("--seconds", type=float, default=8.0, help="CPU seconds of the samples, and of the climb")
    options = parser.parse_args()
    folder, (part, parts) = options.output.with_suffix(""), map(int, options.part.split("/"))
    folder.mkdir(parents=True, exist_ok=True)
    known = {each["name"] for each in read(options.output)}
    chosen = [each for each in cases() if options.only in each.name and (each.in_subset or not options.subset)]
    for case in chosen[part - 1 :: parts]:
        if case.name not in known:
            record = record_of(case, folder, options.seconds)
            with options.output.open("a") as file:
                file.write(json.dumps(record, default=str) + "\n")
            with options.output.with_suffix(".worst.md").open("a") as file:
                file.writelines(f"{each}\n" for each in worst(record, folder))
            print(line(record), flush=True)
    print("\n".join(summary(read(options.output))))


if __name__ == "__main__":
    main()
