"""Imports torchvision even if its C++ operators do not match the installed torch."""

import importlib

import torch

# torch forgets the declarations when the Library object that made them is collected, so it lives here.
_declared = None


def import_torchvision():
    """Imports torchvision, also a CUDA build with a CPU-only torch.

    On Linux the default wheel of torchvision is a CUDA build. Beside a CPU-only torch its C++ operators
    cannot load, and ``import torchvision`` ends in "operator torchvision::nms does not exist", because it
    attaches shape rules to the operators ``nms`` and ``qnms`` (``qnms`` since 0.28). Where that happens,
    this function declares the two without code and imports again. Datasets, transforms and models then
    work; box operators (``torchvision.ops.nms`` and its like) raise torchvision's own message when they are
    called. Where torchvision imports by itself, nothing is declared.

    Call it before the first ``import torchvision`` of a process. To call it again costs nothing.

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
    global _declared
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _declared is not None or "operator torchvision::" not in str(error):
            raise
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")
