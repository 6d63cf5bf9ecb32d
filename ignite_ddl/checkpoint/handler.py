"""``ddl.Checkpoint``: Ignite's handler for a model on a mesh."""

from __future__ import annotations

import atexit
import math
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint as IgniteCheckpoint
from ignite.handlers.checkpoint import BaseSaveHandler

from ignite_ddl.arguments import (
    COUNT,
    ENGINE,
    FLAG,
    FOLDER,
    FUNCTION,
    PATH,
    TEXT,
    Fits,
    a,
    one_of,
    or_none,
    shown,
    takes,
)
from ignite_ddl.checkpoint.form import RESERVED, VERSION, DamagedCheckpoint, LacksObject, NoCheckpoint
from ignite_ddl.checkpoint.kinds import Kinds
from ignite_ddl.checkpoint.loading import load
from ignite_ddl.checkpoint.owners import ENDINGS, check_free, keep, new_number, run_numbers
from ignite_ddl.checkpoint.snapshot import Snapshot, capture, merge
from ignite_ddl.checkpoint.storage import (
    Folder,
    agree,
    attempt,
    complete_checkpoints,
    is_single_process,
    on_rank_0,
    times_saved,
    write,
)
from ignite_ddl.collectives import SECONDS_IN_AN_ERROR, error_in_flight, meet
from ignite_ddl.data import ShardedDataLoader
from ignite_ddl.launch.rank import on_signal, restore_signals, wait_before_result
from ignite_ddl.mesh import get_mesh

_in_background: set[Future] = set()  # writes of all checkpoints that nobody has waited for


