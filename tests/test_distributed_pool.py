"""The pool itself: processes are reused, layouts change from job to job, and a failing rank is reported."""

import os

import psutil
import pytest

from tests.distributed_pool import JobFailed, Pool


def test_processes_are_reused_between_jobs(distributed_pool):
    first = distributed_pool(2).submit("tests.pool_jobs:pid_and_sum", value=1)
    second = distributed_pool(2).submit("tests.pool_jobs:pid_and_sum", value=10)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [total for _, total in first + second] == [3, 3, 30, 30]


def test_each_job_may_choose_its_own_layout(distributed_pool):
    for tensor, expert in [(1, 4), (2, 2), (4, 1), (2, 4)]:
        sizes = {"tensor_model_parallel_size": tensor, "expert_model_parallel_size": expert}
        sizes["expert_tensor_parallel_size"] = 1
        assert distributed_pool(4).submit("tests.pool_jobs:layout", **sizes) == [(tensor, expert)] * 4


def test_a_job_leaves_no_process_group_behind(distributed_pool):
    """Each group of gloo polls on threads of its own: left behind, they would starve the jobs that follow."""
    train = {"layout": {"ep": 2}, "settings": None, "steps": 1}
    counts = []
    for _ in range(2):
        distributed_pool(2).submit("tests.gpt_moe:train", **train)
        counts.append(distributed_pool(2).submit("tests.pool_jobs:threads"))
    assert counts[1] == counts[0]


@pytest.mark.parametrize(
    ("how", "expected"), [("raise", "rank 1 was told to fail"), ("exit", "exit code 7"), ("hang", "no reply")]
)
def test_failing_rank_is_reported_and_its_pool_is_ended(how, expected):
    pool = Pool(2)
    pids = [pid for pid, _ in pool.submit("tests.pool_jobs:pid_and_sum", value=1)]
    with pytest.raises(JobFailed, match="rank 1") as failure:
        pool.submit("tests.pool_jobs:fail_on", rank=1, how=how, timeout=8)
    assert expected in str(failure.value)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(JobFailed, match="ask for a new one"):
        pool.submit("tests.pool_jobs:pid_and_sum", value=1)


def test_what_a_job_started_ends_with_the_pool():
    pool = Pool(2)
    started = [psutil.Process(pid) for pid in pool.submit("tests.pool_jobs:start_a_process")]
    assert all(process.is_running() for process in started)
    pool.close()
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert len(gone) == 2 and not alive
