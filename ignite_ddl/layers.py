"""A model's layers before the mesh cuts it: how it names them, how they are made one at a time, what they cost."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ignite_ddl.mesh import Mesh

__all__ = ["Lazy", "LazyLayers", "layer_costs", "lazy", "named_layers", "put"]


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers between which a pipeline may cut: what the input passes through, in order.

    Those of an ``nn.Sequential``; any other model names them in an attribute ``pipeline_layers`` (a list, or a
    method that returns one). Calling them one after the other has to be what its ``forward`` does.

    Args:
        model: the model.

    Returns:
        list: pairs of name and layer. A layer may be there twice.

    Raises:
        ValueError: if the model does not say what its layers are, or leaves weights or buffers out.

    Examples:
        .. code-block:: python

            from torch import nn
            from ignite_ddl.layers import named_layers

            class Net(nn.Module):
                pipeline_layers = ["embed", "blocks.0", "blocks.1"]

                def __init__(self):
                    super().__init__()
                    self.embed = nn.Linear(2, 4)
                    self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

                def forward(self, x):
                    x = self.embed(x)
                    for block in self.blocks:
                        x = block(x)
                    return x

            assert [name for name, _ in named_layers(Net())] == Net.pipeline_layers
    """
    kind, names = type(model).__name__, getattr(model, "pipeline_layers", None)
    if names is None:
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"model should be an nn.Sequential under pp, but given {kind}: stages are cut between its layers; "
                "or give it an attribute pipeline_layers with the names of its layers, in order"
            )
        if type(model).forward is not nn.Sequential.forward:
            raise ValueError(
                f"model is a {kind}, an nn.Sequential with a forward of its own: say what its layers are, in order, "
                "in an attribute pipeline_layers"
            )
        return list(model._modules.items())  # named_children leaves out a layer's second place
    names = list(names() if callable(names) else names)
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if not name or name not in modules]
    if unknown or not names:
        raise ValueError(
            f"{kind}.pipeline_layers should name modules of the model, but names {unknown or 'none'}; it has "
            f"{', '.join(name for name in modules if name)}"
        )
    inside = tuple(f"{name}." for name in names)
    left_out = [name for name in model.state_dict() if not name.startswith(inside)]
    if left_out:
        raise ValueError(
            f"{kind}.pipeline_layers leaves out {', '.join(left_out)}: no stage would hold them; put them into layers"
        )
    return [(name, modules[name]) for name in names]


