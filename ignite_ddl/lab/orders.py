"""The order of passes on each rank of a pipeline schedule, as torch runs them.

Below, an order is a list of words such as ``F0 I1 W1 F1``:

- The letter is the pass, as in torch: "F" forward, "B" the whole backward pass, "I" its part for the gradient of the
  stage's input, "W" its part for the gradients of the weights.
- The digits are the chunk: the index of the stage among the rank's own stages.
- The microbatch is omitted if each stage takes microbatches in order: its third "F" is that of microbatch 2. Otherwise
  it follows a colon, as in ``B1:7``.
- ``F0+B1`` are two passes that should overlap.

The orders are those of ``torch.distributed.pipelining``, which runs them; a test compares them for each rank. This
file and what it imports need only the standard library, so that a web page can run it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ignite_ddl.pipeline.schedules import check_microbatches, stage_owners

__all__ = ["Action", "schedule_actions", "schedule_entries"]


class Action(NamedTuple):
    """One pass of a schedule.

    Attributes:
        kind: "F" forward, "B" the whole backward, "I" its input part, "W" its weight part (torch's letters).
        stage: index of the stage.
        microbatch: index of the microbatch.
    """

    kind: str
    stage: int
    microbatch: int


# Each takes a rank, the number of ranks p, of microbatches m and of chunks v, and returns that rank's words.


def _gpipe(rank: int, p: int, m: int, v: int) -> list[str]:
    """All forward passes, then all backward passes. Huang et al. 2019, "GPipe" (arXiv 1811.06965), section 2.3."""
    return ["F0"] * m + ["B0"] * m


def _1f1b(rank: int, p: int, m: int, v: int) -> list[str]:
    """p - r forward passes on rank r, then one backward and one forward pass in turn.

    So rank r keeps the activations of at most p - r microbatches. Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2.1.
    """
    ahead = min(m, p - rank)
    return ["F0"] * ahead + ["B0", "F0"] * (m - ahead) + ["B0"] * ahead


def _interleaved_1f1b(rank: int, p: int, m: int, v: int, passes_per_hop: int = 2) -> list[str]:
    """1F1B with v stages on each rank, depth first: a round of microbatches passes all chunks, one after the other.

    The last rank runs its first backward pass after all chunks but the last have processed a round, and the last
    chunk has processed its first microbatch. Each rank before it runs two more forward passes first for each hop to
    the last rank: one while the microbatch travels there and one while its gradient returns. Narayanan et al. 2021
    (arXiv 2104.04473), section 2.2.2. There a round has p microbatches; torch uses equal rounds of p or more, or a
    single round of fewer.
    """
    per_round = m // max(1, m // p)
    forward = [chunk for _ in range(m // per_round) for chunk in range(v) for _ in range(per_round)]
    ahead = min(len(forward), (v - 1) * per_round + passes_per_hop * (p - 1 - rank))
    order = [f"F{chunk}" for chunk in forward[:ahead]]
    for n, chunk in enumerate(forward):
        order += [f"F{later}" for later in forward[ahead + n : ahead + n + 1]]
        order.append(f"B{v - 1 - chunk}")
    return order


def _interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[str]:
    """Interleaved 1F1B with a split backward pass: earlier stages need only "I", and "W" is delayed.

    A rank starts with one forward pass less for each hop to the last rank, and delays as many "W" as there are ranks
    before it: so every rank keeps the activations of equally many microbatches, and the delayed "W" fill the bubble
    at the end. With v = 1 it is ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv
    2401.10241), section 2.1.
    """
    order, waiting = [], deque()
    for word in _interleaved_1f1b(rank, p, m, v, passes_per_hop=1):
        if word.startswith("F"):
            order.append(word)
            continue
        order.append(word.replace("B", "I"))
        waiting.append(word.replace("B", "W"))
        if len(waiting) > rank:
            order.append(waiting.popleft())
    return order + list(waiting)


def _looped_bfs(rank: int, p: int, m: int, v: int) -> list[str]:
    """Breadth first: all microbatches through one chunk, then all through the next; then the backward passes.

    Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953). torch runs the backward passes from
    the last microbatch to the first.
    """
    forward = [f"F{chunk}:{microbatch}" for chunk in range(v) for microbatch in range(m)]
    return forward + [word.replace("F", "B") for word in reversed(forward)]


def _zbv(rank: int, p: int, m: int, v: int) -> list[str]:
    """Zero bubble in a V shape: the last rank owns the two stages in the middle, the first rank the two outer ones.

    The order is optimal for F = I = W: then no rank waits between its first and its last pass. It needs 2p - 1
    microbatches; with fewer it is the order for 2p - 1 without the missing microbatches. Qi et al.
    2023 (arXiv 2401.10241), section 6.
    """
    full = max(m, 2 * p - 1)
    from_here = p - rank
    return (
        "F0 " * (2 * from_here - 1)  # until the first microbatch returns
        + "F1 F0 " * rank
        + "F1 I1 W1 " * from_here  # until the first gradient reaches chunk 0
        + "F0 I0 W0 F1 I1 W1 " * (full - 2 * p + rank + 1)
        + "I0 W0 F1 I1 W1 " * (from_here - 1)
        + "I0 I1 " * rank  # first what other ranks wait for, then the weights
        + "I0 W0 " * from_here
        + "W1 " * rank
        + "W0 " * rank
    ).split()


def _dualpipev(rank: int, p: int, m: int, v: int) -> list[str]:
    """A forward and a backward pass of different microbatches overlap: one computes while the other communicates.

    DualPipe sends microbatches in from both ends of the pipeline and so keeps two copies of the weights: DeepSeek-AI
    2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1. Cut in half, as a V, it needs one: Sea AI
    Lab 2025, "Cut-in-half" (https://huggingface.co/blog/ufotalent/cut-in-half). DeepSeek calls this DualPipeV and has
    its code in https://github.com/deepseek-ai/DualPipe.
    """
    after = p - 1 - rank  # number of later ranks
    main = "F0+B1 F1+B0 " * (m - 2 * p + rank + 1)
    if after == 0:
        main = main.replace("+", " ", 1)  # on the last rank the first pair does not overlap: a smaller bubble
    rest = [1, 0] * (rank + 1) + [0] * after  # chunks of the last backward passes
    unsplit, split = rest[: rank + 1], rest[rank + 1 :]  # the later ones are split; the oldest "W" runs first
    order = (
        "F0 " * 2 * after
        + "F0 F1 " * (rank + 1)
        + "I1 W1 F1 " * after
        + main
        + "B1 F1+B0 " * after
        + "".join(f"B{chunk} " for chunk in unsplit)
        + "".join(f"I{chunk} " for chunk in split[: rank + 1])
        + "".join(f"W{chunk} I0 " for chunk in split[:after])
        + "".join(f"W{chunk} " for chunk in split[after:])
    )
    return order.split()


ORDERS: dict[str, Callable[[int, int, int, int], list[str]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved_1f1b,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


def schedule_entries(
    schedule: str, n_ranks: int, n_microbatches: int, n_chunks: int | None = None
) -> list[list[tuple[Action, ...]]]:
    """The order of passes on each rank, with passes that should overlap in one entry.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: a number that the schedule supports, see :func:`suits`.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        list: for each rank its entries, each a tuple of one action, or of two that overlap (dualpipev).

    Raises:
        ValueError: if the schedule is unknown or does not support the numbers.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.orders import schedule_entries

            first, last = schedule_entries("dualpipev", n_ranks=2, n_microbatches=4)
            pairs = [entry for entry in first if len(entry) == 2]
            assert all([action.kind for action in pair] == ["F", "B"] for pair in pairs) and len(pairs) == 3
    """
    owners = stage_owners(schedule, n_ranks, n_chunks)
    check_microbatches(schedule, n_microbatches, n_ranks)
    table = []
    for rank in range(n_ranks):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        words = ORDERS[schedule](rank, n_ranks, n_microbatches, len(stages))
        # zbv's order may contain more microbatches than there are.
        table.append([entry for entry in _entries(words, stages) if entry[0].microbatch < n_microbatches])
    return table


def _entries(words: list[str], stages: list[int]) -> Iterator[tuple[Action, ...]]:
    """Parses a rank's words; ``stages`` are its own."""
    # Passes so far of each chunk; a "B" counts as an "I" and a "W".
    passes = {kind: [0] * len(stages) for kind in "FIW"}
    for entry in words:
        actions = []
        for word in entry.split("+"):
            kind, (number, _, given) = word[0], word[1:].partition(":")
            chunk, counts = int(number), passes["I" if kind == "B" else kind]
            actions.append(Action(kind, stages[chunk], int(given) if given else counts[chunk]))
            counts[chunk] += 1
            if kind == "B":
                passes["W"][chunk] += 1
        yield tuple(actions)


def schedule_actions(
    schedule: str, n_ranks: int, n_microbatches: int, n_chunks: int | None = None
) -> list[list[Action]]:
    """The order of passes on each rank, as in torch.

    Overlapping passes of dualpipev follow one another, forward first, as torch runs them by default;
    :func:`schedule_entries` keeps the pairs.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: at least ``n_ranks`` for 1f1b, 2 ``n_ranks`` for dualpipev; for the two interleaved ones
            a multiple of ``max(1, n_microbatches // n_ranks)``.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        list: for each rank its actions.

    Raises:
        ValueError: if the schedule is unknown or does not support the numbers.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.orders import schedule_actions

            first, last = schedule_actions("1f1b", n_ranks=2, n_microbatches=2)
            assert [action.kind for action in first] == ["F", "F", "B", "B"]
            assert [action.kind for action in last] == ["F", "B", "F", "B"]
    """
    entries = schedule_entries(schedule, n_ranks, n_microbatches, n_chunks)
    return [[action for entry in row for action in entry] for row in entries]
