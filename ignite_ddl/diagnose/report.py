"""The report for a job that hangs: which rank is in which collective, and which ranks never came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ignite_ddl.diagnose.stacks import Frame, frames_of, place_of, user_frame, waits_in
from ignite_ddl.launch.job import label

NEWEST = 200  # calls of each rank that a report is made of: a step of most models
_UNEVEN = ("gather", "scatter", "all_to_all")  # whose sizes may differ between ranks
_SHOWN = 3  # of the calls that differ between ranks


@dataclass(frozen=True)
class Call:
    """A collective of one rank, or the place of a rank that is in none.

    Attributes:
        rank: the global rank.
        operation: such as "all_reduce"; None if the rank is in no collective, send or receive.
        number: how many collectives the rank has called on this group, this one included; where ``operation`` is None,
            how many it has called on the group in which others wait. None of sends and receives, which torch's
            recorder does not have on gloo.
        group: the ranks of the process group.
        sizes: type and sizes of what it put in, such as "Float[3]".
        frame: file, line and function of the user's code; None of a rank that has returned.
    """

    rank: int
    operation: str | None
    number: int | None
    group: tuple[int, ...]
    sizes: str
    frame: Frame | None

    @property
    def where(self) -> str:
        """The line of the user's code, such as "train.py:12 in step"."""
        return "returned" if self.frame is None else place_of(self.frame)


@dataclass(frozen=True)
class UnlikeCalls:
    """Collectives with the same number on the same group that are not the same call on each rank.

    Attributes:
        number: of the call on its group, from 1.
        group: the ranks of the process group.
        differ_in: "operation", "sizes", or "line" where only the line of the user's code differs: right if a branch
            means the same on each rank, wrong numbers if ranks have swapped two calls.
        calls: one :class:`Call` for each rank.
    """

    number: int
    group: tuple[int, ...]
    differ_in: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        same = defaultdict(list)
        for call in self.calls:
            same[f"{call.operation} {call.sizes}".rstrip() + f" at {call.where}"].append(str(call.rank))
        what_ranks_called = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in same.items())
        return f"call {self.number} of {_ranks(self.group)} differs in {self.differ_in}: {what_ranks_called}"


@dataclass(frozen=True)
class HangReport:
    """Where each rank of a job is; printed, a table.

    Attributes:
        calls: one :class:`Call` for each rank.
        missing: the ranks for which others wait, and which are in no collective themselves; if all are in one, those
            that did not come to the one of the others.
        unlike: the calls that differ between ranks, among each rank's last 200, the earliest first, those
            that differ only in their line at the end.
    """

    calls: tuple[Call, ...]
    missing: tuple[int, ...]
    unlike: tuple[UnlikeCalls, ...]

    def __str__(self) -> str:
        rows = [("rank", "in", "call", "of ranks", "sizes", "where")]
        for call in self.calls:
            number = "" if call.number is None else str(call.number)
            if call.operation is None and number:
                number = f"after {number}"
            group = ", ".join(map(str, call.group))
            rows.append((str(call.rank), call.operation or "-", number, group, call.sizes, call.where))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
        silent = [call.rank for call in self.calls if call.number is None and call.frame and not call.frame[0]]
        for heading, ranks in (("Never came", set(self.missing) - set(silent)), ("No answer from", silent)):
            if ranks:
                lines.append(f"{heading}: {_ranks(sorted(ranks))}.")
        return "\n".join(lines + [f"{str(one)[0].upper()}{str(one)[1:]}." for one in self.unlike[:_SHOWN]])


def hang_report(stacks: Mapping[int, str], records: Mapping[int, Sequence[Mapping[str, Any]]]) -> HangReport:
    """Puts the ranks' parts together.

    Args:
        stacks: of each rank, the most recent call first; "" of a rank that has returned.
        records: of each rank that could say so, what ``diagnose.calls.recorded_calls`` returned there.
    """
    pending = {rank: next((call for call in calls if not call["done"]), None) for rank, calls in records.items()}
    awaited: dict[tuple, int] = {}
    for call in filter(None, pending.values()):
        awaited[_group(call)] = min(call["number"], awaited.get(_group(call), call["number"]))
    n_calls = {
        rank: {group: max((c["number"] for c in calls if _group(c) == group), default=0) for group in awaited}
        for rank, calls in records.items()
    }
    late = {
        rank
        for group, number in awaited.items()
        for rank in set(group[1]) & set(stacks)
        if n_calls.get(rank, {}).get(group, 0) < number
    }
    calls = []
    for rank, stack in sorted(stacks.items()):
        call = pending.get(rank)
        frame = user_frame(frames_of(stack), stack) if stack else None
        if call is not None:
            what = call["operation"], call["number"], tuple(call["ranks"]), call["sizes"]
        else:
            group = next((group for group in awaited if rank in group[1]), None)
            number = n_calls[rank][group] if group and rank in n_calls else None
            what = waits_in(stack), number, group[1] if group else (), ""
            if what[0] is not None:  # a send or a receive
                what = what[0], None, (), ""
        calls.append(Call(rank, *what, frame))
    late = sorted(late)
    free = [rank for rank in late if waits_in(stacks[rank]) is None]  # it may have a call in the background
    return HangReport(tuple(calls), tuple(free or late), tuple(unlike_calls(records)))


