"""A fork that stands for a program holds no lock of its parent, as a new program would not."""

import os

import warm

from chunk_grpo.core.files import try_lock


def test_a_fork_lets_go_of_a_lock_that_its_parent_holds(tmp_path):
    held = open(tmp_path / "log", "ab")
    assert try_lock(held)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        warm.release_inherited_locks(os.open(os.devnull, os.O_RDWR))
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)  # alive while the parent tries
        os._exit(0)
    os.read(ready[0], 1)
    held.close()
    with open(tmp_path / "log", "ab") as handle:
        is_free = try_lock(handle)
    os.write(go_on[1], b"1")
    os.waitpid(child, 0)
    for descriptor in (*ready, *go_on):
        os.close(descriptor)
    assert is_free
