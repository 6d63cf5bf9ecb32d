"""What each rank did when, measured: :class:`Timeline`."""

from ignite_ddl.lab.timeline.timeline import Timeline, bubble

__all__ = ["Timeline", "bubble"]
