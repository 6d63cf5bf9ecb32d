"""Runs a function of a cell on XLA, or returns the recorded result of an earlier run.

The last torch_xla, 2.9, requires torch 2.9; the course uses newer versions. So torch_xla is installed in a separate
environment, which ``make test-tpu`` builds with a Jupyter kernel. In that kernel a function runs on XLA's CPU device,
in a new process, because XLA reads its environment variables only at its first import. In any other kernel the result
is read from ``recorded_xla.json`` beside this file, with date, versions and machine. ``make test-tpu`` runs chapter 03
and compares each number with the recorded one.
"""

import hashlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import cloudpickle

__all__ = ["PATH", "graph_text", "has_xla", "on_xla", "programs", "steps"]

PATH = Path(__file__).with_name("recorded_xla.json")
RECORD = "IGNITE_DDL_RECORD"  # an environment variable: where it is set, each run is recorded
TIMEOUT = 300  # seconds

# Imports torch_xla once, which takes seconds, and forks for each call; it computes nothing itself, so that XLA starts
# anew in each fork. It does not import ignite_ddl, because chapter 03 also shows Ignite without the repair.
SERVER = """
import json, os, pickle, signal, sys, traceback
import ignite.distributed, torch, torch_xla
versions = {module.__name__: module.__version__ for module in (torch_xla, torch, ignite)}
for line in sys.stdin:
    call, answer, log, environ, seconds = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        status = 1
        try:
            os.environ.update(environ)
            function, args = pickle.load(open(call, "rb"))
            with open(answer, "w") as file:
                json.dump({"versions": versions, "result": function(*args)}, file)
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""
_server = None  # the running SERVER; it ends with this process
_said = None  # the line that this cell has printed


def has_xla():
    """Whether torch_xla is installed, so that :func:`on_xla` runs the function."""
    return importlib.util.find_spec("torch_xla") is not None


def on_xla(function, *args, devices=1, collectives=False):
    """Runs ``function(*args)`` on XLA's CPU device if torch_xla is installed, else returns the recorded result.

    It prints one line that says which of the two, once in a notebook's cell. If the function has changed since the
    recording, it raises.

    Args:
        function: a function of a cell, defined by ``def``; runs in a separate process and returns JSON values.
        args: its arguments, JSON values.
        devices: number of XLA devices, default 1; more are virtual ones, for SPMD.
        collectives: whether to return also the collectives of each compiled graph.

    Returns:
        the function's result; with ``collectives`` a pair of that and a list with, for each compiled graph in order, a
        list of its collectives: name, shape of the result, participating devices.

    Raises:
        ValueError: without torch_xla, if this function was not recorded with these arguments.
        RuntimeError: if the function fails; the message is its traceback.

    Examples:
        .. code-block:: python

            def double(x):
                import torch, torch_xla

                return (torch.tensor(x, device=torch_xla.device()) * 2).tolist()

            on_xla(double, [1, 2])
    """
    key = f"{function.__name__}{json.dumps([*args, devices])}"
    source = hashlib.sha256("".join(_source(function).split()).encode()).hexdigest()[:16]
    if has_xla():
        entry = {"source": source, "date": date.today().isoformat()} | _run(function, args, devices, collectives)
        if os.environ.get(RECORD):
            _record(key, entry)
    else:
        entry = _recorded(key, source, function.__name__)
    when = "run now" if has_xla() else f"recorded on {entry['date']}"
    _say(f"XLA, {when}: torch_xla {entry['versions']['torch_xla']}, its CPU device, {entry['machine']}")
    return (entry["result"], entry["collectives"]) if collectives else entry["result"]


def programs():
    """The number of programs that XLA has compiled in this process; 0 where torch_xla was not imported.

    Example:
        >>> from ignite_ddl.course.xla import programs
        >>> programs()
        0
    """
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics

    return metrics.counter_value("UncachedCompile") or 0


def steps(step, inputs):
    """Calls ``step(x)`` for each input, on XLA, and ``torch_xla.sync`` after each. For use inside :func:`on_xla`.

    Args:
        step: a function of one input; what it returns is kept, since XLA does not compute what nobody keeps.
        inputs: of the steps.

    Returns:
        a list for each step: the programs compiled so far, and the seconds of this step.
    """
    import torch_xla

    torch_xla.sync(wait=True)
    before, kept, rows = programs(), [], []
    for x in inputs:
        start = time.perf_counter()
        kept.append(step(x))
        torch_xla.sync(wait=True)
        rows.append([programs() - before, time.perf_counter() - start])
    return rows


def graph_text(*tensors):
    """What XLA has noted for tensors and not yet computed, as text. For use inside :func:`on_xla`."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_text(list(tensors))


