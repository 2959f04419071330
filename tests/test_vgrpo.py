"""vgrpo.py: ratio, pairs, errors, signs, KLs, other papers as oracles, and what each flag changes."""

import dataclasses
import functools
import json
import math
import sys
import types
from pathlib import Path

import conftest
import pytest
import torch
from conftest import Counting, Half, OtherRank, gradient, randomise
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import common
import rewards
import vgrpo
from vgrpo import Args, elbo_ratio, soft_clip

exact = functools.partial(assert_close, rtol=0, atol=0)
BLANK = types.SimpleNamespace(latent_shape=(2, 3, 3), device="cpu")  # enough to draw pairs for
A4 = torch.tensor([1.0, -1.0, 0.5, -0.5])
stored = functools.partial(conftest.stored, vgrpo)
update = functools.partial(conftest.update, vgrpo)
error = functools.partial(conftest.error, vgrpo)


@pytest.fixture
def args():
    return Args(T=4, G=2, P=2, M=2, lr=1e-3, micro_batch=64)


# ---- soft clip ----

finite = st.floats(-50, 50)


@given(finite, st.floats(0.1, 20))
def test_soft_clip(A, eta):
    """P4."""
    A = torch.tensor(A, dtype=torch.float64, requires_grad=True)
    s = soft_clip(A, eta)
    exact(soft_clip(-A, eta), -s)
    assert s.abs() <= min(eta, abs(A.item())) * (1 + 1e-12)
    assert s * A >= 0
    if abs(A) < 10 * eta:
        assert s.abs() < eta
    slope = torch.autograd.grad(s, A)[0]
    assert_close(slope, 1 - (s / eta).square(), rtol=0, atol=1e-12)
    x = A.detach() / (1000 / eta)  # |x| <= eta / 20: the series holds
    third = soft_clip(x, eta) - (x - x**3 / (3 * eta**2))
    assert third.abs() <= 0.14 * x.abs() ** 5 / eta**4 + 1e-12
    assert_close(soft_clip(A, 1e9), A, rtol=1e-12, atol=0)


def test_soft_clip_breaks_the_zero_sum():
    r = torch.zeros(24, dtype=torch.float64)
    r[0] = 1
    A = common.group_advantages(r, 24)
    assert abs(A.sum()) < 1e-9
    assert soft_clip(A, 3.0).sum().item() == pytest.approx(-2.0, abs=0.1)


# ---- ratio ----


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_elbo_ratio(M, B, seed):
    """P1: the mean over pairs comes before the exponential."""
    g = torch.Generator().manual_seed(seed)
    err, old = (torch.rand(M, B, generator=g, dtype=torch.float64) for _ in range(2))
    err.requires_grad_()
    rho = elbo_ratio(err, old)
    assert rho.shape == (B,)
    for b in range(B):
        gap = sum(old[j, b].item() - err[j, b].item() for j in range(M)) / M
        assert rho[b].item() == pytest.approx(math.exp(gap), rel=1e-12)
    slope = torch.autograd.grad(rho.log().sum(), err)[0]
    assert_close(slope, torch.full_like(slope, -1 / M))
    exact(elbo_ratio(err, err.detach()), torch.ones(B, dtype=torch.float64))


def test_elbo_ratio_is_not_the_mean_of_ratios():
    err, old = torch.tensor([[2.0], [0.0]]), torch.zeros(2, 1)
    assert elbo_ratio(err, old).item() == pytest.approx(math.exp(-1))
    assert elbo_ratio(old, err).item() == pytest.approx(math.exp(1))


@pytest.mark.parametrize("sign", [1, -1])
def test_elbo_ratio_stays_finite(sign):
    err = torch.full((2, 1), sign * 1e4, requires_grad=True)
    rho = elbo_ratio(err, torch.zeros(2, 1))
    assert rho.isfinite()
    assert rho > 0  # its logarithm is taken
    assert torch.autograd.grad(rho.sum(), err)[0].isfinite().all()


# ---- pairs ----


@given(st.data())
def test_strata(data):
    """P7: one level from each chunk, in order, and never the final 0."""
    n = data.draw(st.integers(1, 12))
    M = data.draw(st.integers(1, n))
    args = Args(T=n, M=M, G=2, share=data.draw(st.sampled_from(["group", "batch", "none"])))
    grid = torch.linspace(1, 0, n + 1)
    t, eps = vgrpo.draw_pairs(BLANK, grid[:-1], data.draw(st.integers(0, 99)), range(6), args)
    assert t.shape == (6, M)
    assert eps.shape == (6, M, 2, 3, 3)
    for row in t:
        for level, chunk in zip(row, grid[:-1].tensor_split(M), strict=True):
            assert level in chunk
    assert (t > 0).all()


@pytest.mark.parametrize("stratified", [True, False])
def test_every_level_but_zero_comes_up(stratified):
    grid, args = torch.linspace(1, 0, 8), Args(T=7, M=3, G=2, stratified=stratified, share="none")
    t = torch.cat([vgrpo.draw_pairs(BLANK, grid[:-1], i, range(8), args)[0] for i in range(30)])
    exact(t.unique(), grid[:-1].flip(0))
    increasing = (t.diff(dim=1) < 0).all(1)
    assert increasing.all() == stratified  # independent ones repeat and come in any order
    share = [float((t == level).float().mean()) for level in grid[:-1]]
    if not stratified:
        assert max(abs(x - 1 / 7) for x in share) < 0.05


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("share", ["group", "batch", "none"])
def test_who_shares_the_pairs(share, stratified):
    args = Args(T=20, M=4, G=3, share=share, stratified=stratified)
    grid = torch.linspace(1, 0, 21)
    for x in vgrpo.draw_pairs(BLANK, grid[:-1], 0, range(9), args):
        rows = x.flatten(1).unflatten(0, (3, 3))
        same = {(p, g): torch.equal(rows[p, g], rows[0, 0]) for p in range(3) for g in range(3)}
        wanted = {
            "group": lambda p, g: p == 0,
            "batch": lambda p, g: True,
            "none": lambda p, g: (p, g) == (0, 0),
        }[share]
        assert same == {key: wanted(*key) for key in same}
        if share == "group":
            exact(rows, rows[:, :1].expand_as(rows))


