"""Values as JSON, and back: containers keep their kind, tensors their bits, and nothing is executed.

What would need code of its own comes back as what it derives from: a named tuple as a tuple, a dict of another class,
or a defaultdict of a function, as a dict.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ignite_ddl.collectives import octets

_MAX_DEPTH = 100  # containers in containers, so that neither a damaged file nor a list of itself takes all of the stack
_DICTS = {"Counter": Counter, "OrderedDict": OrderedDict} | {
    f"defaultdict of {factory.__name__}": partial(defaultdict, factory) for factory in (int, float, str, list, dict)
}


def plain_state(owner: Any) -> Any:
    """The state of an object, without methods of its own, which Ignite's ReduceLROnPlateauScheduler has in it."""

    def without_methods(state: Any) -> Any:
        if type(state) not in (dict, OrderedDict):
            return state
        return type(state)(
            (k, without_methods(v)) for k, v in state.items() if getattr(v, "__self__", None) is not owner
        )

    return without_methods(owner.state_dict())


def encoded(value: Any, where: str, depth: int = _MAX_DEPTH) -> Any:
    """A value as JSON can hold it: containers keep their kind, tensors their bits.

    Raises:
        ValueError: if there is anything but numbers, strings, tensors and lists, tuples and dicts of them, or these
            are more than 100 deep.
    """
    if hasattr(value, "item") and not isinstance(value, torch.Tensor) and getattr(value, "ndim", None) == 0:
        value = value.item()  # NumPy's numbers
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 10**4000):
        return value
    if not depth:
        raise ValueError(f"{where[:200]}… should be at most {_MAX_DEPTH} containers deep")
    depth -= 1
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_quantized):
        full = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        data = base64.b64encode(octets(full).numpy().tobytes()).decode()
        return {"tensor": data, "dtype": str(full.dtype).removeprefix("torch."), "shape": list(full.shape)}
    if isinstance(value, Mapping):
        pairs, kind = value.items(), type(value).__name__
        if isinstance(value, defaultdict):
            kind += f" of {getattr(value.default_factory, '__name__', None)}"
        is_known = kind in _DICTS and type(value).__module__ == "collections"
        pairs = [[encoded(k, where, depth), encoded(v, f"{where}.{k}", depth)] for k, v in pairs]
        return {"dict": pairs} | ({"kind": kind} if is_known else {})
    if isinstance(value, list | tuple):
        items = [encoded(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise ValueError(
        f"{where} should be numbers, strings, dense tensors, or lists, tuples and dicts of them, so that loading runs "
        f"nothing, but is a {type(value).__name__}"
    )


def decoded(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """What :func:`encoded` was given.

    Raises:
        Exception: of any type, if it was something else, or containers in containers more than 100 deep.
    """
    if not depth:
        raise ValueError(f"containers are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [decoded(item, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        make = _DICTS[value["kind"]] if "kind" in value else dict
        return make({decoded(k, depth - 1): decoded(v, depth - 1) for k, v in value["dict"]})
    if "tuple" in value:
        return tuple(decoded(item, depth - 1) for item in value["tuple"])
    data = bytearray(base64.b64decode(value["tensor"]))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, value["dtype"])).reshape(value["shape"])
