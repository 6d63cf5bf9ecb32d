"""Natural mistakes in chapter 08's exercises."""

import ignite.distributed as idist

ATTACH = "timer.attach(trainer, start=Events.STARTED, resume=begin, pause=end, step=end)"
PAUSE = "trainer.add_event_handler(Events.STARTED, timer.pause)"
GATHER = "idist.all_gather(entered)"
BY_HAND = "[*map(trainer.add_event_handler, (begin, end, end), (timer.resume, timer.pause, timer.step))]"
RIGHT = {
    "two_timers": [{ATTACH: f"{BY_HAND}; trainer.add_event_handler(Events.STARTED, timer.reset)"}],
    "split_wait": [{GATHER: "idist.all_gather(torch.tensor([entered], dtype=torch.float64)).tolist()"}],
}
MISTAKES = {
    "two_timers": {
        "return two timers of Ignite": lambda trainer: (1.0, 2.0),
        "two timers, please": {"return steps, data": "return steps, steps"},
        "steps says 11 s, not 10.5; that is": {"Events.STARTED": "Events.EPOCH_STARTED"},
        "steps says 17.5 s, not 10; it ran before the first step": {"start=Events.STARTED, ": "", PAUSE: "pass"},
        "steps says 40 s, not 10; that is the sum of all": {"average=True": ""},
        "after a second run; each run starts anew": {ATTACH: BY_HAND, PAUSE: "timer.pause()"},
        "steps says 30 s, not 10\n": {"return steps, data": "return data, steps"},
    },
    "split_wait": {
        "return three things": lambda entered, left: idist.get_rank(),
        "the last to come is rank 1, your rank 0 says 0": {"max(": "min("},
        "it is 0 s of idle, you say 2": lambda entered, left: (1, 2.0, 0.5),
        "it is 0.5 s of communication, you say 2.5; that is": {"left - last": "left - entered"},
        "it is 2 s of idle, you say nan": {"last - entered": "float('nan')"},
        "float32 has 7 digits": {GATHER: "idist.all_gather(torch.tensor([entered])).tolist()"},
        "right, but rank 0 hands 16": {"left - last": "left - last + 0 * idist.all_reduce(left)"},
    },
}
