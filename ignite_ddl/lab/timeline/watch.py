"""Hooks that record this rank's collectives, messages, DDP's gradients and a pipeline's passes.

They are installed while a recorder is open:

- Collectives and messages: on the methods of a process group, which ``torch.distributed``, ``idist``, FSDP2 and
  pipelines call, on the operators that DTensor calls, and on ``Work.wait``.
- DDP's gradients, which are reduced in C++: at the end of a backward pass, when DDP waits for its buckets.
- A pipeline's forward and backward passes: on the methods of torch's stages, which its schedules call for each
  microbatch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

__all__ = ["Call", "Recorder", "now", "unwatch", "watch"]

# Methods of a ProcessGroup: those that end when every rank has entered, the root has entered, or one peer has entered.
# fmt: off
_TOGETHER = (
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier",
    "monitored_barrier", "reduce", "gather",
)
_ROOTED = ("broadcast", "scatter")
_MESSAGES = ("send", "recv", "recv_anysource")
# DTensor's collectives are called in C++, as operators of torch's dispatcher.
_OPERATORS = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
)
# fmt: on


# One clock for all processes of a machine, on Linux, macOS and Windows.
now = time.perf_counter


class Call:
    """A collective or message of this rank."""

    __slots__ = ("done", "key", "launched", "name", "needs", "rank", "thread")

    def __init__(
        self,
        rank: int,
        name: str,
        key: tuple | None,
        needs: tuple,
        launched: float,
        thread: tuple[str, int] | None = None,
    ) -> None:
        self.rank = rank
        self.name = name
        self.key = key  # the same on all participating ranks; None: peers unknown
        self.needs = needs  # the ranks that must enter before this rank can leave
        self.launched = launched
        self.thread = thread  # name and number of another thread than the recorded one; None: it is that one
        self.done: float | None = None

    def moved(self, seconds: float) -> Call:
        moved = Call(self.rank, self.name, self.key, self.needs, self.launched + seconds, self.thread)
        moved.done = None if self.done is None else self.done + seconds
        return moved


class Recorder:
    """The raw records of one timeline, written by the hooks of this file.

    Attributes:
        rank: this process's global rank.
        synchronize: whether to wait for the device before and after everything recorded.
        spans: ``(kind or "launch" or "wait", name, start, end, call)``, and for a pipeline's passes stage and
            microbatch.
        calls: the collectives and messages, in the order of the calls.
        counts: number of calls by group (and peer, for messages).
        thread: the thread that opened it. What other threads of Python wait for, such as an asynchronous checkpoint,
            does not block this one.
    """

    def __init__(self, synchronize: bool) -> None:
        self.rank, self.synchronize = 0, synchronize
        self.spans: list[tuple] = []
        self.calls: list[Call] = []
        self.counts: dict[tuple, int] = defaultdict(int)
        self.thread: threading.Thread | None = None

    def other_thread(self) -> tuple[str, int] | None:
        """Name and number of the current thread, if it is another one; autograd's threads are not Python's."""
        current = threading.current_thread()
        if current is self.thread or current is threading.main_thread() or isinstance(current, _AutogradThread):
            return None
        return current.name, vars(current).setdefault("_number_in_timelines", next(_numbers))


_AutogradThread = threading._DummyThread  # what current_thread() gives in a thread that Python did not start
_numbers = itertools.count()  # of threads, since their ids are reused
_watching: list[Recorder] = []
_hooks = contextlib.ExitStack()
_OpenCalls = list[tuple[Recorder, Call]]  # one collective or message, in each open recorder
_works: dict[int, tuple[dist.Work, _OpenCalls]] = {}  # by id; keeps the Work alive, so that no id is reused
_outputs: dict[int, _OpenCalls] = {}  # by address of a result, for wait_tensor, which has no Work
_backwards: set[int] = set()  # backward passes with a callback at their end
_ranks: dict[str, tuple[int, ...]] = {}  # by name of a process group


def watch(recorder: Recorder) -> None:
    """Opens a recorder."""
    if recorder not in _watching:
        if not _watching:
            _install()
        _ranks.clear()  # a group's name may be reused
        recorder.thread = threading.current_thread()
        _watching.append(recorder)


def unwatch(recorder: Recorder) -> None:
    """Closes a recorder; removes the hooks after the last one."""
    if recorder in _watching:
        _watching.remove(recorder)
        if not _watching:
            _hooks.close()
            for kept in (_works, _outputs, _backwards, _ranks):
                kept.clear()


def _install() -> None:
    for name in (*_TOGETHER, *_ROOTED, *_MESSAGES):
        _replace(dist.ProcessGroup, name, functools.partial(_watched_launch, name))
    _replace(dist.Work, "wait", _watched_wait)
    _replace(DistributedDataParallel, "_pre_forward", _watched_pre_forward)
    _replace(DistributedDataParallel, "_post_forward", _watched_post_forward)
    _replace(dist, "_broadcast_coalesced", _watched_buffers)
    if dist.is_initialized():  # else there is no pipeline; the import takes a second
        from torch.distributed.pipelining.stage import _PipelineStageBase

        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            _replace(_PipelineStageBase, name, functools.partial(_watched_pass, name))
    library = _hooks.enter_context(torch.library._scoped_library("_c10d_functional", "IMPL"))
    for name in (*_OPERATORS, "wait_tensor"):
        if hasattr(torch.ops._c10d_functional, name):
            # All calls pass this dispatch key, and torch registers no kernel for it.
            library.impl(name, _kernel(name), "BackendSelect", with_keyset=True)


def _replace(owner: Any, name: str, watched: Callable) -> None:
    if (original := vars(owner).get(name)) is not None:  # the attribute itself, not a bound method
        setattr(owner, name, watched(getattr(owner, name)))
        _hooks.callback(setattr, owner, name, original)


def _open_calls(name: str, group: dist.ProcessGroup, peer: int | None = None, tag: int = 0) -> _OpenCalls:
    """Records that this rank enters a collective, or sends to or receives from the group's rank ``peer``."""
    ranks = _ranks_of(group)
    calls = []
    for recorder in _watching:
        if recorder.synchronize:
            torch.accelerator.synchronize()
        me, key, needs = recorder.rank, None, ()
        known = peer in range(len(ranks))  # else the call itself raises
        if name in ("send", "recv") and known:
            needs = (me, ranks[peer]) if name == "send" else (ranks[peer], me)
            key = (group.group_name, "message", *needs, tag)
        elif ranks and name not in _MESSAGES:
            needs = (ranks[peer], me) if known and ranks[peer] != me else ranks
            key = (group.group_name, name if name in ("gradients", "buckets") else "", ranks)
        if key is not None:  # the same on all participating ranks: group, and number of the call in it
            recorder.counts[key] = number = recorder.counts[key] + 1
            key = (*key, number)
        call = Call(me, name, key, needs, now(), recorder.other_thread())
        recorder.calls.append(call)
        calls.append((recorder, call))
    return calls


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    ranks = _ranks.get(group.group_name)
    if ranks is None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # a group that torch.distributed does not know
            ranks = ()
        _ranks[group.group_name] = ranks
    return ranks


