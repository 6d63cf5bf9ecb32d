"""examples/: the GPT script on one process, on a mesh, resumed and under torchrun, and its errors; the two scripts of
chapter 20; and a run whose ranks are killed."""

import ast
import io
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ignite_ddl.course.examples as examples
import ignite_ddl.course.text as text
from ignite_ddl.course.gpt import GPT
from ignite_ddl.course.text import CharacterText

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
TINY = "--epochs 2 --steps 3 --width 16 --blocks 2 --length 64 --batch-size 256 --lr 0.01 --sample 20 --dtype float64"
BOUND = 1.1e-5  # bits per character, float64, printed with 5 digits


def run(*command):
    """What a command prints; its parts are paths, or words with spaces between them."""
    words = [word for part in command for word in ([part] if isinstance(part, Path) else part.split())]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def losses(printed):
    """Of each epoch: training bits, test bits, accuracy in per cent."""
    line = re.compile(r"epoch \d: ([\d.]+) bits per character, test ([\d.]+) \(accuracy ([\d.]+)%\), [\d.]+ s$", re.M)
    return [tuple(map(float, found)) for found in line.findall(printed)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved") / "gpt.pt"
    out, err = run(SCRIPT, TINY, "--save", saved)
    return out, err, saved


@pytest.mark.slow  # as chapter 25 runs it
def test_one_process_learns_and_samples(one_process):
    out, err, saved = one_process
    (first, first_test, _), (second, second_test, accuracy) = losses(out)
    assert second < first < 6.5  # log2(80) = 6.32 bits is what an untrained model has
    assert second_test < first_test
    assert 0 < accuracy < 100
    assert "Captain Wentworth " in out.split("a sample:\n")[1]
    assert "mesh" not in out
    assert "[1/3]" in err  # the progress bar
    assert "Warning" not in err

    state = torch.load(saved)
    GPT(80, length=64, width=16, n_blocks=2).load_state_dict(state)


def same(out, epochs, one_process):
    """Whether a run printed the training and test bits of one process in these epochs."""
    found, expected = (torch.tensor(losses(printed))[:, :2] for printed in (out, one_process[0]))
    assert len(found) == len(expected[epochs])
    return (found - expected[epochs]).abs().max() <= BOUND


@pytest.mark.slow
def test_eight_ranks_print_the_losses_of_one_process_and_another_mesh_goes_on(one_process, tmp_path):
    saved, folder = tmp_path / "gpt.pt", tmp_path / "run"
    mesh = "--ranks 8 --dp 2 --pp 2 --tp 2 --every 2"
    out, err = run(SCRIPT, TINY, mesh, "--checkpoints", folder, "--save", saved)
    assert all(line.startswith("[rank 0]") for line in out.splitlines())
    assert "mesh dp=2 × pp=2 × tp=2, 8 ranks" in out
    assert same(out, slice(None), one_process)
    assert "Warning" not in err
    weights = torch.load(one_process[2])
    for name, tensor in torch.load(saved).items():
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9)

    # As if it had been killed after step 5, in the middle of the second epoch.
    shutil.rmtree(folder / "checkpoint_6")
    out, err = run(SCRIPT, TINY, "--resume --checkpoints", folder)
    assert "resumes from checkpoint_4" in out
    assert same(out, slice(1, None), one_process)
    assert "Warning" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options", "mesh"), [
    (2, "--plan auto", "mesh dp=. × pp=. × tp=., 2 ranks"),
    (4, "--dp-shard 2", r"mesh dp=4 \(dp_replicate=2 × dp_shard=2\) × pp=1 × tp=1, 4 ranks"),
])  # fmt: skip
def test_torchrun_joins_unchanged_on_a_mesh_of_the_planner_or_of_hsdp(one_process, ranks, options, mesh):
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}"
    out, _ = run(torchrun, SCRIPT, TINY, options)
    assert re.search(mesh, out)
    assert out.count("a sample:") == 1
    assert same(out, slice(None), one_process)


