"""ddl.Checkpoint when things go wrong: killed at any step, full disks, damaged files, files of strangers, signals."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import ignite.distributed as idist
import numpy
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import launch, parallel
from torch import nn

import ignite_ddl as ddl
from ignite_ddl import collectives
from ignite_ddl.checkpoint import DamagedCheckpoint
from ignite_ddl.checkpoint.form import METADATA, SUMS
from ignite_ddl.checkpoint.storage import Folder
from ignite_ddl.launch.parallel import PRELOAD


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def small_run(**options):
    """On any mesh."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 2))
    loader = ddl.auto_dataloader(data, batch_size=4, shuffle=True)
    model = ddl.auto_model(net(), shard=True)
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, **options)
    return {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}


def training(folder, steps, each=None, **kwargs):
    """It saves after each step; ``each`` is called before that."""
    things = small_run()
    model, _, trainer, loader = things.values()
    checkpoint = ddl.Checkpoint(things, folder, **kwargs)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, each or (lambda: None))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=steps), trainer.terminate)
    trainer.run(loader, max_epochs=3)
    return model, checkpoint


def weights_in(path):
    model = net()
    ddl.Checkpoint.load_objects({"model": model}, path)
    return [p.tolist() for p in model.parameters()]


def newest(folder):
    model = net()
    path = ddl.Checkpoint.load_newest({"model": model}, folder)
    return path, [p.tolist() for p in model.parameters()]


def names_in(folder):
    """Of all but the file with the locks of runs."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".owners")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints after steps 1 and 2, when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("two")
    launch({"dp": 2}, lambda rank: training(folder, 2, n_saved=None) and None)
    return folder


@pytest.fixture(scope="module")
def kept(two):
    """What is in them."""
    return {step: weights_in(two / f"checkpoint_{step}") for step in (1, 2)}


# ------------------------------------------------------------------------------------ killed at any step


class KillAt:
    """Ends this process at the n-th thing that it does to a folder: each file or folder that it opens, makes, renames,
    removes, lists or forces to disk."""

    def __init__(self, folder, number):
        self.folder, self.number, self.count, self.armed = str(folder), number, 0, False
        sys.addaudithook(self.hook)
        fsync = os.fsync
        os.fsync = lambda file: (self.step(), fsync(file))

    def hook(self, event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir") and (
            isinstance(args[0], str | Path) and str(args[0]).startswith(self.folder)
        ):
            self.step()

    def step(self):
        if self.armed:
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, folder, who, number):
    """Two steps; a rank is killed at a point of the second save, of which removing the first is a part."""
    kill = KillAt(folder, number if rank == who else 0)
    steps = []

    def each():
        steps.append(None)
        kill.armed = len(steps) == 2

    training(folder, 2, each)
    return kill.count


def number_of_points(folder, who):
    return launch({"dp": 2}, killed, folder, who, 0)[who]


LAST = {0: 32, 1: 3}  # steps of a save on each rank
POINTS = [(who, number) for who, last in LAST.items() for number in range(1, last + 1)]
SOME = {(0, n) for n in (5, 16, 25)} | {(1, 3)}


@pytest.mark.parametrize(("who", "number"), [
    point if point in SOME else pytest.param(*point, marks=pytest.mark.slow) for point in POINTS
])  # fmt: skip
def test_killed_at_any_step_the_last_checkpoint_is_whole(who, number, kept, tmp_path):
    with contextlib.suppress(ddl.RankError):  # on another Python a save may have fewer steps
        launch({"dp": 2}, killed, tmp_path, who, number)
    path, weights = newest(tmp_path)
    step = int(path.name.removeprefix("checkpoint_"))
    assert weights == kept[step]
    # The next run goes on from there, and clears away what is left.
    launch({"dp": 2}, lambda rank: training(tmp_path, 2) and None)
    assert [name for name in names_in(tmp_path) if name.startswith(".")] == []


def test_these_are_all_steps(tmp_path):
    """The list above goes to the end: it would be silent about steps that it does not know."""
    found = {who: number_of_points(tmp_path / str(who), who) for who in LAST}
    assert 24 < found[0] <= LAST[0]
    assert 2 < found[1] <= LAST[1]
    with pytest.raises(ddl.RankError, match="SIGKILL"):
        launch({"dp": 2}, killed, tmp_path / "one", 1, LAST[1])


def test_a_kill_between_two_renames(tmp_path):
    """The same name once more: the old folder steps aside, and counts until the new one is there."""
    model, checkpoint = training(tmp_path, 1)
    path = tmp_path / "checkpoint_1"
    path.rename(tmp_path / "checkpoint_1.replaced")
    found, weights = newest(tmp_path)
    assert found.name == "checkpoint_1.replaced"
    checkpoint.save("checkpoint_1")
    assert names_in(tmp_path) == ["checkpoint_1"]
    checkpoint.save("checkpoint_1")
    assert newest(tmp_path)[1] == weights


# ------------------------------------------------------------------------- names, and what is not ours

NOT_PLAIN = ["", ".", "..", "../x", "/tmp/x", "a/b", "x/", ".x", " x", "x ", "x.", "x\n", "x\0", "a\\b", "x" * 300,
             "\ud800", "x\u200b", "x.saving", "x.Removed", "x.replaced", None, 3, Path("x")]  # fmt: skip


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def precious(tmp_path):
    """A folder with a checkpoint and a user's files, whose names are like ours."""
    checkpoint = ddl.Checkpoint({"model": net()}, tmp_path)
    checkpoint.save("first")
    for name in ("plots", "plots.replaced", "signal_processing", ".plots.saving", ".plots.removed", "signal_7",
                 ".x.0.deadbeef.saving", ".x.0.deadbeef.removed", "old.replaced"):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("precious")
    (tmp_path / "plots" / "SHA256SUMS").write_text("of something else")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    return checkpoint


@pytest.mark.parametrize("name", NOT_PLAIN, ids=lambda name: ascii(name)[:20])
def test_a_name_that_is_not_plain_is_refused(name, precious, tmp_path):
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="name should be a plain visible name .* but given"):
        precious.save(name)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["plots", "signal_processing", "file", "link", "lost", "signal_7", "old"])
def test_only_checkpoints_are_replaced(name, precious, tmp_path):
    before = contents(tmp_path)
    with pytest.raises(OSError, match=f"{name}(.replaced)? is there already, and is no checkpoint"):
        precious.save(name)
    assert contents(tmp_path) == before
    precious.save("first")
    assert {p: c for p, c in contents(tmp_path).items() if "first" not in str(p)} == {
        p: c for p, c in before.items() if "first" not in str(p)
    }