@pytest.mark.parametrize("share", ["group", "batch", "none"])
def test_pairs_are_those_of_the_image_whatever_the_split(share):
    """Micro-batches and ranks hand over other indices: an image keeps its pairs."""
    args, grid = Args(T=6, M=3, G=2, share=share), torch.linspace(1, 0, 7)
    whole = vgrpo.draw_pairs(BLANK, grid[:-1], 3, range(8), args)
    for part in (range(4), range(4, 8), [5], [7, 0]):
        exact(
            vgrpo.draw_pairs(BLANK, grid[:-1], 3, part, args), tuple(x[list(part)] for x in whole)
        )


def test_pairs_depend_on_seed_and_iteration_and_are_normal():
    args, grid = Args(T=12, M=4, G=2), torch.linspace(1, 0, 13)
    shape = types.SimpleNamespace(latent_shape=(4, 16, 16), device="cpu")
    drawn = [
        vgrpo.draw_pairs(shape, grid[:-1], i, range(4), dataclasses.replace(args, seed=s))
        for i, s in ((0, 0), (1, 0), (0, 1))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[one][0] != drawn[other][0]).any()
        assert (drawn[one][1] - drawn[other][1]).flatten(2).std(2).min() > 1
    eps = drawn[0][1][::2].flatten(2).flatten(0, 1)  # 2 groups of 4 pairs, all independent
    assert abs(eps.mean()) < 0.05
    assert abs(eps.std() - 1) < 0.05
    assert (torch.corrcoef(eps) - torch.eye(8)).abs().max() < 0.15
    x_T = common.keyed_noise((4, 16, 16), 0, "x_T", 0, range(4))
    assert all(torch.corrcoef(torch.stack([e, x.flatten()]))[0, 1].abs() < 0.15
               for e in eps for x in x_T)  # not the noise the image grew from  # fmt: skip


# ---- rollout ----


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_rollout_is_the_solver_s_and_leaves_no_trace(policy, args, solver):
    args = dataclasses.replace(args, solver=solver, guidance=2.0)
    state = torch.get_rng_state()
    c, batch = stored(policy, args)
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", 0, range(4))
    exact(batch["x0"], policy.sample(x, c, args.T, 2.0, solver))
    exact(torch.get_rng_state(), state)
    assert not any(x.requires_grad for x in batch.values())
    levels = policy.grid(args.T, solver)[:-1]
    assert all(t in levels for t in batch["t"].flatten())
    parts = stored(policy, args, micro_batch=1)[1]
    assert_close(parts, batch, rtol=1e-5, atol=1e-5)
    other = stored(policy, args, iteration=1)[1]
    assert (other["x0"] - batch["x0"]).flatten(1).std(1).min() > 0.1


# ---- errors ----


def made(t, B=3, seed=0, dtype=torch.float64, shape=(2, 3, 3)):
    """A batch of given noise levels (M,), the same for all, and velocities (M, B, ...)."""
    g = torch.Generator().manual_seed(seed)
    x0, *rest = (torch.randn(B, *shape, generator=g, dtype=dtype) for _ in range(1 + 2 * len(t)))
    eps, v = torch.stack(rest[: len(t)], 1), torch.stack(rest[len(t) :])
    return dict(x0=x0, eps=eps, t=torch.tensor(t, dtype=dtype).expand(B, -1)), v


class Given:
    """A flow policy whose velocities are given, one call after another."""

    abars, device = None, torch.device("cpu")
    noised, coefficients = common.Policy.noised, common.Policy.coefficients

    def __init__(self, v):
        self.v = iter(v)

    def velocity(self, x_t, t, c, guidance):
        return next(self.v)


