"""A signal to the process that started the ranks reaches those that asked for it; after the run all is as before."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from ranks import comes_true, gone, parallel

import ignite_ddl as ddl
from ignite_ddl.launch.rank import on_signal, restore_signals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

TRAINING = """
import os, signal, sys, time
import torch
from ignite.engine import Events
import ignite_ddl as ddl
from ignite_ddl.launch.rank import on_signal

folder, how, asked = sys.argv[1], sys.argv[2], sys.argv[3]

def training(local_rank):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    loader = ddl.auto_dataloader(data, batch_size=4, shuffle=True)
    model = ddl.auto_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)))
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
    ddl.Checkpoint.load_newest(everything, f"{folder}/saved")
    heard = []
    on_signal(signal.SIGTERM, lambda: heard.append(1))
    if asked != "uninterrupted":
        ddl.Checkpoint(everything, f"{folder}/saved").save_on_signal(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine):
        if asked == "wait" and engine.state.iteration == 3:
            open(f"{folder}/{os.getpid()}.pid", "w").close()
            while not heard:
                time.sleep(0.01)

    trainer.run(loader, max_epochs=2)
    if ddl.get_mesh().rank == 0:
        torch.save((engine := trainer.state).iteration and [engine.iteration, engine.output, *model.parameters()],
                   f"{folder}/{asked}.pt")
    return trainer.state.iteration

with ddl.Parallel(*{"started": ("gloo", 2), "serial": (), "torchrun": ("gloo",)}[how]) as parallel:
    line = f"returned {parallel.run(training)}"
    print(line + "\\n", end="", flush=True)  # one write: torchrun's ranks share one stdout, and are unbuffered
time.sleep(float(how == "serial" and asked == "wait" and 60))
"""


def command(tmp_path, how, asked):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if how == "torchrun" else []
    return [sys.executable, *torchrun, str(script), str(tmp_path), how, asked]


def pids(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["started", "serial", "torchrun"])
def test_sigterm_to_a_script_saves_and_the_resumed_run_is_bit_equal(tmp_path, how):
    run = subprocess.Popen(command(tmp_path, how, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert comes_true(lambda: len(pids(tmp_path)) == 1 + (how != "serial"), within=90)
    run.send_signal(signal.SIGTERM)
    if how == "serial":
        assert run.stdout.readline() == "returned [3]\n"
        run.send_signal(signal.SIGTERM)  # again the process's own
    out, err = run.communicate(timeout=60)
    assert [path.name for path in (tmp_path / "saved").glob("[!.]*")] == ["signal_3"], err
    if how != "torchrun":
        assert run.returncode == -signal.SIGTERM
    if how == "started":
        assert "SIGTERM: waiting for the ranks, at most 600 s; a second SIGTERM ends them at once" in err
        assert "returned" not in out
    assert gone(pids(tmp_path))
    for asked in ("uninterrupted", "resumed"):
        if asked == "resumed":
            (tmp_path / "kept").rename(tmp_path / "saved")
        else:
            (tmp_path / "saved").rename(tmp_path / "kept")
        done = subprocess.run(command(tmp_path, how, asked), capture_output=True, text=True, timeout=120)
        assert "returned [20" in done.stdout, done.stderr
    results = [torch.load(tmp_path / f"{asked}.pt") for asked in ("uninterrupted", "resumed")]
    assert results[0][0] == 20
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))


IN_A_CELL = """
import os, signal, time
import torch
from ignite.engine import Events
import ignite_ddl as ddl

def training(local_rank, folder, signum):
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    loader = ddl.auto_dataloader(data, batch_size=4)
    model = ddl.auto_model(torch.nn.Linear(3, 1))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    things = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
    ddl.Checkpoint(things, folder + "/saved").save_on_signal(trainer, signum)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine):
        open(f"{folder}/{os.getpid()}.pid", "w").close()
        time.sleep(0.5)

    trainer.run(loader, max_epochs=10)
    return trainer.state.iteration
