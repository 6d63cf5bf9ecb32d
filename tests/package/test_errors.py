"""What torch's errors mean on a mesh: reasons that need no ranks."""

import pytest

from ignite_ddl.compat import PartError
from ignite_ddl.errors import explaining_errors, reason_in_a_run


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
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_a_step(error, says):
    with pytest.raises(ValueError, match=says), explaining_errors():
        raise error


def test_what_is_not_known_is_left():
    with pytest.raises(RuntimeError, match="^else$"), explaining_errors():
        raise RuntimeError("else")
    assert reason_in_a_run(RuntimeError("appears to not have been used in the graph")) is None  # without a mesh
