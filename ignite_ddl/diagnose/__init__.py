"""Why a job hangs, and what differs between ranks. Imported when it is asked for: a run that goes well needs none."""

from ignite_ddl.diagnose.hangs import report_hangs
from ignite_ddl.diagnose.report import Call, HangReport, UnlikeCalls
from ignite_ddl.diagnose.sync import OutOfSync, check_in_sync, check_same_calls

__all__ = ["Call", "HangReport", "OutOfSync", "UnlikeCalls", "check_in_sync", "check_same_calls", "report_hangs"]