@pytest.mark.parametrize("weight", ["self", "none", "ghuber", "t"])
@pytest.mark.parametrize("space", ["x", "v", "eps"])
def test_errors_are_weighted_velocity_errors(space, weight):
    """m(dx^2) = t^2 m(dv^2), m(de^2) = (1-t)^2 m(dv^2), and what each weight makes of them."""
    levels = [0.9, 0.3, 0.55]
    batch, v = made(levels)
    err, seen = vgrpo.errors(Given(v), {}, batch, Args(space=space, weight=weight), 1.0)
    exact(seen, v)
    for j, t in enumerate(levels):
        dv = (v[j] - (batch["eps"][:, j] - batch["x0"])).flatten(1)
        scale = {"x": t, "v": 1, "eps": 1 - t}[space]
        m = scale**2 * dv.square().mean(1)
        wanted = {
            "none": m,
            "self": m / (scale * dv.abs().mean(1)),
            "t": t * m,
            "ghuber": t * ((m + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25,
        }[weight]
        assert_close(err[j], wanted, rtol=1e-10, atol=0)


def test_errors_see_the_noisy_image_and_the_guidance(policy, args):
    args = dataclasses.replace(args, space="v", weight="none")
    c, batch = stored(policy, args)
    for guidance in (1.0, 3.0):
        with torch.no_grad():
            err, v = vgrpo.errors(policy, c, batch, args, guidance)
            for j in range(args.M):
                t, eps = batch["t"][:, j], batch["eps"][:, j]
                x_t = (1 - t[:, None, None, None]) * batch["x0"] + t[:, None, None, None] * eps
                wanted = policy.velocity(x_t, t, c, guidance)
                exact(v[j], wanted)
                m = (wanted - eps + batch["x0"]).square().flatten(1).mean(1)
                assert_close(err[j], m)


@given(st.floats(0.05, 20), st.floats(0.05, 0.95))
def test_self_weight(factor, t):
    """P3: degree 1 in the error, and no gradient through the divisor: <e, dL/de> = 2 L."""
    batch, v = made([t])
    true = (batch["eps"][:, 0] - batch["x0"])[None]

    def err(v):
        return vgrpo.errors(Given(v), {}, batch, Args(space="x", weight="self"), 1.0)[0]

    one = err(v)
    assert_close(err(true + factor * (v - true)), factor * one)
    d = (t * (v - true)).abs().flatten(2)
    assert (d.mean(2) <= one * (1 + 1e-9)).all()
    assert (one <= d.amax(2) * (1 + 1e-9)).all()
    v.requires_grad_()
    slope = torch.autograd.grad(err(v).sum(), v)[0]
    inner = (slope * (v.detach() - true)).flatten(2).sum(2)
    assert_close(inner, 2 * one)


def test_a_perfect_prediction_has_no_error_and_no_nan():
    batch, v = made([0.5, 0.25], dtype=torch.float32)
    v = (batch["eps"] - batch["x0"][:, None]).transpose(0, 1).clone().requires_grad_()
    for weight in ("self", "none", "ghuber", "t"):
        for space in ("x", "v", "eps"):
            err, _ = vgrpo.errors(Given(v), {}, batch, Args(space=space, weight=weight), 1.0)
            assert err.abs().max() < 1e-3
            assert torch.autograd.grad(err.sum(), v)[0].isfinite().all()


# ---- on-policy ----


@pytest.mark.parametrize("share", ["group", "none"])
def test_one_step_needs_no_old_forward_and_its_ratio_is_one(policy, args, share):
    args = dataclasses.replace(args, share=share, clip=1e-6)
    data = stored(policy, args)
    policy.calls = 0
    A = torch.tensor([1.0, -1.0, 0.25, 0.0])
    _, logs = update(policy, data, A, args)
    assert policy.calls == 3 * args.M  # no forward for the sample without advantage either
    (row,) = [row for row in logs if "log_rho_max" in row]
    assert row["log_rho_max"] == row["clip_fraction"] == row["kl_old"] == 0
    assert row["rho_mean"] == 1


def test_the_first_of_two_steps_has_ratio_one_and_the_second_has_not(policy, args):
    args = dataclasses.replace(args, K=2, kl_old=0.3)
    data = stored(policy, args)
    policy.calls = 0
    A = torch.tensor([1.0, -1.0, 0.5, 0.0])  # the last one has a KL to descend all the same
    _, logs = update(policy, data, A, args, Counting(policy.params, lr=1.0))
    assert policy.calls == 4 * args.M * 3
    first, second = (row for row in logs if "log_rho_max" in row)
    assert first["log_rho_max"] == first["kl_x0"] == 0
    assert second["log_rho_max"] > 1e-5
    assert second["kl_x0"] > 0


def test_gradient_on_policy_is_that_of_the_weighted_error(policy, args):
    data = stored(policy, args)
    err, _ = vgrpo.errors(policy, *data, args, 1.0)
    wanted = gradient(policy, (A4 * err.mean(0)).mean())
    exact(update(policy, data, A4, args)[0].gradients[0].shape, wanted.shape)
    assert_close(update(policy, data, A4, args)[0].gradients[0], wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("clip", [0.05, None])
def test_clip_stops_the_gradient(policy, args, clip):
    """P2: no gradient where the ratio has already moved the wanted way, by more than clip."""
    args = dataclasses.replace(args, K=2, clip=clip, P=1, G=2)
    data = stored(policy, args, P=1)
    now = error(policy, data, args)
    for sign, shift in ((1, 0.1), (-1, -0.1), (1, -0.1), (-1, 0.1), (1, 0.03), (-1, -0.03)):
        A = torch.tensor([float(sign), float(sign)])
        value, stats = vgrpo.loss(policy, *data, A, dict(err_old=now + shift), args)
        assert value.item() == pytest.approx(
            max(-sign * math.exp(shift), -sign * min(max(math.exp(shift), 0.95), 1.05))
            if clip else -sign * math.exp(shift), rel=1e-5)  # fmt: skip
        clipped = clip is not None and sign * shift > 0.05
        assert (gradient(policy, value) == 0).all() == clipped, (sign, shift)
        assert stats["clip_fraction"] == (clip is not None and abs(shift) > 0.05)


# ---- pairs that are shared cancel ----


def test_identical_images_have_no_gradient_if_they_share_their_pairs(policy, args):
    """P6: the sum of the advantages of a group is 0."""
    found = {}
    for share in ("group", "batch", "none"):
        each = dataclasses.replace(args, share=share, G=4, P=1)
        c, batch = stored(policy, each, P=1)
        batch["x0"] = batch["x0"][:1].repeat(4, 1, 1, 1)
        A = torch.tensor([1.5, 0.5, -0.5, -1.5])
        found[share] = update(policy, (c, batch), A, each)[0].gradients[0].norm()
    assert found["none"] > 1e-3
    assert found["group"] < 1e-5 * found["none"]
    assert found["batch"] < 1e-5 * found["none"]


# ---- signs ----


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "flags",
    [
        dict(), dict(share="none"), dict(space="v", weight="none"), dict(space="eps"),
        dict(weight="ghuber", space="v"), dict(K=2, clip=0.2, kl_old=0.3), dict(beta=1e-3),
    ],
    ids=str,
)  # fmt: skip
def test_good_images_become_likelier_and_bad_ones_less(policy, args, flags, sign):
    args = dataclasses.replace(args, P=1, max_grad_norm=1e9, **flags)
    data = stored(policy, args, P=1)
    before = error(policy, data, args)
    update(policy, data, sign * torch.tensor([1.0, -1.0]), args, Counting(policy.params, lr=0.1))
    change = sign * (error(policy, data, args) - before).mean(0)
    assert change[0] - change[1] < -1e-6  # what they have in common may move both
    if args.share == "none":
        assert change[0] < -1e-6
        assert change[1] > 1e-6


def test_gradient_reaches_the_policy_only(policy, args):
    args = dataclasses.replace(args, beta=0.1, kl_ema=0.1, K=2)
    data = stored(policy, args)
    policy.remember()
    randomise(policy, seed=1, scale=1e-3)
    fixed = vgrpo.frozen(policy, *data, args)
    assert not any(x.requires_grad for x in fixed.values())
    vgrpo.loss(policy, *data, A4, fixed, args)[0].backward()
    lora = {id(p) for p in policy.params}
    for name, p in policy.net.named_parameters():
        assert (p.grad is not None) == (id(p) in lora), name


# ---- KL ----


@pytest.mark.parametrize("space", ["x", "v"])
@pytest.mark.parametrize("name", ["old", "ref", "ema"])
def test_kl(policy, make_policy, args, name, space):
    """P16: the one to the old policy is m(dx^2) = t^2 m(dv^2), the others are m(dv^2)."""
    flag = dict(old="kl_old", ref="beta", ema="kl_ema")[name]
    args = dataclasses.replace(args, K=2, space=space, **{flag: 0.7})
    other = make_policy(random=name != "ref")
    policy.remember()
    data = stored(policy, args)
    fixed = vgrpo.frozen(policy, *data, args)
    assert fixed.keys() == {"err_old", "v_old", f"err_{name}", f"v_{name}"}
    if name != "ref":
        randomise(policy, seed=1, scale=0.02)
    c, batch = data
    kls = []
    for j in range(args.M):
        t, eps = batch["t"][:, j], batch["eps"][:, j]
        x_t = common.interpolate(batch["x0"], eps, t)
        dv = policy.velocity(x_t, t, c) - other.velocity(x_t, t, c).detach()
        kls.append(dv.square().flatten(1).mean(1) * (t**2 if name == "old" else 1))
    wanted = torch.stack(kls).mean()
    value, stats = vgrpo.loss(policy, *data, torch.zeros(4), fixed, args)
    assert wanted > 1e-6
    assert_close(
        stats["kl_x0" if name == "old" else f"kl_{name}"], wanted.detach(), rtol=1e-4, atol=1e-9
    )
    assert_close(value.detach(), 0.7 * wanted.detach(), rtol=1e-4, atol=1e-9)
    assert_close(gradient(policy, value), 0.7 * gradient(policy, wanted), rtol=1e-3, atol=1e-6)


def test_every_policy_has_its_own_guidance(policy, args):
    """The base that of --ref-guidance, the others that of the update."""
    args = dataclasses.replace(
        args, K=2, beta=1.0, kl_ema=1.0, train_guidance=2.0, ref_guidance=3.0
    )
    data = stored(policy, args)
    policy.remember()
    randomise(policy, seed=1, scale=0.02)
    fixed = vgrpo.frozen(policy, *data, args)
    with torch.no_grad():
        wanted = dict(old=vgrpo.errors(policy, *data, args, 2.0))
        with policy.old():
            wanted["ema"] = vgrpo.errors(policy, *data, args, 2.0)
        with policy.reference():
            wanted["ref"] = vgrpo.errors(policy, *data, args, 3.0)
    for name, (err, v) in wanted.items():
        assert_close((fixed[f"err_{name}"], fixed[f"v_{name}"]), (err, v))


def test_every_kl_is_zero_before_the_first_step(make_policy, args):
    policy = make_policy(random=False)
    args = dataclasses.replace(args, K=2, beta=1.0, kl_ema=1.0, kl_old=1.0)
    _, logs = update(policy, stored(policy, args), A4, args)
    first = next(row for row in logs if "kl_ref" in row)
    assert first["kl_ref"] == first["kl_ema"] == first["kl_x0"] == 0


@pytest.mark.parametrize(("flag", "stat"), [("beta", "kl_ref"), ("kl_ema", "kl_ema")])
def test_kl_pulls_back(policy, args, flag, stat):
    args = dataclasses.replace(args, **{flag: 1.0})
    policy.remember()
    randomise(policy, seed=1)
    data, kept = stored(policy, args), policy.kept
    optimizer, logs = update(policy, data, torch.zeros(4), args, Counting(policy.params, lr=1e-2))
    assert len(optimizer.gradients) == 1  # no advantage, but a KL to descend
    policy.kept = kept  # the target must not have moved
    after = update(policy, data, torch.zeros(4), args)[1]
    assert after[0][stat] < logs[0][stat]


def test_kl_old_holds_the_second_step_back(policy, args):
    args = dataclasses.replace(args, K=2, max_grad_norm=1e9)
    data, first = stored(policy, args), [p.detach().clone() for p in policy.params]
    moved = {}
    for weight in (0.0, 300.0):
        common.copy_into(policy.params, first)
        each = dataclasses.replace(args, kl_old=weight)
        optimizer, _ = update(policy, data, A4, each, Counting(policy.params, lr=1e-2))
        moved[weight] = optimizer.gradients
    assert_close(moved[0.0][0], moved[300.0][0], rtol=1e-5, atol=1e-7)  # inert in the first
    step = -moved[0.0][0]
    extra = moved[300.0][1] - moved[0.0][1]
    assert (extra * step).sum() > 0  # descending it takes some of the first step back


# ---- other papers as oracles ----


@pytest.mark.parametrize("b", [0.1, 0.5, 1.0, 2.0])
def test_the_gradient_is_that_of_diffusion_nft(policy, args, b):
    """P12: arXiv 2509.16117's two-sided loss, whatever its b, on-policy and without soft clip."""
    A = torch.tensor([1.3, -0.7, -5.0, 4.0])
    c, batch = data = stored(policy, args)
    total = torch.zeros(())
    r = (A.clamp(-5, 5) / 5 * 0.5 + 0.5).clamp(0, 1)
    for j in range(args.M):
        t, eps = batch["t"][:, j], batch["eps"][:, j]
        x_t = common.interpolate(batch["x0"], eps, t)
        v = policy.velocity(x_t, t, c)
        old, sides = v.detach(), []
        for v_side in ((1 - b) * old + b * v, (1 + b) * old - b * v):
            d = x_t - t[:, None, None, None] * v_side - batch["x0"]
            divisor = d.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
            sides.append(d.square().flatten(1).mean(1) / divisor)
        total = total + (5 * (r * sides[0] + (1 - r) * sides[1]) / b).mean() / args.M
    wanted = gradient(policy, total)
    found = update(policy, data, A, dataclasses.replace(args, max_grad_norm=1e9))[0].gradients[0]
    assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("first", ["exp", "mean"])
def test_the_gradient_is_that_of_awm(policy, args, first):
    """P13: arXiv 2509.25050 with ghuber(1/4); exponential or mean first is one on-policy."""
    args = dataclasses.replace(args, space="v", weight="ghuber", max_grad_norm=1e9, share="none")
    c, batch = data = stored(policy, args)
    logps = []
    for j in range(args.M):
        t, eps = batch["t"][:, j], batch["eps"][:, j]
        v = policy.velocity(common.interpolate(batch["x0"], eps, t), t, c)
        m = (v - eps + batch["x0"]).square().flatten(1).mean(1)
        logps.append(-t * ((m + 1e-10).sqrt().sqrt() - 1e-10**0.25) * 4)
    logp = torch.stack(logps)
    gap = logp - logp.detach()
    rho = gap.exp() if first == "exp" else gap.mean(0).exp()
    wanted = gradient(policy, -(A4 * rho).mean())
    found = update(policy, data, A4, args)[0].gradients[0]
    assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


# ---- updates ----


@pytest.mark.parametrize("K", [1, 3])
def test_number_of_optimizer_steps(policy, args, K):
    data = stored(policy, args)
    optimizer, logs = update(policy, data, A4, dataclasses.replace(args, K=K))
    assert len(optimizer.gradients) == K
    assert sum("grad_norm" in row for row in logs) == K
    for g in optimizer.gradients:  # all images, each time: nothing has moved (lr 0)
        assert_close(g, optimizer.gradients[0], rtol=1e-4, atol=1e-7)


def test_micro_batch_changes_nothing(make_policy, args):
    args = dataclasses.replace(args, K=2, clip=0.5, kl_old=0.3, beta=0.1, kl_ema=0.1)
    grads, logs = [], []
    A = torch.tensor([1.0, -0.5, 2.0, 0.0])
    for size in (1, 3, 64):
        policy = make_policy()
        policy.remember()
        randomise(policy, seed=1, scale=1e-2)
        data = stored(policy, args)
        each = dataclasses.replace(args, micro_batch=size)
        optimizer, rows = update(policy, data, A, each, Counting(policy.params, lr=0.3))
        grads.append(optimizer.gradients)
        logs.append(common.merge_logs(rows))
    for other in (1, 2):
        assert_close(grads[other], grads[0], rtol=1e-4, atol=1e-6)
        assert_close(logs[other], logs[0], rtol=1e-3, atol=1e-6)


def test_nothing_to_learn_changes_nothing(policy, args):
    data = stored(policy, dataclasses.replace(args, K=2))
    policy.remember()
    randomise(policy, seed=1)
    before, kept = [p.detach().clone() for p in policy.params], [*policy.kept]
    optimizer = torch.optim.AdamW(policy.params, lr=0.1, weight_decay=0.1)
    _, logs = update(policy, data, torch.zeros(4), args, optimizer)
    exact([p.detach() for p in policy.params], before)
    exact(policy.kept, kept)
    assert logs == []
    assert not optimizer.state


@pytest.mark.parametrize("flags", [dict(), dict(K=2, beta=0.1, kl_ema=0.1, kl_old=0.1)], ids=str)
def test_failed_samples_do_not_reach_the_gradient(policy, args, flags):
    args = dataclasses.replace(args, max_grad_norm=1e9, **flags)
    data = stored(policy, args)
    valid, A = torch.tensor([True, False, True, True]), torch.tensor([1.0, 0.0, -1.0, 0.5])
    good = update(policy, data, A, args, valid=valid)[0].gradients
    policy.kept = None
    data[1]["x0"][1] = data[1]["eps"][1] = math.nan
    optimizer, logs = update(policy, data, A, args, valid=valid)
    exact(optimizer.gradients, good)
    assert optimizer.gradients[0].isfinite().all()
    assert optimizer.gradients[0].abs().max() > 0
    assert all(math.isfinite(x) for row in logs for x in row.values())


def test_a_rank_with_nothing_to_learn_takes_part(policy, args):
    args, ranks = dataclasses.replace(args, K=2), OtherRank()
    optimizer, logs = update(policy, stored(policy, args), torch.zeros(4), args, ranks=ranks)
    assert ranks.calls == 2
    assert all((g == 0).all() for g in optimizer.gradients)
    assert all(math.isfinite(x) for row in logs for x in row.values())


@pytest.mark.parametrize("flags", [dict(), dict(K=2, beta=0.1)], ids=str)
def test_two_ranks_make_the_same_updates_as_one(policy, args, flags):
    args = dataclasses.replace(args, max_grad_norm=1e9, **flags)
    c, batch = data = stored(policy, args)
    A = torch.tensor([1.0, -1.0, 0.5, 0.0])
    one = update(policy, data, A, args)[0].gradients
    halves = []
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        mine = common.take(c, rows), common.take(batch, rows)
        halves.append(update(policy, mine, A[rows], args, ranks=Half(rank))[0].gradients)
    assert_close([(a + b) / 2 for a, b in zip(*halves, strict=True)], one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [1e-6, 1e6])
def test_gradient_norm(policy, args, max_grad_norm):
    args = dataclasses.replace(args, max_grad_norm=max_grad_norm)
    optimizer, logs = update(policy, stored(policy, args), A4, args, ranks=OtherRank())
    norm, logged = optimizer.gradients[0].norm(), logs[-1]["grad_norm"]
    assert logged > 1e-5  # of the mean over the ranks, before clipping
    assert norm == pytest.approx(min(logged, max_grad_norm), rel=1e-3)


@pytest.mark.parametrize(("iteration", "decays"), [(0, [0, 1e-3]), (50, [0.1, 0.101]),
                                                   (1000, [0.3, 0.3])])  # fmt: skip
def test_the_moving_average_follows_every_step(policy, args, iteration, decays):
    policy.remember()
    wanted = [p.clone() for p in policy.kept]
    states = []

    class Recording(Counting):
        def step(self, closure=None):
            super().step(closure)
            states.append([p.detach().clone() for p in policy.params])

    optimizer = Recording(policy.params, lr=1e-2)
    args = dataclasses.replace(args, K=2)
    update(policy, stored(policy, args), A4, args, optimizer, iteration=iteration)
    for decay, params in zip(decays, states, strict=True):
        wanted = [decay * a + (1 - decay) * p for a, p in zip(wanted, params)]
    assert_close(policy.kept, wanted, rtol=1e-5, atol=1e-7)
    assert any((a != b).any() for a, b in zip(policy.kept, states[1]))  # once decays are not 0


# ---- whole iterations ----


def read(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def state(folder):
    return torch.load(Path(folder) / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    ("flags", "nfe"),
    [
        (dict(), 3 + 2),
        (dict(T=5, M=4), 5 + 4),
        (dict(guidance=2.0), 2 * 3 + 2),
        (dict(train_guidance=2.0), 3 + 2 * 2),
        (dict(beta=0.1), 3 + 2 + 2),
        (dict(beta=0.1, ref_guidance=2.0), 3 + 2 + 2 * 2),
        (dict(kl_ema=0.1), 3 + 2 + 2),
        (dict(rollout="ema", ema=0.5), 3 + 2 + 2),  # the errors of the average
        (dict(kl_old=0.3), 3 + 2),  # one step: nothing has changed since the rollout
        (dict(K=2), 3 + 2 + 2 * 2),
        (dict(K=3, kl_old=0.1, beta=0.1, kl_ema=0.1, clip=0.1), 3 + 3 * 2 + 3 * 2),
        (dict(solver="dpm2", share="batch", micro_batch=1), 3 + 2),
    ],
    ids=str,
)
def test_number_of_network_calls(quick, flags, nfe):
    args = quick(vgrpo, **{"M": 2, **flags})
    vgrpo.main(args)
    row = read(args.out)[0]
    assert row["nfe"] == nfe
    assert row["grad_norm"] > 0
    assert row["log_rho_max"] == 0 or args.K > 1


def constant(monkeypatch, value=1.0):
    factory = lambda device, dtype: rewards.Reward(lambda i, p, m: [value] * len(i))  # noqa: E731
    monkeypatch.setitem(rewards.REWARDS, "constant", factory)
    return "constant"


def test_equal_rewards_leave_the_parameters_bit_unchanged(quick, monkeypatch, make_policy):
    args = quick(vgrpo, M=2, reward=constant(monkeypatch), iterations=2, lr=1.0, weight_decay=0.5)
    vgrpo.main(args)
    exact(state(args.out)["params"], [p.detach() for p in make_policy(random=False).params])
    rows = read(args.out)
    assert "grad_norm" not in rows[0]
    assert rows[0]["nfe"] == 3


@pytest.mark.parametrize("flags", [dict(), dict(K=2, beta=0.1, kl_ema=0.1, kl_old=0.1)], ids=str)
def test_a_failed_reward_is_masked(quick, monkeypatch, flags):
    def some(images, prompts, metas):
        values = images[:, 0].float().mean((1, 2)).tolist()
        return [math.nan, *values[1:]] if len(values) == 6 else values

    monkeypatch.setitem(rewards.REWARDS, "flaky", lambda device, dtype: rewards.Reward(some))
    flags = flags | dict(M=2, reward="flaky:1,red:1", P=2, G=3, micro_batch=6, iterations=2)
    args = quick(vgrpo, **flags)
    vgrpo.main(args)
    rows = read(args.out)
    assert rows[0]["reward/fail_frac"] == pytest.approx(1 / 6)
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["nfe"] == pytest.approx(3 + (2 if args.K == 1 else 5 * 2) * 5 / 6)
    assert all(p.isfinite().all() for p in state(args.out)["params"])


def test_the_moving_average_slows_from_iteration_to_iteration(quick, monkeypatch):
    decays, original = [], common.Policy.remember
    monkeypatch.setattr(
        common.Policy, "remember", lambda p, x=0.0: decays.append(x) or original(p, x)
    )
    vgrpo.main(quick(vgrpo, M=2, K=2, iterations=2))
    assert decays == pytest.approx([0, 0, 1e-3, 2e-3, 3e-3])  # the first one is the start


def test_the_moving_average_draws_the_images(quick, monkeypatch):
    """--rollout ema: the average samples, rho compares with it, and the weights themselves are trained."""
    args = quick(vgrpo, M=2, K=8, iterations=2, ema=0.5, rollout="ema")
    conftest.check_the_average_draws(vgrpo, args, monkeypatch)


def test_rho_compares_with_the_average_that_drew_the_images(policy, args):
    data = stored(policy, args)
    drew = [p.detach().clone() for p in policy.params]
    randomise(policy, seed=1, scale=0.1)
    policy.behaviour = lambda: common.swapped(policy.params, drew)
    off = vgrpo.frozen(policy, *data, dataclasses.replace(args, rollout="ema", ema=0.5))
    assert "err_old" not in vgrpo.frozen(policy, *data, args)
    now = vgrpo.errors(policy, *data, args, 1.0)[0].detach()
    with torch.no_grad(), common.swapped(policy.params, drew):
        exact(off["err_old"], vgrpo.errors(policy, *data, args, 1.0)[0])
    assert ((off["err_old"] - now).mean(0).abs() > 1e-3).all()
    A = torch.ones(len(data[1]["x0"]))
    value, stats = vgrpo.loss(policy, *data, A, off, args)
    rho = (off["err_old"] - now).mean(0).exp()
    assert value.item() == pytest.approx(-rho.mean().item(), rel=1e-5)
    assert stats["rho_mean"].item() == pytest.approx(rho.mean().item(), rel=1e-5)


def test_diversity_is_that_of_the_images_of_a_prompt(quick, monkeypatch):
    seen, original = [], vgrpo.update
    monkeypatch.setattr(vgrpo, "update", lambda *a: seen.append(a[3]) or original(*a))
    args = quick(vgrpo, M=2, P=2, G=3)
    vgrpo.main(args)
    one, other = seen[0]["x0"].split(3)
    wanted = torch.stack([one.std(0), other.std(0)]).mean().item()
    assert read(args.out)[0]["diversity"] == pytest.approx(wanted, rel=1e-4)


def launch(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["vgrpo.py", *map(str, argv)])
    vgrpo.main(vgrpo.parse_args())


def test_two_iterations_and_two_more_are_four(quick, tmp_path, monkeypatch, weights, red):
    """The moving average is saved and resumed: bit for bit, with all that reads it."""
    from safetensors.torch import load_file

    quick(vgrpo)  # no figures
    flags = {
        "weights": weights, "reward": red, "heldout-reward": "None", "P": 1, "G": 2, "T": 3, "M": 2,
        "lora-r": 4, "lora-alpha": 8, "eval-prompts": 2, "eval-T": 2, "device": "cpu", "K": 4,
        "kl-ema": 1, "clip": 0.01, "kl-old": 0.3, "ema": 0.5, "rollout": "ema", "t-max": 1.0,
    }  # fmt: skip
    # the preset's learning rate falls with the iterations, which differ here
    flags = ["--no-anneal-lr", *(x for k, v in flags.items() for x in ("--" + k, v))]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(monkeypatch, *flags, "--iterations", 4, "--out", whole)
    launch(monkeypatch, *flags, "--iterations", 2, "--out", parts)
    launch(monkeypatch, "--resume", parts, "--iterations", 4)
    one, other = state(whole), state(parts)
    assert len(one["kept"]) == len(one["params"])
    assert any((a != b).any() for a, b in zip(one["kept"], one["params"]))
    assert one["ema_n"] == 4 * 4  # after every optimizer step
    for name in ("params", "kept", "ema", "optimizer"):
        exact(other[name], one[name])
    assert read(parts)[3:] == read(whole)[3:]
    assert [row["kl_ema"] for row in read(parts)[:4]] == [r["kl_ema"] for r in read(whole)[:4]]
    assert read(whole)[3]["kl_ema"] > 0
    lora = [f / "lora" / "pytorch_lora_weights.safetensors" for f in (whole, parts)]
    exact(*map(load_file, lora))  # the order of the header's keys is free


# ---- settings ----


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(M=0), "--M: 0 is not"),
        (dict(M=11), "--M: 11 pairs of 10"),
        (dict(K=0), "--K: 0 is not"),
        (dict(clip=0.0), "--clip: 0.0 is not"),
        (dict(clip=-1.0), "--clip: -1.0 is not"),
        (dict(soft_clip=0.0), "--soft-clip: 0.0 is not"),
        (dict(soft_clip=math.nan), "--soft-clip: nan is not"),
        (dict(kl_old=-0.1), "--kl-old: -0.1 is not"),
        (dict(beta=-0.1), "--beta: -0.1 is not"),
        (dict(beta=math.inf), "--beta: inf is not"),
        (dict(kl_ema=-0.1), "--kl-ema: -0.1 is not"),
        (dict(ref_guidance=-1.0), "--ref-guidance: -1.0 is not"),
        (dict(train_guidance=0.0), "--train-guidance: 0.0 is not"),
        (dict(t_min=-0.1), "--t-min/--t-max: -0.1..1.0 is no range"),
        (dict(t_min=1.0), "--t-min/--t-max: 1.0..1.0 is no range"),
        (dict(t_max=math.nan), "--t-min/--t-max: 0.0..nan is no range"),
        (dict(t_max=1.1), "--t-min/--t-max: 0.0..1.1 is no range"),
        (dict(rollout="ema", ema=0.0), "--rollout: ema wants an --ema above 0"),
        (dict(p_mix=1.1), "--p-mix: 1.1 is outside 0..1"),
        (dict(p_mix=-0.1), "--p-mix: -0.1 is outside 0..1"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_one_line(flags, line):
    with pytest.raises(SystemExit) as stop:
        vgrpo.check_own(Args(**flags))
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code


def test_the_command_line_refuses_them_before_a_model_is_loaded(monkeypatch, tmp_path, weights):
    monkeypatch.setattr(common, "load_policy", lambda *a: 1 / 0)
    bad = ["--weights", weights, "--device", "cpu", "--out", tmp_path / "run"]
    for flags, line in ((["--M", "99"], "--M: 99"), (["--G", "1"], "--G: ")):
        with pytest.raises(SystemExit, match=f"^{line}[^\n]*$"):
            launch(monkeypatch, *bad, *flags)
    assert not (tmp_path / "run").exists()


@given(
    K=st.integers(1, 4), M=st.integers(1, 10), zero=st.sampled_from(["kl_old", "beta", "kl_ema"])
)
def test_good_settings_are_accepted(K, M, zero):
    vgrpo.check_own(Args(K=K, M=M, clip=None, soft_clip=None, **{zero: 0.0}))


def examples():
    lines = [line.strip() for line in vgrpo.__doc__.splitlines()]
    return [x.partition("#")[0].split() for x in lines if x.startswith("python vgrpo.py")]


def test_every_command_of_the_docstring_is_accepted(monkeypatch, tmp_path):
    """Each preset among them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    found = []
    for line in examples():
        monkeypatch.setattr(sys, "argv", [*line[1:], "--device", "cpu"])
        args = vgrpo.parse_args()
        found.append(args.model)
    assert {*found} == {"tiny", "sd35m"}  # the other presets: tests/test_families.py


# Every own flag once away from its default: name -> (value, what goes with it).
CHANGES = {
    "M": (3, {}),
    "t_min": (0.5, dict(T=4)),
    "t_max": (0.8, dict(T=4)),
    "share": ("none", {}),
    "stratified": (False, {}),
    "space": ("v", {}),
    "weight": ("none", {}),
    "rollout": ("ema", dict(K=8, iterations=2, ema=0.5)),  # averaged from the 8th step on
    "K": (2, {}),
    "clip": (1e-9, dict(K=2)),
    "kl_old": (100.0, dict(K=2)),
    "soft_clip": (None, dict(G=4, adv_std="group")),  # 2 images share |A|: Adam hides a common factor
    "beta": (1e3, dict(K=2)),
    "kl_ema": (1e3, dict(K=2)),
    "ref_guidance": (3.0, dict(K=2, beta=1e3)),
    "train_guidance": (3.0, {}),
}  # fmt: skip
ELSEWHERE = {"p_mix"}  # changes the evaluation only


def test_every_own_flag_is_exercised():
    import test_layout

    assert {*test_layout.own_fields("vgrpo")} == CHANGES.keys() | ELSEWHERE


@pytest.fixture(scope="module")
def outcomes():
    return {}


def outcome(args):
    vgrpo.main(args)
    return state(args.out)["params"], read(args.out)


@pytest.mark.parametrize("name", CHANGES)
def test_the_flag_changes_the_training(quick, tmp_path, outcomes, name):
    value, others = CHANGES[name]
    base = dict(M=2, lr=1e-2, **others)
    key = repr(others)
    if key not in outcomes:
        outcomes[key] = outcome(quick(vgrpo, **base, out=str(tmp_path / "base")))
    params, rows = outcome(quick(vgrpo, **{**base, name: value}, out=str(tmp_path / "changed")))
    moved = max(float((a - b).abs().max()) for a, b in zip(params, outcomes[key][0], strict=True))
    assert moved > 1e-5  # of steps of 1e-2
    assert rows != outcomes[key][1]
    assert all(p.isfinite().all() for p in params)


def test_p_mix_changes_the_evaluation_only(quick, tmp_path):
    flags, runs = dict(lr=0.1, iterations=2, eval_every=1), []
    for p in (1.0, 0.0):
        runs.append(outcome(quick(vgrpo, M=2, p_mix=p, out=str(tmp_path / str(p)), **flags)))
    exact(runs[1][0], runs[0][0])
    ours, base = ([row["eval/red"] for row in rows] for _, rows in runs)
    assert ours[0] == base[0]  # the base is what is evaluated first
    assert base[1:] == pytest.approx([base[0]] * 2)  # all steps by the base
    assert ours[1] != base[1]
    assert ours[2] != base[2]


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_pairs_are_drawn_from_the_levels_of_the_solver(quick, monkeypatch, make_policy, solver):
    seen, original = [], vgrpo.draw_pairs
    monkeypatch.setattr(
        vgrpo, "draw_pairs", lambda p, grid, *a: seen.append(grid) or original(p, grid, *a)
    )
    vgrpo.main(quick(vgrpo, M=2, solver=solver, T=4))
    exact(seen[0], make_policy().grid(4, solver)[:-1])
    assert (seen[0] != make_policy().grid(4, "dpm2" if solver == "euler" else "euler")[:-1]).any()


def test_training_raises_the_reward(quick):
    """Sign and plumbing of the whole loop: a few iterations on `red` make pictures redder."""
    args = quick(
        vgrpo, iterations=8, P=2, G=8, micro_batch=16, lr=2e-2, M=2, T=3, eval_every=8,
        eval_prompts=8, eval_T=3,
    )  # fmt: skip
    vgrpo.main(args)
    rows = read(args.out)
    first, last = rows[0]["eval/red"], rows[-1]["eval/red"]
    assert last - first > 1, (first, last)  # of 255
