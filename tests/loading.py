"""What the tests of tools/ have in common."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load(path):
    """The module in a file of this repository that is no part of a package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
