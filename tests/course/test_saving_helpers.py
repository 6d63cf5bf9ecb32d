"""What chapter 21 is helped by: a run on any mesh, a rank that is killed in a save, a save that is watched."""

import os

import pytest

import ignite_ddl as ddl
from ignite_ddl.course import killed_before_sync, on_ranks, watch_save
from ignite_ddl.course.mesh_training import MeshTraining


def two_epochs(local_rank):
    return MeshTraining(dropout=0.0, seed=0).go_on()


@pytest.mark.slow
def test_the_run_has_one_process_losses_and_rows_on_a_mesh():
    alone, ranks = two_epochs(0), on_ranks(2, two_epochs, dp=2)
    assert len(alone) == 10
    for step, (loss, pictures) in enumerate(alone):
        assert [rank[step][0] for rank in ranks] == pytest.approx([loss] * 2, abs=1e-12)
        assert sorted({one for rank in ranks for one in rank[step][1]}) == sorted(set(pictures))


def write_and_sync(local_rank, folder, call):
    with killed_before_sync(call if local_rank == 0 else None) as synced, (folder / str(local_rank)).open("w") as file:
        for number in range(3):
            file.write(str(number))
            file.flush()
            os.fsync(file.fileno())
    return len(synced)


def test_one_rank_is_killed_before_its_nth_sync(tmp_path):
    sync = os.fsync
    with pytest.raises(ddl.RankError, match="rank 0 was killed by SIGKILL"):
        on_ranks(2, write_and_sync, tmp_path, 2)
    assert (tmp_path / "0").read_text() == "01", "the second sync never came"
    assert on_ranks(2, write_and_sync, tmp_path, 4) == [3, 3]
    assert write_and_sync(1, tmp_path, None) == 3
    assert os.fsync is sync


def test_the_watched_save_is_written_in_the_background_or_blocks(tmp_path):
    for asynchronous in (False, True):
        timeline = watch_save(tmp_path / str(asynchronous), asynchronous, width=8)
        assert {record.rank for record in timeline.background} == ({0, 1} if asynchronous else set())
        assert (tmp_path / str(asynchronous) / "checkpoint_3").is_dir()
