"""Make .venv, or see at once that it is current. Run by the Makefile with whatever python3 is there.

Standard library only, and it must parse on Python 3.6: an old Python has to read this far to be told so.
The stamp inside .venv names what was installed: the Python, the place, pyproject.toml, the constraints.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "setup-stamp")
UNFINISHED = os.path.join(VENV, "setup-unfinished")  # left by a kill: the next call starts from nothing

OLDEST = (3, 11)
GB = 1e9
NEEDED = 3 * GB  # .venv with a CPU build of torch 1.7 GB, and pip's downloads
NEEDED_CUDA = 8 * GB  # what the ordinary index serves on Linux


class Stop(Exception):
    """One line for the reader: what is wrong and what to do."""


def version(info):
    return ".".join(str(part) for part in info[:3])


def venv_version():
    """The version in .venv, "" if it has no usable Python (a dangling link counts as none)."""
    try:
        with open(os.path.join(VENV, "pyvenv.cfg")) as file:
            found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+\.\d+)", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found and os.path.exists(VENV_PYTHON) else ""


def where(python_version):
    # The place is part of the stamp: scripts in .venv/bin name it and break in a moved copy.
    return f"Python {python_version} at {VENV}"


def wanted_stamp(python_version, constraints):
    digest = hashlib.sha256()
    for name in ["pyproject.toml"] + ([constraints] if constraints else []):
        try:
            with open(os.path.join(ROOT, name), "rb") as file:
                digest.update(file.read() + b"\0")
        except OSError:
            raise Stop(f"There is no {name} to install from: give CONSTRAINTS an existing file.") from None
    return f"{where(python_version)}\n{digest.hexdigest()}\n"


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def check_python(name):
    if sys.version_info < OLDEST:
        raise Stop(
            f"ignite-ddl needs Python {version(OLDEST)} or newer; {name} is {version(sys.version_info)}. "
            "Try: make lab PYTHON=python3.12"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise Stop(
            "{} {} lacks the module {}. On Debian or Ubuntu: sudo apt install python{}.{}-venv".format(
                name, version(sys.version_info), error.name, *sys.version_info[:2]
            )
        ) from None


def check_disk():
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED:
        raise Stop(
            f"Set-up needs about {NEEDED / GB:.0f} GB here and {free / GB:.1f} GB are free: make room and try again."
        )


def pip_config():
    command = [VENV_PYTHON, "-m", "pip", "config", "list"]
    return subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True).stdout


def check_disk_for_cuda():
    free = shutil.disk_usage(ROOT).free
    if free >= NEEDED_CUDA or not sys.platform.startswith("linux"):
        return
    # pip may know another source of torch, from its variables or its files.
    if not re.search(r"(index-url|find-links)=", pip_config()):
        raise Stop(
            f"{free / GB:.1f} GB are free: a CPU build of torch fits, but pip's default on Linux is the CUDA "
            f"build, which needs about {NEEDED_CUDA / GB:.0f} GB. "
            "Make room, or show pip an index with CPU builds: PIP_EXTRA_INDEX_URL=... make lab"
        )


def make_venv():
    print(f"making .venv with Python {version(sys.version_info)}", flush=True)
    # From inside an activated .venv: the Python beneath it.
    base = getattr(sys, "_base_executable", None) or sys.executable
    done = subprocess.run(
        [base, "-m", "venv", VENV],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if done.returncode != 0:
        last = done.stdout.strip().split("\n")[-1]
        raise Stop(f"Python's own venv module could not make .venv: {last}")


def install(constraints):
    print("installing torch, Ignite, JupyterLab and the rest (a few minutes the first time)", flush=True)
    command = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["-c", constraints] if constraints else ["--upgrade", "--upgrade-strategy", "eager"]
    done = subprocess.run(
        command + ["--config-settings", "editable_mode=compat", "-e", ".[course,lab,test]"],  # seen by type checkers
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    if done.returncode == 0:
        return
    said = done.stderr
    if re.search(r"No space left on device|Errno 28", said):
        raise Stop(f"The disk is full: make room (about {NEEDED / GB:.0f} GB) and try again.")
    if re.search(r"connection broken by|Max retries exceeded|timed out|name resolution", said):
        raise Stop("pip cannot reach its package index: check the network, the proxy and PIP_INDEX_URL.")
    sys.stderr.write(said)
    raise Stop("pip could not install the course: see its message above. (rm -rf .venv starts over.)")


def set_up(name, constraints, chosen):
    there = venv_version()
    # Plain `make` keeps a .venv that works, also where python3 is too old to have made it.
    python_version = there if there and not chosen else version(sys.version_info)
    stamp = read(STAMP)
    if there and stamp == wanted_stamp(python_version, constraints):
        return

    start = time.time()
    in_place = there == python_version and stamp.startswith(where(there) + "\n")
    if not in_place:
        check_python(name)
        python_version = version(sys.version_info)
        # A .venv that somebody made by hand is completed; our own remains and another Python's are not.
        if stamp or os.path.exists(UNFINISHED) or there not in ("", python_version):
            shutil.rmtree(VENV)
        check_disk()
        mark_unfinished()
        make_venv()
    mark_unfinished()
    if in_place:
        os.remove(STAMP)
    try:
        if not in_place:
            check_disk_for_cuda()
        install(constraints)
    except Stop:
        # pip failed in good order and rolled back: what was true before is true again.
        if in_place:
            write_stamp(stamp)
        os.remove(UNFINISHED)
        raise
    write_stamp(wanted_stamp(python_version, constraints))
    os.remove(UNFINISHED)
    print(f"set up in {time.time() - start:.0f} s", flush=True)


def mark_unfinished():
    os.makedirs(VENV, exist_ok=True)
    with open(UNFINISHED, "w"):
        pass


def write_stamp(text):
    with open(STAMP, "w") as file:
        file.write(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="python3", help="what the reader calls this Python")
    parser.add_argument("--constraints", default="constraints.txt", help="'' for the newest releases")
    parser.add_argument("--chosen", action="store_true", help="this Python's version, not the one in .venv")
    args = parser.parse_args(argv)
    try:
        set_up(args.name, args.constraints, args.chosen)
    except Stop as stop:
        print(stop, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: the next call starts over.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up could not write .venv: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
