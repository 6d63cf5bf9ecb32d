"""What the planner's page shows, from ``ignite_ddl.lab`` itself: in the page by Pyodide, at first by tools/site.py."""

import dataclasses
import json
from html import escape

from ignite_ddl.lab import plan as plans, simulate
from ignite_ddl.lab.model import RECOMPUTE
from ignite_ddl.lab.plan import A100, CLOSE_RATIO, H100, Cluster, Model, predict
from ignite_ddl.pipeline.schedules import SCHEDULES

GPT = {"vocabulary": 51200, "sequence": 2048}
TODAY = {"bias": False, "gated": True, "positions": 0, "mask_bytes": 0, "kernels": "compiled", "loss_bytes": 4}


def _today(layers: int, width: int, heads: int, vocabulary: int, sequence: int, mlp: int, **more) -> Model:
    return Model(
        layers, width, heads, vocabulary, sequence, **({"tied": False, "kv_heads": 8, "mlp_width": mlp} | TODAY | more)
    )


MODELS = {  # as in their config.json; GPTs: Narayanan et al. 2021, table 1, and GPT-3
    "Llama 3.1 8B": _today(32, 4096, 32, 128256, 8192, 14336),
    "Llama 3.1 70B": _today(80, 8192, 64, 128256, 8192, 28672),
    "Llama 3.1 405B": _today(126, 16384, 128, 128256, 8192, 53248),
    "Qwen2.5 7B": _today(28, 3584, 28, 152064, 4096, 18944, kv_heads=4),
    "Qwen3 8B": _today(36, 4096, 32, 151936, 4096, 12288),
    "Qwen3 30B-A3B": _today(
        48, 2048, 32, 151936, 4096, 6144, kv_heads=4, head_width=128, experts=128, chosen=8, expert_width=768
    ),
    "Mistral 7B": _today(32, 4096, 32, 32000, 4096, 14336),
    "Mixtral 8x7B": _today(32, 4096, 32, 32000, 4096, 14336, experts=8, chosen=2),
    "Gemma 2 9B": _today(42, 3584, 16, 256000, 4096, 14336, head_width=256, tied=True),
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
PARTS = ["#0072B2", "#CC79A7", "#E69F00", "#009E73", "#8C8C8C", "#56B4E9", "#D55E00"]
FORMULAS, SIMULATOR = "api/predict.html#ignite_ddl.lab.plan.", "api/simulate.html#ignite_ddl.lab.simulate."


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
        how["cp"] = given.get("cp", 1)
        # Where there are no closed forms only what one microbatch takes on a rank is read, the same in 1f1b.
        count = m if closed else max(m, pp)
        one = predict(
            model, cluster, dp * count * rows, schedule=schedule if closed else "1f1b", microbatches=count, **how
        )
        work = (
            sum(one.seconds.get(part, 0) for part in ("compute", "tp", "cp"))
            / count
            / SCHEDULES[schedule].stages_per_rank
        )
        parts = (1, 2, 1) if given["recompute"] == "full" else (1, 1, 1)
        f, i, w = (work * part / sum(parts) for part in parts)
        sent = rows * model.sequence / how["cp"] * model.width * model.value_bytes / tp
        used = dataclasses.replace(cluster, devices=dp * pp * tp * how["cp"])
        message = used.link(pp, dp * how["cp"] * tp).seconds(sent)
        step = simulate.pipeline(schedule, pp, m, f, i, w, transfer=message if pp > 1 else 0)
    except ValueError as error:
        return {"refused": str(error)}
    values = {"step": step.seconds, "bubble": step.bubble, "peak": max(step.peak_activations)}
    heading = (
        f"<h2>{escape(given['model'])} on {_many(dp * pp * tp * how['cp'], given['device'])} of "
        f"{given['devices']:,}</h2>"
    )
    html = heading + _picture(step, schedule, pp)
    if closed:
        total = sum(one.seconds.values())
        values |= {"seconds": total, "memory": sum(one.memory.values()), "mfu": one.mfu}
        html += _bar(f'Seconds of a step, <a href="{FORMULAS}predict">predicted</a>', one.seconds, 1, "s")
        html += _bar(
            f'Memory of the fullest device, <a href="{FORMULAS}predict">predicted</a>', one.memory, 1e9, "GB",
            cluster.memory,
        )  # fmt: skip
        fits = "it fits" if one.fits else f"<strong>{_number(one.short / 1e9)} GB are lacking</strong>"
        html += (
            f'<p><a href="{FORMULAS}Plan">Predicted</a>: <b>{_number(total)} s</b> for {_many(one.batch, "row")}, '
            f"{one.tokens_per_second:,.0f} tokens per second, MFU {one.mfu:.0%}; of {cluster.memory / 1e9:.0f} GB on a "
            f"device, {fits}. {UNSURE}</p>{_code(one)}"
        )
    else:
        html += f"<p>Simulated only: <code>lab.plan</code> predicts {', '.join(plans.SCHEDULES)}.</p>"
    return {"html": html, "values": values}


def best(given: dict) -> dict:
    """The fastest plans for the same model, devices and rows of a step, as a table."""
    try:
        batch = given["dp"] * given["microbatches"] * given["rows"]
        cluster = Cluster(given["devices"], **DEVICES[given["device"]])
        fused = RECOMPUTE[1:]  # without "none": the efficiencies are of fused attention, which keeps no pairs
        found = plans.plan(MODELS[given["model"]], cluster, batch, recompute=fused)
    except ValueError as error:
        return {"refused": str(error)}
    able = [one for one in found if not one.lacks]
    fit = sum(one.fits for one in able)
    words = (
        f"{_many(len(found), 'plan')} for {_many(batch, 'row')} a step; {len(able):,} run with this version of ddl, "
        f"{fit:,} of them fit. {'The fastest' if fit else 'Those that lack the least memory'} first; ~ is within "
        f"{CLOSE_RATIO - 1:.0%} of the fastest, too close for a prediction to decide:"
    )
    heading = f"<h2>Best plans: {escape(given['model'])} on {_many(given['devices'], given['device'])}</h2>"
    return {
        "html": f'{heading}<p>{words}</p><pre tabindex="0">{escape(plans.table(able, 8))}</pre>',
        "values": {"plans": len(found)},
    }


def answer(question: str) -> str:
    """JSON in, JSON out: for the page's worker."""
    given = json.loads(question)
    return json.dumps((best if given.get("best") else show)(given))


# Chapter 24: of 209 published runs to which nothing was fitted; ratios as in lab.plan.table.
UNSURE = (
    "Of 209 published runs 94 % were predicted within 20 %; two plans of one model can be told apart if their times "
    f"differ by more than {CLOSE_RATIO - 1:.0%}."
)


def _number(value: float) -> str:
    """Three digits, never an exponent."""
    value = abs(value) if abs(value) < 5e-4 else value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _many(n: int, name: str) -> str:
    return f"{n:,} {name}{'' if n == 1 or name.isupper() or name[-1].isdigit() else 's'}"


def _picture(step, schedule: str, pp: int) -> str:
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
        f"{f'{schedule} on {pp} pipeline ranks' if pp > 1 else 'No pipeline, so no schedule'}: "
        f"{_number(step.seconds)} s simulated, in which ranks idle {100 * max(0.0, step.bubble):.1f} % on average. "
        f"A rank keeps the activations of {_many(max(step.peak_activations), 'microbatch').replace('hs', 'hes')} of "
        "a stage at most."
    )
    names = zip(COLOURS.items(), ("forward", "backward", "backward of weights"), strict=True)
    key = "".join(f'<span style="--c:{colour}">{name}</span>' for (_, colour), name in names)
    picture = f'<div class="ranks" role="img" aria-label="{words}">{"".join(lines)}</div>'
    linked = words.replace("simulated", f'<a href="{SIMULATOR}pipeline">simulated</a>')
    return f'{picture}<p class="key">{key}</p><p>{linked}</p>'


