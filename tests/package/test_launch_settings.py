"""What a script has set in torch reaches the ranks that it starts."""

import contextlib
import random

import pytest
import torch
from ranks import parallel

from ignite_ddl.launch import settings


def set_here(local_rank):
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.is_grad_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture
def own_settings():
    before = settings._now()
    yield
    for name, value in before.items():
        settings._SETTINGS[name][1](value)


@pytest.mark.parametrize("warn_only", [False, True])
def test_what_is_set_reaches_the_ranks(own_settings, warn_only):
    assert parallel(2).run(set_here) == [set_here(0)] * 2
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    with torch.no_grad():
        expected = set_here(0)
        assert parallel(2).run(set_here) == [expected] * 2
    assert expected[:5] == (torch.float64, "high", True, warn_only, False)
    assert expected[5:] == (True, False, False, True, True)


def draws(local_rank):
    return torch.rand(2).tolist(), torch.initial_seed()


@contextlib.contextmanager
def seed_of_its_own():
    """As at the import, where nobody has seeded: undone afterwards."""
    state, seed = torch.get_rng_state(), settings._AT_IMPORT
    settings._AT_IMPORT = torch.seed()
    yield
    settings._AT_IMPORT = seed
    torch.set_rng_state(state)


def test_a_seed_reaches_the_ranks_which_draw_as_one_process_does():
    with seed_of_its_own():
        torch.manual_seed(2**40 + 1)
        torch.rand(3)  # which a rank does not draw again
        first, second = parallel(2).run(draws), parallel(2).run(draws)
        one = draws(0)
    assert one[1] == 2**40 + 1
    assert first == second == [one] * 2


def test_a_seed_from_before_the_import_is_told_by_its_size():
    with seed_of_its_own():
        torch.manual_seed(7)
        settings._AT_IMPORT = 7
        assert parallel(1).run(draws) == [draws(0)]


def test_without_a_seed_each_launch_has_another_that_its_ranks_share():
    with seed_of_its_own():
        runs = [parallel(2).run(draws) for _ in range(3)]
    assert all(first == second for first, second in runs)
    assert len({str(first) for first, _ in runs}) == 3
    own = parallel(2).run(lambda rank: random.random())
    assert own[0] != own[1]  # Python's generator is not passed on
