"""The hints of chapter 24: wrong numbers that have a reason, for ``score``."""

from collections.abc import Sequence

from ignite_ddl.lab.plan import Plan

__all__ = ["activations", "best_tp", "days", "large", "smaller", "states"]


def states(plan: Plan) -> dict[float, str]:
    """Of the GB of weights, gradients and optimizer."""
    weights, gradients, optimizer = (plan.memory[part] / 1e9 for part in ("weights", "gradients", "optimizer"))
    return {
        weights: "Those are the weights.",
        gradients + optimizer: "And the weights?",
        weights + gradients: "And Adam's 12 bytes a parameter?",
        80: "That is what the GPU has.",
    }


def activations(plan: Plan) -> dict[float, str]:
    """Of the GB of activations on the first rank of a plan with two stages."""
    right = plan.memory["activations"] / 1e9
    return {
        right / plan.pp: "Under 1F1B the first rank holds a microbatch for each stage.",
        right * plan.tp: "Sequence parallel leaves each tp rank its share.",
        right * plan.pp: "A stage has its part of the layers alone.",
    }


def best_tp(plans: Sequence[Plan]) -> dict[int, str]:
    """Of the tp of the fastest plan."""
    return {
        8: "Each of its all-reduces costs; does memory ask for it?",
        16: "Then it leaves the machine.",
        2: "Close in time, as the table shows: but why cut a layer at all, if it fits?",
    }


def smaller(plan: Plan) -> dict[int, str]:
    """Of the parts, tp times pp, with little memory, by the plan with much."""
    return {
        plan.tp * plan.pp: "That is with 80 GB.",
        2: "Half of the weights and gradients are 15 GB; and Adam's states?",
        16: "Then dp has one rank; fewer parts fit, and send less.",
    }


def large() -> dict[str, str]:
    """Of whether most large runs are predicted too fast or too slow."""
    return {
        "too slow": "What a plan leaves out takes time in the run alone.",
        "half": "That would be so if the plan erred at random; what it leaves out takes time in the run alone.",
    }


def days(right: float) -> dict[float, str]:
    """Of the days of a run, by its peak, MFU and tokens."""
    return {
        0.45 * right: "That is at the peak: only 45 % of it are useful operations.",
        right / 3: "Six operations a parameter and token: backward makes four of them.",
        24 * right: "Those are hours.",
    }
