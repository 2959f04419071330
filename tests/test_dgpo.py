"""dgpo.py: the preference loss against its objective and Diffusion-DPO, whole updates, files of pairs."""

import dataclasses
import functools
import itertools
import json
import math
import sys
import types
from pathlib import Path

import conftest
import pytest
import torch
from conftest import PROMPTS, Counting, Half, OtherRank, gradient, randomise
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import common
import dgpo
import rewards
import vgrpo
from common import trained_levels
from dgpo import Args, preference_loss

exact = functools.partial(assert_close, rtol=0, atol=0)
BLANK = types.SimpleNamespace(latent_shape=(2, 3, 3), device="cpu")  # enough to draw pairs for
A4 = torch.tensor([1.0, -1.0, 0.5, -0.5])
stored = functools.partial(conftest.stored, dgpo)
update = functools.partial(conftest.update, dgpo)
error = functools.partial(conftest.error, dgpo)


@pytest.fixture
def args():
    # 1, 0.67, 0.33 and 0 of the noise: t_min leaves three of them
    return Args(T=4, G=2, P=2, M=2, t_min=0.3, lr=1e-3, micro_batch=64, max_grad_norm=1e9)


# ---- the preference loss ----


def objective(err, err_ref, A, G, beta):
    """-log sigmoid(-S), mean over pairs and groups, with a loop and no vectors."""
    terms = []
    for m, p in itertools.product(range(len(err)), range(err.shape[1] // G)):
        own = range(p * G, (p + 1) * G)
        S = sum(A[i] * (err[m, i] - err_ref[m, i]) for i in own) * beta / G
        terms.append(-torch.nn.functional.logsigmoid(-S))
    return sum(terms) / len(terms)


def drawn(seed, M, P, G, zero_sum=True):
    g = torch.Generator().manual_seed(seed)
    err, err_ref = (torch.rand(M, P * G, generator=g, dtype=torch.float64) for _ in range(2))
    A = torch.randn(P, G, generator=g, dtype=torch.float64)
    return err, err_ref, (A - A.mean(1, keepdim=True) if zero_sum else A).flatten()


sizes = dict(
    seed=st.integers(0, 2**31), M=st.integers(1, 3), P=st.integers(1, 3), G=st.integers(2, 4),
    beta=st.floats(0.01, 100),
)  # fmt: skip


@given(**sizes)
def test_gradient_is_that_of_the_objective_over_beta(seed, M, P, G, beta):
    """P9; the advantages of a group need not add up to 0 (a clamp may have moved them)."""
    err, err_ref, A = drawn(seed, M, P, G, zero_sum=False)
    err.requires_grad_()
    loss, w = preference_loss(err, err_ref, A, G, beta)
    assert w.shape == (M, P)
    found = beta * torch.autograd.grad(loss, err)[0]
    wanted = torch.autograd.grad(objective(err, err_ref, A, G, beta), err)[0]
    assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    # one row alone, as (B,), is the same group by group
    one, w_one = preference_loss(err[0], err_ref[0], A, G, beta)
    assert_close(w_one, w[0])
    assert_close(one, (w[0].repeat_interleave(G) * A * err[0]).mean())


@given(**sizes)
def test_weights(seed, M, P, G, beta):
    """P9: between 0 and 1, 1/2 where nothing is separated, blind to a shift of a group."""
    err, err_ref, A = drawn(seed, M, P, G)
    w = preference_loss(err, err_ref, A, G, beta)[1]
    S = (A * (err - err_ref)).unflatten(1, (P, G)).sum(2)
    assert ((w >= 0) & (w <= 1)).all()
    assert ((w > 0.5) == (S > 0)).all()
    exact(preference_loss(err, err, A, G, beta)[1], torch.full_like(w, 0.5))
    shift = torch.arange(1.0, P + 1, dtype=torch.float64).repeat_interleave(G)
    assert_close(preference_loss(err + shift, err_ref, A, G, beta)[1], w, rtol=0, atol=1e-9)
    S.requires_grad_()
    slope = torch.autograd.grad(torch.sigmoid(beta / G * S).sum(), S)[0]
    assert_close(slope, beta / G * w * (1 - w), rtol=1e-7, atol=1e-12)


@given(seed=st.integers(0, 2**31), order=st.permutations(range(4)))
def test_order_in_a_group_does_not_matter(seed, order):
    err, err_ref, A = drawn(seed, 2, 2, 4)
    err.requires_grad_()
    order = torch.tensor([*order, 4, 5, 6, 7])
    loss, w = preference_loss(err, err_ref, A, 4, 5.0)
    other, w_other = preference_loss(err[:, order], err_ref[:, order], A[order], 4, 5.0)
    assert_close(other, loss)
    assert_close(w_other, w)


def test_groups_do_not_touch_each_other():
    err, err_ref, A = drawn(0, 2, 3, 4)
    w = preference_loss(err, err_ref, A, 4, 10.0)[1]
    err[:, 4:8] += torch.rand(2, 4)
    other = preference_loss(err, err_ref, A, 4, 10.0)[1]
    exact(other[:, [0, 2]], w[:, [0, 2]])
    assert (other[:, 1] != w[:, 1]).all()


def test_equal_rewards_teach_nothing():
    """P9."""
    err, err_ref, _ = drawn(0, 2, 1, 4)
    err.requires_grad_()
    A = common.group_advantages(torch.full((4,), 0.3, dtype=torch.float64), 4)
    loss, w = preference_loss(err, err_ref, A, 4, 100.0)
    assert loss == 0
    exact(w, torch.full_like(w, 0.5))
    assert (torch.autograd.grad(loss, err)[0] == 0).all()


@given(seed=st.integers(0, 2**31), better=st.floats(0.01, 1), beta=st.floats(0.1, 5000))
def test_two_images_are_diffusion_dpo(seed, better, beta):
    """P10: arXiv 2311.12908 with beta' = a beta, a the advantage; gradients to 1e-12."""
    err, err_ref, _ = drawn(seed, 1, 1, 2)
    err.requires_grad_()
    A = common.group_advantages(torch.tensor([better, 0.0], dtype=torch.float64), 2)
    a = 1 / (1 + 2e-4 / better)
    assert_close(A, torch.tensor([a, -a], dtype=torch.float64))
    (winner, loser), (winner_ref, loser_ref) = err[0], err_ref[0]
    inside = -0.5 * a * beta * ((winner - loser) - (winner_ref - loser_ref))
    dpo = -torch.nn.functional.logsigmoid(inside)
    loss, w = preference_loss(err, err_ref, A, 2, beta)
    assert_close(w.item(), torch.sigmoid(-inside).item(), rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad(x, err)[0] for x in (loss, dpo / beta))
    assert_close(found, wanted, rtol=0, atol=1e-12)


def test_mask_removes_the_gradient_and_keeps_the_value():
    err, err_ref, A = drawn(3, 2, 2, 3)
    err.requires_grad_()
    mask = torch.rand(err.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    loss, w = preference_loss(err, err_ref, A, 3, 10.0)
    masked, w_masked = preference_loss(err, err_ref, A, 3, 10.0, mask)
    exact((masked, w_masked), (loss, w))
    whole, part = (torch.autograd.grad(x, err)[0] for x in (loss, masked))
    exact(part, torch.where(mask, 0, whole))
    assert (whole != 0).all()


def test_errors_without_advantage_are_not_read():
    """A failed sample has A = 0, and whatever it likes as an error."""
    err, err_ref, A = drawn(1, 2, 2, 3)
    A[1] = 0
    good, w = preference_loss(err, err_ref, A, 3, 10.0)
    bad, bad_ref = err.clone(), err_ref.clone()
    bad[:, 1], bad_ref[:, 1] = math.nan, math.inf
    for mask in (None, torch.zeros_like(err, dtype=torch.bool)):
        for one, other in ((bad, err_ref), (err, bad_ref), (bad, bad_ref)):
            one = one.clone().requires_grad_()
            loss, w_bad = preference_loss(one, other, A, 3, 10.0, mask)
            exact((loss.detach(), w_bad), (good, w))
            slope = torch.autograd.grad(loss, one)[0]
            assert slope.isfinite().all()
            assert (slope[:, 1] == 0).all()


@pytest.mark.parametrize("gap", [1e6, -1e6])
def test_far_separated_groups_stay_finite(gap):
    err = torch.tensor([gap, 0.0], requires_grad=True)
    loss, w = preference_loss(err, torch.zeros(2), torch.tensor([1.0, -1.0]), 2, 1e3)
    assert w.tolist() == [float(gap > 0)]
    assert torch.autograd.grad(loss, err)[0].isfinite().all()


# ---- pairs (t, eps) ----


@given(st.data())
def test_levels_are_noisy_and_drawn_without_replacement(data):
    n = data.draw(st.integers(1, 12))
    grid = torch.linspace(1, 0, n + 1)
    t_min = data.draw(st.sampled_from([0.0, 0.3, 0.6, *grid[:-1].tolist()]))
    allowed = [t for t in grid[:-1].tolist() if t >= torch.tensor(t_min)]
    M = data.draw(st.integers(1, len(allowed)))
    args = Args(T=n, M=M, G=2, t_min=t_min, share=data.draw(st.sampled_from(["group", "none"])))
    t, eps = dgpo.draw_pairs(
        BLANK,
        trained_levels(grid, args.t_min, args.t_max, args.M),
        data.draw(st.integers(0, 99)),
        range(6),
        args,
    )
    assert t.shape == (6, M)
    assert eps.shape == (6, M, 2, 3, 3)
    for row in t.tolist():
        assert len({*row}) == M
        assert {*row} <= {*allowed}
        assert 0 not in row


def test_every_noisy_level_comes_up_in_any_order():
    grid, args = torch.linspace(1, 0, 11), Args(T=10, M=3, G=2, t_min=0.45, share="none")
    t = torch.cat(
        [
            dgpo.draw_pairs(
                BLANK, trained_levels(grid, args.t_min, args.t_max, args.M), i, range(8), args
            )[0]
            for i in range(40)
        ]
    )
    exact(t.unique(), grid[:6].flip(0))
    for level in grid[:6]:
        assert abs((t[:, 0] == level).float().mean() - 1 / 6) < 0.08


@pytest.mark.parametrize("share", ["group", "batch", "none"])
def test_who_shares_the_pairs(share):
    args, grid = Args(T=20, M=4, G=3, t_min=0.1, share=share), torch.linspace(1, 0, 21)
    drawn = dgpo.draw_pairs(
        BLANK, trained_levels(grid, args.t_min, args.t_max, args.M), 0, range(9), args
    )
    for x in drawn:
        same = [torch.equal(row, x[0]) for row in x]
        wanted = {"group": [i < 3 for i in range(9)], "batch": [True] * 9}
        assert same == wanted.get(share, [i == 0 for i in range(9)])
    for part in (range(3), range(6, 9), [5], [7, 0]):  # whatever the micro-batch or rank
        exact(
            dgpo.draw_pairs(
                BLANK, trained_levels(grid, args.t_min, args.t_max, args.M), 0, part, args
            ),
            tuple(x[list(part)] for x in drawn),
        )
    theirs = vgrpo.Args(T=20, M=4, G=3, share=share)  # its levels are drawn in another way
    exact(drawn[1], vgrpo.draw_pairs(BLANK, grid[:-1], 0, range(9), theirs)[1])
    for other in (dict(seed=1), dict(iteration=1)):
        each = dataclasses.replace(args, seed=other.get("seed", 0))
        t, eps = dgpo.draw_pairs(
            BLANK,
            trained_levels(grid, args.t_min, args.t_max, args.M),
            other.get("iteration", 0),
            range(9),
            each,
        )
        assert (t != drawn[0]).any()
        assert (eps != drawn[1]).all()


# ---- rollout ----


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_rollout_is_the_solver_s(policy, args, solver):
    args = dataclasses.replace(args, solver=solver, guidance=2.0)
    c, batch = stored(policy, args)
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", 0, range(4))
    exact(batch["x0"], policy.sample(x, c, args.T, 2.0, solver))
    levels = policy.grid(args.T, solver)[:-1]
    assert all(t in levels for t in batch["t"].flatten())
    assert not any(x.requires_grad for x in batch.values())
    assert_close(stored(policy, args, micro_batch=1)[1], batch, rtol=1e-5, atol=1e-5)


def test_rollout_takes_given_images(policy, args):
    x0 = torch.randn(4, *policy.latent_shape)
    policy.calls = 0
    c, batch = stored(policy, args, x0=x0, micro_batch=3)
    assert policy.calls == 0
    exact(batch["x0"], x0)
    exact(batch["t"], stored(policy, args)[1]["t"])
    assert error(policy, (c, batch), args).isfinite().all()
    dgpo.errors(policy, c, batch, args, 3.0)  # guidance passes over what is no condition


@pytest.mark.parametrize("weight", ["self", "none", "ghuber", "t"])
@pytest.mark.parametrize("space", ["x", "v", "eps"])
def test_errors_are_those_of_vgrpo(policy, args, space, weight):
    """Checked there by hand; the two scripts may not drift apart."""
    args = dataclasses.replace(args, space=space, weight=weight)
    data = stored(policy, args)
    with torch.no_grad():
        exact(dgpo.errors(policy, *data, args, 2.0), vgrpo.errors(policy, *data, args, 2.0))


# ---- whole updates ----


def brute_force(policy, data, A, args, valid=None):
    """Gradient of the paper's objective over beta_dpo plus the KL, all images at once."""
    c, batch = data
    with torch.no_grad():  # first: swapping the weights would break the graph
        with policy.reference():
            err_base, v_base = dgpo.errors(policy, c, batch, args, args.ref_guidance)
        with policy.old():
            err_ema = dgpo.errors(policy, c, batch, args, args.train_guidance)[0]
    err, v = dgpo.errors(policy, c, batch, args, args.train_guidance)
    if args.clip is not None:
        rho = (err_ema - err.detach()).exp()
        for m, i in itertools.product(range(args.M), range(len(A))):
            moved = rho[m, i] > 1 + args.clip if A[i] > 0 else rho[m, i] < 1 - args.clip
            err = torch.where(
                moved & (torch.arange(len(A)) == i) & (torch.arange(args.M) == m)[:, None],
                err.detach(), err,
            )  # fmt: skip
    err_ref = err_ema if args.ref == "ema" else err_base
    total = objective(err, err_ref, A, args.G, args.beta_dpo) / args.beta_dpo
    w = preference_loss(err, err_ref, A, args.G, args.beta_dpo)[1]
    return gradient(policy, total + args.beta * (v - v_base).square().mean()), w


SETTINGS = [
    dict(), dict(beta=0.5), dict(clip=0.002), dict(ref="ema"), dict(ref="ema", clip=0.002, beta=0.5),
    dict(ref_guidance=3.0, beta=0.5), dict(space="x", weight="self"),
    dict(train_guidance=2.0, ref_guidance=3.0, ref="ema", clip=0.002, beta=0.5),
    dict(share="none"), dict(share="batch", beta_dpo=30.0),
]  # fmt: skip


@pytest.mark.parametrize("flags", SETTINGS, ids=str)
def test_an_update_is_the_paper_s_gradient(policy, args, flags):
    """Whatever the micro-batch: the weight of a group needs all of it."""
    args = dataclasses.replace(args, **{"G": 3, "beta_dpo": 300.0, **flags})
    data = stored(policy, args)
    policy.remember()
    randomise(policy, seed=1, scale=0.1)  # neither the base nor the average
    kept = policy.kept
    A = torch.tensor([0.0, 0.8, -0.8, 0.3, -1.5, 1.2])  # the first may need no forward
    wanted, w = brute_force(policy, data, A, args)
    assert w.std() > 0.01
    w = w.repeat_interleave(3, -1)[:, (A != 0) | (args.beta > 0)]  # of the images that are read
    for size in (1, 2, 3, 4, 6):
        policy.kept = kept
        optimizer, logs = update(policy, data, A, dataclasses.replace(args, micro_batch=size))
        (found,) = optimizer.gradients
        assert_close(found, wanted, rtol=1e-3, atol=1e-6 + 1e-4 * wanted.abs().max().item())
        seen = common.merge_logs(logs)
        assert seen["w_mean"] == pytest.approx(w.mean().item(), abs=1e-3)
        assert (0 < seen["clip_fraction"] < 1) == (args.clip is not None)
        assert ("kl_ref" in seen) == (args.beta > 0)


def test_every_step_weighs_the_groups_anew(policy, args):
    args = dataclasses.replace(args, beta_dpo=300.0)
    data, first = stored(policy, args), [p.detach().clone() for p in policy.params]
    twice, _ = update(
        policy, data, A4, dataclasses.replace(args, K=2), Counting(policy.params, lr=0.3)
    )
    common.copy_into(policy.params, first)
    update(policy, data, A4, args, Counting(policy.params, lr=0.3))
    wanted, _ = brute_force(policy, data, A4, args)
    assert_close(twice.gradients[1], wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_micro_batch_changes_nothing(make_policy, args):
    args = dataclasses.replace(args, K=2, clip=0.01, beta=0.1, G=4)
    A = torch.tensor([1.0, -0.5, 2.0, -2.5, 0.0, 0.5, 0.7, -1.2])
    grads, logs = [], []
    for size in (1, 3, 4, 64):
        policy = make_policy()
        policy.remember()
        randomise(policy, seed=1, scale=1e-2)
        data = stored(policy, args)
        each = dataclasses.replace(args, micro_batch=size)
        optimizer, rows = update(policy, data, A, each, Counting(policy.params, lr=1e-2))
        grads.append(optimizer.gradients)
        logs.append(common.merge_logs(rows))
    for other in (1, 2, 3):
        assert_close(grads[other], grads[0], rtol=1e-4, atol=1e-6)
        assert_close(logs[other], logs[0], rtol=1e-3, atol=1e-6)


SPLIT = dict(micro_batch=1)


@pytest.mark.parametrize(
    ("flags", "forwards"),
    [
        (dict(), 2), (dict(beta=0.1), 2), (dict(ref="ema"), 2), (dict(clip=0.1), 3),
        (dict(ref="ema", clip=0.1), 2), (dict(ref="ema", beta=0.1), 3), (dict(K=2), 3),
        (dict(ref_guidance=2.0), 3), (dict(train_guidance=2.0), 3),
        (SPLIT, 3), (SPLIT | dict(clip=0.1), 4), (SPLIT | dict(K=2), 5),
        (dict(micro_batch=2, beta=0.1), 2), (dict(micro_batch=3, beta=0.1), 3),
    ],
    ids=str,
)  # fmt: skip
def test_number_of_forwards(policy, args, flags, forwards):
    """The loss a step, each reference once; groups over several micro-batches one more a step."""
    args = dataclasses.replace(args, **flags)
    data = stored(policy, args)
    policy.calls = 0
    optimizer, logs = update(policy, data, torch.tensor([1.0, -1.0, 0.5, 0.0]), args)
    images = 4 if args.beta > 0 else 3  # one has no advantage: only a KL would want it
    assert policy.calls == forwards * args.M * images
    assert len(optimizer.gradients) == sum("grad_norm" in row for row in logs) == args.K


def test_at_the_reference_every_weight_is_one_half(make_policy, args):
    policy = make_policy(random=False)
    args = dataclasses.replace(args, clip=1e-3, beta=1.0)
    data = stored(policy, args)
    err, _ = dgpo.errors(policy, *data, args, 1.0)
    wanted = gradient(policy, 0.5 * (A4 * err).mean())
    optimizer, logs = update(policy, data, A4, args)
    seen = common.merge_logs(logs)
    assert seen["w_mean"] == 0.5
    assert seen["clip_fraction"] == seen["kl_ref"] == 0
    assert_close(optimizer.gradients[0], wanted, rtol=1e-3, atol=1e-6)


def test_a_separated_group_is_left_alone(policy, args):
    """The brake: w falls as the policy comes to prefer what it should, more so with beta_dpo."""
    args = dataclasses.replace(args, P=1)
    data, A = stored(policy, args, P=1), torch.tensor([1.0, -1.0])
    with torch.no_grad(), policy.reference():
        ref = dgpo.errors(policy, *data, args, 1.0)[0]
    if ((error(policy, data, args) - ref) @ A).mean() > 0:
        A = -A  # such that the policy already agrees
    w = {}
    for beta_dpo in (1.0, 10.0, 1000.0):
        each = dataclasses.replace(args, beta_dpo=beta_dpo, M=1)
        one = dict(data[1], t=data[1]["t"][:, :1], eps=data[1]["eps"][:, :1])
        gap = (error(policy, (data[0], one), each)[0] - ref[0]) @ A
        w[beta_dpo] = update(policy, (data[0], one), A, each)[1][0]["w_mean"]
        assert w[beta_dpo] == pytest.approx(torch.sigmoid(beta_dpo / 2 * gap).item(), abs=1e-3)
    assert len({round(x, 3) for x in w.values()}) == 3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "flags",
    [
        dict(), dict(share="none"), dict(space="x", weight="self"), dict(ref="ema"),
        dict(K=2, clip=0.2, beta=1e-3), dict(beta_dpo=1.0),
    ],
    ids=str,
)  # fmt: skip
def test_good_images_become_likelier_and_bad_ones_less(policy, args, flags, sign):
    args = dataclasses.replace(args, P=1, **{"beta_dpo": 5.0, **flags})
    data = stored(policy, args, P=1)
    before = error(policy, data, args)
    update(policy, data, sign * torch.tensor([1.0, -1.0]), args, Counting(policy.params, lr=0.1))
    change = sign * (error(policy, data, args) - before).mean(0)
    assert change[0] - change[1] < -1e-6  # what they have in common may move both
    if args.share == "none":
        assert change[0] < -1e-6
        assert change[1] > 1e-6


def test_identical_images_have_no_gradient_if_they_share_their_pairs(policy, args):
    """P6: the sum of the advantages of a group is 0."""
    found = {}
    for share in ("group", "none"):
        each = dataclasses.replace(args, share=share, G=4, P=1, beta_dpo=1.0)
        c, batch = stored(policy, each, P=1)
        batch["x0"] = batch["x0"][:1].repeat(4, 1, 1, 1)
        A = torch.tensor([1.5, 0.5, -0.5, -1.5])
        found[share] = update(policy, (c, batch), A, each)[0].gradients[0].norm()
    assert found["none"] > 1e-3
    assert found["group"] < 1e-5 * found["none"]


def test_kl_pulls_to_the_base(policy, args):
    args = dataclasses.replace(args, beta=1.0)
    data = stored(policy, args)
    optimizer, logs = update(policy, data, torch.zeros(4), args, Counting(policy.params, lr=1e-2))
    assert len(optimizer.gradients) == 1  # no advantage, but a KL to descend
    before, after = (
        common.merge_logs(rows)["kl_ref"]
        for rows in (logs, update(policy, data, torch.zeros(4), args)[1])
    )
    assert 0 < after < before


def test_gradient_reaches_the_policy_only(policy, args):
    args = dataclasses.replace(args, beta=0.1, clip=0.1)
    c, batch = stored(policy, args)
    update(policy, (c, batch), A4, args)
    lora = {id(p) for p in policy.params}
    for name, p in policy.net.named_parameters():
        assert (p.grad is not None) == (id(p) in lora), name
    assert not any(x.requires_grad for x in (*c.values(), *batch.values(), *policy.kept))


@pytest.mark.parametrize("ema_first", [False, True])
@pytest.mark.parametrize("iteration", [0, 100, 1000])
def test_the_moving_average_follows_every_step(policy, args, iteration, ema_first):
    policy.remember()
    wanted, states = [p.clone() for p in policy.kept], []

    class Recording(Counting):
        def step(self, closure=None):
            super().step(closure)
            states.append([p.detach().clone() for p in policy.params])

    args = dataclasses.replace(args, K=2, ref="ema" if ema_first else "base")
    optimizer = Recording(policy.params, lr=1e-2)
    update(policy, stored(policy, args), A4, args, optimizer, iteration=iteration)
    for k, params in enumerate(states):
        decay = min(0.3, 1e-3 * (2 * iteration + k))
        wanted = [decay * a + (1 - decay) * p for a, p in zip(wanted, params)]
    assert_close(policy.kept, wanted, rtol=1e-5, atol=1e-7)


def test_nothing_to_learn_changes_nothing(policy, args):
    args = dataclasses.replace(args, clip=0.1, ref="ema")
    data = stored(policy, args)
    policy.remember()
    randomise(policy, seed=1)
    before, kept = [p.detach().clone() for p in policy.params], [*policy.kept]
    optimizer = torch.optim.AdamW(policy.params, lr=0.1, weight_decay=0.1)
    policy.calls = 0
    _, logs = update(policy, data, torch.zeros(4), args, optimizer)
    exact([p.detach() for p in policy.params], before)
    exact(policy.kept, kept)
    assert logs == []
    assert policy.calls == 0
    assert not optimizer.state


@pytest.mark.parametrize(
    "flags", [dict(), dict(beta=0.1), dict(K=2, clip=0.01, ref="ema", beta=0.1)], ids=str
)
def test_failed_samples_do_not_reach_the_gradient(policy, args, flags):
    args = dataclasses.replace(args, G=3, **flags)
    data = stored(policy, args)
    valid = torch.tensor([True, False, True, True, True, True])
    A = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.7, 0.2])
    good = update(policy, data, A, args, valid=valid)[0].gradients
    policy.kept = None
    data[1]["x0"][1] = data[1]["eps"][1] = math.nan
    optimizer, logs = update(policy, data, A, args, valid=valid)
    exact(optimizer.gradients, good)
    assert optimizer.gradients[0].isfinite().all()
    assert optimizer.gradients[0].abs().max() > 0
    assert all(math.isfinite(x) for row in logs for x in row.values())


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_failed_sample_keeps_its_weight_in_the_mean(policy, args, beta):
    """The others are not reweighed: each is still one of P * G images."""
    args = dataclasses.replace(args, G=3, beta=beta, beta_dpo=5.0)
    data, A = stored(policy, args), torch.tensor([1.0, 0.0, -1.0, 0.5, -0.7, 0.2])
    found = update(policy, data, A, args, valid=torch.arange(6) != 1)[0].gradients[0]
    policy.kept = None
    policy.remember()
    wanted, _ = brute_force(policy, data, A, dataclasses.replace(args, beta=0.0))
    if beta:
        keep = torch.arange(6) != 1
        part = common.take(data[0], keep), common.take(data[1], keep)
        with torch.no_grad(), policy.reference():
            v_base = dgpo.errors(policy, *part, args, 1.0)[1]
        v = dgpo.errors(policy, *part, args, 1.0)[1]
        wanted = wanted + beta * 5 / 6 * gradient(policy, (v - v_base).square().mean())
    assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_a_rank_with_nothing_to_learn_takes_part(policy, args):
    args, ranks = dataclasses.replace(args, K=2), OtherRank()
    optimizer, logs = update(policy, stored(policy, args), torch.zeros(4), args, ranks=ranks)
    assert ranks.calls == 2
    assert all((g == 0).all() for g in optimizer.gradients)
    assert all(math.isfinite(x) for row in logs for x in row.values())


@pytest.mark.parametrize("flags", [dict(), dict(K=2, beta=0.1, clip=0.1)], ids=str)
def test_two_ranks_make_the_same_updates_as_one(policy, args, flags):
    args = dataclasses.replace(args, **flags)
    c, batch = data = stored(policy, args)
    A = torch.tensor([1.0, -1.0, 0.5, 0.0])
    one = update(policy, data, A, args)[0].gradients
    halves = []
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        mine = common.take(c, rows), common.take(batch, rows)
        policy.kept = None
        halves.append(update(policy, mine, A[rows], args, ranks=Half(rank))[0].gradients)
    assert_close([(a + b) / 2 for a, b in zip(*halves, strict=True)], one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [1e-6, 1e6])
def test_gradient_norm(policy, args, max_grad_norm):
    args = dataclasses.replace(args, max_grad_norm=max_grad_norm)
    optimizer, logs = update(policy, stored(policy, args), A4, args, ranks=OtherRank())
    norm, logged = optimizer.gradients[0].norm(), logs[-1]["grad_norm"]
    assert logged > 1e-5  # of the mean over the ranks, before clipping
    assert norm == pytest.approx(min(logged, max_grad_norm), rel=1e-3)


# ---- whole iterations ----


def read(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def state(folder):
    return torch.load(Path(folder) / "state.pt", weights_only=True)


def launch(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["dgpo.py", *map(str, argv)])
    dgpo.main(dgpo.parse_args())


def command(weights, **flags):
    small = dict(
        weights=weights, reward="red", heldout_reward="None", P=1, G=2, T=4, M=2, lora_r=4,
        lora_alpha=8, eval_prompts=2, eval_T=2, device="cpu", t_min=0.4, t_max=1.0, beta=0.003,
        max_grad_norm=1.0, lr=1.5e-3,
    )  # fmt: skip
    flags = {**small, **flags}.items()
    # the preset's learning rate falls with the iterations, which a test may change
    return ["--no-anneal-lr", *(str(x) for k, v in flags for x in ("--" + k.replace("_", "-"), v))]


def small(quick, **flags):
    return quick(dgpo, **{"T": 4, "M": 2, **flags})


@pytest.mark.parametrize(
    ("flags", "nfe"),
    [
        (dict(), 4 + 2 * 2), (dict(guidance=2.0), 2 * 4 + 2 * 2), (dict(solver="dpm2"), 4 + 2 * 2),
        (dict(K=2, clip=0.1, beta=0.1), 4 + (2 + 2) * 2), (dict(micro_batch=1), 4 + 3 * 2),
    ],
    ids=str,
)  # fmt: skip
def test_number_of_network_calls(quick, flags, nfe):
    args = small(quick, **flags)
    dgpo.main(args)
    row = read(args.out)[0]
    assert row["nfe"] == nfe
    assert row["grad_norm"] > 0
    assert row["w_mean"] == 0.5 or args.K > 1


def test_equal_rewards_leave_the_parameters_bit_unchanged(quick, monkeypatch, make_policy):
    factory = lambda device, dtype: rewards.Reward(lambda i, p, m: [1.0] * len(i))  # noqa: E731
    monkeypatch.setitem(rewards.REWARDS, "constant", factory)
    args = small(quick, reward="constant", iterations=2, lr=1.0, weight_decay=0.5)
    dgpo.main(args)
    exact(state(args.out)["params"], [p.detach() for p in make_policy(random=False).params])
    assert "grad_norm" not in read(args.out)[0]
    assert read(args.out)[0]["nfe"] == 4


@pytest.mark.parametrize("flags", [dict(), dict(K=2, beta=0.1, clip=0.1, ref="ema")], ids=str)
def test_a_failed_reward_is_masked(quick, monkeypatch, flags):
    def some(images, prompts, metas):
        values = images[:, 0].float().mean((1, 2)).tolist()
        return [math.nan, *values[1:]] if len(values) == 6 else values

    monkeypatch.setitem(rewards.REWARDS, "flaky", lambda device, dtype: rewards.Reward(some))
    flags = flags | dict(reward="flaky:1,red:1", P=2, G=3, micro_batch=6, iterations=2)
    args = small(quick, **flags)
    dgpo.main(args)
    rows = read(args.out)
    assert rows[0]["reward/fail_frac"] == pytest.approx(1 / 6)
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["nfe"] == pytest.approx(4 + (2 if args.K == 1 else 4) * 2 * 5 / 6)
    assert all(p.isfinite().all() for p in state(args.out)["params"])


def test_the_moving_average_slows_from_iteration_to_iteration(quick, monkeypatch):
    decays, original = [], common.Policy.remember
    monkeypatch.setattr(
        common.Policy, "remember", lambda p, x=0.0: decays.append(x) or original(p, x)
    )
    dgpo.main(small(quick, K=2, iterations=2))
    assert decays == pytest.approx([0, 0, 1e-3, 2e-3, 3e-3])  # the first one is the start


def test_diversity_is_that_of_the_images_of_a_prompt(quick, monkeypatch):
    seen, original = [], dgpo.update
    monkeypatch.setattr(dgpo, "update", lambda *a: seen.append(a[3]) or original(*a))
    args = small(quick, P=2, G=3)
    dgpo.main(args)
    one, other = seen[0]["x0"].split(3)
    wanted = torch.stack([one.std(0), other.std(0)]).mean().item()
    assert read(args.out)[0]["diversity"] == pytest.approx(wanted, rel=1e-4)


def test_two_iterations_and_two_more_are_four(quick, tmp_path, monkeypatch, weights):
    """The moving average is saved and resumed: bit for bit, with all that reads it."""
    from safetensors.torch import load_file

    quick(dgpo)  # no figures
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = command(weights, K=2, ref="ema", clip=0.01, beta=0.1, ema=0.5)
    launch(monkeypatch, *flags, "--iterations", 4, "--out", whole)
    launch(monkeypatch, *flags, "--iterations", 2, "--out", parts)
    launch(monkeypatch, "--resume", parts, "--iterations", 4)
    one, other = state(whole), state(parts)
    assert any((a != b).any() for a, b in zip(one["kept"], one["params"]))
    assert one["ema_n"] == 4 * 2  # after every optimizer step
    for name in ("params", "kept", "ema", "optimizer"):
        exact(other[name], one[name])
    assert read(parts)[3:] == read(whole)[3:]
    lora = [f / "lora" / "pytorch_lora_weights.safetensors" for f in (whole, parts)]
    exact(*map(load_file, lora))  # the order of the header's keys is free


def test_the_moving_average_draws_the_images(quick, monkeypatch):
    """--rollout ema: the average samples and the weights themselves are trained."""
    args = small(quick, K=8, iterations=2, ema=0.5, rollout="ema")
    conftest.check_the_average_draws(dgpo, args, monkeypatch)


# ---- files of pairs ----


def write_pairs(folder, n=2, size=(64, 64), name="pairs.jsonl"):
    """n prompts; each winner is plainly red and each loser green, of its own shade."""
    from torchvision.io import write_png

    lines = []
    for i in range(n):
        row = {"prompt": PROMPTS[i % 2]}
        for field, channel in (("winner", 0), ("loser", 1)):
            image = torch.zeros(3, *size, dtype=torch.uint8)
            image[channel] = 200 - 50 * i
            (folder / "pictures").mkdir(exist_ok=True)
            row[field] = f"pictures/{i}-{field}.png"
            write_png(image, str(folder / row[field]))
        lines.append(json.dumps(row))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@pytest.mark.parametrize("size", [(64, 64), (40, 80)])
def test_training_on_a_file_of_pairs(quick, tmp_path, monkeypatch, weights, size):
    quick(dgpo)
    path, seen, original = write_pairs(tmp_path, size=size), [], dgpo.update

    def spy(policy, optimizer, ema, batch, c, A, *others):
        seen.append((policy, batch, c, A))
        return original(policy, optimizer, ema, batch, c, A, *others)

    monkeypatch.setattr(dgpo, "update", spy)
    out = tmp_path / "run"
    flags = command(weights, pairs=path, P=2, out=out, iterations=2, micro_batch=3, beta_dpo=5000)
    launch(monkeypatch, *flags)
    for policy, batch, c, A in seen:
        a = 1 / (1 + 2e-4)  # the standard deviation of 1 and 0 is 1/2
        assert_close(A, torch.tensor([a, -a, a, -a]))
        for i in range(4):
            alike = PROMPTS.index(
                next(
                    p
                    for p in PROMPTS
                    if torch.equal(policy.encode([p])["tokens"][0], c["tokens"][i])
                )
            )  # the pictures of an image's own prompt
            image = torch.zeros(1, 3, 64, 64)
            image[:, i % 2] = (200 - 50 * alike) / 255
            assert_close(batch["x0"][i], policy.encode_images(image)[0], rtol=1e-5, atol=1e-5)
        exact(batch["t"][::2], batch["t"][1::2])
    rows = read(out)
    assert rows[0]["nfe"] == 3 * 2  # nothing is sampled
    assert rows[0]["reward/preferred"] == rows[0]["reward/mean"] == 0.5
    assert "eval/red" in rows[-1]  # the evaluation still has its reward
    assert rows[1]["w_mean"] < 0.5  # it has learned to prefer them
    launch(monkeypatch, "--resume", out, "--iterations", 3)
    assert [row["iteration"] for row in read(out)] == [0, 1, 2, 3]


def test_picture_of_any_size_and_kind_is_fitted(tmp_path):
    from PIL import Image
    from torchvision.io import write_jpeg, write_png

    wide = torch.zeros(3, 32, 96, dtype=torch.uint8)
    wide[0, :, :32], wide[1, :, 32:64], wide[2, :, 64:] = 255, 255, 255
    write_png(wide, str(tmp_path / "wide.png"))
    write_png(torch.full((1, 50, 20), 128, dtype=torch.uint8), str(tmp_path / "grey.png"))
    Image.new("RGBA", (8, 8), (255, 255, 255, 255)).save(tmp_path / "alpha.png")
    Image.new("I;16", (8, 8), 1 << 15).save(tmp_path / "deep.png")
    write_jpeg(torch.full((3, 16, 16), 64, dtype=torch.uint8), str(tmp_path / "small.jpg"))
    names = ["wide.png", "grey.png", "alpha.png", "small.jpg", "deep.png"]
    rows = [dict(winner=tmp_path / n, loser=None) for n in names]
    images = torch.cat([rewards.pair_images([row], 16) for row in rows])
    assert images.shape == (5, 3, 16, 16)
    assert images.dtype == torch.float32
    assert 0 <= images.min() <= images.max() <= 1
    middle = images[0, :, :, 2:-2].mean((1, 2))  # the middle third of the wide one
    assert_close(middle, torch.tensor([0.0, 1.0, 0.0]), rtol=0, atol=0.02)
    assert_close(images[1], torch.full((3, 16, 16), 128 / 255))
    assert_close(images[2], torch.ones(3, 16, 16))
    assert_close(images[3], torch.full((3, 16, 16), 64 / 255), rtol=0, atol=0.01)
    assert_close(images[4], torch.full((3, 16, 16), 0.5), rtol=0, atol=0.01)


def test_pairs_may_lie_anywhere(tmp_path):
    path = write_pairs(tmp_path, n=2)
    stages = [common.Stage(first, dgpo.Args(), [], {}, {}) for first in (0, 3)]
    (stage, last), pictures = rewards.load_pairs(str(path), stages)
    _, _, rows, weights, fns = stage
    assert (last.first, last.train, last.weights) == (3, rows, weights)
    moved = [
        json.dumps({k: v if k == "prompt" else str(v) for k, v in row.items()}) for row in rows
    ]
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "pairs.jsonl"
    other.write_text("\n\n".join(moved))  # absolute names, and blank lines
    assert rewards.load_pairs(str(other), stages)[0][0].train == rows
    twice = [row for row in rows for _ in range(2)]
    exact(fns["preferred"](torch.zeros(4), [""] * 4, twice), torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert weights == {"preferred": 1.0}
    images = pictures(twice, 16)
    assert images.mean((2, 3)).argmax(1).tolist() == [0, 1, 0, 1]


GOOD = {"prompt": "a", "winner": "a.png", "loser": "a.png"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([GOOD, {**GOOD, "winner": None}], "line 2: winner: None is no file name"),
        ([GOOD, "", {"prompt": "a", "winner": "a.png"}], "line 3: loser: None is no file name"),
        (["", {**GOOD, "loser": 3}], "line 2: loser: 3 is no file name"),
        ([{**GOOD, "loser": "gone.png"}], "line 1: loser: no file .*gone.png"),
        ([{**GOOD, "winner": "."}], "line 1: winner: no file "),
        ([GOOD, "{"], "line 2: not valid JSON"),
        ([GOOD, {"winner": "a.png"}], "line 2: 'prompt' is missing"),
        ([], "no prompts in this file"),
    ],
    ids=str,
)
def test_bad_files_of_pairs(tmp_path, lines, words):
    (tmp_path / "a.png").touch()
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    with pytest.raises(SystemExit, match=rf"^--pairs: [^\n]*pairs.jsonl[^\n]*{words}[^\n]*$"):
        rewards.load_pairs(str(path), [])


def test_missing_file_of_pairs_is_refused_before_a_model_is_loaded(
    quick, tmp_path, monkeypatch, weights
):
    monkeypatch.setattr(common, "load_policy", lambda *a: 1 / 0)
    quick(dgpo)
    for name, words in (("gone.jsonl", "cannot read"), ("a.txt", "winner: None is no file name")):
        (tmp_path / "a.txt").write_text("a red circle\n")
        flags = command(weights, pairs=tmp_path / name, out=tmp_path / "run")
        with pytest.raises(SystemExit, match=rf"^--pairs: [^\n]*{name}[^\n]*{words}[^\n]*$"):
            launch(monkeypatch, *flags)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_picture_ends_the_run_in_one_line(quick, tmp_path, monkeypatch, weights):
    quick(dgpo)
    path = write_pairs(tmp_path, n=1)
    (tmp_path / "pictures" / "0-loser.png").write_text("no picture")
    with pytest.raises(SystemExit, match=r"^--pairs: [^\n]*0-loser\.png[^\n]*picture[^\n]*$"):
        launch(monkeypatch, *command(weights, pairs=path, out=tmp_path / "run"))


# ---- settings ----


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(M=0), "--M: 0 is not"),
        (dict(M=11), "--M: 11 pairs of 10"),
        (dict(K=0), "--K: 0 is not"),
        (dict(beta_dpo=0.0), "--beta-dpo: 0.0 is not"),
        (dict(beta_dpo=math.inf), "--beta-dpo: inf is not"),
        (dict(clip=0.0), "--clip: 0.0 is not"),
        (dict(beta=-0.1), "--beta: -0.1 is not"),
        (dict(ref_guidance=-1.0), "--ref-guidance: -1.0 is not"),
        (dict(train_guidance=0.0), "--train-guidance: 0.0 is not"),
        (dict(t_min=-0.1), "--t-min/--t-max: -0.1..1.0 is no range"),
        (dict(t_min=1.0), "--t-min/--t-max: 1.0..1.0 is no range"),
        (dict(t_min=math.nan), "--t-min/--t-max: nan..1.0 is no range"),
        (dict(t_max=1.1), "--t-min/--t-max: 0.4..1.1 is no range"),
        (dict(rollout="ema", ema=0.0), "--rollout: ema wants an --ema above 0"),
        (dict(p_mix=1.1), "--p-mix: 1.1 is outside 0..1"),
        (dict(pairs="a.jsonl"), "--pairs: a pair is a group of 2; add --G 2"),
        (dict(pairs="a.jsonl", G=3), "--pairs: a pair is a group of 2; add --G 2"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_one_line(flags, line):
    with pytest.raises(SystemExit) as stop:
        dgpo.check_own(Args(**flags))
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code


def test_good_settings_are_accepted():
    dgpo.check_own(Args(G=2, pairs="a.jsonl", clip=None, beta=0.0, t_min=0.0))
    dgpo.check_own(Args(ref="ema", clip=0.01, beta=0.1, M=10))


def test_too_few_noise_levels_are_refused_in_one_line(quick, tmp_path):
    for flags in (dict(t_min=0.9), dict(M=3), dict(t_min=0.7), dict(t_max=0.5)):
        args = small(quick, **flags)
        with pytest.raises(SystemExit, match=r"^--M: \d pairs, but only \d noise levels[^\n]*$"):
            dgpo.main(args)
        assert not Path(args.out).exists()
    dgpo.main(small(quick, t_min=0.6))  # two of two: enough


def examples():
    lines = [line.strip() for line in dgpo.__doc__.splitlines()]
    return [x.partition("#")[0].split() for x in lines if x.startswith("python dgpo.py")]


def test_every_command_of_the_docstring_is_accepted(
    monkeypatch, tmp_path, make_policy, weights, shifted_weights
):
    """Each preset among them, and leaves noise levels enough."""
    folders = dict(tiny=weights, sd35m=shifted_weights)
    policies = {model: make_policy(folder=folder) for model, folder in folders.items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    found = []
    for line in examples():
        monkeypatch.setattr(sys, "argv", [*line[1:], "--device", "cpu"])
        args = dgpo.parse_args()
        found.append(args.model)
        grid = policies[args.model].grid(args.T, args.solver)
        assert (grid[:-1] >= args.t_min).sum() >= args.M, line
    assert {*found} == {"tiny", "sd35m"}  # the other presets: tests/test_families.py


# Every own flag once away from its default: name -> (value, what goes with it).
CHANGES = {
    "M": (1, {}),
    "t_min": (0.3, {}),
    "t_max": (0.8, dict(t_min=0.0)),
    "share": ("none", {}),
    "space": ("x", {}),
    "weight": ("self", {}),
    "rollout": ("ema", dict(K=8, iterations=2, ema=0.5)),  # averaged from the 8th step on
    "K": (2, {}),
    "beta_dpo": (1e5, dict(K=2)),
    "ref": ("ema", dict(K=2, iterations=2, beta_dpo=1e4)),  # the average starts as the base
    "clip": (1e-9, dict(K=2)),
    "beta": (1e3, dict(K=2)),
    "ref_guidance": (3.0, dict(beta_dpo=1e4)),
    "train_guidance": (3.0, {}),
}
ELSEWHERE = {"p_mix", "pairs"}  # tests of their own


def test_every_own_flag_is_exercised():
    import test_layout

    assert {*test_layout.own_fields("dgpo")} == CHANGES.keys() | ELSEWHERE


@pytest.fixture(scope="module")
def outcomes():
    return {}


def outcome(args):
    dgpo.main(args)
    return state(args.out)["params"], read(args.out)


@pytest.mark.parametrize("name", CHANGES)
def test_the_flag_changes_the_training(quick, tmp_path, outcomes, name):
    value, others = CHANGES[name]
    base = dict(lr=1e-2, P=2, micro_batch=4, **others)
    key = repr(others)
    if key not in outcomes:
        outcomes[key] = outcome(small(quick, **base, out=str(tmp_path / "base")))
    changed = small(quick, **{**base, name: value}, out=str(tmp_path / "changed"))
    params, rows = outcome(changed)
    moved = max(float((a - b).abs().max()) for a, b in zip(params, outcomes[key][0], strict=True))
    assert moved > 1e-5  # of steps of 1e-2
    assert rows != outcomes[key][1]
    assert all(p.isfinite().all() for p in params)


def test_p_mix_changes_the_evaluation_only(quick, tmp_path):
    flags, runs = dict(lr=0.1, iterations=2, eval_every=1), []
    for p in (1.0, 0.0):
        runs.append(outcome(small(quick, p_mix=p, out=str(tmp_path / str(p)), **flags)))
    exact(runs[1][0], runs[0][0])
    ours, base = ([row["eval/red"] for row in rows] for _, rows in runs)
    assert ours[0] == base[0]  # the base is what is evaluated first
    assert base[1:] == pytest.approx([base[0]] * 2)  # all steps by the base
    assert ours[1] != base[1]
    assert ours[2] != base[2]


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_pairs_are_drawn_from_the_levels_of_the_solver(quick, monkeypatch, make_policy, solver):
    seen, original = [], dgpo.draw_pairs
    monkeypatch.setattr(
        dgpo, "draw_pairs", lambda p, grid, *a: seen.append(grid) or original(p, grid, *a)
    )
    dgpo.main(small(quick, solver=solver, t_min=0.0))
    exact(seen[0], make_policy().grid(4, solver)[:-1])
    assert (seen[0] != make_policy().grid(4, "dpm2" if solver == "euler" else "euler")[:-1]).any()


def test_training_raises_the_reward(quick):
    """Sign and plumbing of the whole loop: a few iterations on `red` make pictures redder."""
    args = small(
        quick, iterations=8, P=2, G=8, micro_batch=16, lr=2e-2, M=2, T=4, eval_every=8,
        eval_prompts=8, eval_T=3,
    )  # fmt: skip
    dgpo.main(args)
    rows = read(args.out)
    first, last = rows[0]["eval/red"], rows[-1]["eval/red"]
    assert last - first > 1, (first, last)  # of 255