def endless_waits(
    stacks: Mapping[int, str],
    returned: Collection[int],
    records: Mapping[int, Sequence[Mapping[str, Any]]],
    world_size: int,
) -> list[Call]:
    """The collectives that cannot complete: who is awaited has returned, is in another one, or waits like this rank.

    What is not known counts as able to go on: a rank that computes, or that did not answer, a rank of another machine,
    sends and receives where anybody can go on.

    Args:
        stacks: of the ranks that have not returned, and that answer.
        returned: ranks that have, and that answer.
        records: of both, as those of ``hang_report``.
        world_size: the number of ranks of the job.
    """
    pending = {rank: [c for c in records[rank] if not c["done"]] for rank in stacks if waits_in(stacks[rank])}
    in_collectives = {rank: calls for rank, calls in pending.items() if calls}
    known = stacks.keys() | set(returned)
    free = set(range(world_size)) - in_collectives.keys() - set(returned)

    def spread(free: set[int]) -> set[int]:
        while more := {
            rank
            for rank in in_collectives.keys() - free
            if any(_awaited(call, records, known) <= free and _is_alike(call, records) for call in pending[rank])
        }:
            free = free | more
        return free

    receiving = pending.keys() - in_collectives.keys()
    if spread(free - receiving) or not (in_collectives or returned):
        receiving = set()  # from somebody who can go on, for all we know
    stuck = in_collectives.keys() - spread(free - receiving)
    calls = []
    for rank in sorted(stuck | receiving):
        frame = user_frame(frames_of(stacks[rank]), stacks[rank])
        call = (pending[rank] or [{"operation": waits_in(stacks[rank]), "number": None, "ranks": (), "sizes": ""}])[0]
        calls.append(Call(rank, call["operation"], call["number"], tuple(call["ranks"]), call["sizes"], frame))
    return calls


def _awaited(call: Mapping[str, Any], records: Mapping[int, Sequence[Mapping[str, Any]]], known: Set[int]) -> set[int]:
    """The ranks that have not come to a collective, as far as is known."""
    last = {rank: max((c["number"] for c in records[rank] if _group(c) == _group(call)), default=0) for rank in known}
    unknown = {rank for rank, number in last.items() if number == 0 and call["number"] > 1}  # no longer recorded
    return {rank for rank in call["ranks"] if rank in known - unknown and last[rank] < call["number"]}


def _is_alike(call: Mapping[str, Any], records: Mapping[int, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether all ranks that have come to a collective have called the same one."""
    same = [
        c for calls in records.values() for c in calls if (c["number"], _group(c)) == (call["number"], _group(call))
    ]
    return len({c["operation"] for c in same}) == 1


def unlike_calls(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[UnlikeCalls]:
    """The calls with the same number on the same group that differ between ranks."""
    same: dict[tuple, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for rank, calls in sorted(records.items()):
        for call in calls:
            same[call["number"], _group(call)][rank] = call
    found = []
    for (number, (_, group)), calls in same.items():
        made = tuple(
            Call(rank, call["operation"], number, group, call["sizes"], user_frame(call["frames"]))
            for rank, call in calls.items()
        )
        parts = {
            "operation": {call.operation for call in made},
            "sizes": {call.sizes for call in made if call.operation not in _UNEVEN},
            "line": {call.frame for call in made},
        }
        differ_in = next((name for name, values in parts.items() if len(values) > 1), None)
        if differ_in:
            found.append(UnlikeCalls(number, group, differ_in, made))
    return sorted(found, key=lambda one: (one.differ_in == "line", one.number, one.group))


def _group(call: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return call["group"], tuple(call["ranks"])


def _ranks(ranks: Sequence[int | str]) -> str:
    return label(int(ranks[0])) if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
