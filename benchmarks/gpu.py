"""What chapter 02 tells about a GPU, measured on one; the chapter shows the file that this writes.

    python benchmarks/gpu.py                             on a machine with a GPU: ignite_ddl/course/recorded_gpu.json
    python benchmarks/gpu.py --device cpu --output FILE  the same code on the CPU: a smoke test, its numbers mean
                                                         nothing and the chapter refuses them

Measured, each after a warm-up and as the median of several rounds: copies inside and outside a loop, products
timed wrong and right, bandwidth from pageable and from pinned memory, peak memory and time of a training step in
float32 and with AMP, 4 gloo ranks on one GPU, and what NCCL says to 2 ranks on one GPU. About a minute.
"""

import argparse
import datetime
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from ignite_ddl.course.recorded import PATH

ROUNDS = 5


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help=f"default with a GPU: {PATH.name} in ignite_ddl/course")
    parser.add_argument("--size", type=float, default=1.0, help="scales the work, for a smoke test")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --output FILE runs the same code without one")
    if options.device == "cpu" and (options.output is None or options.output.resolve() == PATH):
        parser.error("numbers of a CPU are no recorded results: name another file with --output")
    if options.device == "cpu":
        torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["ignite_ddl"])  # ranks then start with torch imported
    record = measure(options.device, options.size)
    path = options.output or PATH
    path.write_text(json.dumps(record, indent=1) + "\n")
    for section, rows in record["results"].items():
        print(section)
        for name, value, unit in rows:
            print(f"  {name}: {value if isinstance(value, str) else f'{value:,.4g}'} {unit}".rstrip())
    print(f"written to {path.name}")
    return record


def measure(device: str, size: float) -> dict:
    """All sections, each a list of (name, value, unit)."""
    gpu = device == "cuda"
    versions = f"torch {torch.__version__.split('+')[0]}"
    if gpu:
        versions += f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return {
        "device": device,
        "hardware": torch.cuda.get_device_name(0) if gpu else f"the CPU ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "results": {
            "copies": copies(device, max(10, int(100_000 * size))),
            "timing": timing(device, max(64, int(4096 * size))),
            "pinned": pinned(device, max(1, int(256 * size))),
            "memory": memory(device),
            "amp": amp(device, max(8, int(512 * size))),
            "nccl": ranks_on_one_device(device),
        },
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.accelerator.synchronize()


def seconds(function: Callable[[], object], device: str) -> float:
    """Median seconds of a call, to the end of what it started on the device."""
    function()
    taken = []
    for _ in range(ROUNDS):
        wait(device)
        start = time.perf_counter()
        function()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copies(device: str, n: int) -> list:
    """The loop of Practice_Ignite's notebook 2.1.2: sort 3 × 4 numbers n times."""
    x = torch.randn(3, 4)

    def sort(inside: bool) -> None:
        there = x.to(device, copy=True)
        for _ in range(n):
            if inside:
                there = x.to(device, copy=True)
            torch.sort(there)

    inside, outside = (seconds(lambda where=where: sort(where), device) for where in (True, False))
    return [
        (f"{n:,} sorts with the copy inside the loop", inside, "s"),
        ("with the copy before the loop", outside, "s"),
        ("a copy of 48 bytes", 1e6 * (inside - outside) / n, "µs"),
    ]


def timing(device: str, n: int) -> list:
    """Ten products, the clock read without waiting for them and with it."""
    matrix = torch.randn(n, n, device=device)

    def products() -> tuple[float, float]:
        wait(device)
        start = time.perf_counter()
        for _ in range(10):
            matrix @ matrix
        launched = time.perf_counter() - start
        wait(device)
        return launched, time.perf_counter() - start

    products()
    wrong, right = (1e3 * statistics.median(each) for each in zip(*(products() for _ in range(ROUNDS)), strict=True))
    return [(f"ten products of {n} × {n}, without waiting", wrong, "ms"), ("with waiting", right, "ms")]


