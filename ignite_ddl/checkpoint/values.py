"""Values as JSON, and back: containers keep their kind, tensors their bits, and nothing is executed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["decoded", "encoded"]


def encoded(value: Any, where: str) -> Any:
    """A value as JSON can hold it: containers keep their kind, tensors their bits.

    Raises:
        ValueError: if there is anything but numbers, strings, tensors and lists, tuples and dicts of them.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        full = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
        data = base64.b64encode(full.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": data, "dtype": str(full.dtype).removeprefix("torch."), "shape": list(full.shape)}
    if isinstance(value, Mapping):
        return {"dict": [[encoded(k, where), encoded(v, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy's numbers
        return value.item()
    raise ValueError(
        f"{where} should be numbers, strings, tensors, or lists, tuples and dicts of them, so that loading executes "
        f"nothing, but is a {type(value).__name__}"
    )


def decoded(value: Any, deepest: int = 100) -> Any:
    """What :func:`encoded` was given.

    Raises:
        Exception: of any type, if it was something else, or containers in containers more than 100 deep.
    """
    if not deepest:
        raise ValueError("containers are nested more than 100 deep")
    if isinstance(value, list):
        return [decoded(item, deepest - 1) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {decoded(k, deepest - 1): decoded(v, deepest - 1) for k, v in value["dict"]}
    if "tuple" in value:
        return tuple(decoded(item, deepest - 1) for item in value["tuple"])
    data = bytearray(base64.b64decode(value["tensor"]))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, value["dtype"])).reshape(value["shape"])
