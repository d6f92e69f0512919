"""How many threads of the CPU path a call may use, and what becomes of its jobs after an exception."""

import math
import os
import signal
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash.cpu import jobs
from tests.compiled import run_python
from tests.sampling import examples


@pytest.fixture(autouse=True)
def no_quota_of_this_process(monkeypatch):
    monkeypatch.setattr(jobs, "_cores_of_quota", lambda second: math.inf)


def cores_of_affinity():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- OMP_NUM_THREADS -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
    | st.text("0123456789", max_size=12)
    | st.integers(1, 6000).map(lambda n: "0" * n + "1")
    | st.integers(4301, 6000).map(lambda n: "9" * n)
)
@example("9" * 5000)
@example("0" * 5000)
@example("٣")
@example("²")
def test_any_text_of_the_environment(text):
    """A number is the most, 0 is one, and anything else is nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", text)
        patch.setattr(jobs, "_cores_of_quota", lambda second: math.inf)
        count = jobs.count_cores()
    first = text.partition(",")[0].strip()
    wanted = max(1, int(first)) if first.isdecimal() and len(first) < 4300 else math.inf
    if first and set(first) <= {"0"}:
        wanted = 1
    if first.isdecimal() and first.lstrip("0") == "1":
        wanted = 1
    assert count == min(cores_of_affinity(), wanted)


# ---- quotas ----------------------------------------------------------------------------------------------------------


class System:
    """The files of a process and of its cgroups, as Linux shows them."""

    def __init__(self, root, version, mounted_root, path, mount_point="cgroup"):
        self.version, self.path, self.mounted = version, path, root / mount_point
        self.process = root / "proc"
        self.process.mkdir()
        fs_type, options, controllers = (
            ("cgroup2", "rw", "") if version == 2 else ("cgroup", "rw,cpu,cpuacct", "cpu,cpuacct")
        )
        mounted = str(self.mounted).replace(" ", "\\040")
        (self.process / "mountinfo").write_text(
            "23 31 0:28 / /tmp rw,relatime shared:9 - tmpfs tmpfs rw,mode=755\n"
            f"31 23 0:29 / {root}/memory rw,relatime - cgroup cgroup rw,memory\n"
            f"32 23 0:30 {mounted_root} {mounted} rw,nosuid shared:10 master:1 - {fs_type} cgroup {options}\n"
        )
        number = 0 if version == 2 else 4
        (self.process / "cgroup").write_text(f"9:memory:/elsewhere\n{number}:{controllers}:{path}\n")
        self.mounted.mkdir(parents=True)

    def limit(self, group, quota, period=100_000):
        """Give a group below the mount a quota, in microseconds, or None."""
        directory = self.mounted / group
        directory.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            (directory / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")
        else:
            (directory / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (directory / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_root(tmp_path, version):
    system = System(tmp_path, version, "/", "/")
    assert jobs.quota(system.process) == math.inf
    system.limit(".", None)
    assert jobs.quota(system.process) == math.inf
    system.limit(".", 150_000)
    assert jobs.quota(system.process) == 1.5


@pytest.mark.parametrize("version", [1, 2])
def test_groups_around_count_too(tmp_path, version):
    system = System(tmp_path, version, "/", "/kubepods/pod7/main")
    system.limit("kubepods/pod7/main", 800_000)
    system.limit("kubepods", 300_000)
    system.limit("other", 100_000)
    assert jobs.quota(system.process) == 3
    system.limit("kubepods/pod7", 200_000, 400_000)
    assert jobs.quota(system.process) == 0.5


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mounted_root, path", [("/docker/1", "/docker/1"), ("/docker/1", "/"), ("/", "/../2")])
def test_a_mount_that_begins_with_the_group(tmp_path, version, mounted_root, path):
    """A process cannot see the path of its group in the host's hierarchy."""
    system = System(tmp_path, version, mounted_root, path, "a directory with spaces")
    system.limit(".", 250_000)
    assert jobs.quota(system.process) == 2.5


@pytest.mark.parametrize("text", ["", "max", "0 0", "100000 0", "x y", "1 2 3"])
def test_what_is_no_quota(tmp_path, text):
    system = System(tmp_path, 2, "/", "/")
    (system.mounted / "cpu.max").write_text(text)
    assert jobs.quota(system.process) in (math.inf, 0)


def test_systems_without_groups(tmp_path):
    assert jobs.quota(tmp_path / "none") == math.inf


@pytest.mark.parametrize("quota, threads", [(0.1, 1), (1, 1), (1.5, 2), (3, 3), (math.inf, 8)])
def test_a_call_uses_as_many_threads_as_the_quota_keeps_busy(monkeypatch, quota, threads):
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "quota", lambda process: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    jobs._cores_of_quota.cache_clear()
    assert jobs.count_cores() == threads
    with jobs.cpu_threads(5):
        assert jobs.count_cores() == 5
    monkeypatch.undo()
    jobs._cores_of_quota.cache_clear()


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What a handler of a signal raises."""


@pytest.mark.parametrize("raised_in", ["job", "source", "results"])
def test_no_job_begins_after_an_exception(raised_in):
    """Neither one of a job, nor one of what makes jobs or takes results, lets other threads go on."""
    done, threads = [], threading.active_count()

    def work(number):
        if raised_in == "job" and number == 2:
            raise Interrupted
        time.sleep(0.02)
        done.append(number)
        return number

    def numbers():
        for number in range(1000):
            if raised_in == "source" and number == 4:
                raise Interrupted
            yield number

    def take(number):
        if raised_in == "results":
            raise Interrupted

    with pytest.raises(Interrupted):
        jobs.run(work, numbers(), 3, take)
    assert len(done) < 20
    count = len(done)
    assert threading.active_count() == threads
    time.sleep(0.1)
    assert len(done) == count


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_signal_at_any_moment_ends_all_jobs():
    """No thread waits for a lock of one that was interrupted, and none computes afterwards."""
    code = """
import faulthandler, random, signal
from cuflash.cpu import jobs

class Interrupted(BaseException):
    pass

def interrupt(*_):
    if may_interrupt:
        raise Interrupted

def work(number):
    running.append(number)
    total = sum(range(200 + 50 * (number % 5)))
    running.pop()
    return total

faulthandler.dump_traceback_later(60, exit=True)
signal.signal(signal.SIGALRM, interrupt)
expected, interrupted, running = [sum(range(200 + 50 * (number % 5))) for number in range(30)], 0, []
for _ in range(6000):
    try:  # the timer comes once
        may_interrupt = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
        assert list(jobs.results(work, range(30), 3)) == expected
        may_interrupt = False
    except Interrupted:
        interrupted += 1
    assert not running
signal.setitimer(signal.ITIMER_REAL, 0)
assert interrupted > 600, interrupted
"""
    run_python(code)
