"""Pickles a function for ranks: cloudpickle, and what it leaves out."""

from __future__ import annotations

import dis
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle

from ignite_ddl.collectives import reduced


def dumps(value: Any) -> bytes:
    """What ``cloudpickle.loads`` reads in a rank: functions of cells and scripts by value, and all that they use."""
    if "__mp_main__" in sys.modules:  # the script's name in a child that multiprocessing has spawned
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads_apart(data: bytes) -> Any:
    """What ranks get, in the process that sends it: with classes of its own, since cloudpickle would set its own anew.

    Their methods, and functions beside them, see the same copy of the script's globals.
    """
    return _Apart(io.BytesIO(data)).load()


class _Apart(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if not name.startswith("_make_skeleton"):
            return found
        return lambda *args: found(*args[:-2], None, args[-1])  # without the name by which it would find the class


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # Of a type of its own, which pickle does not know, such as torch.backends.cudnn, whose flags are properties.
        is_module = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if is_module and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if (tensor := reduced(obj)) is not None:
            return tensor
        if isinstance(obj, types.FunctionType):
            used = cloudpickle.cloudpickle._extract_code_globals(obj.__code__)  # cached: what is added here is sent
            used.update(dict.fromkeys(_names_in_classes(obj.__code__)))
        return super().reducer_override(obj)


def _names_in_classes(code: types.CodeType) -> Iterator[str]:
    """The globals that bodies of classes inside a function use, such as in annotations and decorators."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
                yield from (i.argval for i in dis.get_instructions(inner) if i.opname in _LOADS)
            yield from _names_in_classes(inner)


_LOADS = "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"  # the latter in Python 3.12 and newer
