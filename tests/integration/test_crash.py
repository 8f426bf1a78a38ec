"""Every resume continues, whatever was killed when; see `crash`."""

import random

import pytest

from tests.integration.crash import PHASES, CrashTest, Tally
from tests.tiny_model import build_coin_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("coin"))


def test_a_run_that_was_killed_comes_to_the_same_numbers(base, tmp_path):
    tally = Tally()
    CrashTest(base, tmp_path, "rollout.engine=transformers").run(random.Random(1), 2, tally)
    assert len(tally.kills) == 2


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(base, tmp_path):
    """About 25 minutes on two cores."""
    tally = Tally()
    crash_test = CrashTest(base, tmp_path, "rollout.engine=transformers")
    try:
        crash_test.run(random.Random(0), 100, tally)
    finally:
        print(tally.describe())
    assert {phase for phase, _ in tally.kills} == set(PHASES)


@pytest.mark.slow
@pytest.mark.vllm
def test_kills_with_a_vllm_engine_lose_nothing(base, tmp_path):
    """About ten minutes on two cores."""
    tally = Tally()
    crash_test = CrashTest(base, tmp_path)
    try:
        crash_test.run(random.Random(0), 12, tally)
    finally:
        print(tally.describe())
