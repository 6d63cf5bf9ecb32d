"""Where the ranks were when a run was stopped: their stacks, summarised in one line per rank."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import ignite
import torch

from ignite_ddl.launch.job import label

Frame = tuple[str, int, str]  # file, line, function
_PACKAGE = str(Path(__file__).parents[1])
_RANK = str(Path(_PACKAGE, "launch/rank.py"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ON_EVERY_RANK = tuple(str(Path(_PACKAGE, name)) for name in ("checkpoint", "state.py", "model.py", "mesh.py"))
_LIBRARIES = (
    *(_PACKAGE, "<frozen", _TORCH, os.path.dirname(ignite.__file__) + os.sep),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),  # such as pip install --user's
)


class _Interrupted(KeyboardInterrupt):
    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]  # called by IPython, as that of RankError


_Interrupted.__name__ = "KeyboardInterrupt"  # which a notebook keeps


def read_stack(path: Path) -> str:
    """The frames that faulthandler wrote, the most recent first, up to the user's function."""
    return _from_user(path.read_text(errors="replace") if path.exists() else "")


def is_main_thread(stack: Path) -> bool:
    """Whether this is the main thread's stack: if it blocks all signals, another thread gets ours."""
    text = stack.read_text(errors="replace") if stack.exists() else ""
    return text.rstrip().endswith("...") or any(f" in {name}" in text for name in ("rank_main", "companion_main"))


def thread_stack(thread: int) -> str:
    """The frames of a thread of this process, in the same form."""
    frames = reversed(traceback.extract_stack(sys._current_frames()[thread]))
    return _from_user("\n".join(f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in frames))


def _from_user(text: str) -> str:
    frames = [line for line in text.splitlines() if line.startswith("  File")]
    for name in ("run_here", "rank_main"):
        launcher = [i for i, line in enumerate(frames) if _RANK in line and line.rstrip().endswith(f" in {name}")]
        if launcher == [0]:
            return f"  (in {'its function, in code that is not Python' if name == 'run_here' else 'its set-up'})"
        if launcher:
            return "\n".join(frames[: launcher[-1]])
    return "\n".join(frames)


def name_cells(text: str) -> str:
    """Replaces ``File "/tmp/ipykernel_7/42.py", line 3`` by ``Cell In[5], line 3``, as IPython does."""
    numbers = getattr(getattr(_shell(), "compile", None), "_filename_map", {})

    def name(match: re.Match) -> str:
        return f"Cell In[{numbers[match[1]]}]" if match[1] in numbers else match[0]

    return re.sub(r'File "([^"]+)"', name, text)


def find_missing_rank(
    stacks: dict[int | str, str], returned: list[int], known: Sequence[int] = ()
) -> tuple[int | str, str]:
    """The rank for which the others wait in a collective, else the first rank; and a line that explains it.

    Args:
        stacks: of the ranks that have not returned.
        returned: the others.
        known: those for which others wait by the record of their calls; without it, who is in another call.
    """
    calls = {rank: waits_in(stack) for rank, stack in stacks.items()}
    if not any(calls.values()):
        return next(iter(stacks)), ""
    common = Counter(filter(None, calls.values())).most_common(1)[0][0]
    missing = sorted((rank for rank in calls if calls[rank] != common), key=lambda rank: calls[rank] is not None)
    missing = [rank for rank in known if rank in stacks] if known else missing
    waiting = ", ".join(str(rank) for rank in calls if calls[rank] == common and rank not in missing)
    places = [f"{label(rank)} was {_place(stacks[rank])}" for rank in missing]
    places += [f"{label(rank)} had returned" for rank in returned if rank in known or not known]
    why = f"Missing: {'; '.join(places)}." if places else "No rank is missing: compare lines, groups and sizes."
    waits = f"Waiting in {common}: {waiting}. " if waiting else ""
    cure = _on_every_rank(stacks, len(stacks) + len(returned))
    if not cure and any(calls[rank] for rank in missing):
        cure = (
            "\nRanks wait for each other in different calls: run a model, an evaluator or a save on all of them, or "
            "none; with shard=True, call each layer equally often on all of them: a loop must not end by a rank's rows."
        )
    return [*missing, *calls][0], f"\n{waits}{why}{cure}"


