"""What fits each argument of a public function: declared in a table beside it, checked before it runs. Plain Python."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Set
from datetime import timedelta
from numbers import Real
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Fits(NamedTuple):
    """What fits an argument; ``one | other`` fits what either fits.

    Attributes:
        says: what it is, after "should be".
        read: takes a value and returns it as the function needs it: a plain int for an integer of numpy, a list for an
            array. Raises an exception, whichever, for a value that does not fit.
    """

    says: str
    read: Callable[[Any], Any]

    def __or__(self, other: Fits) -> Fits:
        def either(value: Any) -> Any:
            try:
                return self.read(value)
            except Exception:
                return other.read(value)

        return Fits(f"{self.says}, or {other.says}", either)


class Detail(ValueError):
    """A detail that the error message adds after the given value."""


def check(name: str, value: Any, fits: Fits) -> Any:
    """The value as the function needs it.

    Args:
        name: the argument's name, for the message.
        value: the argument's value.
        fits: what fits.

    Raises:
        ValueError: if the value does not fit.
    """
    try:
        return fits.read(value)
    except Exception as error:
        more = str(error) if isinstance(error, Detail) else ""
    raise ValueError(f"{name} should be {fits.says}, but given {shown(value)}{more}")


def takes(*tables: Mapping[str, Fits], **fits: Fits) -> Callable[[_Function], _Function]:
    """Decorator of a function, or of a class for its ``__init__``: each argument that is given has to fit.

    An argument whose default is None may also be None. What is not declared is not checked. A keyword that the function
    does not have is a TypeError with the nearest one that it has, where Python would name the wrong one alone; what
    ``**kwargs: Unpack[T]`` takes are the keys of the TypedDict ``T``.

    Args:
        tables: names of arguments to what fits them, shared by several functions.
        fits: the same for this function alone.

    Examples:
        .. code-block:: python

            from ignite_ddl.arguments import COUNT, takes

            @takes(rows=COUNT)
            def half(rows):
                return rows // 2

            assert half(8) == 4
            try:
                half(rows=0.5)
            except ValueError as error:
                assert str(error) == "rows should be a positive integer, but given 0.5"
    """
    table = dict(itertools.chain(*(one.items() for one in tables), fits.items()))

    def decorate(function: _Function) -> _Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        rest = next((p for p in parameters if p.kind == p.VAR_KEYWORD), None)
        optional = {p.name for p in parameters if p.default is None}

        def read(name: str, value: Any) -> Any:
            fits = table.get(name)
            return value if fits is None or (value is None and name in optional) else check(name, value, fits)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known and (rest is None or "Unpack[" in str(rest.annotation)):
                _check_names(function, kwargs, known, rest)
            given = [read(*one) for one in zip(names, args, strict=False)]
            return function(*given, *args[len(given) :], **{name: read(name, value) for name, value in kwargs.items()})

        return call

    return decorate


def _check_names(function: Callable, given: Mapping[str, Any], known: set[str], rest: Any) -> None:
    if rest is not None:
        (more,) = get_args(get_type_hints(function)[rest.name])
        known = known | set(more.__annotations__)
    for name in [name for name in given if name not in known]:
        near = difflib.get_close_matches(name, known, 1)
        raise TypeError(
            f"{function.__qualname__.removesuffix('.__init__')}() got an unexpected keyword argument {name!r}"
            + (f". Did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known - {'self'}))}")
        )


def shown(value: Any) -> str:
    """A value for a message: its text if that is short, else its type."""
    try:
        text = "" if isinstance(value, str | bytes) and len(value) > 100 else repr(value)
    except Exception:
        text = ""
    fits = 0 < len(text) < 120 and "\n" not in text and " at 0x" not in text
    return text if fits else f"a {type(value).__name__}"


def first_line(error: BaseException, length: int = 200) -> str:
    """An exception for a message: the first line of its text, cut after a word, or what it is if it has none."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    return line.rstrip(".") if len(line) <= length else f"{line[:length].rpartition(' ')[0] or line[:length]} ..."


def a(says: str, fits: type | tuple[type, ...] | Callable[[Any], Any]) -> Fits:
    """Objects of a class, or for which a function returns True."""
    is_class = isinstance(fits, type | tuple)

    def read(value: Any) -> Any:
        if not (isinstance(value, fits) if is_class else fits(value)):
            raise TypeError
        return value

    return Fits(says, read)


def having(says: str, *attributes: str) -> Fits:
    """Objects, but no classes, that have these attributes."""
    return a(says, lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in attributes))


# ------------------------------------------------------------------------------------------- numbers


def _plain(value: Any) -> Any:
    """A scalar of numpy, or a tensor or an array without dims, as Python's number."""
    value = value.item() if hasattr(value, "item") and value.ndim == 0 else value
    if isinstance(value, bool):
        raise TypeError
    return value


