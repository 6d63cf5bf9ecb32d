"""Which run owns a checkpoint. Only checkpoints are replaced or removed, and none of another run that is alive.

Each run that saves into a folder has a number. Its checkpoints hold it, and so do the names of its temporary folders.
As long as the run's rank 0 lives, it locks the byte of that number in the folder's file ``.owners``, by ``lockf``: a
``flock`` would survive in a forked DataLoader worker. The system drops the lock with the process. On NFS and other
network file systems that holds where they pass locks on between machines; a run on another machine seems dead
otherwise. Where there are no locks at all (Windows), it is unknown which runs are alive: temporary folders are left
alone, and a checkpoint of the same name is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ignite_ddl.checkpoint.form import STATE, SUMS, read_state

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
except ImportError:  # Windows
    LOCK_EX, LOCK_NB, LOCK_UN, lockf = 0, 0, 0, None

SAVING, REPLACED, REMOVED = ENDINGS = ".saving", ".replaced", ".removed"  # of temporary folders
_OWNERS, _RUNS = ".owners", "IGNITE_DDL_RUNS"
_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{8})\.(?:saving|removed)", re.DOTALL)
_OUR_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.json|SHA256SUMS")
_RENAMING = 1 << 32  # the byte that is locked while names change; those of runs are below
_threads = threading.RLock()
_runs: tuple[int, list[str]] = (0, [])  # of the process with this id
_opened: dict[tuple[int, str], int] = {}  # not closed: that would drop all locks of this process in the file
_numbers = itertools.count()
_kept: dict[str, tuple[int, int]] = {}  # of each name: which Checkpoint of this process keeps it, and when it did so


def run_numbers() -> list[str]:
    """This run's number, last, after those of the processes that started it: it may replace their checkpoints, too."""
    global _runs
    with _threads:
        if _runs[0] != os.getpid():
            _runs = os.getpid(), [*os.environ.get(_RUNS, "").split(), secrets.token_hex(4)]
            os.environ[_RUNS] = " ".join(_runs[1])
        return _runs[1]