def _on_every_rank(stacks: dict[int | str, str], n_ranks: int) -> str:
    """A line that names what of this package every rank has to call, if some wait in it and others are not in it."""
    inside: dict[tuple[str, str], list[str]] = {}
    for rank, stack in stacks.items():
        frames = frames_of(stack)
        user = next((at for at, (file, *_) in enumerate(frames) if not file.startswith(_LIBRARIES)), len(frames))
        ours = [(file, name) for file, _, name in frames[:user] if file.startswith(_ON_EVERY_RANK)]
        if ours and waits_in(stack):  # the outermost, which the user has called
            inside.setdefault(ours[-1], []).append(str(rank))
    for (file, name), ranks in inside.items():
        if len(ranks) < n_ranks:
            called = "ddl.Checkpoint" if file.endswith("handler.py") else f"ddl.{name}"
            only = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
            return f"\nOnly {only} came to {called}: make, attach and call it on every rank, not under `if rank == 0`."
    return ""


def interrupted(stacks: dict[int | str, str]) -> KeyboardInterrupt:
    """What Ctrl-C or a notebook's stop button raises, with one line per rank; in a terminal, these are printed."""
    text = "\n".join(f"{label(rank)} was {_place(stack)}" for rank, stack in stacks.items())
    if _shell() is not None:
        return _Interrupted(f"the ranks were stopped\n{text or 'none was in the function'}")
    if text:
        print(text, file=sys.stderr, flush=True)
    return KeyboardInterrupt()


def frames_of(stack: str) -> list[Frame]:
    return [(file, int(line), name) for file, line, name in re.findall(r'File "(.+)", line (\d+) in (.+)', stack)]


def waits_in(stack: str) -> str | None:
    """The collective, send or receive in which a rank waits, or None."""
    call = None
    for file, line, name in frames_of(stack):
        if not file.startswith(_TORCH):
            waits = call is None and ".wait(" in linecache.getline(file, line)
            return "an asynchronous call" if waits else call
        if name == "_engine_run_backward":  # DDP's all-reduce, or FSDP's
            return "backward"
        if file.endswith("distributed_c10d.py") or "distributed" in file and call is None:
            call = name
    return call


def _place(stack: str) -> str:
    """The innermost line of the user's code, such as "at train.py:12 in step, waiting in all_reduce"."""
    frame, call = user_frame(frames_of(stack), stack), waits_in(stack)
    return ("at " if frame[0] else "") + place_of(frame) + (f", waiting in {call}" if call else "")


def user_frame(frames: Sequence[Frame], otherwise: str = "in code that is not Python") -> Frame:
    """The innermost frame of the user's code, else of all, the most recent first; without frames, ``otherwise``."""
    frames = [tuple(frame) for frame in frames] or [("", 0, otherwise.strip(" ()"))]
    return next((frame for frame in frames if not frame[0].startswith(_LIBRARIES)), frames[0])


def calls() -> str:
    """The lines of the user's code that call this, such as "at Cell In[5], line 3, in <module>, at train.py:8 in f"."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_stack()]
    return ", ".join(f"at {place_of(frame)}" for frame in frames if not frame[0].startswith(_LIBRARIES))


def place_of(frame: Frame) -> str:
    """Such as "train.py:12 in step", or "Cell In[5], line 3, in step"; else what is known."""
    file, line, name = frame
    if not file:
        return name
    cell = name_cells(f'File "{file}"')
    place = f"{cell}, line {line}," if cell.startswith("Cell") else f"{Path(file).name}:{line}"
    return f"{place} in {name}"


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
