"""A traceback's text without the libraries' frames between the user's own.

For a rank's, which :class:`RankError` carries as text. In one process the traceback belongs to the interpreter, or to
IPython, and to debuggers: nothing is cut there.
"""

import os
import re
import sysconfig
from pathlib import Path

SHOW_ALL = "IGNITE_DDL_FULL_TRACEBACK"  # environment variable: set, nothing is left out
FEW = 2  # so many frames of libraries in a row stay

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)
_OURS = Path(__file__).parents[1]
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]


def without_libraries(text: str) -> str:
    """Replaces each run of frames of installed packages by one line that counts them; a traceback's last frame stays.

    Args:
        text: what :func:`traceback.format_exception` gives, chained exceptions included.
    """
    if os.environ.get(SHOW_ALL):
        return text
    shown, run, names = [], [], []

    def end_run() -> None:
        if len(run) > FEW:
            packages = " and ".join(", ".join(dict.fromkeys(names)).rsplit(", ", 1))
            run[:] = [f"  ... {len(run)} frames of {packages} are left out; {SHOW_ALL}=1 shows them\n"]
        shown.extend(run)
        run.clear()
        names.clear()

    at = 0
    for frame in _FRAME.finditer(text):
        if frame.start() > at:
            end_run()
            shown.append(text[at : frame.start()])
        at = frame.end()
        package = _package(frame["file"])
        if package is None or not text.startswith("  File", at):
            end_run()
            shown.append(frame[0])
        else:
            run.append(frame[0])
            names.append(package)
    end_run()
    return "".join(shown) + text[at:]


def _package(file: str) -> str | None:
    """The installed package that a frame belongs to; None for the user's own code."""
    path = Path(file)
    if path.is_relative_to(_OURS):
        return "ignite_ddl"
    for folder in _INSTALLED:
        if path.is_relative_to(folder):
            return path.relative_to(folder).parts[0].removesuffix(".py")
    return None
