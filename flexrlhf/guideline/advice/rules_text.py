"""Report of rules of published systems, as plans follow or contradict them."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.api import Run, counted, table
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.advice.guideline_rules import FLEXRLHF, RuleVerdict, judged


def rules_section(advice: Advice) -> Iterator[str]:
    """Yield the rules as the guideline's placement and the one to use follow them, and where rules and simulated steps
    contradict each other."""
    yield from contradictions(advice)
    yield from _rules(advice)
    yield from _weighed(advice)


def contradictions(advice: Advice) -> Iterator[str]:
    """Yield a sentence where the placement to use has another strategy than FlexRLHF's guideline gives, with the
    operator that makes the difference in the simulated steps."""
    best, ruled = advice.best, _by_guideline(advice)
    if ruled is None or ruled.seconds <= (1 + advice.margin) * best.seconds:
        return
    if ruled.candidate.strategy == best.candidate.strategy:
        return
    verdicts = _judged(ruled)
    rule = next((each for each in verdicts if each.rule.strategy and each.state == "followed"), verdicts[0])
    own, other = _seconds_by_operator(best), _seconds_by_operator(ruled)
    name = max(own, key=lambda each: other.get(each, (0.0, 0))[0] - own[each][0])
    (seconds, devices), (before, all_devices) = other[name], own[name]
    yield (
        f"{best.candidate.strategy} contradicts FlexRLHF's guideline, which gives {ruled.candidate.strategy} "
        f"({rule.rule.name}: {rule.evidence}): that takes {ruled.seconds / best.seconds - 1:+.0%}, because as "
        f"simulated {name} takes {seconds:.1f} s on {counted(devices, 'device')} and {before:.1f} s on {all_devices}, "
        f"and devices run {ruled.simulation.utilisation:.0%} of the time in place of {best.simulation.utilisation:.0%}"
    )


def _judged(item: FeasibleCandidate) -> tuple[RuleVerdict, ...]:
    return judged(item.simulation, item.candidate.space.cluster)


def _by_guideline(advice: Advice) -> FeasibleCandidate | None:
    return next((item for item in advice.feasible if item.candidate.method == "guideline"), None)


def _rules(advice: Advice) -> Iterator[str]:
    """Yield a line for each rule and state, with the figures of the placements in it, and one of rules that do not
    apply. Rules of other systems than the guideline's are judged on the placement to use alone."""
    best, ruled = advice.best, _by_guideline(advice)
    own = _judged(best)
    other = own if ruled is best or ruled is None else _judged(ruled)
    rows: list[tuple[str, ...]] = []
    idle: list[str] = []
    for verdict, first in zip(own, other, strict=True):
        name, is_comment = verdict.rule.name, verdict.rule.source != FLEXRLHF
        both = {">": verdict} if is_comment or other is own else {"": first, ">": verdict}
        evidence = {mark: f"{each.evidence}{_miss(advice, each, mark, ruled is best)}" for mark, each in both.items()}
        marks: dict[str, list[str]] = {}
        for mark, each in both.items():
            marks.setdefault(each.state, []).append(mark)
        unmet = marks.pop("not applicable", [])
        if not marks:
            idle += [] if is_comment else [name]
            continue
        idle += [f"{name} to {mark or 'the first'} ({evidence[mark]})" for mark in unmet]
        title = f"{name} ({verdict.rule.source})"
        for state, alike in marks.items():
            figures = dict.fromkeys(evidence[mark] for mark in alike)
            rows.append((title, "both" if len(alike) > 1 else alike[0], state, "; > ".join(figures)))
            title = ""
    yield from table(rows, "<<<<")
    if idle:
        yield f"not applicable: {', '.join(idle)}"


def _miss(advice: Advice, verdict: RuleVerdict, mark: str, is_ruled: bool) -> str:
    """Return why the guideline's own placement does not follow a rule."""
    reason = advice.misses.get(verdict.rule.name, "") if not mark or is_ruled else ""
    return f"; {reason}" if reason and verdict.state == "contradicted" else ""


def _seconds_by_operator(item: FeasibleCandidate) -> dict[str, tuple[float, int]]:
    """Return the seconds of each operator in a step, over its chunks, and the number of devices that it runs on."""
    found: dict[str, tuple[float, int]] = {}
    for priced in item.simulation.priced:
        if isinstance(priced.instruction, Run) and not priced.is_rare:
            name = priced.instruction.operator.name
            devices = len(item.plan.placement[priced.instruction.model].ranks)
            found[name] = (found.get(name, (0.0, 0))[0] + priced.cost.seconds, devices)
    return found


def _weighed(advice: Advice) -> Iterator[str]:
    """Yield a sentence where rules that apply lead to different strategies, with the seconds of the best of each."""
    applied = [each.rule for each in _judged(advice.best) if each.state != "not applicable"]
    rules = {rule.strategy: rule for rule in reversed(applied) if rule.strategy}
    by_strategy = {item.candidate.strategy: item.seconds for item in reversed(advice.comparable)}
    timed = sorted((by_strategy[name], name) for name in rules if name in by_strategy)
    if len(timed) > 1:
        names = " and ".join(f"{rule.name} ({rule.source})" for rule in rules.values())
        figures = ", ".join(f"{seconds:.2f} s {name}" for seconds, name in timed)
        yield f"{names} contradict each other: as simulated a step takes at best {figures}"