class Checkpoint(IgniteCheckpoint):
    """Ignite's ``Checkpoint`` on a mesh: each rank writes its own shards, and any other mesh can read them.

    Attach it as Ignite's; make it on every rank. A checkpoint is a folder, complete or not there at all. It is
    taken after all other handlers of its event, and holds, next to ``to_save``, the random states of each rank. With
    the trainer and the loader in ``to_save`` a run goes on from any iteration as if it had not been interrupted: on
    the same mesh with the same rows, random numbers and losses; on another one with the same rows, and with the same
    losses if no random number depends on the mesh. The position is that of the trainer in the loader, whatever else
    reads the loader; without a trainer, that of the ``for`` loop over it: save inside the loop.
    A loop over epochs of your own has to count an epoch as done with its last batch, since the next pass over a loader
    that was saved there is that of the next epoch.

    A run that goes on fires STARTED, and in mid-epoch EPOCH_STARTED, again; what held before their handlers is set
    again after them: what was loaded, or what you have changed since, such as a learning rate; random states always as
    they were loaded. An EPOCH_COMPLETED that was still to come is fired after STARTED. A run that is complete fires
    STARTED and COMPLETED and returns. Between two optimizer steps of gradient accumulation a checkpoint has each rank's
    gradients, and the trainer can only be loaded on the same mesh. In the middle of a step (ITERATION_STARTED, the
    update function, an exception in it) the trainer cannot be saved.

    Args:
        to_save: names to objects: the model of ``ddl.auto_model``, the optimizer of ``ddl.auto_optim``, the trainer,
            the loader of ``ddl.auto_dataloader``, and anything else with ``state_dict`` and ``load_state_dict``, such
            as schedulers, a GradScaler, EarlyStopping, metrics. Metrics that have begun to count can only be loaded
            where as many dp ranks are: elsewhere leave them out of ``to_load``. Loading runs none of a state's own
            code: a named tuple in it comes back as a tuple, a ``defaultdict`` of a function as a dict.
        save_handler: a folder on a file system that all ranks see; it is made if need be. Several runs may save into
            it under different names: one that is alive keeps what it has saved (see Note).
        filename_prefix: as in Ignite.
        score_function: as in Ignite, called on every rank; rank 0's score counts.
        score_name: as in Ignite.
        n_saved: how many checkpoints to keep, None: all. Default: 1. An old one is removed after the new one is
            complete. Those of a run before this one stay, as in Ignite, unless ``include_self`` brings their names.
        global_step_transform: as in Ignite.
        filename_pattern: as in Ignite, without an extension.
        include_self: as in Ignite.
        greater_or_equal: as in Ignite.
        asynchronous: whether to copy the shards and write them in the background, while training goes on. An error
            there is raised by the next call, or by :meth:`wait`, which the end of the trainer's run calls, or at the
            end of the function that ``ddl.Parallel.run`` runs: a rank reports after its checkpoints are complete.
            Default: False.
        digests: whether to store a CRC-32 of each part of each file, by which loading finds damage. Default: True.

    Raises:
        ValueError: if a name is not plain and visible (as with slashes, a leading dot, or nothing); if ``to_save`` has
            the trainer but not the loader that it runs on (when saving), or an object that cannot be saved; if ranks
            save different things.
        OSError: on every rank, where any of them cannot write, or where something is in the way: only checkpoints are
            replaced or removed, and none of another run that is alive, or that another ``Checkpoint`` of this run
            keeps. Earlier checkpoints stay complete.

    Note:
        A run owns the names under which it has saved, until the process of its rank 0 ends: other runs cannot replace
        or remove them. The next one can, and clears away what a killed run has left. The folder's file ``.owners``
        carries the locks for this (POSIX locks, which NFS passes on between machines unless it is mounted with
        ``nolock``). Where there are none, as on Windows, it is unknown which runs are alive: a checkpoint of the same
        name is replaced, and hidden folders that end in ``.saving`` stay until you remove them.

        Outside of ``ddl.Parallel.run`` Python waits at its end for what is written in the background; if that fails,
        it prints the error and ends with the exit status 120, which torchrun reports as a failed rank. Call
        :meth:`wait` before ``idist.finalize()`` or the end of ``idist.Parallel``: without the process group several
        ranks cannot complete a checkpoint, and it is such an error.

    Examples:
        .. code-block:: python

            import tempfile
            import torch
            from ignite.engine import Events
            import ignite_ddl as ddl

            def training(local_rank, folder, max_epochs):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
                loader = ddl.auto_dataloader(data, batch_size=4, shuffle=True)
                model = ddl.auto_model(torch.nn.Linear(3, 1), shard=True)
                optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.1))
                trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
                everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
                ddl.Checkpoint.load_newest(everything, folder)                  # if there is one
                checkpoint = ddl.Checkpoint(everything, folder, n_saved=2)
                trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
                trainer.run(loader, max_epochs=max_epochs)
                return trainer.state.iteration, trainer.state.output

            with tempfile.TemporaryDirectory() as folder:
                with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                    (steps, _), _ = parallel.run(training, folder, 1)
                    assert steps == 3                                           # saved after 2 of them
                resumed = training(0, folder, 2)                                # goes on from there, on one process
                with tempfile.TemporaryDirectory() as empty:
                    uninterrupted = training(0, empty, 2)
                assert resumed[0] == uninterrupted[0] and abs(resumed[1] - uninterrupted[1]) < 1e-6
    """

    runs_last = 2  # after the other handlers of an event: MeshEngine sorts them

    @takes(
        save_handler=FOLDER, n_saved=or_none(COUNT),
        **dict.fromkeys(("filename_prefix", "score_name", "filename_pattern"), TEXT),
        **dict.fromkeys(("score_function", "global_step_transform"), FUNCTION),
        **dict.fromkeys(("include_self", "greater_or_equal", "asynchronous", "digests"), FLAG),
    )  # fmt: skip
    def __init__(
        self,
        to_save: Mapping[str, Any],
        save_handler: str | Path,
        filename_prefix: str = "",
        score_function: Callable[[Engine], int | float] | None = None,
        score_name: str | None = None,
        n_saved: int | None = 1,
        global_step_transform: Callable | None = None,
        filename_pattern: str | None = None,
        include_self: bool = False,
        greater_or_equal: bool = False,
        *,
        asynchronous: bool = False,
        digests: bool = True,
    ) -> None:
        self.folder = Path(save_handler).absolute()  # also after os.chdir
        self.asynchronous, self.digests = asynchronous, digests
        _check_objects(to_save, "to_save", "state_dict")
        super().__init__(
            to_save,
            _Writes(self),
            filename_prefix,
            score_function,
            score_name,
            n_saved,
            global_step_transform,
            filename_pattern,
            include_self,
            greater_or_equal,
        )
        _check_names(self)
        self.mesh, self._number = get_mesh(), new_number()
        # A separate group, on gloo: in the background it would meet training's collectives, and NCCL moves no objects.
        self._group = dist.new_group(backend="gloo") if self.mesh.world_size > 1 else None
        self._in_background: Future | None = None
        self._waits_at_the_end = False
        if self.score_function is not None:
            self.score_function = self._common_score(self.score_function)

    @takes(engine=ENGINE)
    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        """Saves, if the score or the step is better than those that are kept. Every rank calls it."""
        self.wait()
        try:
            super().__call__(engine)
        except BaseException:
            self._saved = self._before
            raise
        if self.asynchronous and not self._waits_at_the_end:
            self._waits_at_the_end = True
            trainer = next(iter(Kinds.of(self.to_save).engines.values()), engine)
            trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, self.wait)

    def wait(self, *_: Any) -> None:
        """Waits until what is written in the background is complete.

        Raises:
            OSError: if it could not be written.
        """
        if self._in_background is not None:
            wait_for([self._in_background])
            pending, self._in_background = self._in_background, None
            _in_background.discard(pending)
            if pending.exception():
                self._saved = self._before
            pending.result()
        self._before = list(self._saved)

    def save(self, name: str) -> Path:
        """Saves under a given name, whatever the score, and removes nothing. Every rank calls it.

        Args:
            name: of the new folder in this checkpoint's folder. A checkpoint of that name is replaced, unless another
                run that is alive has saved it.

        Returns:
            Path: of the checkpoint.

        Raises:
            ValueError: if the name is not plain and visible, or not the same on every rank.
            OSError: if it cannot be written, or something else has that name.
        """
        self.wait()
        self._write(name, {})
        return self.folder / name

    @takes(trainer=ENGINE, signum=Fits("a signal", one_of(*signal.valid_signals()).read))
    def save_on_signal(self, trainer: Engine, signum: int = signal.SIGTERM) -> None:
        """Saves after the iteration in which any rank gets a signal, and ends the run. Every rank calls it.

        Clusters send SIGTERM some seconds before they take a machine away. The process that started the ranks
        (``ddl.Parallel`` with ``nproc_per_node``) passes it on to them, waits until they have returned, and then ends
        as by the signal; so does a notebook's kernel that gets SIGTERM. Jupyter's stop, restart and shut-down
        interrupt the cell instead: they save with ``signum=signal.SIGINT``. The checkpoint's name is "signal" and the
        iteration, after ``filename_prefix``; of these the newest is kept. Each iteration reduces one number over all
        ranks for it. When the run of ``ddl.Parallel`` ends, or outside of one that of the trainer, the process has its
        own handler of the signal again.

        Args:
            trainer: the engine to end.
            signum: the signal. Default: SIGTERM. Call this in the main thread.
        """
        handler = _OnSignal(self)
        on_signal(signum, handler.note)
        trainer.add_event_handler(Events.ITERATION_COMPLETED | Events.COMPLETED, handler)
        trainer.add_event_handler(Events.COMPLETED, restore_signals)

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint with the highest score, or of the last step; None if none was saved."""
        return self.folder / self._saved[-1].filename if self._saved else None

    @staticmethod
    @takes(checkpoint=PATH, strict=FLAG)
    def load_objects(to_load: Mapping[str, Any], checkpoint: str | Path, strict: bool = True) -> None:
        """Loads a checkpoint into objects on any mesh, or on one process. Every rank calls it.

        Where the trainer is among them, the random states are restored, too. Nothing in the folder is executed, and
        nothing is changed before names, shapes, dtypes and digests have been compared.

        Args:
            to_load: names to objects, all or some of those that were saved.
            checkpoint: the checkpoint's folder.
            strict: whether models have to have the same names as those that were saved. Default: True.

        Raises:
            ValueError: if the objects are not like those that were saved, or differ by rank; if there is no
                checkpoint, or one that a later ignite_ddl has saved in a format that this one does not know.
            DamagedCheckpoint: a ValueError: if something is missing, or not what was written. The message names it.
        """
        _, error = attempt(_check_objects, to_load, "to_load", "load_state_dict")
        folder, unreadable = attempt(Folder, checkpoint)
        same = {}
        if not (error or unreadable):
            same = {"checkpoint": (folder.path.name, folder.content["saved_ns"]), "to_load": sorted(to_load)}
        agree(unreadable or error, **same)
        load(folder, to_load, strict)

    @staticmethod
    @takes(folder=FOLDER, strict=FLAG)
    def load_newest(to_load: Mapping[str, Any], folder: str | Path, strict: bool = True) -> Path | None:
        """Loads the newest undamaged checkpoint of a folder that has what ``to_load`` asks for.

        A warning names those that are newer and damaged, or have less, such as the best model alone.

        Args:
            to_load: as in :meth:`load_objects`.
            folder: what ``save_handler`` was.
            strict: as in :meth:`load_objects`.

        Returns:
            Path: of the checkpoint that was loaded; None if the folder has none.

        Raises:
            ValueError: as in :meth:`load_objects`, or if all checkpoints are damaged or have less.
        """
        candidates = on_rank_0(lambda: complete_checkpoints(Path(folder)), None)
        skipped: list[ValueError] = []
        tries = 20
        while candidates:
            path = next(iter(candidates))
            saved = candidates.pop(path)
            try:
                Checkpoint.load_objects(to_load, path, strict)
            except (DamagedCheckpoint, LacksObject, NoCheckpoint) as error:
                now, tries = on_rank_0(lambda: times_saved(Path(folder)), None), tries - 1
                if tries and now.get(path) != saved:
                    candidates, skipped = on_rank_0(lambda: complete_checkpoints(Path(folder)), None), []
                    continue  # another run has removed or replaced it meanwhile
                if isinstance(error, NoCheckpoint):
                    raise
                skipped.append(error)
                continue
            for error in skipped if idist.get_rank() == 0 else ():
                warnings.warn(f"{error}; loaded {path} instead", stacklevel=3)
            return path
        if skipped:
            has_all = " and has all of to_load" if any(isinstance(error, LacksObject) for error in skipped) else ""
            raise ValueError(f"no checkpoint in {folder} is undamaged{has_all}: {'; '.join(map(str, skipped))}")
        return None

    @takes(load_kwargs=a("a dict of strict", lambda given: isinstance(given, Mapping) and given.keys() <= {"strict"}))
    def reload_objects(
        self, to_load: Mapping[str, Any], load_kwargs: Mapping[str, Any] | None = None, **filename_components: Any
    ) -> None:
        """As in Ignite: loads the checkpoint of a name, a score or a ``global_step`` from this handler's folder."""
        pattern = self._get_filename_pattern(filename_components.get("global_step"))
        name = next(iter(self.to_save)) if len(self.to_save) == 1 else "checkpoint"
        parts = {"name": name, "score": None, "global_step": None} | filename_components
        if unknown := sorted(filename_components.keys() - {"name", "score", "global_step"}):
            raise ValueError(f"{unknown[0]} should be name, score or global_step, the parts of a name of a checkpoint")
        found = pattern.format(filename_prefix=self.filename_prefix, score_name=self.score_name, **parts)
        self.load_objects(to_load, self.folder / found, **(load_kwargs or {}))

    def _get_filename_pattern(self, global_step: int | None) -> str:
        return super()._get_filename_pattern(global_step).removesuffix(".{ext}")

    def _setup_checkpoint(self) -> dict[str, Any]:
        return {name: {} for name in self.to_save}  # Ignite decides by the names; _write takes the states

    def _common_score(self, score_function: Callable[[Engine], int | float]) -> Callable[[Engine], int | float]:
        """Scores may differ by rank, and ranks that decide differently would wait for each other.

        Every rank calls the function, which may evaluate or reduce.
        """

        def score(engine: Engine) -> int | float:
            own, error = attempt(score_function, engine)
            return on_rank_0(lambda: own, self._group, error)

        return score

    def _write(self, name: str, metadata: Mapping[str, Any], outdated: list[str] | None = None) -> None:
        """Writes a checkpoint; with ``outdated``, the checkpoints in whose place it is kept, which it removes."""
        if error_in_flight() is not None and get_mesh().world_size > 1:  # perhaps of this rank alone
            meet("ddl.Checkpoint", SECONDS_IN_AN_ERROR, "save where no error is being handled, or on all ranks alike")
        objects = dict(self.to_save) | ({"checkpointer": self} if self.include_self else {})
        _, error = attempt(self._check, name, objects, outdated)
        agree(error, self._group, name=name if isinstance(name, str) else shown(name), to_save=sorted(objects))
        snapshot, error = attempt(self._capture, objects)
        agree(error, self._group)
        if not self.asynchronous:
            self._complete(name, snapshot, metadata, outdated or [])
            return
        background = ThreadPoolExecutor(1, "ddl.Checkpoint")  # the interpreter waits for it before it ends
        self._in_background = background.submit(self._complete, name, snapshot, metadata, outdated or [])
        background.shutdown(wait=False)
        _in_background.add(self._in_background)
        wait_before_result(self.wait)

    def _check(self, name: str, objects: Mapping[str, Any], outdated: list[str] | None) -> None:
        _check_name(name, "name")
        _check_loaders(Kinds.of(objects))
        if idist.get_rank() == 0:
            check_free(self.folder / name)
            if outdated is not None:
                keep(self.folder / name, outdated, self._number)

    def _capture(self, objects: Mapping[str, Any]) -> Snapshot:
        return capture(objects).copy() if self.asynchronous else capture(objects)

    def _complete(self, name: str, snapshot: Snapshot, metadata: Mapping[str, Any], outdated: list[str]) -> None:
        def content(states: list[Any]) -> dict[str, Any]:
            newest = max((at for at in times_saved(self.folder).values() if at < math.inf), default=0)
            return {
                "saved_ns": max(time.time_ns(), newest + 1),
                "version": VERSION,
                "run": run_numbers()[-1],
                "torch": torch.__version__,
                "metadata": dict(metadata),
                **merge(states, self.mesh),
            }

        try:
            write(self.folder / name, snapshot.shards, snapshot.state, content, self._group, self.digests, outdated)
        except BaseException:
            is_single_process(self._group)  # raises if the group was destroyed, which explains the error
            raise


