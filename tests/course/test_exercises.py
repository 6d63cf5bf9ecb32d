"""The mechanism of the exercise checks: one deterministic line, a truth value, and never an exception."""

import linecache

import pytest
from checking import said, stub

from ignite_ddl.course.exercises import Hint, exercise


@exercise
def double(function):
    """Doubles a number."""
    for x in (0, 3):
        if function(x) != 2 * x:
            raise Hint(f"double({x}) is {2 * x}, yours is {function(x)}")
    return "doubled"


def divides(x):
    """Raises in a function of its own."""
    helper = lambda y: y / 0  # noqa: E731
    return helper(x)


def calls_int(x):
    return int("three")


def calls_code_from_elsewhere(x):
    return elsewhere["no_kernel"]()


elsewhere = {}
exec('def no_kernel():\n    raise NotImplementedError("no kernel for this type")', elsewhere)


def raises(error):
    def leaves(x):
        raise error

    return leaves


@pytest.mark.parametrize(
    ("check", "function", "line"),
    [
        (double, lambda x: x + x, "right: doubled"),
        (exercise(lambda function: None), stub, "right"),
        (double, stub, "not yet: write the body of stub, then run this cell again"),
        (double, lambda x: x, "not yet: double(3) is 6, yours is 3"),
        (double, lambda x: 6, "not yet: double(0) is 0, yours is 6"),
        (double, 3, "not yet: give the check your function, not a value of type int"),
        (
            double,
            divides,
            "not yet: ZeroDivisionError: division by zero (line 3 of divides: helper = lambda y: y / 0 # noqa: E731)",
        ),
        # Raised below the learner's function: the line that called is named, and no stub is seen in a library's error.
        (
            double,
            calls_int,
            "not yet: ValueError: invalid literal for int() with base 10: 'three' "
            '(line 2 of calls_int: return int("three"))',
        ),
        (
            double,
            calls_code_from_elsewhere,
            "not yet: NotImplementedError: no kernel for this type "
            '(line 2 of calls_code_from_elsewhere: return elsewhere["no_kernel"]())',
        ),
        (exercise(lambda function: [][1]), stub, "not yet: IndexError: list index out of range"),
        (double, raises(SystemExit), "not yet: SystemExit (line 2 of leaves: raise error)"),
        (double, raises(GeneratorExit), "not yet: GeneratorExit (line 2 of leaves: raise error)"),
    ],
)
def test_the_line(check, function, line, capsys):
    verdict = check(function)
    assert said(capsys) == line
    assert bool(verdict) == line.startswith("right")
    assert repr(verdict) == str(bool(verdict))
    assert verdict._ipython_display_() is None  # a notebook does not echo it


def test_assertion_with_and_without_message(capsys):
    # Compiled here, because pytest rewrites this file's own asserts into ones with a message.
    source = 'def check(f):\n    assert f(1) > 0, "the first value is negative"\n    assert f(2) == 4\n'
    linecache.cache["check.py"] = (len(source), None, source.splitlines(True), "check.py")
    namespace = {}
    exec(compile(source, "check.py", "exec"), namespace)
    check = exercise(namespace["check"])

    assert not check(lambda x: -x)
    assert said(capsys) == "not yet: the first value is negative"
    assert not check(lambda x: x)
    assert said(capsys) == "not yet: this does not hold: f(2) == 4"


def test_keyboard_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        double(raises(KeyboardInterrupt))


def test_line_holds_no_address_and_no_folder(capsys):
    def first(x):
        text = "a second line"
        raise RuntimeError(f"{object()} in {__file__}\n{text}")

    assert not double(first)
    line = said(capsys)
    assert "0x…" in line
    assert "in test_exercises.py (line 3 of first" in line
    assert "second line" not in line


class RankError(RuntimeError):
    """Stands for ``ignite_ddl.RankError``, whose message ends in the rank's traceback."""


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("NotImplementedError", "write the body of stub, then run this cell again"),
        ("ValueError: 3 rows do not fit", "ValueError: 3 rows do not fit"),
        ("torch.distributed.DistBackendError: peer left", "DistBackendError: peer left"),
        ("somewhere.exercises.Hint: rank 1 sent 96 bytes: too many", "rank 1 sent 96 bytes: too many"),
        ("AssertionError: sums differ", "sums differ"),
        ("AssertionError", "AssertionError"),
        ("of a message with two lines", "RankError: rank 1 failed:"),
    ],
)
def test_error_on_a_rank_shows_its_last_line(last_line, expected, capsys):
    message = 'rank 1 failed:\nTraceback (most recent call last):\n  File "cell.py", line 3, in stub\n'

    @exercise
    def check(function):
        raise RankError(f"{message}{last_line}\n")

    assert not check(stub)
    assert said(capsys) == f"not yet: {expected}"


def test_check_keeps_its_name_and_docstring():
    assert (double.__name__, double.__doc__) == ("double", "Doubles a number.")