def test_the_planner_chooses_a_mesh_for_the_ranks_at_hand(monkeypatch):
    found = []
    monkeypatch.setattr("ignite_ddl.Parallel.run", lambda parallel, _, args: found.append((parallel, args)))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--ranks", "8", "--plan", "auto", "--blocks", "8", "--width", "512"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    [(parallel, args)] = found
    sizes = parallel.mesh_sizes
    assert (args.dp, args.pp, args.tp) == (sizes["dp"], sizes["pp"], sizes["tp"])
    assert args.dp * args.pp * args.tp == 8
    assert sizes["dp"] < 8  # 25 million weights are dear to send whole
    assert args.batch_size // args.dp % (args.microbatches or 1) == 0


def exits(monkeypatch, capsys, *arguments):
    """Status, stdout and stderr of a call that ends before training."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


def test_help_names_every_option(monkeypatch, capsys):
    status, out, err = exits(monkeypatch, capsys, "--help")
    assert (status, err) == (0, "")
    options = set(re.findall(r'add\("(--[a-z-]+)"', SCRIPT.read_text()))
    assert len(options) > 10
    assert options <= set(re.findall(r"--[a-z-]+", out))
    assert ast.get_docstring(ast.parse(SCRIPT.read_text())).splitlines()[0] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--dp 2",
            "dp × pp × tp should be the number of ranks, 1, but given dp=2, pp=1, tp=1: 2; "
            "--ranks says how many ranks to start",
        ),
        ("--ranks 0", "argument --ranks: should be positive, but given 0"),
        ("--lr nan", "argument --lr: should be positive, but given nan"),
        ("--typo", "unrecognized arguments: --typo"),
        ("--heads 3", "n_heads is 3; it has to divide the width, 128"),
        ("--length 900000", "length is 900000, but the train text has 420,168 characters; .*"),
        ("--ranks 8 --tp 8", "tp=8 should divide the 4 n_heads of 'block0.attention.q', but does not"),
        (
            "--ranks 4 --pp 2 --schedule dualpipev",
            "a batch of 2 rows cannot be cut into microbatches for schedule='dualpipev' on pp=2; .*",
        ),
        ("--pp 2 --schedule 2f2b", "argument --schedule: invalid choice: '2f2b' .*"),
        ("--resume", "--resume needs --checkpoints, the folder to go on from"),
        ("--ranks 7 --plan auto", "batch should be divisible by the dp of a mesh of 7 devices, .*"),
        ("--ranks 4 --plan auto --dp-shard 2", "--plan auto chooses --dp-shard itself: leave out one of the two"),
        ("--save /nowhere/gpt.pt", "--save should name a file in a folder that exists, but given /nowhere/gpt.pt"),
    ],
)
def test_errors_are_one_line_and_start_nothing(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("ignite_ddl.Parallel.run", lambda *_: pytest.fail("something was launched"))
    status, out, err = exits(monkeypatch, capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"train_gpt\.py: error: {message}\n", err), err


def test_a_missing_text_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(text, "TEXT", tmp_path / "persuasion.txt")
    status, _, err = exits(monkeypatch, capsys)
    assert status == 2
    assert err == f"train_gpt.py: error: the text {tmp_path}/persuasion.txt is missing: install ignite_ddl again\n"


def test_ranks_inside_a_job_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = exits(monkeypatch, capsys, "--ranks", 2)
    assert status == 2
    assert err.startswith("train_gpt.py: error: --ranks=2 starts ranks, but this process already is rank 0 of 2; ")
    assert err.count("\n") == 1


def test_the_default_batch_is_what_the_help_says():
    assert -(-len(CharacterText()) // 32) == 206
    assert "206" in SCRIPT.read_text()


# ------------------------------------------------------------------------------------------ chapter 20's two scripts


@pytest.mark.slow
def test_the_plain_script_and_the_one_on_a_mesh_print_the_same():
    plain, _ = run(EXAMPLES / "plain_idist.py", "--epochs 1")
    mesh, err = run(EXAMPLES / "on_a_mesh.py", "--epochs 1 --ranks 8 --dp 2 --pp 2 --tp 2")
    line = re.compile(r"epoch 1: loss (\d\.\d{5}), accuracy (\d+\.\d)%\n")
    found, expected = (list(map(float, line.search(out).groups())) for out in (mesh, plain))
    assert abs(found[0] - expected[0]) <= BOUND  # float32
    assert abs(found[1] - expected[1]) <= 0.4  # two of 500 rows, where two logits are nearly equal
    assert mesh.startswith("[rank 0] epoch 1")
    assert "Warning" not in err


def test_chapters_find_a_script_also_where_the_package_is_installed_alone(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "a" / "b" / "examples.py"))
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url) or io.BytesIO(b"the script"))
    assert examples.example("plain_idist.py") == "the script"
    [url] = asked
    assert re.fullmatch(r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/v[\d.]+/examples/plain_idist\.py", url)


ELASTIC = EXAMPLES / "elastic.py"
STANDALONE = "--standalone"


# Imports first, so that on a busy machine it does not come too late for the round that the first one opens.
JOIN = """
import socket, sys, time
from torch.distributed import run
port = int(sys.argv.pop(1))
while socket.socket().connect_ex(("127.0.0.1", port)):
    time.sleep(0.1)