class _Writes(BaseSaveHandler):
    """Ignite calls ``remove`` before it saves; here the old checkpoint is removed once the new one is complete."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.outdated = checkpoint, []

    def __call__(self, checkpoint: Mapping, filename: str, metadata: Mapping | None = None) -> None:
        outdated, self.outdated = self.outdated, []
        self.checkpoint._write(filename, metadata or {}, outdated)

    def remove(self, filename: str) -> None:
        self.outdated.append(filename)


class _OnSignal:
    runs_last = 2

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.got = checkpoint, 0

    def note(self) -> None:
        self.got = 1

    def __call__(self, engine: Engine) -> None:
        if not idist.all_reduce(self.got):
            return
        self.got = 0
        name = "signal_" if not self.checkpoint.filename_prefix else f"{self.checkpoint.filename_prefix}_signal_"
        earlier = self.checkpoint.folder.glob("*signal_*")
        outdated = [path.name for path in earlier if re.fullmatch(rf"{re.escape(name)}\d+", path.name)]
        self.checkpoint.wait()
        self.checkpoint._write(f"{name}{engine.state.iteration}", {}, outdated)
        self.checkpoint.wait()
        engine.terminate()


def _check_objects(objects: Mapping[str, Any], argument: str, method: str) -> None:
    if not isinstance(objects, Mapping) or not objects or not all(isinstance(key, str) for key in objects):
        raise ValueError(f"{argument} should be a dict of names to objects, but given {shown(objects)}")
    for key, value in objects.items():
        if not hasattr(value, method):
            raise ValueError(f"{argument}[{key!r}] should have a method {method}, but is a {type(value).__name__}")
        if "." in key or key in RESERVED:
            raise ValueError(
                f"{argument} should have names without dots, and none of {', '.join(RESERVED)}, but given {key!r}"
            )


def _check_name(name: Any, argument: str) -> None:
    """Raises a ValueError unless a folder of this name is one folder on any machine, and not hidden."""
    plain = isinstance(name, str) and name.isprintable() and "" != name == name.strip(". ") == Path(name).name
    if not plain or "\\" in name or len(name.encode()) > 200 or name.casefold().endswith(ENDINGS):
        raise ValueError(
            f"{argument} should be a plain visible name of at most 200 bytes, without slashes and control characters, "
            f"dots and spaces at its ends, and the endings {', '.join(ENDINGS)}, but given {shown(name)}"
        )


def _check_names(checkpoint: Checkpoint) -> None:
    """Checks the names that a checkpoint gets from its arguments."""
    prefix, score_name, objects = checkpoint.filename_prefix, checkpoint.score_name, list(checkpoint.to_save)
    name = objects[0] if len(objects) == 1 else "checkpoint"
    _check_name(name, "the name in to_save")
    _check_name(prefix or "none", "filename_prefix")
    _check_name("none" if score_name is None else score_name, "score_name")
    parts = {"filename_prefix": prefix, "name": name, "score_name": score_name, "score": "1", "global_step": 1}
    try:
        pattern = checkpoint._get_filename_pattern(1)
        filled = pattern.format(**parts)
    except Exception as error:
        raise ValueError(f"filename_pattern should be as Ignite's, but given {pattern!r}") from error
    _check_name(filled, "filename_pattern")


@atexit.register
def _fail_at_exit() -> None:
    """Lets Python end with status 120, as it does where flushing raises; it has waited for all threads before."""
    for future in _in_background:
        if future.done() and future.exception():  # in a process that was forked meanwhile it is not done
            sys.stdout.flush()
            sys.stdout.flush = future.result


def _check_loaders(kinds: Kinds) -> None:
    for key, engine in kinds.engines.items():
        loader = engine.state.dataloader
        if isinstance(loader, ShardedDataLoader) and not any(loader is known for known in kinds.loaders.values()):
            raise ValueError(
                f"to_save should have the loader of {key!r}, too, say as 'loader': without it a resumed run reads "
                "other rows"
            )
