"""Asks the ranks of a run, from the process that has started them, where they are."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ignite_ddl.diagnose import stacks
from ignite_ddl.diagnose.report import Call, HangReport, endless_waits, hang_report
from ignite_ddl.launch.job import ALL_CALLS, PLACE, STACK_SIGNAL, Job, label

SHORT_SECONDS = 0.2  # for a rank's stack to arrive
LONG_SECONDS = 1.0  # on a busy machine
POLL_SECONDS = 0.05  # how often files are looked for


def interrupted(job: Job, running: Sequence[Any]) -> KeyboardInterrupt:
    """What Ctrl-C or a notebook's stop button raises, with a line for each rank that runs."""
    return stacks.interrupted(_stacks(job, running))


def explain_timeout(job: Job, ranks: Sequence[Any], running: Sequence[Any]) -> tuple[int | str, str, HangReport | None]:
    """Why a run has timed out.

    Args:
        job: the run.
        ranks: as the parent keeps them, with ``rank``, ``process``, ``release`` and ``done``.
        running: those that have not returned, or companions.

    Returns:
        tuple: the rank for which the others wait, else the first one; a text with all stacks; the report.
    """
    names = ", ".join(str(rank.rank) for rank in running)
    returned = [rank.rank for rank in ranks if rank.done]
    _ask(job, ranks, ALL_CALLS)
    found = _stacks(job, running)
    report = _report(job, ranks, found) if ranks else None
    missing, why = stacks.find_missing_rank(found, returned, report.missing if report else ())
    lines = [f"Not finished: {names}. Finished: {', '.join(map(str, returned)) or 'none'}.{why}"]
    for note in sorted(Path(job.folder).glob("*.waits")):
        lines.append(f"rank {note.stem} {note.read_text(errors='replace')}.")
    if report:
        lines.append(f"\n{report}")
    for rank, stack in found.items():
        lines += [f"\n{label(rank)} was here (most recent call first):", stack]
    return missing, stacks.name_cells("\n".join(lines)), report


def places_of_waits(job: Job, ranks: Sequence[Any]) -> dict[int, tuple]:
    """Of each rank that waits in a collective, send or receive: where, and how many there were. It costs little."""
    _ask(job, ranks, PLACE)
    answers = _answers(job, ranks)
    running = {rank.rank for rank in ranks if not rank.done}
    waiting = {rank: of for rank, of in answers.items() if rank in running and stacks.waits_in(of["stack"])}
    return {rank: (of["stack"], of["counted"]) for rank, of in waiting.items()}


def find_endless_waits(job: Job, ranks: Sequence[Any]) -> list[Call]:
    """The collectives of the ranks of a run that cannot complete."""
    _ask(job, ranks, ALL_CALLS)
    answers = _answers(job, ranks)
    returned = {rank.rank for rank in ranks if rank.done} & answers.keys()
    waiting = {rank: answer["stack"] for rank, answer in answers.items() if rank not in returned}
    records = {rank: answer["calls"] for rank, answer in answers.items()}
    return endless_waits(waiting, returned, records, job.world_size)


def _ask(job: Job, ranks: Sequence[Any], question: bytes) -> None:
    for rank in ranks:  # also those that have returned
        Path(job.folder, f"{rank.rank}.calls").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            rank.release.send_bytes(question)


def _answers(job: Job, ranks: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The calls and the stack of each rank that answers."""
    deadline = time.monotonic() + LONG_SECONDS
    files = {rank.rank: Path(job.folder) / f"{rank.rank}.calls" for rank in ranks}
    while time.monotonic() < deadline and not all(file.exists() for file in files.values()):
        time.sleep(POLL_SECONDS)
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def _report(job: Job, ranks: Sequence[Any], found: dict[int | str, str]) -> HangReport:
    """The report, from the ranks' stacks and the calls of those that answer."""
    answers = _answers(job, ranks)
    for rank, answer in answers.items():
        if rank in found and not stacks.frames_of(found[rank]):  # it blocks our signal, or handles it
            found[rank] = answer["stack"] or found[rank]
    records = {rank: answer["calls"] for rank, answer in answers.items()}
    return hang_report({rank.rank: found.get(rank.rank, "") for rank in ranks}, records)


def _stacks(job: Job, running: Sequence[Any]) -> dict[int | str, str]:
    if STACK_SIGNAL is None:
        return {rank.rank: "  (not known on this platform)" for rank in running}
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_SIGNAL)
    deadline = time.monotonic() + LONG_SECONDS
    time.sleep(SHORT_SECONDS)
    files = {rank.rank: Path(job.folder) / f"{rank.rank}.stack" for rank in running}
    while time.monotonic() < deadline and not all(map(stacks.is_main_thread, files.values())):
        time.sleep(POLL_SECONDS)
    found = {rank: stacks.is_main_thread(file) and stacks.read_stack(file) for rank, file in files.items()}
    return {rank.rank: found[rank.rank] or _why_no_stack(job, rank) for rank in running}


def _why_no_stack(job: Job, rank: Any) -> str:
    """What can be known of a rank that did not write its stack."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return "  (stopped, by SIGSTOP or a debugger)"
    return "  (unable to answer)" if Path(job.folder, f"{rank.rank}.stack").exists() else "  (starting)"
