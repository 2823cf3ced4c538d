"""Which process of which job a command is, as launchers say it in the environment."""

import pytest

from moco_d2.engine.environment import Job, find_job
from moco_d2.errors import UserError


def torchrun(rank, world_size, local_rank, local_world_size):
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": 29500,
    }
    return {key: str(value) for key, value in values.items()}


def slurm(rank, local_rank, tasks, per_node, nodes="gpu[07-09,11],spare", **more):
    values = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": 1234,
        "SLURM_STEP_ID": 2,
        **more,
    }
    return {key: str(value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "local_rank", "host"),
    [
        (torchrun(5, 8, 1, 4), 5, 8, 1, "10.0.0.1"),
        (torchrun(0, 1, 0, 1), 0, 1, 0, "10.0.0.1"),
        (slurm(3, 1, 4, "2(x2)"), 3, 4, 1, "gpu07"),
        (slurm(1, 1, 2, "2", nodes="gpu3"), 1, 2, 1, "127.0.0.1"),
        (slurm(2, 0, 4, "2,2", nodes="rack[2-3]n[4,6]"), 2, 4, 0, "rack2n4"),
        (slurm(1, 0, 2, "1(x2)", MASTER_ADDR="10.0.0.9"), 1, 2, 0, "10.0.0.9"),
    ],
)
def test_a_launcher_says_which_process_this_is(environ, rank, world_size, local_rank, host):
    job = find_job(environ=environ)
    assert (job.first_rank + job.local_rank, job.world_size) == (rank, world_size)
    assert (job.local_rank, job.host) == (local_rank, host)
    assert job.has_main_process == (rank == 0)


def test_tasks_of_a_step_meet_at_one_port_and_steps_at_different_ones():
    first, second = (find_job(environ=slurm(r, 0, 2, "1(x2)")).url for r in range(2))
    other = find_job(environ=slurm(0, 0, 2, "1(x2)", SLURM_STEP_ID=3)).url
    assert first == second != other
    chosen = find_job(environ=slurm(0, 0, 2, "1(x2)", MASTER_PORT=4242)).url
    assert chosen == "tcp://gpu07:4242"


def test_one_slurm_task_per_machine_may_start_several_processes():
    job = find_job(num_gpus=8, environ=slurm(1, 0, 2, "1(x2)"))
    assert (job.local_rank, job.first_rank, job.world_size) == (None, 8, 16)
    assert not job.has_main_process


def test_without_a_launcher_the_arguments_count():
    job = find_job(2, 3, 1, "tcp://10.0.0.1:4000", environ={})
    assert job == Job(2, 3, 1, None, "tcp://10.0.0.1:4000", "10.0.0.1")
    # A batch script, or a step of one task, is no group of tasks.
    for environ in ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, slurm(0, 0, 1, "1")):
        assert find_job(2, environ=environ).world_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus": 0, "environ": {}}, "--num-gpus is 0"),
        ({"num_gpus": -1, "environ": {}}, "--num-gpus is -1"),
        ({"num_machines": 2, "machine_rank": 2, "environ": {}}, "it is one of 0 to 1"),
        ({"num_machines": 2, "environ": {}}, "--dist-url auto works on one machine"),
        ({"dist_url": "10.0.0.1:4000", "environ": {}}, "must be tcp://host:port"),
        ({"num_gpus": 4, "environ": torchrun(0, 2, 0, 2)}, "--num-gpus is 4, but torchrun runs 2"),
        (
            {"num_machines": 3, "environ": slurm(0, 0, 4, "2(x2)")},
            "--num-machines is 3, but SLURM runs 2",
        ),
        ({"environ": torchrun(2, 5, 0, 2)}, "give every machine the same --nproc-per-node"),
        ({"environ": slurm(0, 0, 5, "3,2")}, "same number with --ntasks-per-node"),
        ({"environ": slurm(1, 0, 4, "2(x2)")}, "--distribution=block"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        find_job(**arguments)
