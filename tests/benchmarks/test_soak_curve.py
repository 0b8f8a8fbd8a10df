import os
import random
import subprocess
import sys

import pytest

from benchmarks.soaking.curve import Curve, Sample, Watch, anonymous_bytes
from kvstore.settings import MIB

LEVEL = 60 * MIB
RATES = {"flat": 0, "settling": 4096, "growing": 256 * 1024, "falling": -256 * 1024}  # bytes a second


def samples(rate, seconds=300, pid=1, start=0.0):
    """One a second, with noise, and with a peak of a minute each second minute."""
    rng = random.Random(5)
    return [
        Sample(start + at, pid, int(LEVEL + rate * at + rng.gauss(0, MIB) + 90 * MIB * (at % 120 > 100)))
        for at in range(seconds)
    ]


@pytest.mark.parametrize("kind", RATES)
def test_memory_that_grows_is_told_from_memory_that_has_peaks(kind):
    curve = Curve.of(samples(RATES[kind]), since=0.0)
    assert curve.slope == pytest.approx(RATES[kind], abs=3 * 1024)
    assert curve.grows == (kind == "growing")


def test_only_the_process_that_lived_last_is_judged():
    before, after = samples(RATES["growing"]), samples(0, pid=2, start=300.0)
    assert not Curve.of(before + after, since=0.0).grows
    assert Curve.of(after[:1] + before, since=0.0).grows


def test_what_was_before_the_last_part_is_not_judged():
    settling, settled = samples(RATES["growing"]), samples(0, start=300.0)
    assert not Curve.of(settling + settled, since=300.0).grows


def test_a_short_curve_grows_only_if_it_runs_away():
    settling = samples(RATES["growing"], seconds=60)
    assert not Curve.of(settling, since=0.0).grows
    assert Curve.of(samples(4 * RATES["growing"], seconds=60), since=0.0).grows


def test_a_few_samples_do_not_grow():
    for count in range(3):
        assert not Curve.of(samples(RATES["growing"], seconds=count), since=0.0).grows


def test_a_process_is_watched_until_it_has_ended():
    held = "import sys; held = bytearray(b'x') * (50 << 20); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        assert anonymous_bytes(process.pid) > 50 * MIB
    assert anonymous_bytes(process.pid) is None


def test_samples_are_taken_all_the_while():
    with Watch(os.getpid, seconds=0.01) as watch:
        while len(watch.samples) < 3:
            pass
    assert {each.pid for each in watch.samples} == {os.getpid()}
    assert watch.samples[0].at < watch.samples[-1].at