"""


@pytest.mark.slow
def test_signals_to_a_kernel_save_and_then_interrupt_the_cell_or_end_the_kernel(tmp_path):
    from jupyter_client.manager import start_new_kernel

    def run(signum, send):
        (folder := tmp_path / str(signum)).mkdir()
        cell = f"print('returned', ddl.Parallel('gloo', 2).run(training, {str(folder)!r}, {signum}))"
        asked = client.execute(cell)
        assert comes_true(lambda: len(pids(folder)) == 2, within=90)
        send()
        assert comes_true(lambda: gone(pids(folder)), within=60)
        saved = [path.name for path in (folder / "saved").glob("[!.]*")]
        assert len(saved) == 1
        assert saved[0].startswith("signal_")
        return asked

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute_interactive(IN_A_CELL, timeout=90, output_hook=lambda message: None)
        asked = run(signal.SIGINT, manager.interrupt_kernel)  # what the stop button does
        while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != asked:
            pass
        assert reply["content"].get("ename") == "KeyboardInterrupt"
        run(signal.SIGTERM, lambda: os.kill(manager.provisioner.pid, signal.SIGTERM))
        assert comes_true(lambda: manager.provisioner.process.poll() == -signal.SIGTERM, within=30)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def heard():
    """What reaches this process's own handlers, which it has again after each run."""
    came, before = [], {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda got, frame: came.append(got))
    mine = [signal.getsignal(number) for number in before]
    yield came
    assert [signal.getsignal(number) for number in before] == mine
    for number, handler in before.items():
        signal.signal(number, handler)


def asking(local_rank, folder, signum, who, seconds=30.0, leave=True):
    """Waits for the signal, then returns; with ``leave`` unset waits on."""
    got = []
    if local_rank in who:
        on_signal(signum, lambda: got.append(signum))
    (folder / f"{os.getpid()}.pid").touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (got and leave) and (local_rank in who or not leave):
        time.sleep(0.01)
    return got


def sending(folder, count, *signums, pause=0.3, asked=True):
    """Signals to this process, once ``count`` ranks are there, and it knows what they have asked for."""
    before = signal.getsignal(signums[0])

    def send():
        comes_true(lambda: len(pids(folder)) == count, within=60)
        if asked:
            comes_true(lambda: signal.getsignal(signums[0]) != before, within=60)
        for signum in signums:
            time.sleep(pause)
            os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_what_ranks_ask_for_is_passed_on_to_them_and_then_to_the_handler_before(heard, tmp_path, signum, capfd):
    thread = sending(tmp_path, 3, signum)
    assert parallel(3).run(asking, tmp_path, signum, (0, 2)) == [[signum], [], [signum]]
    thread.join()
    assert heard == [signum]
    assert f"{signum.name}: waiting for the ranks, at most 600 s" in capfd.readouterr().err


def test_what_nobody_asks_for_is_not_passed_on(heard, tmp_path):
    thread = sending(tmp_path, 2, signal.SIGTERM, asked=False)
    assert parallel(2).run(asking, tmp_path, signal.SIGUSR1, (0, 1), 3.0) == [[], []]
    thread.join()
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("how", ["a second one came", "had not returned 0.5 s later"])
def test_a_second_signal_or_ranks_that_do_not_return_end_the_run(heard, tmp_path, how, monkeypatch):
    monkeypatch.setattr("ignite_ddl.launch.parent.SIGNAL_SECONDS", 0.5 if "0.5" in how else 60.0)
    thread = sending(tmp_path, 2, *[signal.SIGTERM] * (1 if "0.5" in how else 2))
    start = time.monotonic()
    with pytest.raises(ddl.RankError, match=f"was stopped: this process got SIGTERM, and {how}"):
        parallel(2).run(asking, tmp_path, signal.SIGTERM, (0, 1), 60.0, False)
    assert time.monotonic() - start < 20
    thread.join()
    assert heard[0] == signal.SIGTERM
    assert gone(pids(tmp_path))


def test_one_process_gets_its_handler_back(heard):
    def on_one(local_rank):
        got = []
        for name in ("a", "b"):  # two trainers
            on_signal(signal.SIGTERM, lambda name=name: got.append(name))
        os.kill(os.getpid(), signal.SIGTERM)
        return got

    assert ddl.Parallel().run(on_one) == [["a", "b"]]
    assert heard == []
    with pytest.raises(KeyError):
        ddl.Parallel().run(lambda rank: (on_one(rank), {}[0]))
    assert on_one(0) == ["a", "b"]  # outside of a run, by hand
    restore_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_handler_that_the_function_sets_itself_stays(heard):
    before = signal.getsignal(signal.SIGTERM)

    def another(local_rank):
        on_signal(signal.SIGTERM, lambda: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    ddl.Parallel().run(another)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)


def test_a_run_in_another_thread_leaves_the_handlers_alone(heard, tmp_path):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(parallel(2).run(asking, tmp_path, signal.SIGTERM, (0, 1), 3.0))
    )
    thread.start()
    sending(tmp_path, 2, signal.SIGTERM, asked=False).join()
    thread.join()
    assert results == [[[], []]]
    assert heard == [signal.SIGTERM]