run.main()
"""


def elastic(folder, torchrun, options="", kill=(), after=None):
    """A machine of two ranks; ``after`` is a port that it waits for."""
    start = ["-c", JOIN, str(after)] if after else ["-m", "torch.distributed.run"]
    restarts = "--max-restarts 10 --monitor-interval 0.1 --nproc_per_node 2"
    command = [sys.executable, *start, *restarts.split(), *torchrun.split()]
    command += [str(ELASTIC), "--folder", str(folder), *options.split(), "--kill", *map(str, kill)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})


def ends(folder, job):
    """Number of ranks and first step of each start, the weights at the end, and all that was printed."""
    printed = job.communicate(timeout=900)[0]
    assert job.returncode == 0, printed
    starts = re.findall(r"^(\d+) ranks start after step (\d+)", printed, re.M)
    return [tuple(map(int, found)) for found in starts], torch.load(folder / "weights.pt"), printed


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max() for name in one)


@pytest.mark.slow
def test_ten_kills_cost_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path):
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    starts, undisturbed, printed = ends(calm, elastic(calm, STANDALONE))
    assert starts == [(2, 0)], printed
    kills = sorted(random.Random(0).sample(range(1, 68), 10))  # of 68 steps, with a checkpoint every 5
    starts, weights, printed = ends(rough, elastic(rough, STANDALONE, kill=kills))
    # Killed after step 5 is killed before the checkpoint of step 5.
    assert starts == [(2, 0)] + [(2, (step - 1) // 5 * 5) for step in kills], printed
    assert largest_difference(undisturbed, weights) <= 1e-12


@pytest.mark.slow
def test_a_lost_machine_leaves_a_job_of_fewer_ranks(tmp_path):
    calm, rough, options = tmp_path / "calm", tmp_path / "rough", "--dropout 0"
    _, undisturbed, _ = ends(calm, elastic(calm, STANDALONE, options))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    torchrun = f"--nnodes 1:2 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} --rdzv_id run "
    torchrun += "--rdzv_conf last_call_timeout=20,keep_alive_interval=1"
    stays = elastic(rough, torchrun, f"{options} --machine", kill=[22])
    # The first keeps the store, and its ranks are 0 and 1.
    goes = elastic(rough, torchrun, f"{options} --machine", kill=[22], after=port)
    starts, weights, printed = ends(rough, stays)
    goes.communicate()
    assert goes.returncode == -signal.SIGKILL
    assert starts == [(4, 0), (2, 20)], printed
    assert largest_difference(undisturbed, weights) <= 1e-9  # other sums, in another order
