"""Rewards and advantages against numbers worked out by hand (spec B17, B22, B36)."""

import math

import pytest

from envs.base import Verdict
from nanoplan.reward import anchored_reward, group_advantages, overlong_penalty

PASSED = Verdict(True, {"budget": True}, {"budget": 0.0}, [])
FAILED = Verdict(False, {"budget": False}, {"budget": 12.5}, ["12.5 over budget"])


def test_gate_and_comparison():
    # a plan that wins the judge but breaks a constraint earns something; a tie counts as a win
    assert anchored_reward(PASSED, "win") == 1.0
    assert anchored_reward(PASSED, "loss") == 0.0
    assert anchored_reward(PASSED, "tie") == 0.0
    for outcome in ("win", "loss", "tie", ""):
        assert anchored_reward(FAILED, outcome) == 0.0


def test_errors_are_not_rewards():
    # a judge's timeout or a broken environment becomes reward 0
    assert anchored_reward(PASSED, "error") is None
    assert anchored_reward(FAILED, "error") is None


def test_unjudged_plan_past_the_gate():
    # a plan that passed is never shown to the judge and silently loses
    with pytest.raises(ValueError, match="ask the judge"):
        anchored_reward(PASSED, "")
    with pytest.raises(ValueError, match="outcome='won'"):
        anchored_reward(PASSED, "won")


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], [2.64495] + [-0.37785] * 7),
        ([1, 1, 0, 0], [0.99980, 0.99980, -0.99980, -0.99980]),
        ([0.35] * 7 + [1.0], [-0.37779] * 7 + [2.64452]),
    ],
)
def test_population_std(rewards, expected):
    # ddof=1 (2.47417, 0.86588 here), or eps under the root
    assert group_advantages(rewards, group=len(rewards), eps=1e-4) == pytest.approx(expected, abs=1e-5)


def test_constant_group_is_exactly_zero():
    # 0.1 * 3 rounding leaves a residue that a small eps blows up to an advantage of order 1
    for value in (1.0, 0.0, 0.35, 0.1, 1e-9):
        assert group_advantages([value] * 7, group=7, eps=1e-12) == [0.0] * 7


def test_statistics_stay_inside_the_group():
    # mean and std over the batch: the second group would get non-zero advantages
    out = group_advantages([1.0, 0.0, 5.0, 5.0], group=2, eps=0.0)
    assert out == [1.0, -1.0, 0.0, 0.0]


def test_one_timeout_of_eight():
    # B36: a timeout counted as a loss makes statistics over 8 (mean 0.375) instead of 7 (mean 3/7)
    rewards = [1.0, 1.0, 1.0, 0.0, None, 0.0, 0.0, 0.0]
    out = group_advantages(rewards, group=8, eps=0.0)
    mean = 3 / 7
    std = math.sqrt(mean * (1 - mean))  # of 3 ones and 4 zeros
    expected = [0.0 if r is None else (r - mean) / std for r in rewards]
    assert out == pytest.approx(expected, abs=1e-12)
    assert out[4] == 0.0 and sum(out) == pytest.approx(0.0, abs=1e-12)


def test_fewer_than_two_rewards_left():
    # a single survivor normalised by itself, or a mean of an empty list
    assert group_advantages([None, 1.0, None], group=3) == [0.0] * 3
    assert group_advantages([None, None], group=2) == [0.0] * 2
    assert group_advantages([None, 1.0, 0.0], group=3, eps=0.0) == [0.0, 1.0, -1.0]


def test_center_only():
    # Dr. GRPO's flag still divides by the std
    assert group_advantages([1.0, 0.0, 0.0, 0.0], group=4, scale=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite(bad):
    # one NaN reward poisons its whole group and then every weight
    with pytest.raises(ValueError, match=r"rewards\[1\]"):
        group_advantages([1.0, bad], group=2)


def test_group_sizes():
    # a group of one learns nothing and says nothing; a torn group is compared with strangers
    with pytest.raises(ValueError, match="group=1"):
        group_advantages([1.0], group=1)
    with pytest.raises(ValueError, match="multiple of group=2"):
        group_advantages([1.0, 0.0, 1.0], group=2)


def test_overlong_penalty():
    # the line starts or ends one token off, or goes below -1
    values = {16384: 0.0, 16385: -0.00024414, 18432: -0.5, 20480: -1.0, 20481: -1.0, 0: 0.0, 99999: -1.0}
    for tokens, expected in values.items():
        assert overlong_penalty(tokens, max_tokens=20480, cache_tokens=4096) == pytest.approx(
            expected, abs=1e-8
        )
    with pytest.raises(ValueError, match="cache_tokens=0"):
        overlong_penalty(5, max_tokens=10, cache_tokens=0)
