"""The objects of ``to_save`` and ``to_load`` by what a checkpoint does with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn

from ignite_ddl.data import ShardedDataLoader


@dataclass(frozen=True)
class Kinds:
    """Objects by kind, each with its name."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    engines: dict[str, Engine]
    loaders: dict[str, ShardedDataLoader]
    others: dict[str, Any]

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> Kinds:
        kinds = (nn.Module, torch.optim.Optimizer, Engine, ShardedDataLoader, object)
        found: list[dict[str, Any]] = [{} for _ in kinds]
        for key, value in objects.items():
            found[next(i for i, kind in enumerate(kinds) if isinstance(value, kind))][key] = value
        return cls(*found)
