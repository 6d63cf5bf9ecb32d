"""The chapters' figures, a module a chapter, and the one way in which a chapter displays a figure."""

import io

__all__ = ["show"]


def show(figure, alt: str) -> None:
    """Displays a matplotlib figure as a PNG with alternative text, and closes it.

    The text stands in the output's metadata, where nbconvert and the site find it, and as the output's
    ``text/plain``, which is what a front end without pictures shows and what nbval compares: when the text
    changes, the chapter's test says so.

    Args:
        figure: a ``matplotlib.figure.Figure``; its text is at least 9 points high.
        alt: one or two sentences with what a reader should see, the same in every run of the chapter.

    Raises:
        ValueError: if ``alt`` has fewer than five words, or a text of the figure is smaller than 9 points.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures, show

            figure = figures.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4)
            show(figure, alt="A product of two matrices, cut for four ranks by columns and by rows.")
    """
    if len(alt.split()) < 5:
        raise ValueError(f"alt should say in five words or more what the figure shows, but given {alt!r}")
    # Imported here: ranks import the course too, and they draw nothing.
    import matplotlib.pyplot as plt
    from IPython import get_ipython
    from IPython.display import display
    from matplotlib.text import Text

    png = io.BytesIO()
    # A white ground, unless the figure has none; no Software entry, which holds matplotlib's version.
    ground = "none" if figure.patch.get_alpha() == 0 else "white"
    figure.savefig(png, format="png", dpi=110, facecolor=ground, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)  # else the inline backend shows it again at the end of the cell
    # After drawing: before it, an axis has no ticks and so no texts on them.
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_size() < 9:
            raise ValueError(f"text should be at least 9 points high, but {text.get_text()!r} has {text.get_size():g}")
    if get_ipython() is None:
        print(alt)
        return
    data = {"image/png": png.getvalue(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