def put(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Makes ``layer`` the submodule ``name`` of ``root``, with a ModuleDict for each part before a dot."""
    *parts, last = name.split(".")
    for part in parts:
        if part not in root._modules:
            root.add_module(part, nn.ModuleDict())
        root = root._modules[part]
    root.add_module(last, layer)


# ------------------------------------------------------------------------------------------- made one at a time


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

    def sketch(self) -> nn.Module:
        """The layer with shapes only: on the meta device, without drawing a number."""
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
        self.sketches: list[nn.Module] = []

    @contextlib.contextmanager
    def sketched(self) -> Iterator[None]:
        """Puts a sketch in the place of each, to look at; they come back where that raises."""
        self.sketches = [lazy.sketch() for lazy in self.lazies]
        for lazy_, sketch in zip(self.lazies, self.sketches, strict=True):
            _put_in_place([self.model], lazy_, sketch)
        try:
            yield
        except BaseException:
            for lazy_, sketch in zip(self.lazies, self.sketches, strict=True):
                _put_in_place([self.model], sketch, lazy_)
            raise

    def build(
        self, mesh: Mesh, roots: Sequence[nn.Module], finish: Callable[[nn.Module, list[str]], None]
    ) -> None:
        """Makes the layers one by one, drawing alike on all ranks, and keeps those that are sketched in ``roots``.

        Args:
            mesh: the mesh.
            roots: modules of this rank; the names of layers are those in the first.
            finish: takes a layer that is kept and its names, and cuts it before the next is made.
        """
        with _stream_of_rank_0(mesh) if self.lazies else contextlib.nullcontext():
            for lazy_, sketch in zip(self.lazies, self.sketches, strict=True):
                layer = lazy_.build()
                names = [name for name, m in roots[0].named_modules(remove_duplicate=False) if m is sketch]
                if names:
                    _put_in_place(roots, sketch, layer)
                    finish(layer, names)
                del layer  # before the next one is made


def _in_order(model: nn.Module) -> Iterator[Lazy]:
    for child in model._modules.values():
        if isinstance(child, Lazy):
            yield child
        elif child is not None:
            yield from _in_order(child)


def _put_in_place(roots: Sequence[nn.Module], old: nn.Module, new: nn.Module) -> None:
    for root in roots:
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


# ------------------------------------------------------------------------------------------------ what they cost


def layer_costs(model: nn.Module, x: torch.Tensor, unit: str = "flops", repeats: int = 5) -> list[float]:
    """What a forward and a backward pass of each layer costs, for ``ddl.auto_model(..., costs=)``.

    "flops" counts the operations of matrix products, convolutions and attention by their shapes
    (``torch.utils.flop_counter``): nothing is computed, every machine finds the same, and layers that only
    move numbers (embeddings, norms, activations) count nothing. "seconds" takes the time of each layer on rank 0's
    device; the other ranks wait, and get rank 0's numbers, since all ranks have to cut alike.

    Args:
        model: an ``nn.Sequential``, or a model that names its layers (see :func:`~ignite_ddl.layers.named_layers`);
            not cut yet. Lazy layers are made for it and forgotten. It is left as it is.
        x: a microbatch: costs are for its rows.
        unit: "flops" or "seconds". Default: "flops".
        repeats: of "seconds": how often each is measured, after once to warm up; the median counts. Default: 5.

    Returns:
        list: a number for each layer.

    Raises:
        ValueError: if the model does not say what its layers are, or ``unit`` is unknown.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            wide, narrow = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
            first, second = ddl.layer_costs(torch.nn.Sequential(wide, narrow), torch.zeros(10, 64))
            assert first == 2 * (2 * 10 * 64 * 64)          # forward, and the weights' gradient: the input needs none
            assert second == 3 * (2 * 10 * 64 * 2)
    """
    if unit not in ("flops", "seconds"):
        raise ValueError(f'unit should be "flops" or "seconds", but given {unit!r}')
    layers = named_layers(model)
    box: list[Any] = [None]
    if unit == "flops" or idist.get_rank() == 0:
        device = torch.device("meta") if unit == "flops" else idist.device()
        hidden, box = x.detach().to(device), [[]]
        for _, layer in layers:
            with torch.random.fork_rng(), torch.enable_grad():
                layer = _to_try(layer, device)
                cost = _flops if unit == "flops" else _seconds
                hidden, found = cost(layer, hidden, repeats)
            box[0].append(found)
    if unit == "seconds" and idist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _to_try(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer on a device, to run without a trace in the model."""
    if isinstance(layer, Lazy):
        return layer.sketch() if device.type == "meta" else layer.build().to(device)
    layer = copy.deepcopy(layer)
    late = LazyLayers(layer)
    for lazy_ in late.lazies:
        _put_in_place([layer], lazy_, lazy_.sketch() if device.type == "meta" else lazy_.build())
    return layer.to(device)


def _once(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns what the next layer is given."""
    output = layer(hidden)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    layer.zero_grad()
    hidden.grad = None
    return output.detach().requires_grad_(output.requires_grad)


def _flops(layer: nn.Module, hidden: torch.Tensor, _: int) -> tuple[torch.Tensor, float]:
    with FlopCounterMode(display=False) as counter:
        output = _once(layer, hidden)
    return output, float(counter.get_total_flops())


def _seconds(layer: nn.Module, hidden: torch.Tensor, repeats: int) -> tuple[torch.Tensor, float]:
    output, seconds = _once(layer, hidden), []
    for _ in range(repeats):
        start = time.perf_counter()
        _once(layer, hidden)
        if hidden.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return output, statistics.median(seconds)
