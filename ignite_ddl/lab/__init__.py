"""The instruments: predict what parallel training costs, simulate it, measure it, and draw what they find.

``cost``, ``plan``, ``simulate`` and what they import need neither torch nor Ignite.
"""

from ignite_ddl.lab import cost, plan, simulate
from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.lab.memory import SavedBytes
from ignite_ddl.lab.timeline import Timeline, bubble

__all__ = ["SavedBytes", "Timeline", "bubble", "cost", "count_bytes", "plan", "simulate"]
