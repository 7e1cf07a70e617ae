"""All checks of a preflight, and the checks of its machines together: software, settings, shared directories, clocks,
connections, links."""

from __future__ import annotations

from collections.abc import Sequence

from flexrlhf.api import Cluster, DiskDemand, JobSecret, Plan, Sides, UserError, bytes_text, counted, ranks_text
from flexrlhf.guideline.simulation.inputs import ordinary_cpu
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.measure import host_checks
from flexrlhf.measure.facts import Check, HostFacts, JobFacts, LinkFacts, Result, united

MOST_CLOCK_SECONDS = 1.0
"""Difference of clocks from which causes of failures, compared by their times, are in doubt."""
LEAST_LINK_SHARE = 0.5
"""Share of a link's planned bandwidth that counts as it."""
MOST_SPEED_SHARE = 0.25
"""Difference of a measured speed from the one that rows are shared by, as a share."""
MOST_NAMED = 3
"""Machines and connections that a check names."""
_NOT_REACHED = "not reached"


def judge(plans: Sequence[Plan], job: JobFacts, failure: str = "") -> list[Check]:
    """Return the checks in the order of their table.

    ``failure``: sentence with which the ranks ended early; empty if they did not.
    """
    used = job.groups.open_files if job.groups is not None else 0
    return [
        host_checks.check_devices(plans, job),
        host_checks.check_host_libraries(job.hosts),
        host_checks.check_memory_plan(plans),
        host_checks.check_memory_found(plans, job),
        host_checks.check_inputs(job.hosts),
        check_reached(job, failure),
        *check_terms(job.hosts),
        check_directories(job),
        job.hosts[0].disk,
        check_clocks(job),
        check_speed(plans[0].cluster, job),
        united("shared memory", map(host_checks.check_shared_memory, job.hosts)),
        united("open files", (host_checks.check_open_files(host, used) for host in job.hosts)),
        check_links(plans, job),
    ]


def check_terms(hosts: Sequence[HostFacts]) -> list[Check]:
    """Compare versions, settings and inputs of all hosts with node 0's."""
    first = hosts[0]
    versions = first.terms.versions
    same = {
        "versions": ", ".join(f"{library} {versions.get(library, '?')}" for library in ("flexrlhf", "torch", "python")),
        "settings": counted(len(first.terms.specs), "run"),
        "inputs": counted(len(first.terms.inputs), "file"),
    }
    machines = "one machine" if len(hosts) == 1 else f"all {len(hosts)} machines"
    checks = []
    for subject, found in same.items():
        compared = [first.terms.compare(subject, host.terms, Sides(first.name, host.name)) for host in hosts[1:]]
        if parts := [(difference, advice) for difference, advice in compared if difference]:
            checks.append(Check(f"same {subject}", "FAILS", "; ".join(text for text, _ in parts), parts[0][1]))
        else:
            checks.append(Check(f"same {subject}", "ok", f"{found} on {machines}"))
    return checks


def check_reached(job: JobFacts, failure: str) -> Check:
    """Check that all ranks have exchanged messages in every group. ``failure``: how the ranks ended, if early."""
    name = "ranks"
    if job.unreachable:
        advice = "open the ports between the machines, or set GLOO_SOCKET_IFNAME to the interface of the job"
        return Check(name, "FAILS", "; ".join(job.unreachable[:MOST_NAMED]), advice)
    if failure:
        return Check(name, "FAILS", failure)
    if job.groups is None:
        return Check(name, "skipped", _NOT_REACHED)
    found, number = job.groups, len(job.ranks)
    if number == 1:
        return Check(name, "ok", "one rank")
    made = f"{counted(found.groups, 'group')} of the plans made and summed over in {found.seconds:.1f} s"
    pairs = f"{counted(found.pairs, 'pair')} of {number} ranks exchanged messages"
    return Check(name, "ok", f"{found.backend}: {pairs}; {made if found.groups else 'no groups of the plans made'}")


