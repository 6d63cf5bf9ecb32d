"""ddl.Checkpoint when things go wrong: killed at any step, full disks, damaged files, files of strangers, signals."""

import contextlib
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import launch
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.checkpoint import DamagedCheckpoint


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


LAST = {0: 45, 1: 17}  # steps of a save on each rank
POINTS = [(who, number) for who, last in LAST.items() for number in range(1, last + 1)]
SOME = {(0, n) for n in (5, 16, 31)} | {(1, 5)}


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
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_these_are_all_steps(tmp_path):
    """The list above goes to the end: it would be silent about steps that it does not know."""
    found = {who: number_of_points(tmp_path / str(who), who) for who in LAST}
    assert 30 < found[0] <= LAST[0]
    assert 10 < found[1] <= LAST[1]
    with pytest.raises(ddl.RankError, match="SIGKILL"):
        launch({"dp": 2}, killed, tmp_path / "one", 1, 10)


def test_a_kill_between_two_renames(tmp_path):
    """The same name once more: the old folder steps aside, and counts until the new one is there."""
    model, checkpoint = training(tmp_path, 1)
    path = tmp_path / "checkpoint_1"
    path.rename(tmp_path / "checkpoint_1.replaced")
    found, weights = newest(tmp_path)
    assert found.name == "checkpoint_1.replaced"
    checkpoint.save("checkpoint_1")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_1"]
    checkpoint.save("checkpoint_1")
    assert newest(tmp_path)[1] == weights


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
    assert [p.name for p in tmp_path.iterdir()] == ["first"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    with pytest.raises(OSError, match="file"):
        ddl.Checkpoint({"model": model}, tmp_path / "file").save("x")


# ------------------------------------------------------------------------------------------------ damage


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place if place >= 0 else len(content) + place] ^= 1
    path.write_bytes(content)


def in_a_weight(folder):
    """A byte of a weight's values in rank 1's file."""
    state = json.loads((folder / "state.json").read_text())
    offset, length, _ = state["digests"]["__1_0.distcp"][0]
    raw = (folder / "__1_0.distcp").read_bytes()[offset : offset + length]
    return offset + raw.index(b"data/0") + 64


DAMAGES = {
    "a flipped bit in a weight": (lambda f: flip(f / "__1_0.distcp", in_a_weight(f)), "in __1_0.distcp is not what"),
    "a truncated shard": (lambda f: os.truncate(f / "__0_0.distcp", 900), "__0_0.distcp ends before"),
    "a missing shard": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "a flipped bit in state.json": (lambda f: flip(f / "state.json", 40), "state.json is not what was written"),
    "no state.json": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "a flipped bit in .metadata": (lambda f: flip(f / ".metadata", 40), ".metadata is not what was written"),
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
    with pytest.raises(ValueError, match="no checkpoint in .* is whole"):
        newest(tmp_path)


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


class Planted:
    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", [".metadata", "__0_0.distcp"])
def test_a_planted_pickle_is_not_executed(where, two, tmp_path):
    """By a stranger, who makes the digests fit."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(two / "checkpoint_2", folder)
    Planted.path = str(tmp_path / "executed")
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Planted()))
    else:
        state = json.loads((folder / "state.json").read_text())
        offset, length, _ = state["digests"][where][0]
        content = bytearray((folder / where).read_bytes())
        planted = pickle.dumps(Planted())
        content[offset : offset + length] = planted + bytes(length - len(planted))
        (folder / where).write_bytes(content)
        digest = f"{zlib.crc32(content[offset : offset + length]):08x}"
        state["digests"][where][0] = [offset, length, digest]
        (folder / "state.json").write_text(json.dumps(state))
    sums = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in ("state.json", ".metadata")
    )
    (folder / "SHA256SUMS").write_text(sums)
    with pytest.raises(DamagedCheckpoint):
        weights_in(folder)
    assert not Path(Planted.path).exists()
    pickle.loads(pickle.dumps(Planted()))
    assert Path(Planted.path).exists(), "it would have been"


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
    return seen, [path.name for path in sorted(folder.iterdir())]


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
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]


# ----------------------------------------------------------------------------------------------- signals


def terminated(rank, folder, load):
    things, losses = small_run(gradient_accumulation_steps=2), []  # the third iteration is the first half of a step
    trainer = things["trainer"]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    if load:
        ddl.Checkpoint.load_newest(things, folder)
    elif folder:
        ddl.Checkpoint(things, folder, asynchronous=True).save_on_signal(trainer)

        @trainer.on(Events.ITERATION_STARTED(once=3))
        def _():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.run(things["loader"], max_epochs=1)
    return losses


def test_sigterm_on_one_rank_saves_on_all_and_ends_the_run(tmp_path):
    whole, _ = launch({"dp": 2}, terminated, None, False)
    (first, second) = launch({"dp": 2}, terminated, tmp_path, False)
    assert len(first) == len(second) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["signal_3"]
    rest, _ = launch({"dp": 2}, terminated, tmp_path, True)
    assert first + rest == whole
