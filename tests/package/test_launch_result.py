"""What a rank waits for before it reports its result: ``launch.rank.wait_before_result``."""

import time

import pytest
from ranks import failing, parallel

import ignite_ddl as ddl
from ignite_ddl.launch.rank import wait_before_result


def waiting(local_rank, folder, seconds=0.0, raises=None):
    def later():
        time.sleep(seconds)
        (folder / str(local_rank)).write_text("written")

    wait_before_result(lambda: wait_before_result(later))  # one may ask for another
    if raises and local_rank == 1:
        raise raises
    return local_rank


def fail():
    raise OSError("the disk is full")


def written(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("seconds", [0.3, pytest.param(8, marks=pytest.mark.slow)])  # more than EXIT_SECONDS
def test_a_rank_reports_when_what_it_waits_for_is_done(tmp_path, seconds):
    assert parallel(2).run(waiting, tmp_path, seconds) == [0, 1]
    assert written(tmp_path) == ["0", "1"]


def test_its_error_is_the_ranks_error():
    error = failing(lambda rank: wait_before_result(fail) if rank == 1 else None)
    assert error.rank == 1
    assert isinstance(error.exception, OSError)
    assert "the disk is full" in str(error)


def test_an_exception_of_the_function_goes_first(tmp_path):
    error = failing(waiting, tmp_path, 60, KeyError("lost"))
    assert (error.rank, type(error.exception)) == (1, KeyError)
    assert written(tmp_path) == []


def test_on_a_serial_run_too_and_once_a_run(tmp_path):
    calls = []

    def asking(local_rank, name):
        wait_before_result(lambda: calls.append(name))
        if name == "outer":
            ddl.Parallel().run(asking, "inner")
            assert calls == ["inner"]
        return name

    for _ in range(2):
        assert ddl.Parallel().run(asking, "outer") == ["outer"]
        assert calls == ["inner", "outer"]
        calls.clear()
    with pytest.raises(OSError, match="the disk is full"):
        ddl.Parallel().run(lambda rank: wait_before_result(fail))
    wait_before_result(fail)  # outside of a run: nobody calls it
    assert ddl.Parallel().run(abs) == [0]
