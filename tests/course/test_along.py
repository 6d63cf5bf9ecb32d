"""course/along.py: what ranks hold along a block, found by running it."""

import pytest

import ignite_ddl.course.along as along
from ignite_ddl.course.gpt import GPT


def model():
    return GPT(65, length=8, width=16, n_heads=4, n_blocks=1)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_plan_cuts_features_inside_the_pairs_and_sums_the_terms_of_out_and_down(n_ranks):
    steps = along.held_along_a_block(model, GPT.tensor_plan, n_ranks)
    assert [name for name, *_ in steps] == [
        *("x", "norm1", "q k v", "mix", "out", "+ x"),
        *("norm2", "up", "down", "+"),
    ]
    assert [features for _, features, *_ in steps] == [16] * 7 + [64, 16, 16]
    held = {how: [name for name, _, found, _ in steps if found == how] for how in ("features", "terms")}
    assert held == {"features": ["q k v", "mix", "up"], "terms": ["out", "down"]}
    assert {how for *_, how, _ in steps} == {"features", "terms", "whole"}
    assert [(name, calls) for name, *_, calls in steps if calls] == [("+ x", ["all_reduce"]), ("+", ["all_reduce"])]


def test_a_sequence_plan_cuts_the_rest_by_tokens():
    steps = along.held_along_a_block(model, GPT.sequence_plan, 2)
    assert {name for name, _, how, _ in steps if how == "tokens"} == {"x", "norm1", "+ x", "norm2", "+"}
    assert [(name, calls) for name, *_, calls in steps if calls] == [
        ("q k v", ["all_gather"]),
        ("+ x", ["reduce_scatter"]),
        ("up", ["all_gather"]),
        ("+", ["reduce_scatter"]),
    ]
