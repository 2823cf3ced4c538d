"""Errors that say what to do, in place of the words of torch and the operating system."""

import errno
import os

import pytest
from support import tiny_pretrain_config

from moco_d2.engine.explain import LoaderWorkerDied, explain
from moco_d2.errors import UserError


@pytest.mark.parametrize(
    "words",
    [
        "DataLoader worker (pid 12) is killed by signal: Killed. ",
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared limit.",
        "DataLoader worker (pid(s) 12, 13) exited unexpectedly",
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent "
        "call last):\nRuntimeError: unable to write to file </torch_1_2_0>: No space left on "
        "device (28)",
        "unable to open shared memory object </torch_1_2_0> in read-write mode: Too many files",
    ],
)
def test_a_dead_loader_worker_is_about_workers_and_shared_memory(words):
    error = explain(RuntimeError(words), tiny_pretrain_config(DATALOADER__NUM_WORKERS=3))
    assert isinstance(error, LoaderWorkerDied)
    assert "shared memory" in str(error) and "DATALOADER.NUM_WORKERS (now 3" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_names_the_folder(number):
    error = explain(OSError(number, os.strerror(number)), tiny_pretrain_config("some/where"))
    assert isinstance(error, UserError)
    assert "some/where" in str(error) and os.strerror(number) in str(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Caught KeyError in DataLoader worker process 0."),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        KeyError("boxes"),
    ],
)
def test_what_needs_its_stack_trace_keeps_it(error):
    assert explain(error, tiny_pretrain_config()) is None


def test_what_says_itself_what_to_do_is_left_alone():
    error = UserError("SEED is red; give a number")
    assert explain(error, tiny_pretrain_config()) is error
