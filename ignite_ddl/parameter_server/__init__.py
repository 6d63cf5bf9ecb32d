"""A parameter server: workers pull parameters and push gradients, and the server runs the optimizer."""

from ignite_ddl.parameter_server.worker import ParameterServer

__all__ = ["ParameterServer"]
