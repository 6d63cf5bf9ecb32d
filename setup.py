"""What pyproject.toml cannot say: outside of the repository the README's relative links need its address."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def absolute(link: re.Match) -> str:
    kind = "raw" if link[1] else "blob"  # a picture, or a page
    return f"{link[0]}{PROJECT['urls']['Repository']}/{kind}/v{PROJECT['version']}/"


README = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[[^\]\n]*\]\((?!https?:|#)", absolute, README),
    long_description_content_type="text/markdown",
)