def pinned(device: str, mebibytes: int) -> list:
    pageable = torch.empty(mebibytes * 2**20, dtype=torch.uint8)
    there = torch.empty_like(pageable, device=device)
    rows = []
    for name, host in (("pageable", pageable), ("pinned", pageable.pin_memory() if device == "cuda" else None)):
        if host is None:
            rows.append(("pinned", "needs a GPU", ""))
            continue
        taken = seconds(lambda host=host: there.copy_(host, non_blocking=True), device)
        rows.append((f"{mebibytes} MiB from {name} memory", host.nbytes / taken / 1e9, "GB/s"))
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        rows.append((f"the call returns, from {name} memory, after", 1e3 * (time.perf_counter() - start), "ms"))
        wait(device)
    return rows


def memory(device: str) -> list:
    """The step of the chapter's prediction: 8 MiB of weights, Adam, 8 MiB of input."""
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 1024, bias=False)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2048, 1024, device=device)
    rows = []

    def look(name: str) -> None:
        if device == "cuda":
            rows.append((name, torch.accelerator.memory_allocated() / 2**20, "MiB"))

    for step in range(2):
        if device == "cuda":
            torch.accelerator.reset_peak_memory_stats()
        loss = model(x).mean()
        if step:
            look("after forward")
        loss.backward()
        if step:
            look("after backward")
        optimizer.step()
        optimizer.zero_grad()
        del loss
    look("after the step")
    if device == "cuda":
        rows.append(("peak", torch.accelerator.max_memory_allocated() / 2**20, "MiB"))
        rows.append(("reserved by torch's allocator", torch.accelerator.memory_reserved() / 2**20, "MiB"))
    return rows or [("device memory", "needs a GPU", "")]


def amp(device: str, rows: int) -> list:
    """Training steps of a wide network, in float32 and with autocast: float16 and a scaler on a GPU."""
    width = 2048 if device == "cuda" else 64
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    x, y = torch.randn(8 * rows, width, device=device), torch.randint(10, (8 * rows,), device=device)
    results = []
    for name, enabled in (("float32", False), (f"AMP, {str(dtype).split('.')[1]}", True)):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(device, enabled=enabled and dtype == torch.float16)

        def step(model=model, optimizer=optimizer, scaler=scaler, enabled=enabled) -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        if device == "cuda":
            torch.accelerator.reset_peak_memory_stats()
        results.append((f"a step in {name}", 1e3 * seconds(step, device), "ms"))
        if device == "cuda":
            results.append((f"peak in {name}", torch.accelerator.max_memory_allocated() / 2**20, "MiB"))
        del model, optimizer, step  # the next one must not count this one's memory
    return results


def ranks_on_one_device(device: str) -> list:
    """One NCCL rank; four gloo ranks, which may share a GPU by way of the host; two NCCL ranks: what they raise.

    On the CPU gloo stands in NCCL's place, and works.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    return [
        (f"sum of 1 {backend} rank, right: 1", _ranks(1, backend, device), ""),
        ("sum of 4 gloo ranks on one device, right: 10", _ranks(4, "gloo", device), ""),
        (f"2 {backend} ranks on one device", _ranks(2, backend, device), ""),
    ]


def _ranks(n: int, backend: str, device: str) -> str:
    """All-reduces rank + 1 over n ranks on one device; what rank 0 got, or the first line of each error."""
    with tempfile.TemporaryDirectory() as folder:
        # Not fork: this process has computed, and has opened the GPU.
        context = mp.get_context("forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn")
        answers = context.SimpleQueue()
        arguments = (n, backend, device, str(Path(folder) / "store"), answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(n)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 120
        for rank in ranks:
            rank.join(max(0.1, deadline - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        found = []
        while not answers.empty():
            found.append(answers.get())
    return min(found)[1] if found else "no answer within 120 s"


def _rank(rank: int, n: int, backend: str, device: str, store: str, answers) -> None:
    try:
        if device == "cuda":
            torch.cuda.set_device(0)  # every rank the same GPU
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=n, timeout=limit)
        mine = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(mine)
        answers.put((rank, f"{mine.item():.0f}"))
        dist.destroy_process_group()
    except Exception as error:
        # Not destroyed: a group that never came up may hang in that.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "GPU" in line or "nccl" in line.lower()]
        answers.put((rank, f"{type(error).__name__}: {' | '.join(told or lines[:1])}"))


if __name__ == "__main__":
    main()
