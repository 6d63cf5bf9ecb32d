"""Judges a reader's guesses: right, close, or off and by what; one result for each guess of a chapter."""

import math
import re
import sys
from typing import Any

__all__ = ["score", "tally"]

HOW = "put yours in place of None, then run its cell and this one"
FACTORS = {
    2: "twice as much", 3: "three times as much", 4: "four times as much", 8: "eight times as much",
    10: "ten times as much", 100: "100 times as much", 1000: "1,000 times as much", 1e6: "a million times as much",
    1 / 2: "half as much", 1 / 3: "a third as much", 1 / 4: "a quarter as much", 1 / 8: "an eighth as much",
    1 / 10: "a tenth as much", 1 / 100: "a hundredth as much", 1e-3: "a thousandth as much",
    1e-6: "a millionth as much",
}  # fmt: skip
UNITS = (100, 1000, 1e6, 1 / 100, 1e-3, 1e-6)  # factors that are hardly anything else than another unit

_results: dict[str, str] = {}  # the name of each guess -> none, right, close or off


def score(
    guess: Any,
    answer: Any,
    unit: str = "",
    within: float | None = None,
    mistakes: dict[Any, str] | None = None,
    name: str | None = None,
) -> None:
    """Says whether a guess is right, close, or off and by what, and counts it once for :func:`tally`.

    It raises nothing, whatever the guess is. A number is close within three times what counts as right, and within
    10 % where only the very number is right. A list is right where each of its entries is, a set in any order; text
    is compared without capitals. The first guess that is made counts; a later one is judged, too. Where there is no
    guess yet, an exact answer is told, and none that may differ from machine to machine: the cell that measured it
    prints it.

    Args:
        guess: None or ``...`` where the reader has not guessed.
        answer: what came out: a number, a text, True or False, or a list or set of these.
        unit: written after both, as in " bytes". Default: none.
        within: the share by which a number may differ and be right: 0.2 is from 1 / 1.2 to 1.2 times the answer, 1
            from half to twice. Default: 0 for whole numbers, 0.1 for others.
        mistakes: hints for wrong answers that have a reason. A list is written as a tuple. Default: none.
        name: for the tally. Default: the variable in the call whose name starts with "guess".

    Example:
        >>> from ignite_ddl.course import score, tally
        >>> bytes_sent, n_ranks = 72, 4
        >>> all_to_all = (n_ranks - 1) * 48
        >>> guess_bytes = 144
        >>> score(guess_bytes, bytes_sent, " bytes", mistakes={all_to_all: "A ring sends a quarter at a time."})
        off: it is 72 bytes, and you said 144 bytes, twice as much. A ring sends a quarter at a time.
        >>> guess_ms = 340
        >>> score(guess_ms, 352.7, " ms")
        right: it is 353 ms, and you said 340 ms
        >>> tally()
        1 of 2
        off: guess_bytes
    """
    try:
        verdict, said = judge(guess, answer, unit, within, mistakes)
    except Exception:
        verdict, said = "none", f"{type(guess).__name__} cannot be compared with what came out; {HOW}"
    if name is None:
        frame = sys._getframe(1)  # Jupyter compiles a cell statement by statement
        names = [each for each in frame.f_code.co_names + frame.f_code.co_varnames if each.startswith("guess")]
        here = frame.f_globals | frame.f_locals
        names = [each for each in names if here.get(each) is guess] or names
        name = names[0] if names else f"line {frame.f_lineno}"
    if _results.get(name, "none") == "none":
        _results[name] = verdict
    _display(said, {"name": name, "answer": answer, "unit": unit, "within": within, "mistakes": mistakes or {}})


def tally() -> None:
    """Prints how many guesses were right or close, and which were off or not made.

    Example:
        >>> from ignite_ddl.course import tally
        >>> tally()  # doctest: +SKIP
        6 of 7, 2 close
        off: guess_peak
    """
    by_verdict = {verdict: [] for verdict in ("none", "right", "close", "off")}
    for name, verdict in _results.items():
        by_verdict[verdict].append(name)
    none, right, close, off = by_verdict.values()
    print(f"{len(right + close)} of {len(_results)}" + (f", {len(close)} close" if close else ""))
    if none and len(none) == len(_results):
        print(f"no guesses yet: {HOW}")
    elif none:
        print(f"no guess yet: {', '.join(none)}")
    if off:
        print(f"off: {', '.join(off)}")


def judge(
    guess: Any, answer: Any, unit: str = "", within: float | None = None, mistakes: dict[Any, str] | None = None
) -> tuple[str, str]:
    """What :func:`score` says, without counting it.

    Returns:
        "none", "right", "close" or "off", and the line that is printed.
    """
    guess, answer = _plain(guess), _plain(answer)
    if _empty(guess):
        several = isinstance(answer, (list, set))
        exact = all(_tolerance(one, within) == 0 for one in (answer if several else [answer]))
        return "none", f"no guess yet: {HOW}" + (f"; it is {_say(answer)}{unit}" if exact else "")
    if isinstance(guess, str) and isinstance(answer, (int, float)) and _number(guess) is not None:
        guess = _number(guess)
    verdict, by_what = _compare(guess, answer, within)
    both = f"it is {_say(answer)}{unit}, and you said {_say(guess)}{unit}"
    if verdict == "right":
        return verdict, f"right: {both}" if _say(guess) != _say(answer) else f"right: it is {_say(answer)}{unit}"
    hints = []
    for value, hint in (mistakes or {}).items():
        width = max(within if within is not None else 0, 0.01)
        if _compare(guess, _plain(value), width)[0] == "right":
            hints.append((_distance(guess, _plain(value)), hint))
    said = f"{verdict}: {both}" + (f", {by_what}" if by_what else "")
    return verdict, said + (f". {min(hints)[1]}" if hints else "")