def check_directories(job: JobFacts) -> Check:
    """Check that the directories of the runs can be written, and by which ranks they are shared."""
    name, first = "run directory", job.hosts[0]
    problems = [f"{each.place} cannot be written ({each.problem})" for each in first.directories if each.problem]
    if problems:
        return Check(name, "FAILS", "; ".join(problems), "set runs: to another directory, or free space there")
    places = ", ".join(each.place for each in first.directories)
    if job.directories is None:
        return Check(name, "skipped", f"{places} can be written by node {first.node}; {_NOT_REACHED} by the ranks")
    if job.directories.problems:
        by_problem: dict[str, list[int]] = {}
        for rank, problem in job.directories.problems.items():
            by_problem.setdefault(problem, []).append(rank)
        seen = "; ".join(f"{ranks_text(tuple(ranks))}: {problem}" for problem, ranks in by_problem.items())
        return Check(name, "FAILS", seen, "set runs: to a directory that all machines mount, or to one that none does")
    if apart := job.directories.apart:
        other = f"{ranks_text(apart)} on machines with others, whose files are copied there"
        if not JobSecret.here().value:
            advice = f"set runs: to a directory that all machines mount, or the same secret on all: {JobSecret.MAKE}"
            return Check(name, "FAILS", f"{places} on node {first.node}; {other} with a secret, found none", advice)
        return Check(name, "ok", f"{places} on node {first.node}; {other}")
    return Check(name, "ok", f"{places} is read and written by all {len(job.ranks)} ranks")


def check_disk(demand: DiskDemand) -> Check:
    """Check the free space for checkpoints and saved models."""
    result: Result = "FAILS" if demand.missing else "warning" if demand.missing_on_signal else "ok"
    if demand.missing:
        advice = f"free {bytes_text(demand.missing)}, set runs: to another directory, or reduce checkpoint.keep_last"
    else:
        advice = f"free {bytes_text(demand.missing_on_signal)} for a checkpoint on a signal"
    return Check("disk space", result, demand.text, "" if result == "ok" else advice)


def check_clocks(job: JobFacts) -> Check:
    """Check the differences of the hosts' clocks."""
    name = "clocks"
    if job.clocks is None:
        return Check(name, "skipped", _NOT_REACHED)
    if not job.clocks:
        return Check(name, "ok", "one machine")
    names = {host.node: host.name for host in job.hosts}
    far = [each for each in job.clocks if abs(each.difference) - each.uncertainty > MOST_CLOCK_SECONDS]
    if far:
        seen = "; ".join(f"{names[each.node]} is {each.difference:+.1f} s from node 0" for each in far[:MOST_NAMED])
        return Check(name, "warning", seen, "set the clocks by NTP: the cause of a failure is found by its time")
    largest = max(job.clocks, key=lambda each: abs(each.difference))
    seen = f"at most {1000 * abs(largest.difference):.0f} ms apart ({names[largest.node]})"
    return Check(name, "ok", f"{seen}, measured to {1000 * max(each.uncertainty for each in job.clocks):.0f} ms")


def check_speed(cluster: Cluster, job: JobFacts) -> Check:
    """Check measured speeds against those by which rows are shared. The slowest rank of a node counts."""
    name = "speed"
    by_node = {host.node: [rank.tflops for rank in job.ranks if rank.node == host.node] for host in job.hosts}
    found = {node: min(each for each in speeds if each) for node, speeds in by_node.items() if any(speeds)}
    if not found:
        return Check(name, "skipped", _NOT_REACHED)
    seen = ", ".join(f"node {node} {tflops:.3g}" for node, tflops in found.items())
    first = job.hosts[0].node
    planned = {host.node: cluster.speed(host.ranks[0]) for host in job.hosts if host.ranks}
    relative = {node: float(planned[node] / planned[first]) for node in found}
    far = [node for node in found if abs(found[node] / found[first] / relative[node] - 1) > MOST_SPEED_SHARE]
    text = f"{seen} TFLOP/s for a rank"
    if not far:
        return Check(name, "ok", text)
    measured = ", ".join(f"{found[node] / found[first]:.2g}" for node in found)
    shares = ", ".join(f"{relative[node]:.2g}" for node in found)
    advice = f"set speed: of cluster.nodes to {measured}; rows are shared by {shares}"
    return Check(name, "warning", text, advice)


