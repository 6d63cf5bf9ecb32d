"""The same pulls and pushes in plain torch.distributed.rpc: what benchmarks/parameter_server.py measures against.

As short and as fast as it goes: one server, no checks, no records, no faults.
"""

import threading

import torch
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

state = {}


def create(tensors, workers, sync):
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    state.update(parameters=parameters, optimizer=optimizer, workers=workers, sync=sync)
    state.update(lock=threading.Lock(), version=0, arrived=0, waiting=[])


@rpc.functions.async_execution
def pull(version):
    """At the version asked for, or a later one."""
    future = Future()
    with state["lock"]:
        if state["version"] >= version:
            tensors = [p.detach() for p in state["parameters"]]
            if not state["sync"]:  # others may update while this is sent
                tensors = [tensor.clone() for tensor in tensors]
            future.set_result(tensors)
        else:
            state["waiting"].append(future)
    return future


def push(gradients):
    with state["lock"]:
        for parameter, gradient in zip(state["parameters"], gradients, strict=True):
            if state["arrived"] == 0:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        state["arrived"] += 1
        if state["sync"] and state["arrived"] < state["workers"]:
            return
        if state["sync"]:
            for parameter in state["parameters"]:
                parameter.grad /= state["workers"]
        state["optimizer"].step()
        state["arrived"] = 0
        state["version"] += 1
        tensors = [p.detach() for p in state["parameters"]]
        for future in state["waiting"]:
            future.set_result(tensors)
        state["waiting"].clear()
