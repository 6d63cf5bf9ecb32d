"""What `make lab` prints: the address, in one line, and warnings. JupyterLab runs this file, which gives it ``c``."""

import logging
import re


def short(record: logging.LogRecord) -> bool:
    """Leaves out what is no warning, and of the banner all but the address."""
    address = re.search(r"https?://\S+token=\w+", record.getMessage())
    if address and record.levelno == logging.CRITICAL:
        record.msg, record.args = f"JupyterLab: {address[0]} (Ctrl-C ends it)", ()
    return record.levelno >= logging.WARNING


c.ServerApp.log_format = "%(message)s"  # noqa: F821
for name in ("ServerApp", "LabApp"):
    logging.getLogger(name).addFilter(short)
