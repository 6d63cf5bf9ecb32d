"""The rarer traps of data loaders, each run on four ranks: what chapter 05's table of reference is about."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ignite.distributed as idist
import torch
from torch.utils import data

import ignite_ddl as ddl
from ignite_ddl.course.ranks import on_ranks

__all__ = ["loader_traps"]


def loader_traps() -> dict[str, tuple[Any, Any]]:
    """Runs each case on four ranks of this machine, with idist's loader and with ddl's.

    Returns:
        dict: a case in words to what came out with ``idist.auto_dataloader`` and with ``ddl.auto_dataloader``.

    Example:
        >>> from ignite_ddl.course import loader_traps
        >>> loader_traps()["a global batch of 10: rows in the first batch"]
        (8, 10)
    """
    found = [_of_one_loader(make) for make in (idist.auto_dataloader, ddl.auto_dataloader)]
    return {case: (found[0][case], found[1][case]) for case in found[0]}


def _of_one_loader(make: Callable) -> dict[str, Any]:
    ranks = on_ranks(4, _on_rank, make)

    def of(case: str) -> list:
        return [rank[case] for rank in ranks]

    def together(case: str) -> int:
        return sum(of(case))

    mesh = on_ranks(4, _noise, make is idist.auto_dataloader, dp=2, tp=2)
    refused = None in of("divided")
    return {
        "no `shuffle`: the first batch is rows 0 to 7": _yes(set().union(*of("first")) == set(range(8))),
        "a global batch of 10: rows in the first batch": together("ten"),
        "a global batch of 2: rows in the first batch": together("two"),
        "num_workers=2: workers of a rank": of("workers")[0],
        "a batch_sampler over 18 rows: rows read": together("batch_sampler"),
        "a DistributedSampler over 18 rows: rows read": "refused" if refused else together("divided"),
        "a weighted sampler, then randint: different numbers": len(set(of("drawn"))),
        "a weighted sampler: epoch 2 draws the rows of epoch 1": _yes(all(of("repeated"))),
        "rank 0 looks at a batch first: then all rows are read": _yes(
            set().union(*of("after a look")) == set(range(16))
        ),
        "2 × 2, each rank its seed: tp peers have the same noise": _yes(mesh[0] == mesh[1]),
        "a stream of 18 rows, num_workers=2: rows read": together("stream"),
        "one seed on all ranks, a worker each: different noises": len({tuple(noise) for noise in of("noise")}),
    }


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _on_rank(local_rank: int, make: Callable) -> dict[str, Any]:
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")  # idist warns of the batch_sampler
    torch.manual_seed(local_rank)
    rows = range(18)
    batches = data.BatchSampler(data.SequentialSampler(rows), 8, drop_last=False)
    found = {
        "first": set(next(iter(make(range(16), batch_size=8))).tolist()),
        "ten": len(next(iter(make(range(40), batch_size=10)))),
        "two": len(next(iter(make(range(40), batch_size=2)))),
        "workers": make(range(40), batch_size=8, num_workers=2).num_workers,
        "batch_sampler": sum(map(len, make(rows, batch_sampler=batches))),
        "stream": sum(map(len, make(_Stream(), batch_size=8, num_workers=2))),
    }
    try:
        divided = make(rows, batch_size=8, sampler=data.DistributedSampler(rows, shuffle=False))
        found["divided"] = sum(map(len, divided))
    except ValueError:
        found["divided"] = None
    weighted = make(range(16), batch_size=8, sampler=data.WeightedRandomSampler([1.0] * 16, num_samples=16))
    first, second = ([batch.tolist() for batch in weighted] for _ in range(2))
    found["repeated"], found["drawn"] = first == second, int(torch.randint(1000, ()))
    look = make(range(16), batch_size=8, shuffle=True)
    passes = _EveryPassAnEpoch(look) if make is idist.auto_dataloader else look
    if local_rank == 0:
        next(iter(passes))
    found["after a look"] = {row for batch in passes for row in batch.tolist()}
    torch.manual_seed(0)  # as scripts begin, alike on every rank
    _, numbers = next(iter(make(_Noisy(), batch_size=8, shuffle=False, num_workers=4)))  # a worker for each rank
    found["noise"] = numbers.tolist()
    return found


class _EveryPassAnEpoch:
    """idist's loader with the epoch set whenever a pass begins."""

    def __init__(self, loader: data.DataLoader) -> None:
        self.loader, self.epoch = loader, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.loader.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class _Stream(data.IterableDataset):
    """Eighteen rows; each worker that reads it runs this anew."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(18))


class _Noisy(data.Dataset):
    """Rows with a random number each, as a transform that flips or crops draws it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> tuple[int, int]:
        return row, int(torch.randint(1000, ()))


def _noise(local_rank: int, by_hand: bool) -> list[int]:
    torch.manual_seed(local_rank)
    mesh, dataset = ddl.get_mesh(), _Noisy()
    if by_hand:  # idist knows no pairs; a sampler can be told of them
        pairs = data.DistributedSampler(dataset, mesh.dp_size, mesh.dp_rank, shuffle=False)
        loader = data.DataLoader(dataset, batch_size=8 // mesh.dp_size, sampler=pairs)
    else:
        loader = ddl.auto_dataloader(dataset, batch_size=8)
    return [number for _, numbers in loader for number in numbers.tolist()]
