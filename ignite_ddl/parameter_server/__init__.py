"""A parameter server: workers pull the parameters and push gradients, and the server takes the step."""

from ignite_ddl.parameter_server.worker import ParameterServer

__all__ = ["ParameterServer"]
