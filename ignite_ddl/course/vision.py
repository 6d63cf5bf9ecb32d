"""Imports torchvision even if its C++ operators do not match the installed torch."""

import importlib
import importlib.abc
import importlib.machinery
import sys

from torch.library import Library


def import_torchvision():
    """Imports torchvision, also a CUDA build with a CPU-only torch.

    On Linux the default wheel of torchvision is a CUDA build. Beside a CPU-only torch its C++ operators cannot load,
    and ``import torchvision`` ends in "operator torchvision::nms does not exist". ``import ignite_ddl.course`` changes
    that, in this process and in the ranks that ``ddl.Parallel`` starts from it: the missing operators are declared,
    without code. Datasets, transforms and models work; box operators (``torchvision.ops.nms`` and its like) raise
    torchvision's own message when they are called. Where torchvision imports by itself, nothing is declared.

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
    return importlib.import_module("torchvision")


def repair_torchvision():
    """From now on, ``import torchvision`` works in this process, see :func:`import_torchvision`.

    The import fails because torchvision attaches shape rules to the operators ``nms`` and ``qnms`` (the latter since
    0.28). Where that happens, these two are declared and the import is repeated.
    """
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchvisionLoader(spec.loader.name, spec.loader.path)
        return spec


class _TorchvisionLoader(importlib.machinery.SourceFileLoader):
    declared = []  # torch forgets a declaration when the Library that made it is collected

    def exec_module(self, module):
        try:
            super().exec_module(module)
        except RuntimeError as error:
            if self.declared or "operator torchvision::" not in str(error):
                raise
            self.declared.append(Library("torchvision", "FRAGMENT"))
            for operator in ("nms", "qnms"):
                self.declared[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            super().exec_module(module)