def test_what_is_outdated_is_removed_only_if_it_is_a_checkpoint(precious, tmp_path):
    before = contents(tmp_path)
    outdated = ["plots", "signal_7", "file", "link", "lost", "nothing", "first"]
    precious._write("second", {}, outdated)
    assert not (tmp_path / "first").exists()
    assert contents(tmp_path / "second")
    after = contents(tmp_path)
    assert all(after[path] == content for path, content in before.items() if "first" not in str(path))
    precious._write("second", {}, ["second"])
    assert contents(tmp_path / "second")


def test_nothing_is_saved_in_a_checkpoint(precious, tmp_path):
    """It would be removed with it."""
    with pytest.raises(OSError, match="save_handler should be a folder of checkpoints, but .*first is one"):
        ddl.Checkpoint({"model": net()}, tmp_path / "first").save("second")
    assert not (tmp_path / "first" / "second").exists()


class Odd:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"a": self.value}

    def load_state_dict(self, state):
        self.value = state["a"]


def nested(depth):
    return [nested(depth - 1)] if depth else 1


(A_CIRCLE := []).append(A_CIRCLE)
NO_JSON = {"deep": nested(120), "circle": A_CIRCLE, "complex": numpy.complex128(1j), "time": numpy.datetime64("2026"),
           "digits": 10**5000, "sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta")}  # fmt: skip


@pytest.mark.parametrize("what", NO_JSON)
def test_a_state_that_could_not_be_loaded_is_not_saved(what, tmp_path):
    checkpoint = ddl.Checkpoint({"model": net(), "own": Odd(NO_JSON[what])}, tmp_path)
    with pytest.raises(ValueError, match=r"^own\.a.* should be "):
        checkpoint.save("x")
    checkpoint.to_save["own"].value = nested(90)
    checkpoint.save("x")
    ddl.Checkpoint.load_objects(checkpoint.to_save, tmp_path / "x")
    assert names_in(tmp_path) == ["x"]


def test_texts_that_no_file_can_hold(tmp_path):
    for to_save in ({"own": Odd("\ud800")}, {"\ud800": Odd(1), "own": Odd(1)}):
        with pytest.raises(ValueError, match="to_save should have names and texts that UTF-8 can hold"):
            ddl.Checkpoint(to_save, tmp_path).save("x")
    with pytest.raises(ValueError, match="save_handler should be a folder"):
        ddl.Checkpoint({"own": Odd(1)}, "\ud800")


def test_on_a_file_system_without_upper_case(precious, tmp_path, monkeypatch):
    """There the outdated "SECOND" is the new "second"."""
    real = Path.with_name
    monkeypatch.setattr(Path, "with_name", lambda path, name: real(path, "second" if name == "SECOND" else name))
    precious._write("second", {}, ["SECOND"])
    assert weights_in(tmp_path / "second")


def test_arguments_that_make_names_are_checked(tmp_path):
    model = net()
    refused = [
        ({}, {"filename_prefix": name}, "filename_prefix should be") for name in NOT_PLAIN if name not in ("", None)
    ]
    refused += [({}, {"score_name": name}, "score_name should be") for name in ("", "val/acc", "../x", "a\nb")]
    patterns = (
        "a/{name}",
        ".{name}",
        "../{name}",
        "{name}/{global_step}.{ext}",
        "",
        "{name}.saving",
        "{nam}",
        "{name",
        "{}",
    )
    refused += [({}, {"filename_pattern": pattern}, "filename_pattern should be") for pattern in patterns]
    refused += [
        ({"to_save": {name: model}}, {}, "name in to_save should be") for name in ("a/b", "", "a\nb", "x" * 300)
    ]
    for name in ("random states", "runs of engines"):
        refused += [({"to_save": {name: model, "model": model}}, {}, "to_save should have names without dots")]
    refused += [({"save_handler": ""}, {}, "save_handler should be a folder")]
    for given, more, message in refused:
        with pytest.raises(ValueError, match=message):
            ddl.Checkpoint(**({"to_save": {"model": model}, "save_handler": tmp_path} | given), **more)
    trainer = small_run()["trainer"]
    for step in ("../x", "a/b", "x" * 300):
        given = {"score_function": lambda engine: 1, "global_step_transform": lambda *_, step=step: step}
        with pytest.raises(ValueError, match="name should be a plain"):
            ddl.Checkpoint({"model": model}, tmp_path, **given)(trainer)
    assert names_in(tmp_path) == []
    for more in ({"filename_prefix": "best run"}, {"filename_pattern": "{global_step:04d}-{name}.{ext}"},
                 {"score_name": "val acc", "score_function": lambda engine: 1}):  # fmt: skip
        ddl.Checkpoint({"model": model}, tmp_path, **more)(trainer)
    assert names_in(tmp_path) == ["0000-model", "best run_model_0", "model_val acc=1"]


def unlike_calls(rank, folder):
    things = small_run()

    class Own(Exception):
        def __init__(self, code):
            super().__init__(f"own error {code}")
            self.lock = threading.Lock()

    class Failing:
        def state_dict(self):
            if rank == 1:
                raise Own(7)
            return {}

    checkpoint = ddl.Checkpoint({"model": things["model"]}, folder)
    with pytest.raises(
        ValueError, match="name should be the same on every rank, but is 'one0' on rank 0 and 'one1' on"
    ):
        checkpoint.save(f"one{rank}")
    with pytest.raises(ValueError, match="plain visible name"):
        checkpoint.save("one" if rank == 0 else "../one")
    with pytest.raises(OSError, match="mine is there already"):
        checkpoint.save("mine")
    with pytest.raises(Exception, match=r"own error 7") as told:
        ddl.Checkpoint(things | {"failing": Failing()}, folder).save("x")
    assert (type(told.value).__name__, "Own" in str(told.value)) == (("RuntimeError", True), ("Own", False))[rank]

    def fails_by_rank(self):
        raise OSError("of rank 0") if rank == 0 else ValueError("of rank 1")

    Failing.state_dict = fails_by_rank  # what is raised decides what ranks do next
    with pytest.raises(OSError, match="of rank 0"):
        ddl.Checkpoint({"failing": Failing()}, folder).save("x")
    some = dict(list(things.items())[: 4 - rank])
    with pytest.raises(
        ValueError, match=r"to_save should be the same on every rank, but is \['loader', 'model'.* on rank 0"
    ):
        ddl.Checkpoint(some, folder).save("x")
    checkpoint.save("a")
    checkpoint.save("b")
    ddl.Checkpoint(things, folder).save("all")
    with pytest.raises(ValueError, match="checkpoint should be the same on every rank, but is .'a', "):
        ddl.Checkpoint.load_objects({"model": things["model"]}, folder / "ab"[rank])
    with pytest.raises(ValueError, match="to_load should be the same on every rank"):
        ddl.Checkpoint.load_objects(some, folder / "all")


