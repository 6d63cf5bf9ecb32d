"""Natural mistakes in chapter 08's exercises."""

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.handlers import Timer

STEP = {
    "resume": Events.ITERATION_STARTED,
    "pause": Events.ITERATION_COMPLETED,
    "step": Events.ITERATION_COMPLETED,
}
DATA = {
    "resume": Events.GET_BATCH_STARTED,
    "pause": Events.GET_BATCH_COMPLETED,
    "step": Events.GET_BATCH_COMPLETED,
}


def by_hand(trainer, average=True, reset=Events.STARTED):
    timers = []
    for events in (STEP, DATA):
        timers.append(Timer(average=average))
        timers[-1].pause()
        for event, method in ((reset, "reset"), (reset, "pause"), *((events[m], m) for m in events)):
            if event:
                trainer.add_event_handler(event, getattr(timers[-1], method))
    return timers


def one_timer(trainer):
    return [Timer(average=True).attach(trainer, **STEP)] * 2


def split(entered, left, gather=idist.all_gather, last=max, stay=False):
    moments = gather(entered)
    return moments.index(last(moments)), last(moments) - entered, left - (entered if stay else last(moments))


def by_tensor(dtype):
    return lambda entered: idist.all_gather(torch.tensor([entered], dtype=dtype)).tolist()


RIGHT = {
    "two_timers": [by_hand],
    "split_wait": [lambda entered, left: split(entered, left, by_tensor(torch.float64))],
}
MISTAKES = {
    "two_timers": {
        "return two timers of Ignite": lambda trainer: (1.0, 2.0),
        "two timers, please": one_timer,
        "steps says 11 s, not 10.5; that is": lambda trainer: by_hand(trainer, reset=Events.EPOCH_STARTED),
        "steps says 17.5 s, not 10; it ran before the first step": lambda trainer: [
            Timer(average=True).attach(trainer, **events) for events in (STEP, DATA)
        ],
        "steps says 40 s, not 10; that is the sum of all": lambda trainer: by_hand(trainer, average=False),
        "after a second run; each run starts anew": lambda trainer: by_hand(trainer, reset=None),
        "steps says 30 s, not 10\n": lambda trainer: by_hand(trainer)[::-1],
    },
    "split_wait": {
        "return three things": lambda entered, left: idist.get_rank(),
        "the last to come is rank 1, your rank 0 says 0": lambda *moments: split(*moments, last=min),
        "it is 0 s of idle, you say 2": lambda entered, left: (1, 2.0, 0.5),
        "it is 0.5 s of communication, you say 2.5; that is": lambda *moments: split(*moments, stay=True),
        "float32 has 7 digits": lambda *moments: split(*moments, by_tensor(torch.float32)),
        "right, but rank 0 hands 16": lambda entered, left: split(entered, left + 0 * idist.all_reduce(left)),
    },
}
