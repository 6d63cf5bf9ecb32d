"""Layers that are made one at a time, for models that no rank can hold whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.mesh import Mesh

__all__ = ["Lazy", "LazyLayers", "lazy", "replace_module"]


def lazy(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Lazy:
    """A layer that is made when ``ddl.auto_model`` comes to it, for models that no rank can hold whole.

    Every rank makes every layer, one at a time, from rank 0's random stream, and keeps its part: so the weights are
    those that one process would have drawn, and memory holds at most a rank's shard and one layer. Under pp a
    rank keeps its stages' layers; the parts of ``tensor_plan`` and of ``shard=True`` are cut out of a layer before
    the next is made. On a serial run the layers are just made.

    Draw from torch's CPU stream, and do in the factory what the layer needs (initialise, freeze, load).
    ``model.double()``, ``.to(dtype)``, ``.requires_grad_()`` and ``.eval()`` are remembered. Weights cannot be tied
    across lazy layers.

    Args:
        factory: a class of layers, or a function that returns one.
        args: for it.
        kwargs: for it.

    Returns:
        Lazy: stands in the layer's place.

    Raises:
        ValueError: if ``factory`` cannot be called.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def weights_held(local_rank):
                torch.manual_seed(0)
                model = torch.nn.Sequential(*[ddl.lazy(torch.nn.Linear, 8, 8, bias=False) for _ in range(4)])
                model = ddl.auto_model(model)
                return {name: weight.tolist() for name, weight in model.named_parameters()}

            with ddl.Parallel(backend="gloo", nproc_per_node=2, pp=2) as parallel:
                first, second = parallel.run(weights_held)

            torch.manual_seed(0)
            eager = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
            assert list(first) == ["0.weight", "1.weight"] and list(second) == ["2.weight", "3.weight"]
            assert second["3.weight"] == eager[3].weight.tolist()
    """
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ValueError(
            f"factory should be a class of layers or a function that makes one, but given {factory!r}"
        )
    return Lazy(factory, args, kwargs)


class Lazy(nn.Module):
    """Stands in the place of a layer that is yet to be made. Made by :func:`lazy`."""

    def __init__(self, factory: Callable[..., nn.Module], args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.recipe = factory, args, kwargs
        self.converted: list[Callable] = []  # by .double(), .to(...)
        self.trainable: bool | None = None  # by .requires_grad_(...)

    def build(self) -> nn.Module:
        """Makes the layer, drawing its weights."""
        layer = self._make()
        for convert in self.converted:
            layer._apply(convert)
        return layer

    def on_meta(self) -> nn.Module:
        """The layer on the meta device: shapes only, without drawing a number."""
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    layer = self._make()
            except (NotImplementedError, RuntimeError):  # it looks at values: make them, and forget them
                layer = self._make()
            layer.to("meta")
        for convert in self.converted:
            with contextlib.suppress(NotImplementedError):  # nothing moves away from the meta device
                layer._apply(convert)
        return layer

    def _make(self) -> nn.Module:
        factory, args, kwargs = self.recipe
        layer = factory(*args, **kwargs)
        if not isinstance(layer, nn.Module):
            raise ValueError(
                f"factory should return a layer, but {factory!r} returned {type(layer).__name__}"
            )
        if self.trainable is not None:
            layer.requires_grad_(self.trainable)
        return layer.train(self.training) if self.training != layer.training else layer

    def _apply(self, fn: Callable, recurse: bool = True) -> Lazy:
        self.converted.append(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Lazy:
        self.trainable = requires_grad
        return self

    def apply(self, fn: Callable) -> Lazy:
        raise RuntimeError("a lazy layer has no weights yet to apply a function to: do it in its factory")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a lazy layer has not been made yet: give the model to ddl.auto_model first")

    def extra_repr(self) -> str:
        factory, args, kwargs = self.recipe
        given = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
        return ", ".join([getattr(factory, "__name__", repr(factory)), *given])


class LazyLayers:
    """The lazy layers of a model, in the order in which one process would have made them.

    Args:
        model: any model; it may have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lazies = list(dict.fromkeys(_in_order(model)))

    @contextlib.contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside, a layer on the meta device stands in the place of each: shapes to check, no weights."""
        on_meta = [lazy.on_meta() for lazy in self.lazies]
        for lazy, layer in zip(self.lazies, on_meta, strict=True):
            replace_module(self.model, lazy, layer)
        try:
            yield
        finally:
            for lazy, layer in zip(self.lazies, on_meta, strict=True):
                replace_module(self.model, layer, lazy)

    def make(self, mesh: Mesh, is_held: Callable[[str], bool]) -> Iterator[list[str]]:
        """Makes the layers one by one, drawing alike on all ranks, and puts those that are held here into the model.

        Args:
            mesh: the mesh.
            is_held: whether this rank holds the layer of a name.

        Yields:
            list: the names of a layer that is held, before the next one is made.
        """
        if not self.lazies:
            return
        with _stream_of_rank_0(mesh):
            for lazy in self.lazies:
                names = [name for name, m in self.model.named_modules(remove_duplicate=False) if m is lazy]
                layer = lazy.build()
                if any(is_held(name) for name in names):
                    replace_module(self.model, lazy, layer)
                    yield names
                del layer  # before the next one is made


def _in_order(model: nn.Module) -> Iterator[Lazy]:
    for child in model._modules.values():
        if isinstance(child, Lazy):
            yield child
        elif child is not None:
            yield from _in_order(child)


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts ``new`` wherever ``old`` stands inside ``root``."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


@contextlib.contextmanager
def _stream_of_rank_0(mesh: Mesh) -> Iterator[None]:
    """Draws as rank 0 draws. A rank that was seeded otherwise goes on in its own stream afterwards."""
    if mesh.world_size == 1:
        yield
        return
    own = torch.get_rng_state()
    common = own.clone().to(idist.device())
    dist.broadcast(common, src=0)
    torch.set_rng_state(common.cpu())
    yield
    if not torch.equal(common.cpu(), own):
        torch.set_rng_state(own)