def test_calls_that_differ_by_rank_are_said_so_on_all(tmp_path):
    (tmp_path / "mine").mkdir()
    launch({"dp": 2}, unlike_calls, tmp_path)
    assert names_in(tmp_path) == ["a", "all", "b", "mine"]


def test_an_export_removes_what_an_export_has_left(tmp_path):
    model = net()
    ddl.export_weights(model, tmp_path, 100)
    theirs = ("model-00001-of-00009.safetensors", "model-best-of-3.safetensors", "model-1-of-2.safetensors")
    for name in theirs:
        (tmp_path / name).write_text("precious")
    for size in (200, None):
        ddl.export_weights(model, tmp_path, size)
        assert all((tmp_path / name).read_text() == "precious" for name in theirs)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*theirs, "model.safetensors"])


def test_an_export_that_fails_leaves_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(2, 2, dtype=torch.complex128))  # which safetensors do not know
    with pytest.raises(
        ValueError, match="has '1.weight' of the type torch.complex128, which safetensors does not know"
    ):
        ddl.export_weights(model, tmp_path / "out", 5000)
    assert not list((tmp_path / "out").iterdir())


# --------------------------------------------------------------------------------- two jobs in one folder


@pytest.mark.parametrize("when", ["__init__", "check"])
def test_a_checkpoint_that_another_run_replaces_while_it_is_read(when, tmp_path, monkeypatch):
    model = net()
    checkpoint, real = ddl.Checkpoint({"model": model}, tmp_path), getattr(Folder, when)

    def replaced(self, *args):
        if not (tmp_path / "new").exists():
            checkpoint.save("new")
            shutil.rmtree(tmp_path / "old")
        return real(self, *args)

    checkpoint.save("old")
    monkeypatch.setattr(Folder, when, replaced)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ddl.Checkpoint.load_newest({"model": model}, tmp_path) == tmp_path / "new"


def beside(function, *args):
    """A job of one process, which is no child of a job that saves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def one_job(pipe, folder):
    """Saves under the names that it is told, and says what came of it."""
    os.environ.pop("IGNITE_DDL_RUNS", None)
    checkpoint = ddl.Checkpoint({"model": net()}, folder)
    pipe.send("ready")
    while True:
        name, dies = pipe.recv()
        fsync = os.fsync

        def die(file):
            pipe.send("in the middle")
            time.sleep(60)

        os.fsync = die if dies else fsync
        try:
            checkpoint.save(name)
            pipe.send(name)
        except OSError as error:
            pipe.send(str(error))


def test_what_another_run_has_written_is_left_alone_while_it_lives(tmp_path):
    jobs = [beside(one_job, tmp_path) for _ in range(2)]
    (a, to_a), (b, to_b) = jobs
    try:
        assert to_a.recv() == to_b.recv() == "ready"

        def told(pipe, name, dies=False):
            pipe.send((name, dies))
            assert pipe.poll(30)
            return pipe.recv()

        assert told(to_a, "last") == "last"
        assert told(to_a, "last") == "last", "its own"
        assert "last was saved by another run that is still alive" in told(to_b, "last")
        assert told(to_b, "other") == "other"
        shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name} copied")  # reads the file of the locks
        assert told(to_a, "next", dies=True) == "in the middle"
        [saving] = tmp_path.glob(".*.saving")
        assert told(to_b, "other") == "other"
        assert saving.exists(), "a living run is writing it"
        a.kill()
        a.join()
        assert told(to_b, "last") == "last"
        assert names_in(tmp_path) == ["last", "other"], "what the dead one has left is removed"
    finally:
        for process, _ in jobs:
            process.kill()


def test_a_reader_in_the_same_process_does_not_free_its_names(tmp_path):
    """The system drops a process's locks when it closes any descriptor of the file; the next save takes them again."""
    checkpoint = ddl.Checkpoint({"model": net()}, tmp_path)
    checkpoint.save("a")
    (tmp_path / ".owners").read_bytes()
    checkpoint.save("b")
    job, pipe = beside(one_job, tmp_path)
    try:
        assert pipe.recv() == "ready"
        pipe.send(("a", False))
        assert "still alive" in pipe.recv()
    finally:
        job.kill()


def test_two_handlers_of_one_process_save_under_one_name(tmp_path):
    model = net()
    first, second = (ddl.Checkpoint({"model": model}, tmp_path, asynchronous=True) for _ in range(2))
    for _ in range(5):
        first.save("same")
        second.save("same")
    first.wait()
    second.wait()
    assert names_in(tmp_path) == ["same"]
    assert weights_in(tmp_path / "same") == [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("kept", [(3, 1), (1, 3)])
def test_a_handler_removes_no_checkpoint_that_another_one_keeps(kept, tmp_path):
    """The second one says so at its first checkpoint. One of an earlier training in this process may be replaced."""

    def train(*n_saved, **options):
        torch.manual_seed(0)
        model, trainer = ddl.auto_model(net()), ddl.MeshEngine(lambda *_: None)
        for n in n_saved:
            handler = ddl.Checkpoint({"model": model}, tmp_path, n_saved=n, **options)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
        trainer.run(range(2), max_epochs=3)

    with pytest.raises(OSError, match="model_2 is kept by another .*: give each of them a filename_prefix"):
        train(*kept)
    assert names_in(tmp_path) == ["model_2"]
    for _ in range(2):
        train(3)
        assert names_in(tmp_path) == ["model_2", "model_4", "model_6"]
    train(1, filename_prefix="last")
    assert names_in(tmp_path) == ["last_model_6", "model_2", "model_4", "model_6"]


def test_many_folders_in_one_process(tmp_path):
    before = len(os.listdir("/dev/fd"))
    for number in range(120):
        ddl.Checkpoint({"model": nn.Linear(1, 1)}, tmp_path / str(number)).save("a")
    assert len(os.listdir("/dev/fd")) < before + 110


def test_where_there_are_no_locks(tmp_path, monkeypatch):
    """As on Windows: what is on its way is left alone, a checkpoint of the same name is replaced."""
    monkeypatch.setattr("ignite_ddl.checkpoint.owners.lockf", None)
    checkpoint = ddl.Checkpoint({"model": net()}, tmp_path)
    checkpoint.save("a")
    (tmp_path / ".b.0.01234567.saving").mkdir()
    state_of(lambda state: state | {"run": "01234567"})(tmp_path / "a")
    checkpoint.save("a")
    assert names_in(tmp_path) == [".b.0.01234567.saving", "a"]


# ------------------------------------------------------------------------------------------- full disks


def on_a_full_disk(rank, folder):
    model = ddl.auto_model(nn.Linear(6, 40_000), shard=True)
    checkpoint = ddl.Checkpoint({"model": model}, folder)
    checkpoint.save("first")
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"second could not be written \(rank 1:"):
        checkpoint.save("second")


