import pytest

from nanoplan import stats


def test_wilson_matches_published_values():
    # Catches: the normal interval in Wilson's place, which is [1, 1] at 10 of 10.
    assert stats.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert stats.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert stats.wilson(15, 20) == pytest.approx((0.5313, 0.8881), abs=1e-4)
    assert stats.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert stats.wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"successes=3.*n=2"):
        stats.wilson(3, 2)


def test_bootstrap_mean_has_the_width_of_the_normal_interval():
    # Catches: an interval of the values instead of their mean (sqrt(n) too wide), or a level halved.
    values = [0.0, 1.0] * 200
    mean, low, high = stats.bootstrap_mean(values, seed=0, samples=4000)
    assert mean == 0.5
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.004)
    assert high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.004)
    assert stats.bootstrap_mean(values, seed=0, samples=4000) == (mean, low, high)
    with pytest.raises(ValueError, match="empty"):
        stats.bootstrap_mean([], seed=0)


def test_paired_bootstrap_uses_the_pairs():
    # Catches: independent resampling of a and b, which hides a small constant gain among noisy items.
    a = [float(i) for i in range(50)]
    diff, low, high = stats.paired_bootstrap(a, [x + 1.0 for x in a], seed=1, samples=500)
    assert (diff, low, high) == (1.0, 1.0, 1.0)
    assert stats.paired_bootstrap([x + 1.0 for x in a], a, seed=1, samples=500)[0] == -1.0  # b - a
    with pytest.raises(ValueError, match=r"len\(a\)=2 and len\(b\)=1"):
        stats.paired_bootstrap([1.0, 2.0], [1.0], seed=0)


def test_lr_is_a_function_of_the_step():
    # Catches: a scheduler with its own counter, which starts again at warmup after a resume.
    at = dict(base=1e-5, floor=1e-6, warmup=10)
    assert stats.lr_at(50, total=100, **at) == pytest.approx(6.2814e-6, rel=1e-5)
    assert stats.lr_at(50, total=200, **at) == pytest.approx(9.0511e-6, rel=1e-5)
    assert stats.lr_at(0, total=100, **at) == pytest.approx(1e-6)
    assert stats.lr_at(9, total=100, **at) == stats.lr_at(10, total=100, **at) == 1e-5
    assert stats.lr_at(100, total=100, **at) == stats.lr_at(500, total=100, **at) == pytest.approx(1e-6)
    assert stats.lr_at(75, base=4.0, total=100, floor=2.0, schedule="linear") == 2.5
    assert stats.lr_at(99, base=4.0, total=100, schedule="constant") == 4.0
    assert stats.lr_at(0, base=4.0, total=1) == 4.0


def test_lr_refuses_what_it_does_not_know():
    # Catches: a misspelled schedule that trains at a constant rate.
    with pytest.raises(ValueError, match=r"schedule='cos'.*constant, linear, cosine"):
        stats.lr_at(0, base=1.0, total=10, schedule="cos")
    with pytest.raises(ValueError, match="warmup=11"):
        stats.lr_at(0, base=1.0, total=10, warmup=11)


def test_pass_hat_by_hand():
    # Catches: (c/k)^k in place of draws without replacement, or pass@k, which any success satisfies.
    assert stats.pass_hat([4, 2, 0], 4, 1) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert stats.pass_hat([4, 2, 0], 4, 2) == pytest.approx((1 + 1 / 6 + 0) / 3)
    assert stats.pass_hat([4, 2, 0], 4, 4) == pytest.approx(1 / 3)
    for arguments in (([1], 4, 5), ([1], 4, 0), ([], 4, 1), ([5], 4, 1)):
        with pytest.raises(ValueError, match="wanted 1 <= k <= trials"):
            stats.pass_hat(*arguments)


def test_the_standard_error_is_of_the_mean():
    # Catches: the population's deviation, or the deviation itself.
    assert stats.standard_error([0.0, 1.0]) == pytest.approx(0.5)
    assert stats.standard_error([0.0, 0.0, 1.0, 1.0]) == pytest.approx((1 / 3) ** 0.5 / 2)
    assert stats.standard_error([1.0]) is None
