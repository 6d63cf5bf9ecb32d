"""What the benchmarks share: sides measured in turns, rows of ratios, and the table of rows.

A row is one ratio, the seconds of ``what`` over those of ``against``: below 1, ``what`` is the faster. All sides of a
ratio run in turns, in the same processes where that can be, so that a busy machine slows all of them. A control is
``against`` measured twice: what its ratio differs from 1 is noise, as is the spread of the rounds, and a target nearer
than that is not decided. A part that fails becomes a row that says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RIVALS = ROOT / "build" / "benchmarks"  # `make benchmarks` puts accelerate and ipyparallel there
sys.path.append(str(RIVALS))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else processes that start compile ours anew, but not torch
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(RIVALS)]))


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    meet: Callable[[], object] = lambda: None,
    after: Callable[[str], object] = lambda name: None,
    busy: Callable[[], float] = time.process_time,
    warm_up: bool = True,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and CPU seconds of each side's calls, one a round.

    Args:
        sides: by name, what is called.
        rounds: how often. The side that begins changes from round to round, and so do the neighbours.
        meet: called before the clock starts and before it stops: a barrier.
        after: called with the side's name after each call; not timed.
        busy: the CPU seconds used so far.
        warm_up: begin with a round that does not count.
    """
    names, seconds, cpu = list(sides), {name: [] for name in sides}, {name: [] for name in sides}
    for turn in range(-1 if warm_up else 0, rounds):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order[:: -1 if turn // len(names) % 2 else 1]:
            meet()
            used = busy()
            meet()
            start = time.perf_counter()
            sides[name]()
            meet()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
                cpu[name].append(busy() - used)
            after(name)
    return seconds, cpu


def of_all_ranks(results: list[tuple[dict, dict]]) -> tuple[dict, dict]:
    """Rank 0's wall seconds and all ranks' CPU seconds, from what ``in_turns`` returned on each."""
    seconds = results[0][0]
    summed = {name: [sum(each) for each in zip(*(cpu[name] for _, cpu in results), strict=True)] for name in seconds}
    return seconds, summed


def row(
    what: str,
    against: str,
    ours: list[float],
    theirs: list[float],
    *,
    again: list[float] = (),
    cpu: tuple[list[float], list[float]] | None = None,
    target: float | None = None,
    note: str = "",
) -> dict:
    """One line of the table, from the seconds (or bytes) of both sides by round.

    Args:
        what: what was measured.
        against: what it is compared with.
        ours: of ``what``, one a round.
        theirs: of ``against``; the shorter list of the two says how many rounds count.
        again: of ``against`` once more, the control.
        cpu: CPU seconds of both sides.
        target: what the ratio should not exceed.
        note: what else to say.
    """
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=False))
    found = {"what": what, "against": against, "ratio": statistics.median(ratios), "rounds": len(ratios)}
    if len(ratios) > 2:
        found["middle_half"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
    if again:
        found["control"] = statistics.median(a / b for a, b in zip(again, theirs, strict=False))
    if cpu:
        found["cpu_ratio"] = statistics.median(a / b for a, b in zip(*cpu, strict=True))
    if target is not None:
        found |= {"target": target, "verdict": verdict(found, target)}
    found |= {"medians": [statistics.median(ours), statistics.median(theirs)]}
    return found | ({"note": note} if note else {})


def verdict(found: dict, target: float) -> str:
    """Noise is what the control moved, or about the standard error of the median, whichever is more."""
    low, high = found.get("middle_half", (0, 0))
    noise = max(abs(found.get("control", 1) - 1), (high - low) / found["rounds"] ** 0.5)
    if abs(found["ratio"] - target) <= noise:
        return f"within noise, ± {noise:.3f}"
    return "kept" if found["ratio"] <= target else "missed"


def attempt(name: str, measure: Callable[[bool], list[dict]], quick: bool, limit: float = 900) -> list[dict]:
    """The rows of a part, or one row that says why there are none. It has ``limit`` seconds."""

    def too_long(*_):
        raise TimeoutError(f"took more than {limit:g} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return measure(quick)
    except Exception as error:  # whatever it is, the other parts go on
        for child in multiprocessing.active_children():
            child.kill()
        return [failed(name, f"{type(error).__name__}: {error}")]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def failed(name: str, why: str) -> dict:
    lines = [line.strip() for line in why.replace(str(ROOT), "").splitlines() if line.strip()]
    return {"what": name, "error": " … ".join(dict.fromkeys((lines[0], lines[-1])))[:300]}


HEAD = (
    "| what | against | ratio | middle half | control | CPU | target | medians, rounds |\n"
    + "|---|---|--:|---|--:|--:|---|---|"
)


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    return "\n".join([HEAD, *lines_of(rows)])


def lines_of(rows: list[dict]) -> list[str]:
    """A line of the table for each row."""
    lines = []
    for found in rows:
        if "error" in found:
            cells = [found["what"], "", "not measured", found["error"].replace("|", "/"), "", "", "", ""]
        else:
            target = f"≤ {found['target']:.3g}: {found['verdict']}" if "target" in found else ""
            low, high = found.get("middle_half", (None, None))
            cells = [
                found["what"],
                found["against"],
                digits(found["ratio"]),
                "" if low is None else f"{digits(low)} – {digits(high)}",
                digits(found.get("control")),
                digits(found.get("cpu_ratio")),
                target,
                " / ".join(map(amount, found["medians"])) + f", {found['rounds']}",
            ]
            if "note" in found:
                cells[-1] += f"; {found['note']}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def digits(ratio: float | None) -> str:
    """Two decimals from 10, three below, and three digits that count below a tenth."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio >= 10 else f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.3g}"


def amount(number: float) -> str:
    if number > 1e4:
        return f"{number / 2**20:.0f} MiB"
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.3g} ms"


def main(description: str, parts: Mapping[str, Callable[[bool], list[dict]]]) -> None:
    """Runs the parts of one file and prints their table. Each is called with whether the pass is a quick one."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not what it takes")
    parser.add_argument("--only", default="", help="parts whose name begins so")
    parser.add_argument("--json", type=Path, help="write the rows there")
    given, rows = parser.parse_args(), []
    if not any(name.startswith(given.only) for name in parts):
        parser.error(f"--only should begin one of {', '.join(parts)}, but given {given.only!r}")
    for name, measure in parts.items():
        if name.startswith(given.only):
            print(f"{time.strftime('%H:%M:%S')}  {name}", file=sys.stderr, flush=True)
            found = attempt(name, measure, given.quick)
            print(*([] if rows else [HEAD]), *lines_of(found), sep="\n", flush=True)
            rows += found
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
