"""The mechanism of the exercise checks: one deterministic line, a truth value, and never an exception."""

import linecache
import textwrap

import pytest

from ignite_ddl.lab.exercises import Hint, exercise


@exercise
def double(function):
    """Doubles a number."""
    for x in (0, 3):
        if function(x) != 2 * x:
            raise Hint(f"double({x}) is {2 * x}, yours is {function(x)}")
    return "doubled"


def stub(x):
    """Twice ``x``."""
    raise NotImplementedError


def printed(capsys) -> str:
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith("\n")
    assert out.count("\n") == 1, "one line"
    return out[:-1]


def test_right(capsys):
    assert double(lambda x: x + x)
    assert printed(capsys) == "right: doubled"


def test_right_without_text(capsys):
    assert exercise(lambda function: None)(stub)
    assert printed(capsys) == "right"


def test_stub_is_not_yet(capsys):
    assert not double(stub)
    assert printed(capsys) == "not yet: write the body of stub, then run this cell again"


def test_hint(capsys):
    assert not double(lambda x: x)
    assert printed(capsys) == "not yet: double(3) is 6, yours is 3"


@pytest.mark.parametrize("constant", [0, 6, None])
def test_a_constant_does_not_pass(constant, capsys):
    assert not double(lambda x: constant)
    assert printed(capsys).startswith("not yet: double(")


def test_assertion_with_and_without_message(capsys):
    # Compiled here, because pytest rewrites this file's own asserts into ones with a message.
    source = 'def check(f):\n    assert f(1) > 0, "the first value is negative"\n    assert f(2) == 4\n'
    linecache.cache["check.py"] = (len(source), None, source.splitlines(True), "check.py")
    namespace = {}
    exec(compile(source, "check.py", "exec"), namespace)
    check = exercise(namespace["check"])

    assert not check(lambda x: -x)
    assert printed(capsys) == "not yet: the first value is negative"
    assert not check(lambda x: x)
    assert printed(capsys) == "not yet: this does not hold: f(2) == 4"


def test_error_names_the_line_of_the_learner(capsys):
    def broken(x):
        """Divides."""
        helper = lambda y: y / 0  # noqa: E731
        return helper(x)

    assert not double(broken)
    expected = (
        "ZeroDivisionError: division by zero (line 3 of broken: helper = lambda y: y / 0  # noqa: E731)"
    )
    assert printed(capsys) == f"not yet: {' '.join(expected.split())}"


def test_error_below_the_learner_names_the_line_that_called(capsys):
    def broken(x):
        return int("three")

    assert not double(broken)
    assert printed(capsys).endswith('(line 2 of broken: return int("three"))')


def test_not_implemented_by_a_library_is_an_error_of_its_own(capsys):
    def library():
        raise NotImplementedError("no kernel for this type")

    def calls(x):
        return library()

    assert not double(calls)
    expected = "not yet: NotImplementedError: no kernel for this type (line 2 of calls: return library())"
    assert printed(capsys) == expected


def test_an_error_of_the_check_itself_does_not_raise(capsys):
    assert not exercise(lambda function: [][1])(stub)
    assert printed(capsys) == "not yet: IndexError: list index out of range"


@pytest.mark.parametrize("leave", [SystemExit, GeneratorExit])
def test_leaving_is_caught(leave, capsys):
    def leaves(x):
        raise leave

    assert not double(leaves)
    assert leave.__name__ in printed(capsys)


def test_keyboard_interrupt_passes():
    def endless(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        double(endless)


def test_line_holds_no_address_and_no_folder(capsys):
    def first(x):
        text = "a second line"
        raise RuntimeError(f"{object()} in {__file__}\n{text}")

    assert not double(first)
    line = printed(capsys)
    assert "0x…" in line
    assert "in test_exercises.py (line 3 of first" in line
    assert "second line" not in line


def test_a_value_instead_of_a_function(capsys):
    assert not double(3)
    assert printed(capsys) == "not yet: give the check your function, not a value of type int"


class RankError(RuntimeError):
    """Stands for ``ignite_ddl.RankError``, whose message ends in the rank's traceback."""


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("NotImplementedError", "write the body of stub, then run this cell again"),
        ("ValueError: 3 rows do not fit", "ValueError: 3 rows do not fit"),
        ("torch.distributed.DistBackendError: peer left", "DistBackendError: peer left"),
        ("ignite_ddl.lab.exercises.Hint: rank 1 sent 96 bytes: too many", "rank 1 sent 96 bytes: too many"),
        ("AssertionError: sums differ", "sums differ"),
        ("AssertionError", "AssertionError"),
        ("of a message with two lines", "RankError: rank 1 failed:"),
    ],
)
def test_error_on_a_rank_shows_its_last_line(last_line, expected, capsys):
    message = textwrap.dedent("""\
        rank 1 failed:
        Traceback (most recent call last):
          File "cell.py", line 3, in stub
        """)

    @exercise
    def check(function):
        raise RankError(message + last_line + "\n")

    assert not check(stub)
    assert printed(capsys) == f"not yet: {expected}"


def test_verdict_is_a_truth_value_that_a_notebook_does_not_echo(capsys):
    verdict = double(lambda x: 2 * x)
    assert verdict == True  # noqa: E712
    assert repr(verdict) == "True"
    assert verdict._ipython_display_() is None
    printed(capsys)


def test_check_keeps_its_name_and_docstring():
    assert (double.__name__, double.__doc__) == ("double", "Doubles a number.")
