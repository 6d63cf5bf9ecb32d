"""All benchmarks, one table of ratios: ``make benchmarks``.

Each file runs in processes of its own; one that fails, or takes too long, leaves a row that says so. The rows of each
file that was run replace those in results.json; README.md beside this file, and what the README of the repository
quotes, are written from it. A quick pass prints only.

    python benchmarks/run.py [launch overhead ...] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sides

HERE = Path(__file__).parent
RESULTS, PAGE, README = HERE / "results.json", HERE / "README.md", sides.ROOT / "README.md"
# Files, and the seconds after which one is ended.
FILES = {
    "import_time": 300,
    "launch": 1200,
    "overhead": 3000,
    "parameter_server": 300,
    "timeline": 200,
    "checkpoint": 300,
}
PACKAGES = ("torch", "pytorch-ignite", "accelerate", "ipyparallel")
MARKS = "<!-- benchmarks/run.py writes this table -->\n", "\n<!-- its end -->"
LAUNCHES = (
    "Launches of ddl.Parallel are later ones of a session, copies of a process that has torch loaded; the first, which "
    "starts that process, takes about 2 s more. notebook_launcher copies one, too; idist.spawn and torchrun start "
    "Python anew each time."
)
# Quoted in the repository's README: what, against what.
QUOTED = [
    ("ddl.Parallel, 4 ranks", "idist.spawn"),
    ("ddl.Parallel, 4 ranks", "torchrun"),
    ("ddl.Parallel, 4 ranks", "accelerate's notebook_launcher"),
    ("ddl.Parallel, 32 ranks", "idist.spawn"),
    ("ddl.Parallel, 4 ranks", "ipyparallel's engines, already up: no process starts"),
    ("a step, dp2 (DDP)", "by hand"),
    ("a step, dp2 (DDP)", "Accelerate"),
    ("a step, dp2 (DDP)", "plain Ignite, loss reduced"),
    ("a step, dp2 (DDP)", "plain Ignite, its rank's own loss"),
    ("a step, dp2 (FSDP2)", "by hand"),
    ("a step, tp2", "by hand"),
    ("a step, pp2 (1f1b)", "by hand"),
    ("a step, dp2 × pp2 × tp2", "by hand"),
    ("a step, dp2 (DDP), width 32", "by hand"),
    ("pull and push, sync, 1 M parameters, 2 workers", "RPC by hand"),
    ("a step through the server, 1 M parameters, 2 workers", "DDP"),
    ("save, ddl.Checkpoint, dp2, width 1024", "DCP by hand"),
    ("load, ddl.Checkpoint, dp2, width 1024", "DCP by hand"),
    ("import ignite_ddl", "import torch, ignite.distributed"),
]


def rows_of(name: str, limit: float, quick: bool, folder: Path = HERE) -> list[dict]:
    """The rows of one file, and one more if it did not end well."""
    with tempfile.TemporaryDirectory() as place:
        path, log = Path(place) / "rows.json", Path(place) / "log"
        command = [sys.executable, str(folder / f"{name}.py"), "--json", str(path)] + ["--quick"] * quick
        with open(log, "w") as errors:
            process = subprocess.Popen(command, start_new_session=True, stderr=errors)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = f"took more than {limit:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        rows = json.loads(path.read_text()) if path.exists() else []
        if status != 0:
            why = status if isinstance(status, str) else f"ended with {status}"
            rows.append(sides.failed(f"{name}.py", f"{why}\n{log.read_text()[-300:]}"))
    return rows


def machine() -> dict:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_GiB": round(memory),
        "load_before": round(os.getloadavg()[0], 1),  # programs that wanted to run, in the minute before
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def page(results: dict) -> str:
    return f"""# Benchmarks

Written by `make benchmarks` from `results.json`; do not edit. One line is one ratio: the time of "what" over that
of "against", both measured in turns in one run, so below 1 the first is the faster. It is the median of the rounds'
ratios; half of them lie in the middle half. The control is "against" measured twice. What it differs from 1 is noise,
as is the middle half over the root of the rounds; a target that is nearer than that is not decided. CPU: the same
ratio in processor seconds of all ranks.

{LAUNCHES}

{described(results)}.

{sides.table(all_rows(results))}
"""


def all_rows(results: dict) -> list[dict]:
    return [found for name in FILES if name in results for found in results[name]["rows"]]


def described(results: dict) -> str:
    """Where and when; files that were run on the same machine stand together."""
    together: dict[str, list[str]] = {}
    for name in (name for name in FILES if name in results):
        found = results[name]["machine"]
        place = f"{found['processor']}, {found['cores']} cores, {found['memory_GiB']} GiB; Python {found['python']}, "
        place += ", ".join(f"{package} {found[package]}" for package in PACKAGES)
        said = f"{name}.py {found['date']}, load {found['load_before']} before, {found['minutes']} min"
        together.setdefault(place, []).append(said)
    return ". ".join(f"{place}: {'; '.join(said)}" for place, said in together.items())


def quoted(results: dict) -> str:
    """The README's table."""
    rows = {(found["what"], found.get("against")): found for found in all_rows(results)}
    lines = [LAUNCHES, "", "| what | against | time, as a ratio | middle half |", "|---|---|--:|---|"]
    for key in QUOTED:
        found = rows.get(key, {})
        low, high = map(sides.digits, found.get("middle_half", (None, None)))
        ratio = sides.digits(found.get("ratio")) or "not measured"
        lines.append(f"| {key[0]} | {key[1]} | {ratio} | {f'{low} – {high}' if low else ''} |")
    return "\n".join(lines) + f"\n\n{described(results)}."


def publish(results: dict) -> None:
    """Into both READMEs."""
    PAGE.write_text(page(results))
    text = README.read_text()
    first, last = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    README.write_text(text[:first] + quoted(results) + text[last:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "files", nargs="*", choices=[[], *FILES], metavar="file", help=f"of {', '.join(FILES)}; default all"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not what it takes")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not given.quick else {}
    for name in given.files or FILES:
        here, start = machine(), time.monotonic()
        rows = rows_of(name, FILES[name], given.quick)
        results[name] = {"machine": here | {"minutes": round((time.monotonic() - start) / 60, 1)}, "rows": rows}
        print(f"{name}.py: {results[name]['machine']['minutes']} min", flush=True)
        if not given.quick:
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            publish(results)
    print(page(results))


if __name__ == "__main__":
    main()
