"""The same pulls and pushes in plain torch.distributed.rpc: what benchmarks/parameter_server.py measures against.

As short and as fast as it goes: one server, no checks, no records, no faults.
"""

import os
import threading
import warnings

import torch
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # loopback: who reaches RPC's ports can run code here
state = {}


def join(rank, workers, address):
    """The server is the last rank."""
    name = f"worker{rank}" if rank < workers else "server0"
    # Plain TCP: TensorPipe's shared memory polls, which costs half a core per waiting process.
    plain = {"_transports": ["uv"], "_channels": ["basic"], "num_worker_threads": 8}
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, **plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own use of gloo
        rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)


def serve(workers, address):
    torch.set_num_threads(1)
    join(workers, workers, address)
    threading.Event().wait()  # until it is killed


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
