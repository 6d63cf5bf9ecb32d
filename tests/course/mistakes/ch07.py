"""Natural mistakes in chapter 07's exercises."""

READY = 'table["data"] + table["handlers"]'
RIGHT = {"straggler": [{READY: '-table["step"]'}]}  # by the shortest step
MISTAKES = {
    "profile": {
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
        "not for 1: all ranks are ready for the step within 1 ms": {"0.001": "0.0003"},
        "2, not for None: rank 2 is ready 1.5 ms after the next one": {"0.001": "0.01"},
        "2, not for 0: rank 0 has the longest step because it waits in it": {READY: 'table["step"]'},
        "the others wait for 0, not for 2": lambda tables: (2, 0.049),
        "an iteration gains 49.0 ms, not 50.0": {"(last), last - second": "(last), last - min(before_the_meeting)"},
    },
}