def _record_wait(calls: _OpenCalls, start: float | None, what: str = "wait") -> None:
    """Records that this rank was blocked from ``start`` (None: from the call) until now."""
    for recorder, call in calls:
        if recorder.synchronize:
            torch.accelerator.synchronize()
        end = now()
        if what == "wait":
            call.done = end
        if call.thread is None:
            recorder.spans.append((what, call.name, call.launched if start is None else start, end, call))


def _watched_launch(name: str, method: Callable) -> Callable:
    blocking = name == "monitored_barrier"

    def watched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        calls = _open_calls(name, group, *_peer_and_tag(name, args, kwargs))
        work = method(group, *args, **kwargs)
        synchronous = blocking or any(recorder.synchronize for recorder, _ in calls)
        _record_wait(calls, None, "wait" if synchronous else "launch")
        if work is not None and not blocking:
            if len(_works) > 200:  # remove those that were never waited for
                for number, (old, _) in list(_works.items()):
                    if old.is_completed():
                        del _works[number]
            _works[id(work)] = work, calls
        return work

    return watched


def _peer_and_tag(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[int | None, int]:
    """The peer and tag of a message, or the root of a collective, from positional or keyword arguments."""
    if name in ("send", "recv"):
        given = dict(zip(("tensors", "dstRank" if name == "send" else "srcRank", "tag"), args, strict=False)) | kwargs
        return given.get("dstRank", given.get("srcRank")), given.get("tag", 0)
    if name in _ROOTED:  # the root, or options with it, follows one or two tensor arguments
        place = 1 if name == "broadcast" else 2
        root = args[place] if len(args) > place else kwargs.get("root", kwargs.get("opts"))
        return (root if hasattr(root, "__index__") else getattr(root, "rootRank", 0)), 0
    return None, 0


def _watched_wait(wait: Callable) -> Callable:
    def watched(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _, calls = _works.pop(id(work), (None, None))
        start = now()
        try:
            return wait(work, *args, **kwargs)
        finally:
            _record_wait(calls or _unknown_calls("wait"), start)

    return watched


def _unknown_calls(name: str) -> _OpenCalls:
    return [(recorder, Call(recorder.rank, name, None, (), now(), recorder.other_thread())) for recorder in _watching]


def _kernel(name: str) -> Callable:
    operator = getattr(torch.ops._c10d_functional, name).default
    redispatch = operator._handle.redispatch_boxed  # releases the GIL, which the threads of gloo may need
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    arguments = [argument.name for argument in operator._schema.arguments]
    place = arguments.index("group_name") if "group_name" in arguments else None

    def launch(keys: Any, *args: Any, **kwargs: Any) -> Any:
        group = args[place]
        if isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(group)
        calls = _open_calls(name.strip("_"), group, args[1] if name.startswith("broadcast") else None)
        result = redispatch(keys & below, *args, **kwargs)
        _record_wait(calls, None, "launch")
        if len(_outputs) > 200:
            _outputs.clear()
        for output in result if isinstance(result, list | tuple) else [result]:
            _outputs[_address(output)] = calls
        return result

    def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
        calls, start = _outputs.pop(_address(tensor), None), now()
        try:
            return redispatch(keys & below, tensor)
        finally:
            _record_wait(calls or _unknown_calls("wait"), start)

    return launch if name != "wait_tensor" else wait_tensor


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without storage
        return 0


def _watched_buffers(broadcast_coalesced: Callable) -> Callable:
    """DDP's broadcast of its buffers before a forward pass."""

    def watched(group: dist.ProcessGroup, tensors: Any, size: int, root: int = 0) -> Any:
        calls = _open_calls("broadcast", group, root)
        result = broadcast_coalesced(group, tensors, size, root)
        _record_wait(calls, None)
        return result

    return watched


def _watched_pre_forward(pre_forward: Callable) -> Callable:
    """DDP rebuilds its buckets once, in the second step, which synchronizes the ranks."""

    def watched(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if getattr(ddp, "_has_rebuilt_buckets", True):
            return pre_forward(ddp, *args, **kwargs)
        start = now()
        result = pre_forward(ddp, *args, **kwargs)
        if ddp._has_rebuilt_buckets:
            calls = _open_calls("buckets", ddp.process_group)
            for _, call in calls:
                call.launched = start
            _record_wait(calls, start)
        return result

    return watched


def _watched_post_forward(post_forward: Callable) -> Callable:
    """DDP waits for its gradients in a callback at the end of a backward pass.

    When the pass begins, this queues a callback that runs before DDP's, and that one queues another that runs after
    it. The time between them is the wait. All buckets count as one collective, which a rank enters when its backward
    computation has ended.
    """

    def watched(ddp: DistributedDataParallel, output: Any) -> Any:
        output = post_forward(ddp, output)
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            for tensor in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(_watch_end_of_backward, ddp.process_group))
        return output

    return watched


def _watch_end_of_backward(group: dist.ProcessGroup, _: torch.Tensor) -> None:
    backward = torch._C._current_graph_task_id()
    if backward in _backwards:
        return
    _backwards.add(backward)
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def before() -> None:
        calls = _open_calls("gradients", group)

        def after() -> None:
            _backwards.discard(backward)
            _record_wait(calls, None)

        queue(after)

    queue(before)


def _watched_pass(name: str, method: Callable) -> Callable:
    """A pass of a pipeline's stage with one microbatch, named like torch's actions."""
    kind = {"forward_one_chunk": "forward", "backward_one_chunk": "backward"}.get(name, "backward_weight")

    def watched(stage: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        letter = kind[0].upper() if kind != "backward_weight" else "W"
        if not kwargs.get("full_backward", True):
            letter = "I"
        start = _time()
        try:
            return method(stage, microbatch, *args, **kwargs)
        finally:
            end, index = _time(), stage.stage_index
            for recorder in _watching:
                name = f"{index}{letter}{microbatch}"
                recorder.spans.append((kind, name, start, end, None, index, microbatch))

    return watched


def _time() -> float:
    """The current time, after synchronizing the device if a recorder asks for it."""
    if any(recorder.synchronize for recorder in _watching):
        torch.accelerator.synchronize()
    return now()
