"""What ranks print, shown in rank order."""

from __future__ import annotations

import codecs
import re
import sys
import time
from pathlib import Path

from ignite_ddl.launch.job import label

HOLD_SECONDS = 30.0  # how long output of higher ranks is held back, so that short runs print in order


class Output:
    """Shows what ranks print, each line with its rank: the lowest running rank live, the others after it."""

    def __init__(self, folder: Path, ranks: list[int | str]) -> None:
        self.labels = [label(rank) for rank in ranks]
        self.files = [{name: folder / f"{rank}.{name}" for name in ("stdout", "stderr")} for rank in ranks]
        for names in self.files:
            for path in names.values():
                path.touch()
        self.offsets = [dict.fromkeys(names, 0) for names in self.files]
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = [{name: decoder(errors="replace") for name in names} for names in self.files]
        self.partial = [dict.fromkeys(names, "") for names in self.files]
        self.held: list[list[tuple[str, str]]] = [[] for _ in self.files]
        self.started = time.monotonic()

    def show(self, finished: list[bool] | None = None, all_of_it: bool = False) -> None:
        finished = finished or [False] * len(self.files)
        live = all_of_it or time.monotonic() > self.started + HOLD_SECONDS
        for index in range(len(self.files)):
            self._read(index, at_end=all_of_it)
        for index, done in enumerate(finished):
            self._write(index)
            if not done and not live:
                return

    def _read(self, index: int, at_end: bool) -> None:
        for name, path in self.files[index].items():
            try:
                with path.open("rb") as file:
                    file.seek(self.offsets[index][name])
                    data = file.read()
            except FileNotFoundError:
                continue
            self.offsets[index][name] += len(data)
            text = self.partial[index][name] + self.decoders[index][name].decode(data, final=at_end)
            # A carriage return ends a line too: progress bars use it.
            *lines, rest = re.split(r"(?<=[\n\r])", text.replace("\r\n", "\n"))
            if at_end and rest:
                lines, rest = [*lines, rest + "\n"], ""
            self.partial[index][name] = rest
            self.held[index] += [(name, line) for line in lines if line.strip("\r")]

    def _write(self, index: int) -> None:
        held, self.held[index] = self.held[index], []
        for name, line in held:
            stream = getattr(sys, name)
            # A line without words, with which a progress bar clears itself, gets no label.
            stream.write(f"[{self.labels[index]}] {line}" if line.strip() else line)
        if held:
            sys.stdout.flush()
            sys.stderr.flush()