def check_links(plans: Sequence[Plan], job: JobFacts) -> Check:
    """Check measured bandwidths against those that the plans count on, and against the bytes of their steps."""
    name = "links"
    if job.links is None:
        return Check(name, "skipped", _NOT_REACHED)
    if not job.links:
        return Check(name, "ok", "one rank")
    within = [link for link in job.links if link.ends[0] == link.ends[1]]
    across = [link for link in job.links if link.ends[0] != link.ends[1]]
    lines = [_slowest(plans[0].cluster, job, links) for links in (within, across) if links]
    if across:
        slowest = min(link.gb_s for link in across)
        lines += [line for plan in plans if (line := _step_over(plan, slowest, job.hosts[0].device)) is not None]
    return united(name, lines)


def _slowest(cluster: Cluster, job: JobFacts, links: Sequence[LinkFacts]) -> Check:
    """Check the slowest of links of one kind against the bandwidth that the plan counts on."""
    link = min(links, key=lambda each: each.gb_s)
    first, second = link.ends
    planned = planned_gb_s(cluster, job, link)
    across = f"node {first} to node {second} by {counted(link.ranks, 'rank')}"
    where = f"within node {first}" if first == second else across
    of = "slowest " if len(links) > 1 else ""
    seen = f"{of}{where} {link.gb_s:.3g} GB/s, {'no planned figure' if planned is None else f'planned {planned:g}'}"
    if planned is None or link.gb_s >= LEAST_LINK_SHARE * planned:
        return Check("links", "ok", seen)
    advice = "check cables, drivers and interfaces, or correct link_gb_s and network_gb_s in cluster.nodes"
    return Check("links", "warning", seen, advice)


def _step_over(plan: Plan, gb_s: float, device: str) -> Check | None:
    """Check the time that the bytes of a step need over the slowest link between machines; None if there are none."""
    most = max((each.rows + each.weights + each.gradients for each in plan.traffic.sent.values()), default=0.0)
    if not most:
        return None
    seconds, step = most / (1e9 * gb_s), _predicted_step(plan, device)
    seen = f"the {bytes_text(round(most))} that a node sends in a step of {plan.spec.name} take {seconds:.3g} s"
    if step is None or seconds <= step:
        return Check("links", "ok", seen)
    advice = "set network_gb_s in cluster.nodes to the measured figure, and let `flexrlhf advise` find a placement"
    return Check("links", "warning", f"{seen}, and its predicted step {step:.3g} s", advice)


def _predicted_step(plan: Plan, device: str) -> float | None:
    """Return the time of a step by figures or measurements, on CPUs by those of an ordinary one; None without any."""
    try:
        return simulate(plan).seconds
    except UserError:
        pass
    try:
        return simulate(plan, ordinary_cpu(plan.spec).costs).seconds if device == "cpu" else None
    except UserError:
        return None


def planned_gb_s(cluster: Cluster, job: JobFacts, link: LinkFacts) -> float | None:
    """Return the bandwidth that the plan counts on for ``link``; None for devices without figures or given links."""
    ranks = [rank for host in job.hosts if host.node in link.ends for rank in host.ranks if rank in cluster.ranks]
    is_within = link.ends[0] == link.ends[1]
    found = []
    for rank in ranks:
        device, figures = cluster.devices[rank], cluster.figures(rank)
        given = device.link_gb_s if is_within else device.network_gb_s
        found.append(given or (None if figures is None else figures.link_gb_s if is_within else figures.node_gb_s))
    known = [figure for figure in found if figure is not None]
    return min(known) if known else None
