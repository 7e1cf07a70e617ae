"""A step in words: metrics, throughput, time left, and the share of time of each kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flexrlhf.metrics import METRICS, Metric

OF_TIME = "time_"
EVALUATION = "eval_"
WINDOW = 20
"""Steps of which throughput and time left are means."""
LEAST_SHARE = 0.005


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``12 s``, ``1:05`` minutes or ``2:03:10`` hours."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    return f"{minutes}:{second:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def rate(value: float) -> str:
    """Return a number in a second with three digits, as ``0.52``, ``64`` or ``1.24k``."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def seconds_left(seconds: Sequence[float], remaining: int) -> float | None:
    """Return the time of the ``remaining`` steps, given the ``seconds`` of the steps before; None without any.

    It is the mean of the last ones, without the first one if there are others: that one warms everything up.
    """
    usual = seconds[1:] or seconds
    recent = usual[-WINDOW:]
    return remaining * sum(recent) / len(recent) if recent else None


def throughput(rows: Sequence[Mapping[str, float]], most: int = WINDOW) -> str:
    """Return samples and tokens in a second over the last rows of metrics, at ``most`` so many; else an empty text."""
    parts = []
    for noun in ("samples", "tokens"):
        found = [row for row in rows[-most:] if f"{noun}_per_second" in row]
        seconds = sum(row["seconds"] for row in found)
        if seconds > 0:
            number = sum(row[f"{noun}_per_second"] * row["seconds"] for row in found)
            parts.append(f"{rate(number / seconds)} {noun}/s")
    return ", ".join(parts)


def time_shares(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each kind of work in the time of ``rows``, the kinds in the order of the metrics."""
    names = [metric.name for metric in METRICS if metric.name.startswith(OF_TIME)]
    counted = [row for row in rows if any(name in row for name in names)]
    total = sum(row["seconds"] for row in counted)
    if total <= 0:
        return {}
    sums = {name: sum(row.get(name, 0.0) * row["seconds"] for row in counted) for name in names}
    return {name.removeprefix(OF_TIME): value / total for name, value in sums.items() if value >= LEAST_SHARE * total}


def shares_text(shares: Mapping[str, float]) -> str:
    """Return ``generate 41 %, train 30 %, wait 29 %``."""
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares.items())


def shown_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of training that are shown while it goes on."""
    return _chosen(row, (m for m in METRICS if m.progress and not m.name.startswith(EVALUATION)))


def evaluation_text(row: Mapping[str, float]) -> str:
    """Return the metrics of the evaluation after the step, if any."""
    return _pairs(_chosen(row, (m for m in METRICS if m.progress and m.name.startswith(EVALUATION))))


def problems_text(row: Mapping[str, float]) -> str:
    """Return the metrics that should be 0 and are not."""
    return _pairs({name: value for name, value in _chosen(row, (m for m in METRICS if m.is_problem)).items() if value})


def _chosen(row: Mapping[str, float], metrics: Iterable[Metric]) -> dict[str, float]:
    return {metric.name: row[metric.name] for metric in metrics if metric.name in row}


def _pairs(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def fitting(fixed: int, parts: Sequence[str], width: int) -> list[str]:
    """Return the first of ``parts`` that fit into ``width`` next to ``fixed`` characters, two spaces before each."""
    kept = []
    for part in parts:
        fixed += len(part) + 2
        if fixed > width:
            break
        kept.append(part)
    return kept