def _lock(folder: Path, byte: int, how: int) -> bool | None:
    """Locks a byte, or unlocks it. False: another process has it. None: locks do not work in this folder."""
    if lockf is None:
        return None
    path, key = folder / _OWNERS, (os.getpid(), os.path.realpath(folder))
    with _threads:
        try:
            known = os.path.samestat(os.fstat(_opened[key]), os.stat(path))
        except (KeyError, OSError):
            known = False
        try:
            if not known:
                opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                _opened.pop(key, None)  # of a file that was removed; the new one is the last to be given up
                _opened[key] = opened
        except OSError:  # as where another user owns it
            return None
        if len(_opened) > 100:  # folders in one process: the first one is given up
            os.close(_opened.pop(next(iter(_opened))))
        file = _opened[key]
    try:
        lockf(file, how, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_alive(folder: Path, run: str) -> bool | None:
    """Whether a run is alive; None: unknown."""
    free = run != run_numbers()[-1] and _lock(folder, int(run, 16), LOCK_EX | LOCK_NB)
    if free:
        _lock(folder, int(run, 16), LOCK_UN)
    return free if free is None else not free


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and (path / SUMS).is_file() and (path / STATE).is_file()


def _belongs_to_live_run(path: Path) -> bool:
    """Whether another run that is alive has written a checkpoint."""
    try:
        run = str(read_state(path)["run"])
    except Exception:  # damaged
        return False
    return (
        run not in run_numbers() and re.fullmatch("[0-9a-f]{8}", run) is not None and bool(_is_alive(path.parent, run))
    )


def check_free(path: Path) -> None:
    """Raises unless a checkpoint may get this name.

    Raises:
        FileExistsError: if there is something that is no checkpoint, or one of another run that is alive.
    """
    if _is_checkpoint(path.parent):
        raise FileExistsError(
            f"save_handler should be a folder of checkpoints, but {path.parent} is one: what is saved in it would be "
            "removed with it"
        )
    for found in filter(os.path.lexists, (path, path.with_name(path.name + REPLACED))):
        why = "is there already, and is no checkpoint" if not _is_checkpoint(found) else None
        if why or _belongs_to_live_run(found):
            why = why or "was saved by another run that is still alive"
            raise FileExistsError(f"{found} {why}, so that it is not replaced: take another name, or another folder")


def new_number() -> int:
    """A number for a ``ddl.Checkpoint``, by which :func:`keep` knows it, and knows when it was made."""
    return next(_numbers)


def keep(path: Path, outdated: Sequence[str], keeper: int) -> None:
    """Notes that a ``ddl.Checkpoint`` of this process keeps this name from now on, in the place of those outdated.

    Raises:
        FileExistsError: if another one that has kept names since this one was made keeps any of them; one that was in
            use before that, as in the cell of a notebook that is run again, may be replaced.
    """
    names = [os.path.realpath(name) for name in (path, *map(path.with_name, outdated))]
    for name in names:
        other, since = _kept.get(name, (keeper, 0))
        if other != keeper and since > keeper:
            raise FileExistsError(
                f"{name} is kept by another ddl.Checkpoint of this run, which would lose it: give each of them a "
                "filename_prefix or a folder of its own"
            )
    for name in names[1:]:
        _kept.pop(name, None)
    _kept[names[0]] = keeper, next(_numbers)


def _temporary_path(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{next(_numbers)}.{run_numbers()[-1]}{ending}")


def make_temporary_folder(path: Path) -> Path:
    """Makes the hidden folder for what is written, and removes what runs that are dead have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # With each save: closing any other descriptor of the file in this process drops the lock.
    _lock(path.parent, int(run_numbers()[-1], 16), LOCK_EX)
    for left in path.parent.iterdir():
        found = _TEMPORARY.fullmatch(left.name)
        if found and _is_alive(path.parent, found[1]) is False:
            with contextlib.suppress(OSError):
                remove(left)
    saving = _temporary_path(path, SAVING)
    saving.mkdir()
    return saving


def publish(saving: Path, path: Path, outdated: Sequence[str]) -> None:
    """Gives a complete checkpoint its name, in the place of one that has it, and removes those that are outdated."""
    replaced = path.with_name(path.name + REPLACED)  # not hidden: it is valid until the new one has its name
    discarded = []
    with _locked_names(path.parent):
        check_free(path)
        if path.exists():
            if replaced.exists():
                discarded.append(replaced.rename(_temporary_path(replaced, REMOVED)))
            path.rename(replaced)
        saving.rename(path)
        sync_folder(path.parent)
        for old in (replaced, *map(path.with_name, outdated)):
            if _is_checkpoint(old) and not old.samefile(path) and not _belongs_to_live_run(old):
                discarded.append(old.rename(_temporary_path(old, REMOVED)))
    for old in discarded:
        remove(old)


def remove(path: Path) -> None:
    """Removes a temporary folder; no other function deletes.

    Raises:
        FileExistsError: if it holds anything else than a checkpoint, or files of an incomplete one.
    """
    with contextlib.suppress(FileNotFoundError):  # another one removes it, too
        of_one = not path.is_symlink() and all(_OUR_FILES.fullmatch(name) for name in os.listdir(path))
        if not _TEMPORARY.fullmatch(path.name) or not (of_one or _is_checkpoint(path)):
            raise FileExistsError(f"{path} is no checkpoint, so that it is not removed")
        shutil.rmtree(path)


@contextlib.contextmanager
def _locked_names(folder: Path) -> Iterator[None]:
    """No other thread or process changes names in the folder meanwhile."""
    with _threads:
        _lock(folder, _RENAMING, LOCK_EX)
        try:
            yield
        finally:
            _lock(folder, _RENAMING, LOCK_UN)


def sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
