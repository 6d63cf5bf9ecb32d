"""Imports torchvision even if its C++ operators do not match the installed torch."""

import importlib

from ignite_ddl.compat import repair_torchvision


def import_torchvision():
    """Imports torchvision, also a CUDA build with a CPU-only torch; ranks of ``ddl.Parallel`` need no such call.

    On Linux the default wheel of torchvision is a CUDA build. Beside a CPU-only torch its C++ operators cannot load,
    and ``import torchvision`` ends in "operator torchvision::nms does not exist". Here the missing operators are
    declared, without code: datasets, transforms and models work; box operators (``torchvision.ops.nms`` and its like)
    raise torchvision's own message when they are called. Where torchvision imports by itself, nothing is declared.

    Call it before the first ``import torchvision`` (or ``import transformers``, which imports it) of a process. To call
    it again costs nothing.

    Returns:
        The module ``torchvision``.

    Raises:
        ImportError: If torchvision is not installed.

    Example:
        >>> from ignite_ddl.course import import_torchvision
        >>> torchvision = import_torchvision()
        >>> from torchvision.transforms import v2
        >>> v2.CenterCrop(20)(torchvision.datasets.FakeData(1, (3, 28, 28))[0][0]).size
        (20, 20)
    """
    repair_torchvision()
    return importlib.import_module("torchvision")
