"""Transfer protocols of one's own: the prompts of a mini-batch over the replicas of an operator's model."""


def round_robin(replicas, prompts):
    """Return the prompts of each replica; of prompts that are sorted by length all get long ones."""
    return [prompts[number :: len(replicas)] for number in range(len(replicas))]


def pinned(replicas, prompts):
    """Return the prompts of each replica, which has the same numbers of every step whatever the mini-batches are."""
    return [[each for each in prompts if each % len(replicas) == number] for number in range(len(replicas))]
