"""What the tests of exercises and of figures have in common."""


def said(capsys) -> str:
    """The one line that a check has printed."""
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1, "one line"
    return out[:-1]


def stub(*args):
    """An exercise that nobody has begun."""
    raise NotImplementedError


def wrong(check, function, hint, capsys):
    """Asserts that the check does not pass the function, and says why."""
    assert not check(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


def text_sizes(figure) -> dict[str, float]:
    """Each text of a figure, to its size in points."""
    from matplotlib.text import Text  # not above: ranks read this file to find a test's function

    figure.canvas.draw()
    return {text.get_text(): text.get_size() for text in figure.findobj(Text) if text.get_text()}