def _source(function):
    """The source of a function, and of the functions of its module that it calls."""
    text = inspect.getsource(function)
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if inspect.isfunction(called) and called.__module__ == function.__module__:
            text += _source(called)
    return text


def _say(line):
    global _said
    if line != _said:
        print(line)
    if shell := "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        shell.events.register("pre_run_cell", _begin_cell)  # which IPython keeps once
        _said = line


def _begin_cell(_):
    global _said
    _said = None


def _run(function, args, devices, collectives):
    with tempfile.TemporaryDirectory(prefix="ignite_ddl_xla_") as folder:
        call, answer, log, programs = (Path(folder) / name for name in ("call", "answer", "log", "programs"))
        call.write_bytes(cloudpickle.dumps((function, args), protocol=pickle.DEFAULT_PROTOCOL))
        flags = f"--xla_force_host_platform_device_count={devices}"
        if collectives:
            flags += f" --xla_dump_to={programs} --xla_dump_hlo_as_text"
        environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": flags}
        status = _ask(json.dumps([str(call), str(answer), str(log), environ, TIMEOUT]))
        if status != 0:
            end = log.read_text()[-4000:] if log.exists() else "torch_xla could not be imported"
            raise RuntimeError(f"{function.__name__} failed on XLA (status {status})\n{end}")
        entry = json.loads(answer.read_text()) | {"machine": f"a machine with {os.cpu_count()} cores"}
        if collectives:
            graphs = sorted(programs.glob("module_*after_optimizations.txt"))
            entry["collectives"] = [_collectives(path.read_text()) for path in graphs]
        return entry


def _ask(line):
    """Sends the server one call; returns the exit status, 0 on success, or None."""
    global _server
    if _server is None or _server.poll() is not None:
        environ = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-c", SERVER]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        _server = subprocess.Popen(command, env=environ, text=True, **streams)
    try:
        _server.stdin.write(line + "\n")
        _server.stdin.flush()
        return int(_server.stdout.readline())
    except (BrokenPipeError, ValueError):
        return None  # it has died
    except KeyboardInterrupt:
        _server.kill()
        raise


def _collectives(program):
    """[name, shape, groups] of each collective in a compiled graph, XLA's text form ("HLO")."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(?\w+\[.*?) ({names})(?:-start)?\(.*?replica_groups=(\S+?),? ", program)
    # "f32[8,3]{1,0}": the part in braces is the order in memory.
    return [[name, re.sub(r"(?<=\])\{[\d,]*\}", "", shape), groups] for shape, name, groups in found]


def _record(key, entry):
    entries = json.loads(PATH.read_text()) if PATH.exists() else {}
    PATH.write_text(json.dumps(entries | {key: entry}, indent=1) + "\n")


def _recorded(key, source, name):
    entry = json.loads(PATH.read_text()).get(key) if PATH.exists() else None
    if entry is None or entry["source"] != source:
        what = "was changed since" if entry else "was not recorded with these arguments"
        raise ValueError(
            f"{name} {what}, and this kernel has no torch_xla to run it. `make test-tpu` builds an environment that "
            "has it; then choose the kernel 'ignite-ddl on XLA'"
        )
    return entry
