"""Agreement of the machines of a job before anything is written: each compares its terms with node 0's.

Node 0 publishes its terms and the directories of the runs in the job's store, every other node its verdict on them, and
then all go on or all end with the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from pydantic import TypeAdapter

from flexrlhf.comm.store import Notice, await_keys
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.refusals import LISTEN_SECONDS, Refusals
from flexrlhf.launch.shared_directories import DirectoryFacts, Sharing
from flexrlhf.launch.terms import Sides, Terms
from flexrlhf.plan.plan import Plan

LAST_WORD_SECONDS = 10.0
"""Time in which the other nodes read why a job does not start, before node 0 closes the store."""
_DIRECTORIES = TypeAdapter(tuple[DirectoryFacts, ...])


@dataclass(frozen=True)
class Member:
    """A machine that comes to an agreement, through one of its processes.

    number:   0 for the one whose terms count.
    members:  how many there are.
    host:     name of the machine.
    noun:     of the process, for messages: ``node``, or ``rank`` if another launcher starts the ranks.
    """

    number: int
    members: int
    host: str
    noun: str = "node"

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.noun} {self.number} (host {self.host})"

    @property
    def first(self) -> str:
        """Number 0, for messages that name no host."""
        return f"{self.noun} 0"


def agree(
    store: dist.Store, member: Member, plans: Sequence[Plan], make_terms: Callable[[], Terms] | None, seconds: float
) -> bool:
    """Compare the terms of all members with number 0's, and look whether they share its directories of runs.

    Returns whether this member's machine shares them; meaningless without terms.

    make_terms: returns the terms of this member; None if another member of its machine compares them.
    seconds:    longest wait for another member.

    Raises UserError on all members with the first difference, RunStopped if a member does not come.
    """
    shares = True
    try:
        if member.number == 0:
            assert make_terms is not None, "the terms of number 0 count"
            sentence = _judge(store, member, plans, make_terms(), seconds)
        else:
            sentence, shares = _compare(store, member, plans, make_terms, seconds)
    except RuntimeError as error:
        # as torch reports a store that is closed
        raise RunStopped(f"{member.name}: {member.first} has ended before the job began") from error
    if sentence:
        raise UserError(sentence)
    return shares


def _judge(store: dist.Store, member: Member, plans: Sequence[Plan], terms: Terms, seconds: float) -> str:
    """Return, on number 0, the first difference that another member has found."""
    others, refusal = range(1, member.members), ""
    with DirectoryFacts.probed(plans, makes_probes=True) as directories:
        store.set("host", member.host)
        store.set(
            "directories", JobSecret.here().signed("directories", _DIRECTORIES.dump_json(tuple(directories)).decode())
        )
        store.set("terms", JobSecret.here().signed("terms", terms.json))
        notice = Notice(f"{member.name} compares settings, versions and files")
        verdicts = {f"verdict/{each}": f"{member.noun} {each}" for each in others}
        try:
            await_keys(store, verdicts, seconds, notice, Refusals(store).check)
        except UserError as error:
            refusal = str(error)
    unwritable = [f"runs: {each.place} cannot be written ({each.problem})" for each in directories if each.problem]
    found = [refusal] if refusal else [*unwritable, *(store.get(key).decode() for key in verdicts)]
    sentence = next(filter(None, found), "")
    store.set("result", sentence)
    if sentence:
        # the refused machine does not read it
        _await_readers(store, member, LISTEN_SECONDS if refusal else LAST_WORD_SECONDS)
    return sentence


def _await_readers(store: dist.Store, member: Member, seconds: float) -> None:
    readers = {f"read/{each}": f"{member.noun} {each}" for each in range(1, member.members)}
    try:
        await_keys(store, readers, seconds, Notice(f"{member.name} waits for the others", prints=False))
    except RunStopped:
        # a member that is gone needs no word
        return


def _compare(
    store: dist.Store, member: Member, plans: Sequence[Plan], make_terms: Callable[[], Terms] | None, seconds: float
) -> tuple[str, bool]:
    """Return the difference from number 0 that a member has found, and whether this one shares directories."""
    own, shares = "", True
    if make_terms is not None:
        terms, first = make_terms(), {"terms": member.first}
        await_keys(store, first, seconds, Notice(f"{member.name} waits for the terms of {member.first}"))
        sides = Sides(f"{member.first} (host {store.get('host').decode()})", member.name)
        sharing = _compare_with_first(store, terms, sides, member.number)
        own, shares = sharing.problem, sharing.shares
        if not own and not shares and not JobSecret.here().value:
            own = (
                f"runs: {plans[0].spec.runs} on {sides.other} is not that of {sides.first}; set runs: to a directory "
                f"that all machines mount, or the same secret on all, by which they copy files: {JobSecret.MAKE}"
            )
        if not own and not shares:
            with DirectoryFacts.probed(plans, makes_probes=True) as mine:
                unwritable = [each for each in mine if each.problem]
            if unwritable:
                own = f"runs: {unwritable[0].place} on {member.name} cannot be written ({unwritable[0].problem})"
    store.set(f"verdict/{member.number}", own)
    if not own:
        notice = Notice(f"{member.name} waits for the comparison of the others", prints=make_terms is not None)
        await_keys(store, {"result": member.first}, seconds, notice)
    sentence = own or store.get("result").decode()
    store.set(f"read/{member.number}", "")
    return sentence, shares


def _compare_with_first(store: dist.Store, terms: Terms, sides: Sides, number: int) -> Sharing:
    """Compare the terms and directories of this member with number 0's, if both have the same secret."""
    try:
        directories = _DIRECTORIES.validate_json(
            JobSecret.here().verified("directories", store.get("directories").decode())
        )
        first = Terms.of_json(JobSecret.here().verified("terms", store.get("terms").decode()))
    except UserError as error:
        return Sharing(False, f"{sides.other}: {error}")
    return first.compare_machine(terms, sides, directories, number)
