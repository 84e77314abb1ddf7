"""Real processes: tasks are `exec` of a line, so that they import nothing but the standard library."""

from __future__ import annotations

import math
import os
import time

from profiling.measure.workers import Outcome, Pool, Task

NOTE = "from profiling.measure.workers import note; note('128x64 w4'); "


def test_tasks_that_fail_or_kill_their_process_do_not_affect_the_others():
    tasks = [
        Task(math.sqrt, (4.0,)),
        Task(math.sqrt, (-1.0,)),
        Task(exec, (NOTE + "import os; os._exit(3)",)),
        Task(os.getenv, ("CUTE_FLASH_TEST",)),
        Task(exec, (NOTE + "import signal; signal.raise_signal(9)",)),
        Task(exec, (NOTE + "from profiling.measure.workers import Unusable; raise Unusable('lost\\n the GPU')",)),
        Task(os.getpid),
        Task(os.getpid),
    ]
    with Pool(1, {"CUTE_FLASH_TEST": "private"}, limit_s=60) as pool:
        found = {outcome.index: outcome for outcome in pool.run(tasks)}
        # The next run uses the process of the previous run.
        (again,) = pool.run([Task(os.getpid)])
    assert found[0] == Outcome(0, value=2.0)
    assert found[1].error is not None and found[1].error.startswith("ValueError: ")
    assert found[2] == Outcome(2, error="its process ended with exit status 3", note="128x64 w4")
    assert found[3] == Outcome(3, value="private") and "CUTE_FLASH_TEST" not in os.environ
    assert found[4] == Outcome(4, error="its process ended with signal 9", note="128x64 w4")
    assert found[5] == Outcome(5, error="lost the GPU", note="128x64 w4")
    assert found[6].value == found[7].value == again.value != os.getpid()


def test_a_task_that_hangs_is_ended():
    with Pool(2, {}, limit_s=60) as pool:
        list(pool.run([Task(math.sqrt, (4.0,)), Task(math.sqrt, (9.0,))]))
        pool.limit_s = 0.5
        start = time.monotonic()
        tasks = [Task(exec, (NOTE + "import time; time.sleep(60)",)), Task(math.sqrt, (16.0,))]
        first, second = sorted(pool.run(tasks), key=lambda outcome: outcome.index)
    assert time.monotonic() - start < 30
    assert first.error == "no message for 0.5 s" and first.note == "128x64 w4"
    assert second.value == 4.0
