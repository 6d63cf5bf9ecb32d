"""Measures what each rank does over time: :class:`Timeline`."""

from ignite_ddl.lab.timeline.timeline import Timeline, bubble

__all__ = ["Timeline", "bubble"]
