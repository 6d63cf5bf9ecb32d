"""Runs test files again and again, and says how many repeats each has reached: a flake shows by its number.

python tools/repeat.py 50                                   the multi-process files, one after the other, 50 times
python tools/repeat.py 50 tests/package/test_launch.py      these
python tools/repeat.py 50 --minutes 30 --busy 2             for half an hour at most, beside two busy loops

A line a run is appended to build/repeat.log; the output of a run that failed is kept beside it. Stop it at any time.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    f"tests/package/test_{name}.py"
    for name in ("launch", "faults", "parity", "pipeline", "schedules", "parameter_server", "silent")
] + ["tests/lab/test_timeline.py"]


def burn() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repeats", type=int)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute all the time")
    options = parser.parse_args()
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    for _ in range(options.busy):
        multiprocessing.Process(target=burn, daemon=True).start()
    passed, failed = collections.Counter(), collections.Counter()
    start = time.monotonic()
    for number in range(1, options.repeats + 1):
        for file in options.files:
            if time.monotonic() - start > 60 * options.minutes:
                break
            began = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", file]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            (passed if done.returncode == 0 else failed)[file] += 1
            said = f"run {number} {file}: {'passed' if done.returncode == 0 else 'FAILED'}, "
            said += f"{time.monotonic() - began:.0f} s"
            print(said, flush=True)
            with (folder / "repeat.log").open("a") as log:
                log.write(said + "\n")
            if done.returncode:
                (folder / f"repeat-{Path(file).stem}-{number}.txt").write_text(done.stdout + done.stderr)
    for file in options.files:
        print(f"{passed[file]:4} passed {failed[file]:4} failed  {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
