"""Results recorded elsewhere, shown with their date and machine.

``benchmarks/gpu.py`` writes what a GPU does to ``recorded_gpu.json`` beside this file, and chapter 02 shows it. If the
file does not exist, :func:`recorded` says so. ``tests/extra_slurm.sh --record`` writes what two hosts and Slurm do to
``recorded_machines.json``, and chapter 23 shows it.
"""

import json
from pathlib import Path

import torch

__all__ = ["PATH", "gpu_here", "recorded", "recorded_machines", "recorded_training"]

PATH = Path(__file__).with_name("recorded_gpu.json")


def recorded(section: str, path: Path = PATH) -> str:
    """The recorded results of a section of chapter 02, with date and hardware, or a note that there are none.

    Args:
        section: "copies", "timing", "pinned", "memory", "amp" or "nccl".
        path: the file, default ``recorded_gpu.json`` beside this module.

    Returns:
        one line of text, or several.

    Raises:
        ValueError: if the file was not measured on a GPU, or has no such section.

    Examples:
        .. code-block:: python

            print(recorded("copies"))
    """
    if not path.exists():
        return "Not yet verified on a GPU."
    record = json.loads(path.read_text())
    if record["device"] != "cuda":
        raise ValueError(f"{path.name} was measured on {record['device']!r}; record it on a GPU")
    if section not in record["results"]:
        raise ValueError(f"section should be one of {list(record['results'])}, but given {section!r}")
    lines = [f"Recorded on {record['hardware']}, {record['date']}, {record['versions']}:"]
    for name, value, unit in record["results"][section]:
        shown = value if isinstance(value, str) else f"{value:,.4g}"
        lines.append(f"  {name}: {shown} {unit}".rstrip())
    return "\n".join(lines)


def gpu_here(section: str) -> bool:
    """Whether there is a CUDA GPU; if not, prints that the cell is skipped, and the recorded results.

    Args:
        section: as in :func:`recorded`.

    Returns:
        True with a GPU (nothing is printed then), False without.

    Examples:
        .. code-block:: python

            if gpu_here("copies"):
                torch.zeros(3).to("cuda")
    """
    if torch.cuda.is_available():
        return True
    print(f"skipped: this machine has no GPU. {recorded(section)}")
    return False


def recorded_machines() -> dict:
    """What the tests saw on two hosts and under Slurm: by name, beside "date", "machine" and "versions".

    Returns:
        dict: the whole file.

    Examples:
        .. code-block:: python

            print(recorded_machines()["date"])
    """
    return json.loads(PATH.with_name("recorded_machines.json").read_text(encoding="utf-8"))


def recorded_training() -> dict:
    """What ``examples/train_gpt.py`` printed in a longer run on one process, for chapter 25.

    Returns:
        dict: "date", "machine", "command", the bits of each epoch as "trained on" and "never seen", and a "sample".

    Examples:
        .. code-block:: python

            print(recorded_training()["sample"])
    """
    return json.loads(PATH.with_name("recorded_training.json").read_text(encoding="utf-8"))
