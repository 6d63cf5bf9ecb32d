"""What ``import ignite_ddl`` costs over the imports of torch and Ignite that every such script has.

Fresh processes, in turns, from the start of Python to its end.

    python benchmarks/import_time.py [--quick]
"""

import functools
import os
import resource
import subprocess
import sys

import sides

TARGET = 1.05
BELOW = "import torch, ignite.distributed"
COUNT = "import sys, ignite_ddl; print(sum(name.split('.')[0] == 'ignite_ddl' for name in sys.modules))"


# Some containers set it; a user's second import finds our bytecode as it finds torch's.
CACHED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=CACHED).stdout


def fresh(quick):
    codes = {"ours": "import ignite_ddl", "theirs": BELOW, "again": BELOW}

    def of_children():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    sides_ = {name: functools.partial(python, code) for name, code in codes.items()}
    seconds, cpu = sides.in_turns(sides_, 1 if quick else 7, busy=of_children)
    found = {"again": seconds["again"], "cpu": (cpu["ours"], cpu["theirs"]), "target": TARGET}
    found["note"] = f"{int(python(COUNT))} modules of ours"
    return [sides.row("import ignite_ddl", BELOW, seconds["ours"], seconds["theirs"], **found)]


if __name__ == "__main__":
    sides.main(__doc__, {"import": fresh})