def test_a_full_disk_is_named_on_all_ranks(tmp_path):
    launch({"dp": 2}, on_a_full_disk, tmp_path)
    assert names_in(tmp_path) == ["first"]


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    things, file = {"model": nn.Linear(2, 2)}, tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match="file"):
        ddl.Checkpoint(things, file / "within").save("x")
    for path in (file, "/dev/null"):
        with pytest.raises(ValueError, match="save_handler should be a folder, but given .* something else is: take"):
            ddl.Checkpoint(things, path)
        with pytest.raises(ValueError, match="folder should be a folder, but given"):
            ddl.Checkpoint.load_newest(things, path)
    monkeypatch.setenv("HOME", str(tmp_path))
    ddl.Checkpoint(things, "~/runs").save("x")
    assert names_in(tmp_path) == ["file", "runs"]
    assert ddl.Checkpoint.load_newest(things, "~/runs") == tmp_path / "runs" / "x"


# ------------------------------------------------------------------------------------------------ damage


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place if place >= 0 else len(content) + place] ^= 1
    path.write_bytes(content)


def place_of_part(state, file):
    """The first part in a file."""
    parts = (part for tensor in state["tensors"].values() for part in tensor["parts"])
    return next(part for part in parts if part[2] == file)


def in_a_weight(folder):
    """A byte of a weight's values in rank 1's file."""
    offset, length = place_of_part(json.loads((folder / "state.json").read_text()), "__1_0.distcp")[3:5]
    raw = (folder / "__1_0.distcp").read_bytes()[offset : offset + length]
    return offset + raw.index(b"data/0") + 64


