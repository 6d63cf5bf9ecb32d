"""What torch's errors mean on a mesh: reasons that need no ranks."""

import pytest
from ranks import mesh_of, pipeline_of
from torch import nn

from ignite_ddl import errors
from ignite_ddl.errors import explaining_errors, reason_in_a_run
from ignite_ddl.parts import PartError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("Sharding propagation failed for aten.masked_fill_.Scalar(Spec(f64[16, 1](P(sum))))"),
            "torch does not compute masked_fill_ of a weight that is cut .* leave the weight uncut",
        ),
        (
            RuntimeError("aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all"),
            r"the model computes \(mul\) with a plain tensor .* cut a mask, as of a hook, by ddl.distribute_like",
        ),
        (PartError(RuntimeError("no strategy")), r"\(no strategy\): .* leave it uncut"),
        (RuntimeError("Expected to have finished reduction"), "pass find_unused_parameters=True"),
        (RuntimeError("Expected variable to have sparse gradient."), "sparse=False has the same gradients"),
        (
            TypeError("cannot assign 'torch.DoubleTensor' as parameter 'weight' (torch.nn.Parameter or None expected)"),
            "a layer computes a weight that was its parameter before .* change the layer before ddl.auto_model",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_a_step(error, says, monkeypatch):
    monkeypatch.setattr(errors, "get_mesh", lambda: mesh_of(dp=2))
    with pytest.raises(ValueError, match=says), explaining_errors():
        raise error


def test_a_layer_of_a_pipeline_is_not_replaced():
    with pytest.raises(ValueError, match="replace layers before ddl.auto_model"):
        pipeline_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh_of(pp=2))[0] = nn.Linear(2, 2)


def test_errors_that_a_script_makes_or_handles_stay_as_they_are():
    class Stop(Exception):
        pass

    class Raises(nn.Identity):
        def forward(self, x):
            if x == 0:
                raise Stop("the rate has its least size")
            return x

    layer = Raises()
    errors.explain_errors(layer, f"{errors.THIS_WAS_IN}a layer")
    with pytest.raises(Stop), explaining_errors():
        layer(0)
    try:
        raise KeyError("shape")
    except KeyError as error:
        layer(1)
        notes = getattr(error, "__notes__", [])
    assert not notes


@pytest.mark.parametrize("words", ["mat1 and mat2 shapes cannot be multiplied (10x10 and 5x8)", "15x5 is no number"])
def test_shapes_of_a_ranks_rows_have_a_note(words, monkeypatch):
    monkeypatch.setattr(errors, "get_mesh", lambda: mesh_of(dp=2))
    with pytest.raises(RuntimeError) as found, explaining_errors((5, 10)):
        raise RuntimeError(words)
    assert [note[:41] for note in getattr(found.value, "__notes__", [])] == (
        ["This rank has 5 of the batch's 10 rows: i"] if "shapes" in words else []
    )


def test_what_is_not_known_is_left():
    with pytest.raises(RuntimeError, match="^else$"), explaining_errors():
        raise RuntimeError("else")
    assert reason_in_a_run(RuntimeError("appears to not have been used in the graph")) is None  # without a mesh
