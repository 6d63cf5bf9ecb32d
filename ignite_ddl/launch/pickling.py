"""Pickles a function for ranks: cloudpickle, and what it leaves out."""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from torch.nn.parameter import is_lazy

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


class NeedsNotebook(ValueError):
    """A function uses IPython's shell."""


class _Pickler(cloudpickle.Pickler):
    """Keeps of tensors what pickle drops: the memory that they share, gradients and hooks; a graph becomes an error."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.memory: dict[int, torch.TypedStorage] = {}  # that tensors share, which torch would send with each

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage | torch.UntypedStorage):
            untyped = getattr(obj, "_untyped_storage", obj)
            first = self.memory.setdefault(untyped._cdata, _typed(untyped, torch.uint8))
            return NotImplemented if obj is first else (_storage, (first, getattr(obj, "dtype", None)))
        if isinstance(obj, torch.Tensor) and not is_lazy(obj):
            return _reduce_tensor(obj)
        # Of a type of its own, which pickle does not know, such as torch.backends.cudnn, whose flags are properties.
        is_module = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if is_module and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        shell = sys.modules.get("IPython.core.interactiveshell")
        if shell is not None and isinstance(obj, shell.InteractiveShell):
            raise NeedsNotebook(
                "it is a part of the notebook, which ranks do not have: leave magics (%, !), get_ipython, exit, quit "
                "and __main__ out of the function"
            )
        if isinstance(obj, types.FunctionType):
            used = cloudpickle.cloudpickle._extract_code_globals(obj.__code__)  # cached: what is added here is sent
            used.update(dict.fromkeys(_names_in_classes(obj.__code__)))
        return super().reducer_override(obj)


def _reduce_tensor(tensor: torch.Tensor) -> tuple:
    warns = tensor._backward_hooks and not isinstance(tensor, torch.nn.Parameter)  # that hooks are lost
    with warnings.catch_warnings(action="ignore") if warns else contextlib.nullcontext():
        made = reduced(tensor) or tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if tensor.grad_fn is not None:
        base = tensor._base
        is_view = base is not None and base.is_leaf and base.dtype == tensor.dtype and type(tensor) is torch.Tensor
        if is_view and not tensor.is_conj() and not tensor.is_neg():  # of a weight
            return torch.as_strided, (base, tensor.shape, tensor.stride(), tensor.storage_offset())
        return _without_graph, made
    state = tensor.grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if all(each is None for each in state):
        return made
    return *made, state, None, None, _set_autograd


def _storage(first: torch.TypedStorage, dtype: torch.dtype | None) -> torch.TypedStorage | torch.UntypedStorage:
    return first._untyped_storage if dtype is None else _typed(first._untyped_storage, dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _without_graph(make: Callable, args: tuple) -> torch.Tensor:
    tensor = make(*args).requires_grad_()
    delayed = torch._C._functions.DelayedError(_COMPUTED, 1)(tensor)
    return delayed if type(delayed) is type(tensor) else delayed.as_subclass(type(tensor))


def _set_autograd(tensor: torch.Tensor, state: tuple) -> None:
    tensor.grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks = state


_COMPUTED = (
    "a gradient reached a tensor that was computed before ddl.Parallel.run, and ranks have only its values: compute it "
    "in the function that ranks run, or send x.detach() if no gradient should go further"
)


def _names_in_classes(code: types.CodeType) -> Iterator[str]:
    """The globals that bodies of classes inside a function use, such as in annotations and decorators."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
                yield from (i.argval for i in dis.get_instructions(inner) if i.opname in _LOADS)
            yield from _names_in_classes(inner)


_LOADS = "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"  # the latter in Python 3.12 and newer