DAMAGES = {
    "a flipped bit in a weight": (lambda f: flip(f / "__1_0.distcp", in_a_weight(f)), "in __1_0.distcp is not what"),
    "a truncated shard": (lambda f: os.truncate(f / "__0_0.distcp", 900), "__0_0.distcp ends before"),
    "a missing shard": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "a flipped bit in state.json": (lambda f: flip(f / "state.json", 40), "state.json is not what was written"),
    "no list of digests": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "no state.json": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "an empty list of digests": (lambda f: (f / "SHA256SUMS").write_text(""), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(what, two, kept, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    damage, message = DAMAGES[what]
    damage(tmp_path / "checkpoint_2")
    model = net()
    before = [p.tolist() for p in model.parameters()]
    with pytest.raises(DamagedCheckpoint, match=message):
        ddl.Checkpoint.load_objects({"model": model}, tmp_path / "checkpoint_2")
    assert [p.tolist() for p in model.parameters()] == before, "nothing is overwritten"
    with pytest.warns(UserWarning, match=f"{message}.*loaded .*checkpoint_1 instead"):
        path, weights = newest(tmp_path)
    assert (path.name, weights) == ("checkpoint_1", kept[1])
    damage(tmp_path / "checkpoint_1")
    with pytest.raises(ValueError, match="no checkpoint in .* is undamaged"):
        newest(tmp_path)


def test_a_folder_that_was_emptied_is_named(two, kept, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for number in (2, 1):
        for file in (tmp_path / f"checkpoint_{number}").iterdir():
            file.unlink()
        with pytest.warns(UserWarning, match=f"checkpoint_{number} is empty: if it was a checkpoint"):
            path, weights = newest(tmp_path)
        assert path is None if number == 1 else weights == kept[1]


def loaded_on_two(rank, folder):
    model = ddl.auto_model(net(), shard=True)
    before = [p.to_local().tolist() for p in model.parameters()]
    with pytest.raises(DamagedCheckpoint, match="in __1_0.distcp is not what"):
        ddl.Checkpoint.load_objects({"model": model}, folder / "checkpoint_2")
    assert [p.to_local().tolist() for p in model.parameters()] == before, "nothing is overwritten"


def test_damage_that_one_rank_sees_stops_all(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    flip(tmp_path / "checkpoint_2" / "__1_0.distcp", in_a_weight(tmp_path / "checkpoint_2"))
    launch({"dp": 2}, loaded_on_two, tmp_path)


def fails_on_rank_1(rank, folder):
    """Reading fails after all digests were right; and one rank does not see the folder."""
    model = ddl.auto_model(net(), shard=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "load", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(DamagedCheckpoint, match="checkpoint_2 is damaged: "):
            ddl.Checkpoint.load_objects({"model": model}, folder / "checkpoint_2")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "is_dir", lambda path: False)
        with pytest.raises(ValueError, match="should be a folder that all ranks see"):
            ddl.Checkpoint({"model": model}, folder).save("unseen")
    return names_in(folder)


def test_all_ranks_raise_what_one_finds_while_it_reads_or_writes(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    assert launch({"dp": 2}, fails_on_rank_1, tmp_path)[0] == ["checkpoint_1", "checkpoint_2"]


def sign(folder):
    """Makes the digests fit."""
    sums = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in ("state.json", ".metadata")
    )
    (folder / "SHA256SUMS").write_text(sums)


class Planted:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_planted_pickle_is_not_executed(two, kept, tmp_path):
    """By a stranger, who makes the digests fit."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(two / "checkpoint_2", folder)
    Planted.path = str(tmp_path / "executed")
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    sign(folder)
    assert weights_in(folder) == kept[2], "it is not read"
    state = json.loads((folder / "state.json").read_text())
    part = place_of_part(state, "__0_0.distcp")
    offset, length = part[3:5]
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    planted = pickle.dumps(Planted())
    content[offset : offset + length] = planted + bytes(length - len(planted))
    (folder / "__0_0.distcp").write_bytes(content)
    part[5] = f"{zlib.crc32(content[offset : offset + length]):08x}"
    (folder / "state.json").write_text(json.dumps(state))
    sign(folder)
    with pytest.raises(DamagedCheckpoint):
        weights_in(folder)
    assert not Path(Planted.path).exists()
    pickle.loads(pickle.dumps(Planted()))
    assert Path(Planted.path).exists(), "it would have been"


def linked(path, target):
    path.unlink()
    path.symlink_to(target)


def piped(path):
    path.unlink()
    os.mkfifo(path)


def signed(write):
    def damage(folder):
        write(folder)
        sign(folder)

    return damage


def state_of(change):
    """``change`` is given what is in state.json, and returns what is to be, or its text."""

    def write(folder):
        path = folder / "state.json"
        changed = change(json.loads(path.read_text()))
        path.write_text(changed if isinstance(changed, str) else json.dumps(changed))

    return signed(write)


def with_parts(change):
    """``change`` is given the parts of a tensor, and returns what they are to be."""

    def write(state):
        tensor = state["tensors"]["model.0.weight"]
        return state | {"tensors": state["tensors"] | {"model.0.weight": tensor | {"parts": change(tensor["parts"])}}}

    return state_of(write)


def with_first_part(**changes):
    names = ("at", "sizes", "file", "start", "length", "digest")
    return with_parts(lambda parts: [list((dict(zip(names, parts[0], strict=True)) | changes).values()), *parts[1:]])


def deep_in_state(state):
    state["objects"]["trainer"] = {"all": "deep"}
    return json.dumps(state).replace('"deep"', "[" * 20_000 + "]" * 20_000)


def sparse_state(folder):
    os.truncate(folder / "state.json", 3 << 30)


HOSTILE = {
    **{f"{name} is a pipe": lambda f, name=name: piped(f / name)
       for name in ("SHA256SUMS", "state.json", "__0_0.distcp")},
    **{f"{name} never ends": lambda f, name=name: linked(f / name, "/dev/zero")
       for name in ("SHA256SUMS", "state.json", "__0_0.distcp")},
    "a tensor has many parts": with_parts(lambda parts: parts * 20_000),
    "a tensor has parts twice": with_parts(lambda parts: parts * 2),
    "a tensor lacks parts": with_parts(lambda parts: parts[1:]),
    "a part begins before its tensor": with_first_part(at=[-1, 0]),
    "a part ends before it begins": with_first_part(sizes=[-2, -3]),
    "a part has too few bytes": with_first_part(length=3),
    "a part begins before its file": with_first_part(start=-1),
    "a part has 10 ** 30 rows": with_first_part(sizes=[10**30, 3]),
    "state.json is deep": state_of(deep_in_state),
    "state.json is a long number": state_of(lambda state: json.dumps(state | {"saved_ns": 1})[:-1] + "1" * 9000 + "}"),
    "state.json is of the year 1e299": state_of(lambda state: state | {"saved_ns": 10**308}),
    "state.json is huge": sparse_state,
    "state.json has many values": signed(lambda f: (f / "state.json").write_text("[" + "[]," * 20_000_000 + "[]]")),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_hang_is_damaged(what, two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    HOSTILE[what](tmp_path / "checkpoint_2")
    start = time.process_time()
    with pytest.warns(UserWarning, match="checkpoint_2 is damaged.*loaded .*checkpoint_1 instead"):
        path, _ = newest(tmp_path)
    assert path.name == "checkpoint_1"
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20, "4 GiB"


# What has to be in state.json, and values that cannot stand there.
OPTIMIZER, ITS_STATE = ("optimizers", "optimizer"), ("optimizers", "optimizer", "states", "model.0.weight")
TENSOR = ("tensors", "model.0.weight")
WRONG = (None, True, -1, 1.5, "x", [[3]], {"x": 5})
WRONG_STATE = (
    {"tensor": "!", "dtype": "float32", "shape": [1]},
    {"tensor": "", "dtype": "load", "shape": []},
    {"dict": 3},
    {"dict": [[[], 1]]},
    {"x": 1},
)
NEEDED = {
    **dict.fromkeys([("saved_ns",), ("mesh",), ("mesh", "dp"), ("models",), ("models", "model", "names"),
                     ("models", "model", "saved_as"), ("models", "model", "extra"), ("optimizers",),
                     (*OPTIMIZER, "groups"), (*OPTIMIZER, "states"), (*OPTIMIZER, "groups", 0, "names"),
                     (*ITS_STATE, "tensors"), (*ITS_STATE, "values"), ("objects",), ("objects", "random states"),
                     ("objects", "loader"), ("loaders",), ("version",), ("tensors",), TENSOR,
                     *((*TENSOR, key) for key in ("dtype", "size", "parts")),
                     *((*TENSOR, "parts", 0, i) for i in range(6))], WRONG),
    **dict.fromkeys([(*OPTIMIZER, "groups", 0, "options"), ("objects", "trainer", "all")], WRONG_STATE),
}  # fmt: skip
FITS = {
    **dict.fromkeys([("models", "model", "extra"), (*ITS_STATE, "values")], ({"x": 5},)),
    **dict.fromkeys([(*TENSOR, "parts", 0, 2), (*TENSOR, "parts", 0, 5)], ("x",)),  # a file and a digest
}


def changed(state, keys, *value):
    """With another value at a place, or without any."""
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    if value:
        inner[keys[-1]] = value[0]
    else:
        del inner[keys[-1]]
    return state


def test_each_part_of_a_state_is_checked(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    raw = (tmp_path / "checkpoint_2" / "state.json").read_text()
    for keys, wrong in NEEDED.items():
        for value in [(), *((other,) for other in wrong)]:
            if FITS.get(keys) == value:
                continue
            state_of(lambda _, keys=keys, value=value: changed(json.loads(raw), keys, *value))(
                tmp_path / "checkpoint_2"
            )
            with pytest.raises(DamagedCheckpoint):
                print(keys, value, Folder(tmp_path / "checkpoint_2"))
    with pytest.warns(UserWarning, match="checkpoint_2 is damaged"):
        assert newest(tmp_path)[0].name == "checkpoint_1"


def test_a_later_format_is_named_and_never_skipped(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    state = json.loads((two / "checkpoint_2" / "state.json").read_text())
    assert state["version"] == 1
    state_of(lambda state: state | {"version": 2, "tensors": "elsewhere"})(tmp_path / "checkpoint_2")
    for load in (newest, lambda folder: weights_in(folder / "checkpoint_2")):
        with pytest.raises(ValueError, match="checkpoint_2 was saved in the format 2, .* formats up to 1: load"):
            load(tmp_path)
    for version in (0, -1, True, 1.5, "2", None):
        state_of(lambda _, version=version: state | {"version": version})(tmp_path / "checkpoint_2")
        with pytest.warns(UserWarning, match="checkpoint_2 is damaged"):
            newest(tmp_path)


def test_digests_are_those_of_sha256sum(two):
    folder = two / "checkpoint_1"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


# -------------------------------------------------------------------------------------- in the background


def slowly(seconds):
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(seconds), fsync(file))


def in_the_background(rank, folder):
    slowly(0.15)
    seen = []

    def each():
        seen.append((folder / "checkpoint_1").exists())

    _, checkpoint = training(folder, 3, each, asynchronous=True, n_saved=None, score_function=None)
    return seen, names_in(folder)


def test_training_goes_on_while_it_is_written(kept, tmp_path):
    (seen, left), _ = launch({"dp": 2}, in_the_background, tmp_path)
    assert seen == [False, False, True], "the second step came before the first checkpoint was complete"
    assert left == ["checkpoint_1", "checkpoint_2", "checkpoint_3"], "the end of the run waits"
    assert weights_in(tmp_path / "checkpoint_1") == kept[1], "as it was when the handler was called"
    assert weights_in(tmp_path / "checkpoint_2") == kept[2]


def failing_in_the_background(rank, folder):
    def each():
        each.calls += 1
        if each.calls == 2 and rank == 0:
            while not (folder / "checkpoint_1").exists():
                time.sleep(0.01)
            os.fsync = lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device"))

    each.calls = 0
    said = r"checkpoint_2 could not be written \(rank 0.*No space left on device"
    with pytest.raises(OSError, match=said):
        training(folder, 5, each, asynchronous=True)
    assert each.calls == 3


def test_an_error_in_the_background_is_raised_at_the_next_save(tmp_path):
    launch({"dp": 2}, failing_in_the_background, tmp_path)
    assert names_in(tmp_path) == ["checkpoint_1"]


def returning_early(rank, folder, seconds, fails, raises):
    """The last thing that it does is to save in the background, by a checkpoint that nobody keeps."""
    model = ddl.auto_model(net(), shard=True)
    fsync = os.fsync

    def slow(file):
        time.sleep(seconds)
        if fails and rank == 0:
            raise OSError(28, "No space left on device")
        fsync(file)

    os.fsync = slow
    ddl.Checkpoint({"model": model}, folder, asynchronous=True).save("last")
    if raises:
        raise KeyError("the function's own")
    return "returned"


@pytest.mark.parametrize("seconds", [0.1, pytest.param(3, marks=pytest.mark.slow)])  # six syncs; EXIT_SECONDS is 5
def test_a_rank_waits_for_its_last_checkpoint(seconds, tmp_path):
    assert launch({"dp": 2}, returning_early, tmp_path, seconds, False, False) == ["returned"] * 2
    assert names_in(tmp_path) == ["last"]
    weights_in(tmp_path / "last")


@pytest.mark.parametrize("ranks", [2, None])
def test_the_error_of_the_last_write_is_the_runs_error(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", os.fsync)  # on a serial run it is this process that has no space
    with pytest.raises((ddl.RankError, OSError), match="last could not be written.*No space left on device"):
        (parallel(2) if ranks else ddl.Parallel()).run(returning_early, tmp_path, 0, True, False)
    assert names_in(tmp_path) == []


def leaving_the_group(rank, folder):
    """The function of ``idist.Parallel`` returns so, while the last checkpoint is written."""
    checkpoint = ddl.Checkpoint({"model": ddl.auto_model(net(), shard=True)}, folder, asynchronous=True)
    fsync, begun, left = os.fsync, threading.Event(), threading.Event()
    os.fsync = lambda file: (begun.set(), left.wait(), fsync(file))
    checkpoint.save("last")
    begun.wait()
    idist.barrier()  # no rank is in a collective of the save
    idist.finalize()
    left.set()
    for call in (checkpoint.wait, lambda: checkpoint.save("later")):
        with pytest.raises(OSError, match=r"call Checkpoint.wait\(\) before idist.finalize\(\)"):
            call()


def test_without_the_process_group_nothing_is_completed_and_the_cure_is_named(tmp_path):
    launch({"dp": 2}, leaving_the_group, tmp_path)
    assert names_in(tmp_path) == []


def test_what_could_not_be_written_is_not_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoint = ddl.Checkpoint({"model": net()}, tmp_path, asynchronous=True)
    trainer = small_run()["trainer"]
    checkpoint(trainer)
    checkpoint.wait()
    trainer.state.iteration = 1
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda file: os.close(-1))
        checkpoint(trainer)
        with pytest.raises(OSError, match="model_1 could not be written"):
            checkpoint.wait()
    assert checkpoint.last_checkpoint == tmp_path / "model_0"
    trainer.state.iteration = 2
    checkpoint(trainer)
    checkpoint.wait()
    assert names_in(tmp_path) == ["model_2"], "one is kept"


@pytest.mark.parametrize("step", [1, 3])  # of shards, of state.json
def test_an_interrupt_while_it_is_written_is_no_error_of_writing(step, tmp_path, monkeypatch):
    steps = iter(range(1, 100))

    def fsync(file):
        if next(steps) == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        ddl.Checkpoint({"model": net()}, tmp_path).save("one")
    assert names_in(tmp_path) == []


def test_an_exception_goes_before_the_last_write(tmp_path):
    with pytest.raises(ddl.RankError) as told:
        launch({"dp": 2}, returning_early, tmp_path, 0.2, True, True)
    assert isinstance(told.value.exception, KeyError)


def test_a_folder_goes_too_if_the_other_ranks_were_never_told_of_it(tmp_path, monkeypatch):
    def untold(*args):
        assert any(name.endswith(".saving") for name in os.listdir(tmp_path))
        raise OSError("no process group")

    monkeypatch.setattr("torch.distributed.checkpoint.utils._DistWrapper.scatter_object", untold)
    with pytest.raises(OSError, match="no process group"):
        ddl.Checkpoint({"model": nn.Linear(2, 2)}, tmp_path).save("one")
    assert names_in(tmp_path) == []


A_SCRIPT = """
import atexit, os, sys
import torch, ignite_ddl as ddl
checkpoint = ddl.Checkpoint({"model": torch.nn.Linear(2, 2)}, sys.argv[1], asynchronous=True)
checkpoint.save("first")
checkpoint.wait()
def full(file):
    raise OSError(28, "No space left on device")
if sys.argv[2] == "fails":
    os.fsync = full
checkpoint.save("last")
atexit.register(print, "at the exit")
print("the end of the script")
"""


@pytest.mark.parametrize("how", ["fails", pytest.param("writes", marks=pytest.mark.slow)])
def test_a_script_whose_last_write_fails_ends_with_an_error(how, tmp_path):
    done = subprocess.run([sys.executable, "-c", A_SCRIPT, tmp_path, how], capture_output=True, text=True)
    assert done.returncode == (120 if how == "fails" else 0), done.stderr
    assert ("last could not be written" in done.stderr) == (how == "fails"), done.stderr
    assert done.stdout.split("\n")[:2] == ["the end of the script", "at the exit"]
    assert names_in(tmp_path) == ["first", "last"][: 1 + (how == "writes")]


A_JOB = """
import os, sys
import ignite.distributed as idist, torch, ignite_ddl as ddl
def training(local_rank, folder, what):
    checkpoint = ddl.Checkpoint({"model": ddl.auto_model(torch.nn.Linear(2, 2))}, folder, asynchronous=True)
    fsync = os.fsync
    def full(file):
        if what == "fails" and idist.get_rank() == 0:
            raise OSError(28, "No space left on device")
        fsync(file)
    os.fsync = full
    checkpoint.save("last")
    if what == "waits":
        checkpoint.wait()
with (idist if sys.argv[3] == "idist" else ddl).Parallel("gloo") as parallel:
    parallel.run(training, *sys.argv[1:3])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "what"), [("ddl", "fails"), ("idist", "fails"), ("idist", "waits")])
def test_a_job_of_torchrun_whose_last_write_fails_ends_with_an_error(launcher, what, tmp_path):
    script, saved = tmp_path / "job.py", tmp_path / "saved"
    script.write_text(A_JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, script, saved, what, launcher], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (what == "waits"), done.stderr
    assert names_in(saved) == ["last"] * (what == "waits")
    if what == "fails":  # what was first: idist.Parallel does not wait
        assert "No space left on device" in done.stderr or "before idist.finalize()" in done.stderr, done.stderr


# ----------------------------------------------------------------------------------------------- signals


def terminated(rank, folder, load, prefix=""):
    things, losses = small_run(gradient_accumulation_steps=2), []  # the third iteration is the first half of a step
    trainer = things["trainer"]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    if load:
        ddl.Checkpoint.load_newest(things, folder)
    elif folder:
        ddl.Checkpoint(things, folder, prefix, asynchronous=True).save_on_signal(trainer)

        @trainer.on(Events.ITERATION_STARTED(once=3))
        def _():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.run(things["loader"], max_epochs=1)
    return losses


def test_sigterm_on_one_rank_saves_on_all_and_ends_the_run(tmp_path):
    (tmp_path / "signal_processing").mkdir()
    whole, _ = launch({"dp": 2}, terminated, None, False)
    (first, second) = launch({"dp": 2}, terminated, tmp_path, False)
    assert len(first) == len(second) == 3
    assert names_in(tmp_path) == ["signal_3", "signal_processing"]
    rest, _ = launch({"dp": 2}, terminated, tmp_path, True)
    assert first + rest == whole
    launch({"dp": 2}, terminated, tmp_path, False, "[b]")  # another seed
    assert names_in(tmp_path) == ["[b]_signal_3", "signal_3", "signal_processing"]


# ----------------------------------------------------------------------- the suite: many faults, all compared


def fingerprint(things):
    """Of this rank's weights, averages, random numbers and place in the data, to the last bit."""
    tensors = [*things["model"].state_dict().values()]
    tensors += [v for state in things["optimizer"].state.values() for v in state.values()]
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().numpy().tobytes())
    found.update(repr((things["loader"].state_dict()["rows"], things["trainer"].state.output)).encode())
    return found.hexdigest()


def one_life(rank, folder, log, victim, seconds, until, options):
    """Goes on from the newest checkpoint, and saves after each step; a thread of the victim kills it."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(30, 6), torch.randn(30, 2))
    loader = ddl.auto_dataloader(data, batch_size=4, shuffle=True)
    model = ddl.auto_model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2)), shard=True)
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    things = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
    if folder is not None:
        found = ddl.Checkpoint.load_newest(things, folder)
        log.with_name(f"loaded {rank}").write_text(found.name.removeprefix("checkpoint_") if found else "0")
        trainer.add_event_handler(Events.ITERATION_COMPLETED, ddl.Checkpoint(things, folder, n_saved=2, **options))
    lines = os.open(log.with_name(f"{log.name} {rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    late = 2 if options.get("asynchronous") else 1  # so many steps ago the last one was saved that is complete

    @trainer.on(Events.ITERATION_STARTED)
    def _(engine):
        log.with_name(f"saved {rank}").write_text(str(engine.state.iteration - late))

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine):
        os.write(lines, f"{engine.state.iteration} {fingerprint(things)}\n".encode())
        if engine.state.iteration == until:
            engine.terminate()

    if rank == victim:
        threading.Thread(
            target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()
    trainer.run(loader, max_epochs=1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"asynchronous": True}], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments_nothing_is_lost(ranks, options, tmp_path):
    kills = 18  # 72 in all
    chance = random.Random(f"{ranks} {options}")
    folder, log, trial = tmp_path / "checkpoints", tmp_path / "steps", tmp_path / "trial"
    loaded = []
    trial.mkdir()
    began = time.perf_counter()
    launch({"dp": ranks}, one_life, trial / "checkpoints", trial / "steps", None, 0, 3, options)
    longest = max(0.5, time.perf_counter() - began)  # a busy machine saves nothing in half a second
    for _ in range(kills):
        victim, seconds = chance.randrange(ranks), chance.uniform(0, longest)
        with pytest.raises(ddl.RankError, match="SIGKILL"):
            launch({"dp": ranks}, one_life, folder, log, victim, seconds, None, options)
        if (tmp_path / "loaded 0").exists():
            loaded.append(int((tmp_path / "loaded 0").read_text()))
        complete = int((tmp_path / "saved 0").read_text() or 0) if (tmp_path / "saved 0").exists() else 0
        path, _ = newest_of_dropout(folder)
        assert path is None or int(path.name.removeprefix("checkpoint_")) >= complete
    assert path is not None, "all were killed before their first checkpoint"
    until = int(path.name.removeprefix("checkpoint_")) + 12
    launch({"dp": ranks}, one_life, folder, log, None, 0, until, options)
    launch({"dp": ranks}, one_life, None, tmp_path / "uninterrupted", None, 0, until, {})
    done = 0
    for rank in range(ranks):
        expected = dict(line.split() for line in (tmp_path / f"uninterrupted {rank}").read_text().splitlines())
        steps = [line.split() for line in (tmp_path / f"steps {rank}").read_text().splitlines() if len(line) > 64]
        assert all(expected[step] == found for step, found in steps if int(step) <= until)
        assert str(until) == steps[-1][0]
        done += len(steps)
    print(f"{kills} kills, {done} steps compared, resumed at {loaded}")
    assert loaded == sorted(loaded)


def newest_of_dropout(folder):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    return ddl.Checkpoint.load_newest({"model": model}, folder), model


def saving_job(pipe, folder, prefix, seed, first, n_steps, n_saved):
    """Saves step after step, with its seed and the step as weights, and says what was saved and what refused."""
    os.environ.pop("IGNITE_DDL_RUNS", None)
    model = nn.Linear(200, 200)
    trainer = small_run()["trainer"]
    checkpoint = ddl.Checkpoint({"model": model}, folder, prefix, n_saved=n_saved)
    saved, errors = [], []
    pipe.send("ready")
    pipe.recv()
    for step in range(first, first + n_steps):
        nn.init.constant_(model.weight, seed * 1000 + step)
        trainer.state.iteration = step
        try:
            checkpoint(trainer)
            saved.append(step)
        except (OSError, ValueError) as error:
            errors.append(str(error))
    pipe.send((saved, errors))
    pipe.recv()  # stays alive


def two_jobs(folder, *jobs):
    started = [beside(saving_job, folder, *job) for job in jobs]
    for _, pipe in started:
        assert pipe.recv() == "ready"
    for _, pipe in started:
        pipe.send("go")
    told = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.kill()
        process.join()
    return told


def step_and_seed(path):
    model = nn.Linear(200, 200)
    ddl.Checkpoint.load_objects({"model": model}, path)
    return divmod(int(model.weight[0, 0]), 1000)


@pytest.mark.slow
def test_two_seeds_in_one_folder_keep_all_they_wrote(tmp_path):
    told = two_jobs(tmp_path, ("a", 1, 0, 150, 2), ("b", 2, 0, 150, 2))
    assert [(len(saved), errors) for saved, errors in told] == [(150, [])] * 2
    assert names_in(tmp_path) == [f"{prefix}_model_{step}" for prefix in "ab" for step in (148, 149)]
    for seed, prefix in enumerate("ab", 1):
        assert [step_and_seed(tmp_path / f"{prefix}_model_{step}") for step in (148, 149)] == [(seed, 148), (seed, 149)]


@pytest.mark.slow
def test_a_requeued_job_beside_its_dying_predecessor(tmp_path):
    """Both save the same steps: each is whole, and of the one who was told that it is saved."""
    told = two_jobs(tmp_path, ("", 1, 0, 40, None), ("", 2, 0, 60, None))
    by_seed = {seed: saved for seed, (saved, _) in enumerate(told, 1)}
    errors = [error for _, errors in told for error in errors]
    print({seed: len(saved) for seed, saved in by_seed.items()}, len(errors), "refused")
    assert all("another run that is still alive" in error for error in errors)
    assert not set(by_seed[1]) & set(by_seed[2])
    assert len(by_seed[1]) + len(by_seed[2]) == 60
    for seed, saved in by_seed.items():
        assert all(step_and_seed(tmp_path / f"model_{step}") == (seed, step) for step in saved)
    told = two_jobs(tmp_path, ("", 3, 0, 60, None), ("alone", 4, 0, 1, None))
    assert told[0] == (list(range(60)), []), "those of the dead are replaced"


@pytest.mark.slow
def test_each_flipped_bit_is_found(two, tmp_path):
    shutil.copytree(two / "checkpoint_2", tmp_path / "checkpoint")
    chance, things, found = random.Random(0), small_run(), 0
    ddl.Checkpoint.load_objects(things, tmp_path / "checkpoint")
    for file in sorted(path for path in (tmp_path / "checkpoint").iterdir() if path.name != METADATA):  # never read
        raw = file.read_bytes()
        end = raw.index(b"\n") + 1 if file.name == SUMS else len(raw)  # the line after it is that of .metadata
        for place in [0, end - 1, *chance.choices(range(end), k=98)]:
            flipped = bytearray(raw)
            flipped[place] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(DamagedCheckpoint):
                print(file.name, place, ddl.Checkpoint.load_objects(things, tmp_path / "checkpoint"))
            found += 1
        file.write_bytes(raw)
    assert found == 400
    ddl.Checkpoint.load_objects(things, tmp_path / "checkpoint")


def saving_in_an_error(local_rank, folder, fails_on):
    collectives.SECONDS_IN_AN_ERROR = 1.0
    model = ddl.auto_model(torch.nn.Linear(2, 1))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    checkpoint = ddl.Checkpoint({"model": model}, folder)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: checkpoint.save("crash"))

    @trainer.on(Events.GET_BATCH_COMPLETED(once=2))
    def fail():
        if local_rank in fails_on:
            raise KeyError("row 13 is broken")

    rows = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    with pytest.raises(KeyError) if len(fails_on) == 2 else contextlib.nullcontext():
        trainer.run(ddl.auto_dataloader(rows, batch_size=4), max_epochs=2)


def test_a_rank_that_saves_because_of_its_error_does_not_hide_it(tmp_path):
    """Others are in the step; where all ranks fail alike, they save."""
    with pytest.raises(ddl.RankError, match="while this rank handles KeyError: 'row 13 is broken'"):
        launch({"dp": 2}, saving_in_an_error, str(tmp_path), (1,), timeout=60)


def test_ranks_that_fail_alike_may_save(tmp_path):
    def failing_alike(local_rank, folder):
        try:
            raise KeyError("on all ranks")
        except KeyError:
            ddl.Checkpoint({"model": ddl.auto_model(torch.nn.Linear(2, 1))}, folder).save("crash")

    launch({"dp": 2}, failing_alike, str(tmp_path))
    assert (tmp_path / "crash").is_dir()
