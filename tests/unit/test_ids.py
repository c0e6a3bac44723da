"""Message ids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest

from acemq.ids import new_id

SHAPE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def test_an_id_is_a_lower_case_uuid_of_version_4() -> None:
    for _ in range(1_000):
        made = new_id()
        assert SHAPE.fullmatch(made)
        assert str(UUID(made)) == made
        assert (UUID(made).version, UUID(made).variant) == (4, RFC_4122)


def test_no_id_comes_twice() -> None:
    assert len({new_id() for _ in range(50_000)}) == 50_000


def test_no_id_comes_twice_over_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [one for many in pool.map(lambda _: [new_id() for _ in range(2_000)], range(8)) for one in many]
    assert len(set(made)) == len(made)


def test_every_random_bit_of_an_id_varies() -> None:
    seen = [UUID(new_id()).int for _ in range(2_000)]
    fixed = 0xF << 76 | 0x3 << 62
    always, ever = seen[0], seen[0]
    for value in seen:
        always, ever = always & value, ever | value
    assert always & ~fixed == 0
    assert ever | fixed == 2**128 - 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_makes_other_ids_than_its_parent() -> None:
    new_id()  # the pool is filled, and would be shared
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn where other threads run
        child = os.fork()
    if not child:
        os.write(write, "\n".join(new_id() for _ in range(300)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        theirs = pipe.read().split()
    os.waitpid(child, 0)
    assert len(theirs) == 300
    assert not set(theirs) & {new_id() for _ in range(300)}


def test_another_process_makes_other_ids() -> None:
    program = "from acemq.ids import new_id; print(new_id())"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert len({run.stdout for run in runs}) == 2
