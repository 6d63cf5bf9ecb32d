"""Exercise checks: print one line, "right" or "not yet" with the reason, and never stop Run All.

For a solution, a function whose name ends in ``_solution``, the line only says that it passes, so that no "right"
appears below a learner's "not yet".

The checks of chapter NN are in ``checks/chNN.py``. A check is a function that takes the learner's function, raises
:class:`Hint` if it is not right yet and returns the text to print if it is. :func:`exercise` does the rest.
"""

import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["Hint", "exercise"]


class Hint(Exception):
    """A hint for the learner; raised by a check.

    Examples:
        .. code-block:: python

            raise Hint("rank 1 sent 96 bytes, a ring sends 72")
    """


class Verdict(int):
    """True or False, which a notebook does not display below the printed line."""

    def __repr__(self) -> str:
        return str(bool(self))

    def _ipython_display_(self) -> None:
        pass


def exercise(
    check: Callable[..., str | None] | None = None,
    *,
    cases: Iterable[Any] | None = None,
    about: str | Callable[..., str] = "",
    right: str | None = None,
) -> Callable:
    """Turns a check into one that prints its verdict on one line and never raises.

    The line has no paths and no addresses, so that stored outputs can be compared. Only a ``KeyboardInterrupt`` is
    raised: Ctrl-C ends an endless loop.

    Args:
        check: takes the learner's function, and the case where there are cases; raises :class:`Hint` or
            ``AssertionError`` while it is not right, and returns a short text for the success, or None.
        cases: on which the learner's function is tried, one after the other: a tuple of the check's further arguments
            each, or the one argument. Default: none, the check is called once.
        about: what a hint says of its case: a text with the arguments' names in braces, or a function of them.
            Default: nothing.
        right: the text for the success, where there are cases.

    Returns:
        the check to call in a chapter: it takes the learner's function and returns a truth value.

    Examples:
        .. code-block:: python

            @exercise(
                cases=((10, 4), (3, 5)), about="{n_rows} rows on {n_ranks} ranks", right="every row has one rank"
            )
            def shard_sizes(function, n_rows, n_ranks):
                sizes = function(n_rows, n_ranks)
                if sum(sizes) != n_rows:
                    raise Hint(f"your shards hold {sum(sizes)}")

            checks.shard_sizes(shard_sizes)
            # not yet: write the body of shard_sizes, then run this cell again
    """
    if check is None:
        return functools.partial(exercise, cases=cases, about=about, right=right)

    def try_all(function: Callable) -> str | None:
        for case in cases:
            arguments = case if isinstance(case, tuple) else (case,)
            try:
                check(function, *arguments)
            except Hint as hint:
                named = inspect.signature(check).bind(function, *arguments).arguments
                told = about(*arguments) if callable(about) else about.format(**named)
                hint.args = (f"{told}: {hint}" if told else str(hint),)
                raise
        return right

    @functools.wraps(check)
    def verdict(function: Callable) -> Verdict:
        try:
            if not callable(function):
                raise Hint(f"give the check your function, not a value of type {type(function).__name__}")
            text = check(function) if cases is None else try_all(function)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a learner's exit() must not end the kernel
            print(f"not yet: {_tidy(_explain(error, function))}")
            return Verdict(False)
        if getattr(function, "__name__", "").endswith("_solution"):
            text = "the solution passes"
        else:
            text = f"right: {text}" if text else "right"
        print(text)
        return Verdict(True)

    return verdict


def _explain(error: BaseException, function: Callable) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    to_write = f"write the body of {name}, then run this cell again"
    if isinstance(error, Hint):
        return str(error)
    if type(error).__name__ == "RankError":
        # By name, without importing the launcher. The message ends with the rank's traceback, if it has one.
        match = re.fullmatch(r"(?:\w+\.)*([A-Z]\w+)(?:: (.*))?", _last_line(str(error)))
        if match is None:
            return f"RankError: {_first_line(str(error))}"
        kind, message = match.groups()
        if kind == "NotImplementedError" and not message:
            return to_write
        return message if kind in ("Hint", "AssertionError") and message else f"{kind}: {message or ''}".rstrip(": ")

    place, innermost = _place(error, function)
    if isinstance(error, NotImplementedError) and innermost:
        return to_write
    if isinstance(error, AssertionError):
        if str(error):
            return str(error)
        if not place:  # an assert without message in the check: show its source line
            frame = _frames(error)[-1]
            return f"this does not hold: {_source(frame).removeprefix('assert ')}"
    told = f"{type(error).__name__}: {_first_line(str(error))}".rstrip(": ")
    wanted = getattr(function, "__annotations__", {}).get("return", "what its docstring says")
    if not place and wanted is not None and _stumbled(error):
        wanted = wanted if isinstance(wanted, str) else inspect.formatannotation(wanted)
        return f"the check cannot read what {name} returns ({told}); it should be {wanted}"
    return told + place


def _stumbled(error: BaseException) -> bool:
    """Whether the error arose in the check itself, or in what of torch it called: at what it was given."""
    files = [Path(code.co_filename) for code, _ in _frames(error)]
    while "torch" in files[-1].parts:
        files.pop()
    here = Path(__file__)
    return isinstance(error, Exception) and files[-1] != here and files[-1].is_relative_to(here.parent)


def _place(error: BaseException, function: Callable) -> tuple[str, bool]:
    """The learner's line where the error arose, and whether it was raised there, not in a function called there."""
    code = getattr(function, "__code__", None)
    frames = _frames(error)
    own = [frame for frame in frames if code is not None and _contains(code, frame[0])]
    if not own:
        return "", False
    line = own[-1][1] - code.co_firstlineno + 1
    return f" (line {line} of {function.__name__}: {_source(own[-1])})", own[-1] is frames[-1]


def _contains(code: CodeType, other: CodeType) -> bool:
    """Whether ``other`` is the code of the function or of one defined inside it (a closure, a lambda)."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code is other or any(_contains(constant, other) for constant in inner)


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames


def _source(frame: tuple[CodeType, int]) -> str:
    code, line = frame
    return linecache.getline(code.co_filename, line).strip()


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1].strip()


def _tidy(text: str) -> str:
    """The text on one line, without what differs between runs: addresses, and the folders of a path."""
    text = " ".join(text.split())
    text = re.sub(r"0x[0-9a-fA-F]{4,}", "0x…", text)
    return re.sub(r"(?<![\w.~])/(?:[\w.+-]+/)+", "", text)
