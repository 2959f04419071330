"""Which samplers keep the marginals of the probability-flow ODE, and how nearly.

Every step is affine in (x, v or eps, noise): two basis inputs give its coefficients, and Gaussian
data N(m, q^2) give an exact recursion for mean and variance, without Monte Carlo. At a practical
number of steps no sampler but DDIM keeps the marginals, so nothing here claims that they do.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import common

SAMPLERS = {
    "ode": (common.flow_sde_step, 0.0),
    "sde": (common.flow_sde_step, 0.7),
    "sde 1.2": (common.flow_sde_step, 1.2),
    "dance": (common.flow_dance_step, 0.3),
    "cps": (common.flow_cps_step, 0.8),
}
SD3_GRID = [1.0, 0.9601293206, 0.9133489728, 0.8576923013, 0.7903682590, 0.7072784901]
SD3_GRID += [0.6021505594, 0.4648760259, 0.2780487835, 0.0089285718, 0.0]


def coefficients(step, now, then, noise_level):
    """(c_x, c_v, std) of a step, float64, one row per entry of the grid slices `now` and `then`."""
    now, then = (torch.as_tensor(g, dtype=torch.float64).reshape(-1) for g in (now, then))
    one = torch.ones(len(now), 1, dtype=torch.float64)
    on_x = step(one, 0 * one, now, then, noise_level)
    on_v = step(0 * one, one, now, then, noise_level)
    std = on_x.std.expand_as(one)
    return torch.cat([on_x.mean, on_v.mean, std], 1).T  # (3, steps)


def variance(t, q):
    return (1 - t) ** 2 * q**2 + t**2


def slope(t, q):
    """dv*/dx of the perfect velocity E[eps - x0 | x_t]; v* = -m + slope (x - (1-t) m)."""
    return (t - (1 - t) * q**2) / variance(t, q)


def next_variance(step, t, s, level, q, var=None):
    c_x, c_v, std = (c.item() for c in coefficients(step, t, s, level))
    var = variance(t, q) if var is None else var
    return (c_x + c_v * slope(t, q)) ** 2 * var + std**2


def run(name, grid, q):
    """Final variance of a sampler with a perfect velocity, started with the right variance."""
    step, level = SAMPLERS[name]
    grid = torch.as_tensor(grid, dtype=torch.float64)
    var = variance(grid[0].item(), q)
    rows = coefficients(step, grid[:-1], grid[1:], level).T.tolist()
    for t, (c_x, c_v, std) in zip(grid[:-1].tolist(), rows, strict=True):
        var = (c_x + c_v * slope(t, q)) ** 2 * var + std**2
    return var


def uniform(n, start=1.0):
    return torch.linspace(start, 0, n + 1, dtype=torch.float64)


# ---- DDIM: exact ----

unit = st.floats(0.01, 0.99)


@given(unit, unit, st.floats(0, 1), st.floats(0.1, 2))
def test_ddim_variance_is_exact_for_one_point_and_closed_form_for_gaussian_data(a, b, eta, q):
    A, A_next = min(a, b), max(a, b)
    c_x, c_eps, std = (c.item() for c in coefficients(common.ddim_step, A, A_next, eta))
    assert (c_x * math.sqrt(1 - A) + c_eps) ** 2 + std**2 == pytest.approx(1 - A_next, abs=1e-14)
    var = A * q**2 + 1 - A
    g = math.sqrt(1 - A) / var  # eps* = g (x - sqrt(A) m)
    root = math.sqrt(A * A_next) * q**2 + math.sqrt((1 - A_next - std**2) * (1 - A))
    expected = root**2 / var + std**2
    assert (c_x + c_eps * g) ** 2 * var + std**2 == pytest.approx(expected, rel=1e-12)


@given(unit, unit, st.floats(0, 1), st.floats(-2, 2))
def test_ddim_mean_is_exact(a, b, eta, m):
    A, A_next = min(a, b), max(a, b)
    c_x = coefficients(common.ddim_step, A, A_next, eta)[0].item()
    # at the mean of the marginal the perfect eps is 0
    assert c_x * math.sqrt(A) * m == pytest.approx(math.sqrt(A_next) * m, abs=1e-13)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_chain_approaches_the_data_variance_at_first_order(eta):
    q, errors = 0.5, []
    for n in (200, 400, 800):
        abar = torch.cos(uniform(n, 0.999) * math.pi / 2) ** 2
        rows = coefficients(common.ddim_step, abar[:-1], abar[1:], eta).T.tolist()
        A = abar[0].item()
        var = A * q**2 + 1 - A
        for A, (c_x, c_eps, std) in zip(abar[:-1].tolist(), rows, strict=True):
            var = (c_x + c_eps * math.sqrt(1 - A) / (A * q**2 + 1 - A)) ** 2 * var + std**2
        errors.append(abs(var - q**2))
    assert errors[2] < 3e-3
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.15)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)


# ---- flow samplers: the mean is exact, the variance O(h^2) per step ----


@pytest.mark.parametrize("name", SAMPLERS)
@given(t=st.floats(0.02, 1), fraction=st.floats(0, 0.98), m=st.floats(-3, 3), q=st.floats(0.1, 2))
def test_mean_recursion_is_exact(name, t, fraction, m, q):
    step, level = SAMPLERS[name]
    s = t * fraction
    c_x, c_v, _ = (c.item() for c in coefficients(step, t, s, level))
    mean = c_x * (1 - t) * m + c_v * (-m)  # v* = -m at the mean
    if name.startswith("sde") and 0.99 < t < 1:  # c_x is large there, or t counts as 1
        assert mean == pytest.approx((1 - s) * m, abs=1e-2)
    else:
        assert mean == pytest.approx((1 - s) * m, abs=1e-11)


@pytest.mark.parametrize("name", ["ode", "sde", "sde 1.2", "dance"])
@pytest.mark.parametrize("t", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("q", [0.5, 1.5])
def test_one_step_variance_error_is_second_order(name, t, q):
    step, level = SAMPLERS[name]
    errors = [next_variance(step, t, t - h, level, q) - variance(t - h, q) for h in (2e-4, 1e-4)]
    assert errors[0] / errors[1] == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("name", ["ode", "sde", "dance"])
def test_global_error_is_first_order_from_below_one(name):
    errors = [abs(run(name, uniform(n, 0.9), 0.5) - 0.25) for n in (200, 400, 800)]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.05)
    assert errors[2] < 2e-3


def test_ode_dance_and_strong_sde_converge_from_pure_noise():
    for name in ("ode", "dance", "sde 1.2"):
        errors = [abs(run(name, uniform(n), 0.5) - 0.25) for n in (100, 400, 1600)]
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 6e-4


@pytest.mark.parametrize("a", [0.5, 0.7])
def test_error_of_the_first_sde_step_decays_slowly(a, monkeypatch):
    """The t = 1 step adds a^4/4; the later steps damp it only like N^(-a^2)."""
    monkeypatch.setitem(SAMPLERS, "weak", (common.flow_sde_step, a))

    def left_of_it(n):  # against a run that enters the second step with the right variance
        return run("weak", uniform(n), 0.5) - run("weak", uniform(n)[1:], 0.5)

    rate = math.log(left_of_it(400) / left_of_it(800)) / math.log(2)
    assert rate == pytest.approx(a**2, abs=0.04)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (10, [0.1856, 0.2300, 0.2487, 0.1950, 0.1238]),
        (100, [0.2427, 0.2504, 0.2497, 0.2438, 0.1561]),
        (1600, [0.2495, 0.2508, 0.2500, 0.2496, 0.1626]),
    ],
)
def test_final_variance_on_uniform_grids(n, expected):
    assert [round(run(name, uniform(n), 0.5), 4) for name in SAMPLERS] == expected


def test_final_variance_on_the_ten_steps_of_sd3():
    final = [run(name, SD3_GRID, 0.5) for name in ("ode", "sde", "cps")]
    assert final == pytest.approx([0.129, 0.177, 0.095], abs=5e-4)


# ---- data at one point: what one step leaves too much ----


@given(t=st.floats(0.01, 0.998), fraction=st.floats(0, 0.99), a=st.floats(0, 1.5))
def test_sde_excess_over_one_point(t, fraction, a):
    s = t * fraction
    h = t - s
    excess = next_variance(common.flow_sde_step, t, s, a, 0.0) - s**2
    expected = a**2 * h**2 / (1 - t) + a**4 * h**2 / (4 * (1 - t) ** 2)
    assert excess == pytest.approx(expected, rel=1e-9, abs=1e-13)


@given(s=st.floats(0, 0.99), a=st.floats(0, 1.5))
def test_sde_excess_over_one_point_from_pure_noise(s, a):
    excess = next_variance(common.flow_sde_step, 1.0, s, a, 0.0) - s**2
    assert excess == pytest.approx(a**2 * (1 - s) + a**4 / 4, rel=1e-9, abs=1e-13)


@given(t=st.floats(0.01, 1), fraction=st.floats(0, 0.99), eta=st.floats(0, 1))
def test_dance_excess_over_one_point(t, fraction, eta):
    s = t * fraction
    h = t - s
    excess = next_variance(common.flow_dance_step, t, s, eta, 0.0) - s**2
    expected = eta**2 * h**2 / t + eta**4 * h**2 / (4 * t**2)
    assert excess == pytest.approx(expected, rel=1e-9, abs=1e-13)


# ---- CPS: exact over one point, a closed form of its own otherwise ----


@given(t=st.floats(0.01, 1), fraction=st.floats(0, 1), eta=st.floats(0, 1), q=st.floats(0, 2))
def test_cps_variance(t, fraction, eta, q):
    s, c = t * fraction, math.cos(eta * math.pi / 2)
    one_point = next_variance(common.flow_cps_step, t, s, eta, 0.0)
    assert one_point == pytest.approx(s**2, abs=1e-13)
    spread = next_variance(common.flow_cps_step, t, s, eta, q)
    expected = ((1 - t) * (1 - s) * q**2 + c * t * s) ** 2 / variance(t, q) + s**2 * (1 - c**2)
    assert spread == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("eta", [0.3, 0.8])
def test_cps_loses_variance_however_short_the_step(eta):
    t, q, c = 0.6, 0.5, math.cos(eta * math.pi / 2)
    a, b = (1 - t) ** 2 * q**2, t**2
    loss = variance(t, q) - next_variance(common.flow_cps_step, t, t - 1e-9, eta, q)
    assert loss == pytest.approx(a * b * (1 - c) ** 2 / (a + b), abs=1e-7)


# ---- and the samplers really sample what the recursion says ----


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_follow_the_recursion(name):
    step, level = SAMPLERS[name]
    grid, m, q, n = torch.tensor(SD3_GRID), -0.3, 0.5, 40_000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 1, generator=generator)
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        v = -m + slope(t, q) * (x - (1 - t) * m)
        x = step(x, v, t, s, level, noise=torch.randn(x.shape, generator=generator)).x_next
    expected = run(name, SD3_GRID, q)
    assert x.mean().item() == pytest.approx(m, abs=5 * math.sqrt(expected / n))
    assert x.var().item() == pytest.approx(expected, abs=5 * expected * math.sqrt(2 / n))
