"""Natural mistakes in chapter 07's exercises."""

import math

MEETINGS = 'meetings = [table["meeting"] for table in tables]'
OWN = '[table["meeting"] - sum(table[part] for part in ("data", "step", "handlers")) for table in tables]'
RIGHT = {"straggler": [{MEETINGS: f"meetings = {OWN}"}]}
FROM_FIRST = "meetings.index(last), max(meetings) - last"
MISTAKES = {
    "profile": {
        "data took 21 s, you have nan s": lambda engine, clock: dict.fromkeys(("data", "step", "handlers"), math.nan),
        "return the dict with the keys": lambda engine, clock: [0, 0, 0],
        "data took 12 s, you have 21 s": lambda engine, clock: {"data": 21.0, "step": 9.0, "handlers": 0.0},
        "handlers took 42 s, you have": {"(Events.STARTED, ": "(", ", Events.COMPLETED)": ")"},
        "step took 30 s, you have 36 s\n": {
            "Events.GET_BATCH_COMPLETED, ": "",
            "Events.ITERATION_STARTED": "Events.GET_BATCH_COMPLETED",
        },
        "right, but you read the clock 17 times in 3 steps": {
            "last = []": "last = []\n    engine.add_event_handler(Events.ITERATION_STARTED, clock)"
        },
    },
    "straggler": {
        "return two things": lambda tables: 2,
        "not for 1: all ranks come to the meeting within 1 ms": {"0.001": "0.0003"},
        "2, not for None: rank 2 comes 1.5 ms after the next one": {"0.001": "0.01"},
        "2, not for 1: the step of rank 1 holds computing and the meeting": {'"meeting"] for': '"step"] for'},
        "the others wait for 2, not for 1": {'table["meeting"] for': '-table["data"] - table["handlers"] for'},
        "2, not for 0: rank 0 stays in the meeting for the longest time": {'[table["m': '[-table["m'},
        "the others wait for 0, not for 2": lambda tables: (2, 0.049),
        "an iteration gains 49.0 ms, not nan": {"last), second - last": "last), float('nan')"},
        "an iteration gains 49.0 ms, not 51.0": {"meetings.index(last), second - last": FROM_FIRST},
    },
}