def _bar(title: str, parts: dict, unit: float, name: str, limit: float = 0) -> str:
    """Parts of a whole, side by side; with a limit, a mark where it lies."""
    whole = max(sum(parts.values()), limit)
    pieces = "".join(
        f'<span style="width:{100 * size / whole:.2f}%;background:{colour}"></span>'
        for size, colour in zip(parts.values(), PARTS, strict=False)
    )
    mark = f'<i style="left:{100 * limit / whole:.2f}%"></i>' if limit else ""
    key = "".join(
        f'<span style="--c:{colour}">{part} {_number(size / unit)} {name}</span>'
        for (part, size), colour in zip(parts.items(), PARTS, strict=False)
    )
    return f'<p class="title">{title}</p><div class="bar">{pieces}{mark}</div><p class="key">{key}</p>'


def _code(one: plans.Plan) -> str:
    """The arguments with which ``ddl`` runs a plan, or why it does not."""
    try:
        given = one.arguments()
    except ValueError as error:
        return f"<p>This version of ddl does not run it: {escape(str(error))}.</p>"
    before = {
        "auto_dataloader": ["dataset"], "auto_model": ["model"],
        "create_supervised_trainer": ["model", "optimizer", "loss_fn"],
    }  # fmt: skip
    if one.tp > 1:  # the styles are the model's: of transformers it brings them along
        before["auto_model"].append('tensor_plan="auto"')
    lines = [
        f"ddl.{name}({', '.join(before.get(name, []) + [f'{key}={value!r}' for key, value in named.items()])})"
        for name, named in given.items()
    ]
    if one.tp > 1:
        lines.insert(0, '# tensor_plan: "auto" for a model of transformers, else your own styles')
    if one.recompute == "full":
        lines.insert(-2, f"model.gradient_checkpointing_enable()  # of transformers; {one.full_layers} layers a rank")
    elif one.recompute != "none":
        fused = "fused attention" + (": attn_implementation='sdpa'" if one.cp == 1 else ", as ring attention is")
        kept = {"selective": fused, "pointwise": "products and attention kept"}
        lines.insert(-2, f"# recomputation: {kept[one.recompute]}")
    if one.cp > 1:
        lines[-2:-2] = [
            "register_attention()  # of ignite_ddl.context.huggingface; in a model of your own: ddl.ring_attention",
            'model.set_attn_implementation("ddl_ring")  # of transformers; batches bring input_ids and position_ids',
        ]
    return f'<pre tabindex="0">{escape(chr(10).join(lines))}</pre>'
