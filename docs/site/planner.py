"""What the planner's page shows, from ``ignite_ddl.lab`` itself: in the page by Pyodide, at first by tools/site.py."""

import json
from html import escape

from ignite_ddl.lab import plan as plans, simulate
from ignite_ddl.lab.plan import A100, H100, Cluster, Model, predict
from ignite_ddl.pipeline.schedules import SCHEDULES

GPT = {"vocabulary": 51200, "sequence": 2048}
MODELS = {  # Narayanan et al. 2021, table 1, and GPT-3
    "1.7 billion": Model(layers=24, width=2304, heads=24, **GPT),
    "7.5 billion": Model(layers=36, width=4096, heads=32, **GPT),
    "39 billion": Model(layers=48, width=8192, heads=64, **GPT),
    "175 billion": Model(layers=96, width=12288, heads=96, **GPT),
}
DEVICES = {"A100": A100, "H100": H100}
START = {
    "model": "39 billion", "device": "A100", "devices": 64, "dp": 2, "pp": 4, "tp": 8, "schedule": "1f1b",
    "microbatches": 8, "rows": 1, "zero": 1, "recompute": "full",
}  # fmt: skip
# As ignite_ddl.lab.draw.ACTIVITY, which needs matplotlib.
COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "backward_weight": "#D55E00"}
PARTS = ["#0072B2", "#CC79A7", "#E69F00", "#009E73", "#8C8C8C"]


def show(given: dict) -> dict:
    """The page for one choice.

    Args:
        given: as ``START``.

    Returns:
        dict: ``html`` to show, and its numbers as ``values``; or the package's own words, ``refused``.
    """
    try:
        model, cluster = MODELS[given["model"]], Cluster(given["devices"], **DEVICES[given["device"]])
        dp, pp, tp, m, rows = (given[name] for name in ("dp", "pp", "tp", "microbatches", "rows"))
        schedule = given["schedule"] if pp > 1 else "1f1b"
        closed = schedule in plans.SCHEDULES
        how = {"dp": dp, "pp": pp, "tp": tp, "zero": given["zero"], "recompute": given["recompute"]}
        # Where there are no closed forms only what one microbatch takes on a rank is read, the same in 1f1b.
        count = m if closed else max(m, pp)
        one = predict(
            model, cluster, dp * count * rows, schedule=schedule if closed else "1f1b", microbatches=count, **how
        )
        work = (one.seconds["compute"] + one.seconds["tp"]) / count / SCHEDULES[schedule].stages_per_rank
        parts = (1, 2, 1) if given["recompute"] == "full" else (1, 1, 1)
        f, i, w = (work * part / sum(parts) for part in parts)
        message = cluster.link(pp, dp * tp).seconds(rows * model.sequence * model.width * model.value_bytes / tp)
        step = simulate.pipeline(schedule, pp, m, f, i, w, transfer=message if pp > 1 else 0)
    except ValueError as error:
        return {"refused": str(error)}
    values = {"step": step.seconds, "bubble": step.bubble, "peak": max(step.peak_activations)}
    html = _picture(step, schedule)
    if closed:
        total = sum(one.seconds.values())
        values |= {"seconds": total, "memory": sum(one.memory.values()), "mfu": one.mfu}
        html += _bar("Seconds of a step, predicted", one.seconds, 1, "s")
        html += _bar("Memory of the fullest device", one.memory, 1e9, "GB", cluster.memory)
        fits = "it fits" if one.fits else f"<strong>{one.short / 1e9:.1f} GB are lacking</strong>"
        html += (
            f"<p>Predicted: <b>{total:.3g} s</b> for {one.batch:,} rows, {one.tokens_per_second:,.0f} tokens "
            f"per second, MFU {one.mfu:.0%}; of {cluster.memory / 1e9:.0f} GB on a device, {fits}.</p>{_code(one)}"
        )
    else:
        html += f"<p>Simulated only: <code>lab.plan</code> predicts {', '.join(plans.SCHEDULES)}.</p>"
    return {"html": html, "values": values}


def best(given: dict) -> dict:
    """The fastest plans for the same model, devices and rows of a step, as a table."""
    try:
        batch = given["dp"] * given["microbatches"] * given["rows"]
        found = plans.plan(MODELS[given["model"]], Cluster(given["devices"], **DEVICES[given["device"]]), batch)
    except ValueError as error:
        return {"refused": str(error)}
    words = f"{len(found):,} plans for {batch:,} rows a step, {sum(one.fits for one in found):,} fit. The fastest:"
    return {"html": f"<p>{words}</p><pre>{escape(plans.table(found, 8))}</pre>", "values": {"plans": len(found)}}


def answer(question: str) -> str:
    """JSON in, JSON out: for the page's worker."""
    given = json.loads(question)
    return json.dumps((best if given.get("best") else show)(given))


def _picture(step, schedule: str) -> str:
    """A row for each rank; what is not coloured is idle."""
    lines = []
    for rank in range(len(step.actions)):
        spans = [s for s in step.records if s.rank == rank and s.kind in COLOURS]
        boxes = "".join(
            f'<rect x="{1000 * s.start / step.seconds:.1f}" width="{1000 * (s.end - s.start) / step.seconds:.1f}" '
            f'height="10" fill="{COLOURS[s.kind]}"/>'
            for s in spans
        )
        lines.append(
            f'<div><span>rank {rank}</span><svg viewBox="0 0 1000 10" preserveAspectRatio="none">{boxes}</svg></div>'
        )
    words = (
        f"{schedule} on {len(step.actions)} pipeline ranks: {step.seconds:.3g} s simulated, in which ranks idle "
        f"{step.bubble:.1%} on average. A rank keeps the "
        f"activations of {max(step.peak_activations)} microbatches of a stage at most."
    )
    names = zip(COLOURS.items(), ("forward", "backward", "backward of weights"), strict=True)
    key = "".join(f'<span style="--c:{colour}">{name}</span>' for (_, colour), name in names)
    picture = f'<div class="ranks" role="img" aria-label="{words}">{"".join(lines)}</div>'
    return f'{picture}<p class="key">{key}</p><p>{words}</p>'


def _bar(title: str, parts: dict, unit: float, name: str, limit: float = 0) -> str:
    """Parts of a whole, side by side; with a limit, a mark where it lies."""
    whole = max(sum(parts.values()), limit)
    pieces = "".join(
        f'<span style="width:{100 * size / whole:.2f}%;background:{colour}"></span>'
        for size, colour in zip(parts.values(), PARTS, strict=True)
    )
    mark = f'<i style="left:{100 * limit / whole:.2f}%"></i>' if limit else ""
    key = "".join(
        f'<span style="--c:{colour}">{part} {size / unit:.3g} {name}</span>'
        for (part, size), colour in zip(parts.items(), PARTS, strict=True)
    )
    return f'<p class="title">{title}</p><div class="bar">{pieces}{mark}</div><p class="key">{key}</p>'


def _code(one: plans.Plan) -> str:
    """The arguments with which ``ddl`` runs a plan, or why it does not."""
    try:
        given = one.arguments()
    except ValueError as error:
        return f"<p>{escape(str(error))}</p>"
    before = {
        "auto_dataloader": ["dataset"], "auto_model": ["model"],
        "create_supervised_trainer": ["model", "optimizer", "loss_fn"],
    }  # fmt: skip
    lines = [
        f"ddl.{name}({', '.join(before.get(name, []) + [f'{key}={value!r}' for key, value in named.items()])})"
        for name, named in given.items()
    ]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"