def _plain(value: Any) -> Any:
    """Python's own kinds for those of torch and numpy; what was typed as text becomes what it says."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (set, frozenset)):
        return {_plain(one) for one in value}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return " ".join(value.split())
    if value is None or value is ... or isinstance(value, (bool, int, float)):
        return value
    return str(value).removeprefix("torch.")


def _empty(guess: Any) -> bool:
    return guess is None or guess is ... or guess == "" or (isinstance(guess, list) and any(map(_empty, guess)))


def _number(value: Any) -> float | None:
    """A number, also one that was typed as text with its unit; None if it is none."""
    if isinstance(value, str):
        found = re.fullmatch(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?) ?[^\d]*", value, re.IGNORECASE)
        value = float(found[1].replace(",", "")) if found else None
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else None


def _compare(guess: Any, answer: Any, within: float | None) -> tuple[str, str]:
    """The verdict and, unless it is right, by what the guess is off."""
    if isinstance(answer, (list, set)):
        return _compare_many(guess, answer, within)
    number, wanted = _number(guess), _number(answer)
    if isinstance(answer, str) or wanted is None or number is None:
        same = _letters(guess) == _letters(answer)
        return ("right" if same else "off"), ""
    within = _tolerance(answer, within)
    distance = _distance(number, wanted)
    if distance <= within + 1e-9:
        return "right", ""
    return ("close" if distance <= max(0.1, 3 * within) + 1e-9 else "off"), _by_what(number, wanted)


def _letters(value: Any) -> str:
    """A text without capitals, spaces and the difference between × and x."""
    return str(value).lower().removeprefix("torch.").replace(" ", "").replace("×", "x")


def _tolerance(answer: Any, within: float | None) -> float:
    """The share by which a guess may differ; 0 for what is no number."""
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        return 0
    return within if within is not None else 0.1 if isinstance(answer, float) else 0


def _compare_many(guess: Any, answer: list | set, within: float | None) -> tuple[str, str]:
    guessed = list(guess) if isinstance(guess, (list, set)) else [guess]
    if isinstance(answer, set):
        missing = [one for one in answer if all(_compare(mine, one, within)[0] != "right" for mine in guessed)]
        wrong = [mine for mine in guessed if all(_compare(mine, one, within)[0] != "right" for one in answer)]
        said = [f"{len(missing)} missing"] * bool(missing) + [f"{len(wrong)} too many"] * bool(wrong)
        return ("off", " and ".join(said)) if said else ("right", "")
    if len(guessed) != len(answer):
        return "off", f"{len(guessed)} {'entry' if len(guessed) == 1 else 'entries'} for {len(answer)}"
    verdicts = [_compare(*pair, within)[0] for pair in zip(guessed, answer, strict=True)]
    verdict = next((one for one in ("off", "close") if one in verdicts), "right")
    return verdict, f"{verdicts.count('right')} of {len(answer)} entries right"


def _distance(guess: Any, answer: Any) -> float:
    """0 for the same number, 1 for twice or half of it."""
    guess, answer = _number(guess), _number(answer)
    if guess is None or answer is None or guess == answer:
        return 0.0
    if guess == 0 or answer == 0 or (guess < 0) != (answer < 0):
        return math.inf
    return max(guess / answer, answer / guess) - 1


def _by_what(guess: float, answer: float) -> str:
    more = "too much" if guess > answer else "too little"
    if guess == 0 or answer == 0 or (guess < 0) != (answer < 0):
        return f"{_say(abs(guess - answer))} {more}"
    ratio = guess / answer
    for factor, words in FACTORS.items():
        if _distance(ratio, factor) < 0.02:
            return words + (" (another unit?)" if factor in UNITS else "")
    if isinstance(guess, int) and isinstance(answer, int) and abs(answer) <= 20:
        return f"{abs(guess - answer)} {more}"
    if 0.5 < ratio < 2:
        return f"{abs(100 * (ratio - 1)):.0f} % {more}"
    return f"{_say(ratio)} times as much"


def _say(value: Any) -> str:
    if isinstance(value, (list, set)):
        inside = ", ".join(map(_say, value if isinstance(value, list) else sorted(value)))
        return f"[{inside}]" if isinstance(value, list) else f"{{{inside}}}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    size = abs(value)
    return f"{value:,.0f}" if 100 <= size < 1e12 or value == 0 else f"{value:.3g}"


def _display(said: str, record: dict) -> None:
    """In a notebook the call's values stand in the output's metadata: tests judge them without a run."""
    shell = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        print(said)
        return
    answer, mistakes = _plain(record["answer"]), [[_plain(v), hint] for v, hint in record["mistakes"].items()]
    kept = record | {"answer": sorted(answer) if isinstance(answer, set) else answer, "mistakes": mistakes}
    kept["any_order"] = isinstance(answer, set)
    shell.display.display({"text/plain": said}, raw=True, metadata={"text/plain": {"score": _stored(kept)}})


def _stored(value: Any) -> Any:
    """With texts for nan and inf, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _stored(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_stored, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