@functools.cache
def whole(least: int = 1, most: int = 2**63 - 1, *, floats: bool = False) -> Fits:
    """Integers, those of numpy and torch too, but no bools; with ``floats`` also 4.0."""

    def read(value: Any) -> int:
        value = _plain(value)
        n = int(value) if floats and isinstance(value, float) and value.is_integer() else operator.index(value)
        if n < least or getattr(value, "ndim", 0):
            raise ValueError
        if n > most:
            raise Detail(f"; the largest is {most:,}")
        return n

    named = {1: "a positive integer", -(2**63): "an integer"}
    return Fits(named.get(least, f"an integer of at least {least}"), read)


def number(least: float = -sys.float_info.max, most: float = sys.float_info.max, above: float | None = None) -> Fits:
    """Real numbers, those of numpy and torch too, but neither bools nor NaN; infinite ones only with ``most`` = inf."""

    def read(value: Any) -> float:
        if type(value) is not float:
            value = _plain(value)
            if not isinstance(value, Real):
                raise TypeError
            value = value if isinstance(value, int) and abs(value) < 2**63 else float(value)
        if not least <= value <= most or (above is not None and not value > above):
            raise Detail("" if math.isfinite(value) else ", which is not finite")
        return value

    if above is not None:
        return Fits(f"a number above {above:g}" if above else "a positive number", read)
    if most < 1e300:
        return Fits(f"a number from {least:g} to {most:g}", read)
    return Fits("a number" if least < -1e300 else f"a number of at least {least:g}", read)


def _seconds(value: Any) -> float:
    """A time limit, also a ``timedelta``, as seconds; 1e9 are thirty years, which fit into nanosecond clocks."""
    value = number(above=0, most=math.inf).read(value.total_seconds() if isinstance(value, timedelta) else value)
    if value > 1e9:
        raise Detail("; the longest is 1e+09")
    return float(value)


COUNT, INTEGER = whole(), whole(-(2**63))
WORLD = whole(most=10**6)  # something is made for each rank
NUMBER, AMOUNT, POSITIVE, SHARE = number(), number(0), number(above=0), number(0, 1)
SECONDS = Fits("a positive number of seconds", _seconds)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of at least ``least``, and not a bool."""
    try:
        return whole(least).read(value) >= least
    except Exception:
        return False


# ------------------------------------------------------------------------------------------- all else


def one_of(*known: Any) -> Fits:
    """One of a few names, or of a few integers."""

    def read(value: Any) -> Any:
        return known[known.index(value if isinstance(value, str) else operator.index(_plain(value)))]

    return Fits(f"one of {', '.join(map(str, known))}", read)


def each(fits: Fits, says: str, least: int = 0, most: int = sys.maxsize - 1) -> Fits:
    """Sequences of what fits, arrays too, as a list; no strings, dicts, sets or endless iterators."""

    def read(value: Any) -> list[Any]:
        if isinstance(value, str | bytes | bytearray | Mapping | Set):
            raise TypeError
        value = value.tolist() if hasattr(value, "tolist") else value
        end = most if hasattr(value, "__len__") else min(most, 10**6)
        found = [fits.read(one) for one in itertools.islice(value, end + 1)]
        if not least <= len(found) <= end:
            raise ValueError
        return found

    return Fits(says, read)


def or_none(fits: Fits) -> Fits:
    """Also None, where that is not the default."""
    return Fits(f"{fits.says}, or None", lambda value: None if value is None else fits.read(value))


def _of_torch(says: str, name: str) -> Fits:
    """Objects of a class of torch; where one exists, torch is loaded."""
    return a(says, lambda value: isinstance(value, operator.attrgetter(name)(sys.modules["torch"])))


def _flag(value: Any) -> bool:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError
    return bool(value)


def _path(value: Any) -> Any:
    path = os.path.expanduser(os.fspath(value))  # nothing else does so: "~/x" would be in a folder of the name "~"
    if not (isinstance(path, str) and 0 < len(os.fsencode(path)) <= 4096 and "\0" not in path):
        raise ValueError
    return value if path == os.fspath(value) else path


def _folder(value: Any) -> Any:
    path = _path(value)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise Detail(", where something else is: take another path, or move it away")
    return path


FLAG = Fits("True or False", _flag)
TEXT, PATH, FUNCTION = a("a string", str), Fits("a path", _path), a("a function", callable)
FOLDER = Fits("a folder", _folder)  # or a path where there is nothing yet
OPTIMIZER = having("an optimizer, with param_groups and step", "param_groups", "step")
ENGINE = having("an Engine of Ignite", "add_event_handler", "state", "terminate")
PROCESSES = 4096  # on one machine; more are a mistake
MAPPING, MODULE, TENSOR = a("a dict", Mapping), _of_torch("an nn.Module", "nn.Module"), _of_torch("a tensor", "Tensor")
AMOUNTS, NAMES = each(AMOUNT, "a sequence of numbers of at least 0"), each(TEXT, "a sequence of strings")
