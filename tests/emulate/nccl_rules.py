"""NCCL's rules, played on the calls of every rank: no rank may wait for ever, whatever the timing.

A communicator has one queue on each device, which runs in order: a batch of messages until each has met its other
end, a collective until all its ranks run it. It begins after the main stream's waits at the time of posting.
A wait blocks the main stream, and here the host, too, which waits with a deadline.

Single messages have a queue for each pair of ranks, whose communicator is made at the first of them: there the host
waits until the other rank is at one of this pair, too.

A wait holds a rank up, and does not change the order of its calls. So calls that end with more waits end with fewer,
and one play decides for every timing.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flexrlhf.config.spec import SyncSpec
from flexrlhf.placement.groups import Group
from flexrlhf.weights.sync_plan import RankBucket, SyncPlan

Message = tuple[int, int]
"""Sender and receiver."""
Order = Callable[[int, Sequence[Message]], Iterable[Message]]
"""Order in which a rank begins messages one by one."""


@dataclass(frozen=True)
class Post:
    """Communication that begins.

    messages:   of this rank; none: it is a collective of the group.
    is_single:  whether the one message is no batch.
    """

    key: object
    group: Group
    messages: tuple[Message, ...] = ()
    is_single: bool = False

    @property
    def queue(self) -> object:
        shared = self.group.communicator
        return (shared, frozenset(self.messages[0])) if self.is_single else shared


@dataclass(frozen=True)
class Await:
    """Wait of the main stream for work posted under ``key``; without a key the host waits for the main stream.

    on_device:  whether the host goes on meanwhile.
    """

    key: object = None
    on_device: bool = False


@dataclass(frozen=True)
class Synchronize:
    """Place where a library may wait for all work on the device: ``at`` an instruction of an engine."""

    at: tuple[str, str]


@dataclass(frozen=True)
class Meet:
    """Place where the hosts of ``ranks`` wait for each other: they make a group."""

    key: object
    ranks: tuple[int, ...]


Call = Post | Await | Synchronize | Meet


@dataclass
class _Running:
    """Communication in a queue. ``left``: messages that have not crossed. ``after``: waits that it comes after."""

    post: Post
    left: Counter[Message]
    after: int


@dataclass
class _Device:
    """One rank.

    calls:    remaining calls of its host.
    awaited:  keys that its main stream waits for, in order; ``passed`` of them are done.
    begun:    how often each key was posted here, less ended ones.
    queues:   posted work, by group, and by pair of ranks.
    order:    queues of posted work that has not ended, if it runs in one order (``is_strict``).
    """

    calls: deque[Call]
    is_strict: bool
    awaited: list[object] = field(default_factory=list)
    passed: int = 0
    begun: Counter[object] = field(default_factory=Counter)
    queues: dict[object, deque[_Running]] = field(default_factory=lambda: defaultdict(deque))
    order: deque[object] = field(default_factory=deque)

    def post(self, post: Post) -> None:
        self.queues[post.queue].append(_Running(post, Counter(post.messages), len(self.awaited)))
        self.begun[post.key] += 1
        self.order += [post.queue] * self.is_strict

    def head(self, queue: object) -> _Running | None:
        """Running work of a queue."""
        if self.order and self.order[0] != queue:
            return None
        running = self.queues[queue][0] if self.queues.get(queue) else None
        return running if running is not None and running.after <= self.passed else None

    def end(self, queue: object) -> None:
        self.begun[self.queues[queue].popleft().post.key] -= 1
        if self.is_strict:
            self.order.popleft()

    def is_idle(self) -> bool:
        return self.passed == len(self.awaited) and not any(self.queues.values())

    def advance(self) -> bool:
        """Let the main stream pass ended work."""
        before = self.passed
        while self.passed < len(self.awaited) and not self.begun[self.awaited[self.passed]]:
            self.passed += 1
        return self.passed > before


def sync_calls(
    plan: SyncPlan, group: Group, position: object, has_checksums: bool, overlaps: bool
) -> tuple[list[Call], list[Call]]:
    """Calls of ``comm/sync.py`` on a rank: at the Sync, and before its weights are used or sent next."""
    if not overlaps:
        return _walked(plan.rank, plan.buckets, group, ("sync", position), has_checksums), []
    first = [bucket for bucket in plan.buckets if not bucket.sends_on]
    rest = [bucket for bucket in plan.buckets if bucket.sends_on]
    key = ("sync", position)
    begun = [
        Post((*key, number), group, messages)
        for number, each in enumerate(first)
        if (messages := _messages(plan.rank, [each]))
    ]
    awaited: list[Call] = [Await(post.key) for post in begun]
    if has_checksums and begun:
        begun.append(_checksums(plan.rank, first, group, key))
        awaited += [Await(begun[-1].key), Await()]
    return [*begun], awaited + _walked(plan.rank, rest, group, (*key, "on"), has_checksums)


def _walked(
    rank: int, buckets: Sequence[RankBucket], group: Group, key: tuple[object, ...], has_checksums: bool
) -> list[Call]:
    """Calls of a rank that has two buckets under way, and awaits all of them in the end."""
    calls: list[Call] = []
    sending: deque[Call] = deque()
    arriving: deque[list[Call]] = deque()
    for number, bucket in enumerate(buckets):
        if bucket.sends and len(sending) == SyncSpec.NUM_BUCKETS - 1:
            calls.append(sending.popleft())
        if messages := _messages(rank, [bucket]):
            calls.append(Post((*key, number), group, messages))
        sending += [Await((*key, number))] * bool(bucket.sends)
        arriving.append([Await((*key, number))] * bool(bucket.receives))
        if len(arriving) == SyncSpec.NUM_BUCKETS - 1:
            calls += arriving.popleft()
    for each in arriving:
        calls += each
    if has_checksums and _messages(rank, buckets):
        post = _checksums(rank, buckets, group, key)
        calls += [post, Await(post.key), Await()]
    return [*calls, *sending]


def _checksums(rank: int, buckets: Sequence[RankBucket], group: Group, key: tuple[object, ...]) -> Post:
    return Post((*key, "checksums"), group, tuple(dict.fromkeys(_messages(rank, buckets))))


def outstanding(calls: Iterable[Call]) -> list[tuple[Synchronize, list[Post]]]:
    """Return the places where a library may wait for the device of a rank, each with communication that the rank has
    begun and awaits later."""
    found: list[tuple[Synchronize, list[Post]]] = []
    posted: dict[object, Post] = {}
    for call in calls:
        match call:
            case Post():
                posted[call.key] = call
            case Await():
                posted.pop(call.key, None)
            case Synchronize():
                found.append((call, [*posted.values()]))
    return found


def _messages(rank: int, buckets: Iterable[RankBucket]) -> tuple[Message, ...]:
    """Messages that ``rank`` sends and receives, one for each vector."""
    found: list[Message] = []
    for bucket in buckets:
        found += [(rank, each) for message in bucket.sends for _ in message.vectors for each in message.destinations]
        found += [(message.source, rank) for message in bucket.receives for _ in message.vectors]
    return tuple(found)


def find_block(
    calls: Mapping[int, Sequence[Call]],
    one_by_one: Order | None = None,
    strict: bool = False,
) -> str:
    """Play the calls of each rank; return the calls at which ranks are blocked, empty if all end.

    one_by_one:  messages of a batch are single ones, in this order.
    strict:      whether the host also waits for the device wherever a library may, and all work of a device runs in the
                 order of its posting, whatever its communicator: hardware queues that streams share do no worse
                 (CUDA_DEVICE_MAX_CONNECTIONS).
    """
    devices = {rank: _Device(deque(_expanded(rank, own, one_by_one, strict)), strict) for rank, own in calls.items()}
    player = _Player(devices)
    while player.advance():
        pass
    return player.blocked()


def _expanded(rank: int, calls: Iterable[Call], one_by_one: Order | None, strict: bool) -> Iterable[Call]:
    for call in calls:
        if isinstance(call, Synchronize):
            yield from [call] * strict
        elif isinstance(call, Await) and call.key is not None:
            # the library's waits would block only the main stream, but ours have a deadline
            yield from [call] if call.on_device else (call, Await())
        elif one_by_one is None or not isinstance(call, Post) or not call.messages:
            yield call
        else:
            yield from (Post(call.key, call.group, (each,), True) for each in one_by_one(rank, call.messages))


class _Player:
    def __init__(self, devices: Mapping[int, _Device]) -> None:
        self._devices = devices
        # pairs that have a communicator
        self._made: set[object] = set()
        self._met: set[Meet] = set()

    def advance(self) -> bool:
        """Advance every rank as far as possible; return whether one has advanced."""
        moved = False
        for rank, device in self._devices.items():
            moved |= device.advance()
            while device.calls and self._call(rank, device, device.calls[0]):
                device.calls.popleft()
                moved = True
            for queue in list(device.queues):
                while (running := device.head(queue)) is not None and self._cross(rank, queue, running):
                    moved = True
        return moved

    def _call(self, rank: int, device: _Device, call: Call) -> bool:
        """Whether the host of ``rank`` gets past ``call``."""
        if isinstance(call, Meet):
            heads = [self._devices[other].calls for other in call.ranks]
            if all(calls and calls[0] == call for calls in heads):
                self._met.add(call)
            return call in self._met
        if isinstance(call, Synchronize) or (device.is_strict and call == Await()):
            return device.is_idle()
        if isinstance(call, Await):
            if call.key is not None:
                device.awaited.append(call.key)
            return call.key is not None or device.passed == len(device.awaited)
        if call.is_single and call.queue not in self._made:
            (other,) = set(call.messages[0]) - {rank}
            calls = self._devices[other].calls
            if not (calls and isinstance(calls[0], Post) and calls[0].queue == call.queue):
                return False
            self._made.add(call.queue)
        device.post(call)
        return True

    def _cross(self, rank: int, queue: object, running: _Running) -> bool:
        """Match the running work of ``rank`` with its other ends; return whether it has ended."""
        if not running.post.messages:
            heads = [self._devices[other].head(queue) for other in running.post.group.ranks]
            if all(head is not None and head.post == running.post for head in heads):
                for other in running.post.group.ranks:
                    self._devices[other].end(queue)
                return True
            return False
        for link in list(running.left):
            (other,) = set(link) - {rank}
            head = self._devices[other].head(queue)
            if head is not None and (number := min(running.left[link], head.left[link])):
                for each in (running, head):
                    each.left[link] -= number
                if not +head.left:
                    self._devices[other].end(queue)
        if +running.left:
            return False
        self._devices[rank].end(queue)
        return True

    def blocked(self) -> str:
        """Current call of each rank."""
        lines = []
        for rank, device in self._devices.items():
            running = [queue[0].post for queue in device.queues.values() if queue]
            if device.calls or running:
                at = device.calls[0] if device.calls else "its end"
                lines.append(f"rank {rank}: its host at {at}, its device in {running}")
        return "\n".join(lines)
