"""Sphinx's settings. tools/site.py gathers the pages and calls Sphinx."""

import re
import sys
import tomllib
import warnings
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
version = release = PROJECT["version"]
copyright = "the ignite-ddl contributors, BSD-3-Clause"
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # by default from another host
nb_merge_streams = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
suppress_warnings = ["misc.highlighting_failure"]  # pseudo-code in docstrings

html_theme = "furo"
html_title = project
html_favicon = "static/favicon.svg"
html_static_path = ["static", "../../build/site-static"]
html_css_files = ["site.css"]
html_js_files = ["page.js"]
templates_path = ["templates"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {"source_repository": PROJECT["urls"]["Repository"]}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

warnings.filterwarnings("ignore", module="ignite")  # while autodoc imports it


def write_formula(translator, node: nodes.Node) -> None:
    """A formula as MathML, which browsers draw without a script."""
    block = isinstance(node, nodes.math_block)
    mathml = convert(node.astext(), display="block" if block else "inline")
    translator.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def skip_fields(app, what, name, member, skip, options) -> bool | None:
    """The fields of a named tuple stand under its Attributes."""
    return True if type(member).__name__ == "_tuplegetter" else None


def make_accessible(app, page, template, context, doctree) -> None:
    """Levels of headings, names of folds, signatures that are no lists: left out by furo, myst-nb and Sphinx."""
    context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body", "").replace('<summary aria-label="Toggle hidden content">', "<summary>")
    context["body"] = re.sub(r'<dl>\s*(<dd><em class="sig-param">.*?)</dl>', _lines_of_signature, body, flags=re.S)


def _lines_of_signature(found: re.Match) -> str:
    return found[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")


def setup(app) -> None:
    app.connect("html-page-context", make_accessible, priority=900)  # after furo's
    app.connect("autodoc-skip-member", skip_fields)
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
