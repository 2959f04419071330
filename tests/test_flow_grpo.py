"""flow_grpo.py: the ratio on-policy, signs, KL, windows, and what each setting changes."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import Counting, Half, OtherRank, randomise
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import common
import flow_grpo
import rewards
from flow_grpo import Args, trained_steps, window_start

exact = functools.partial(assert_close, rtol=0, atol=0)
PROMPTS = ["a red circle", "draw two squares"]
SDES = ["sde", "cps", "dance"]


def stored(policy, args, P=2, iteration=0, micro_batch=64, order=None):
    """A rollout of P prompts, in micro-batches: condition, grid, steps and batch."""
    c = policy.encode([PROMPTS[i // args.G % 2] for i in range(P * args.G)])
    grid, steps = policy.grid(args.T), trained_steps(iteration, args)
    batch = common.cat_batches(
        flow_grpo.rollout(policy, part, grid, iteration, indices, args)
        for part, indices in common.micro_batches(c, range(P * args.G), micro_batch)
    )
    return c, grid, steps, batch


def losses(policy, data, A, args, rows=None):
    """Loss and statistics of every trained step on the given rows."""
    c, _, steps, batch = data
    rows = torch.arange(len(A)) if rows is None else rows
    part = common.take(c, rows), common.take(batch, rows)
    return [flow_grpo.loss(policy, *part, k, A[rows], args) for k in range(len(steps))]


def chain(batch):
    """The states (B, S + 1, ...) that the S stored transitions lead through."""
    return torch.cat([batch["x_t"], batch["x_s"][:, -1:]], 1)


def logps(policy, data, args):
    """Log-densities (B, S) of the stored transitions under the policy as it is now."""
    c, grid, steps, batch = data
    out = []
    with torch.no_grad():
        for k, i in enumerate(steps):
            v = policy.velocity(batch["x_t"][:, k], grid[i], c, args.guidance)
            step = flow_grpo.STEPS[args.sde](
                batch["x_t"][:, k], v, grid[i], grid[i + 1], args.a, x_next=batch["x_s"][:, k]
            )
            out.append(step.logp)
    return torch.stack(out, 1)


def update(policy, data, A, args, optimizer=None, valid=None, ranks=None, iteration=0):
    c, _, _, batch = data
    valid = torch.ones(len(A), dtype=torch.bool) if valid is None else valid
    optimizer = optimizer or Counting(policy.params)
    ema = common.Ema(policy.params, 0.0)
    logs = flow_grpo.update(
        policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks or common.Ranks("cpu")
    )  # fmt: skip
    return optimizer, logs


@pytest.fixture
def args():
    return Args(T=4, G=2, P=2, lr=1e-3, micro_batch=64)


# ---- on-policy ----


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("sde", SDES)
def test_ratio_is_one_before_any_update(policy, args, sde, guidance):
    args = dataclasses.replace(args, sde=sde, guidance=guidance, T=5, G=3)
    A = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.3, -2.0])
    for size in (4, 64):
        data = stored(policy, args, micro_batch=size)
        rounding = 1e-6 * data[3]["logp"].abs().amax(0).clamp(min=1)  # 6 at the last step of CPS
        for order in (torch.arange(6), torch.arange(6).flip(0), torch.tensor([3, 0])):
            for (value, stats), bound in zip(losses(policy, data, A, args, order), rounding):
                assert stats["log_rho_max"] <= bound
                assert stats["clip_fraction"] == 0
                assert value.item() == pytest.approx(-A[order].mean().item(), abs=1e-5)


def test_ratio_is_one_over_a_bf16_base(make_policy, args):
    policy = make_policy(dtype=torch.bfloat16)
    data = stored(policy, args)
    assert {x.dtype for x in data[3].values()} == {torch.float32}
    for _, stats in losses(policy, data, torch.ones(4), args):
        assert stats["log_rho_max"] <= 1e-6


@pytest.mark.parametrize("kl", ["official", "exact"])
@pytest.mark.parametrize("sde", SDES)
def test_kl_is_exactly_zero_before_any_update(make_policy, args, sde, kl):
    policy = make_policy(random=False)
    args = dataclasses.replace(args, sde=sde, kl=kl, beta=0.5)
    for _, stats in losses(policy, stored(policy, args), torch.ones(4), args):
        assert stats["kl_ref"] == 0


def test_train_guidance_makes_the_ratio_differ(policy, args):
    args = dataclasses.replace(args, guidance=3.0)
    data, A = stored(policy, args), torch.ones(4)
    policy.calls = 0
    losses(policy, data, A, args)
    assert policy.calls == 2 * 4 * 3
    args = dataclasses.replace(args, train_guidance=1.0)
    policy.calls = 0
    assert all(stats["log_rho_max"] > 1e-5 for _, stats in losses(policy, data, A, args))
    assert policy.calls == 4 * 3


def test_rollout_leaves_no_trace_and_repeats(policy, args):
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in policy.params]
    first = stored(policy, args)[3]
    exact(stored(policy, args)[3], first)
    exact(torch.get_rng_state(), state)
    exact([p.detach() for p in policy.params], weights)
    assert all(p.grad is None for p in policy.params)
    assert not any(x.requires_grad for x in first.values())
    other = stored(policy, args, iteration=1)[3]
    assert (chain(other) - chain(first)).flatten(2).std(2).min() > 0.1


def test_rollout_ignores_the_micro_batch(policy, args):
    whole, parts = stored(policy, args)[3], stored(policy, args, micro_batch=1)[3]
    assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_the_network_sees_the_same_inputs_in_rollout_and_update(policy, args):
    seen = []
    policy.net.register_forward_pre_hook(
        lambda module, _, kwargs: seen.append(
            {k: x.clone() for k, x in kwargs.items() if isinstance(x, torch.Tensor)}
        ),
        with_kwargs=True,
    )
    data = stored(policy, dataclasses.replace(args, guidance=2.0))
    rollout = seen[:3]
    seen.clear()
    losses(policy, data, torch.ones(4), dataclasses.replace(args, guidance=2.0))
    exact(seen, rollout)


# ---- loss, gradient, signs ----


def test_micro_batch_changes_neither_loss_nor_gradient(make_policy, args):
    A = torch.tensor([1.0, -0.5, 2.0, -1.0])
    grads, logs = [], []
    for size in (1, 3, 64):
        policy = make_policy()
        data = stored(policy, args)
        randomise(policy, seed=1, scale=1e-3)  # off-policy: rho is not 1
        each = dataclasses.replace(args, micro_batch=size, updates=1, beta=0.1, clip=0.5)
        optimizer, rows = update(policy, data, A, each)
        grads.append(optimizer.gradients)
        logs.append(common.merge_logs(rows))
    for other in (1, 2):
        assert_close(grads[other], grads[0], rtol=1e-4, atol=1e-6)
        assert_close(logs[other], logs[0], rtol=1e-3, atol=1e-9)
        assert_close(logs[other]["kl_ref"], logs[0]["kl_ref"], rtol=1e-5, atol=0)


def test_gradient_is_reinforce_at_rho_one(policy, args):
    """Plain policy gradient of the true Gaussian log-density, written down independently."""
    args = dataclasses.replace(args, updates=1)
    data, A = stored(policy, args), torch.tensor([1.0, -0.5, 2.0, -1.0])
    c, grid, steps, batch = data
    total = torch.zeros(())
    for k, i in enumerate(steps):
        v = policy.velocity(batch["x_t"][:, k], grid[i], c)
        _, _, mean, std = common.flow_sde_step(
            batch["x_t"][:, k], v, grid[i], grid[i + 1], args.a, x_next=batch["x_s"][:, k]
        )
        logp = Normal(mean, std.expand_as(mean)).log_prob(batch["x_s"][:, k]).flatten(1).mean(1)
        total = total - (A * logp).mean() / len(steps)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(total, policy.params)])
    optimizer, _ = update(policy, data, A, args)
    assert_close(optimizer.gradients, [wanted], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("sde", SDES)
@pytest.mark.parametrize("sign", [1, -1])
def test_good_samples_become_likelier_and_bad_ones_less(policy, args, sde, sign):
    args = dataclasses.replace(args, sde=sde, updates=1, P=1, clip=10.0)
    data = stored(policy, args, P=1)
    before = logps(policy, data, args)
    optimizer = Counting(policy.params, lr=1e-4 if sde == "cps" else 1e-2)  # its last std is 1e-3
    update(policy, data, sign * torch.tensor([1.0, -1.0]), args, optimizer)
    change = (logps(policy, data, args) - before).mean(1)
    assert sign * change[0] > 1e-7
    assert sign * change[1] < -1e-7


def test_gradient_reaches_the_policy_only(policy, args):
    args = dataclasses.replace(args, beta=0.1)
    data = stored(policy, args)
    randomise(policy, seed=1, scale=1e-3)
    total = sum(value for value, _ in losses(policy, data, torch.ones(4), args))
    total.backward()
    lora = {id(p) for p in policy.params}
    for name, p in policy.net.named_parameters():
        assert (p.grad is not None) == (id(p) in lora), name
    for x in data[3].values():
        assert x.grad is None


def test_clip_stops_the_gradient(policy, args):
    args = dataclasses.replace(args, clip=1e-7)
    data = stored(policy, args)
    data[3]["logp"] -= 0.01  # every rho is 1.01
    (good, stats) = losses(policy, data, torch.ones(4), args)[0]
    assert stats["clip_fraction"] == 1
    assert all((g == 0).all() for g in torch.autograd.grad(good, policy.params))
    bad, _ = losses(policy, data, -torch.ones(4), args)[0]
    assert any((g != 0).any() for g in torch.autograd.grad(bad, policy.params))


# ---- KL ----


@pytest.mark.parametrize("sde", SDES)
def test_kl_is_the_divergence_of_the_two_steps(make_policy, args, sde):
    policy, base = make_policy(), make_policy(random=False)
    args = dataclasses.replace(args, sde=sde, beta=0.7, kl="exact", guidance=2.0)
    data = stored(policy, args)
    c, grid, steps, batch = data
    A = torch.zeros(4)
    for k, (i, (value, stats)) in enumerate(zip(steps, losses(policy, data, A, args))):
        normals = []
        for network in (policy, base):
            x = batch["x_t"][:, k]
            with torch.no_grad():
                v = network.velocity(x, grid[i], c, 2.0)
            step = flow_grpo.STEPS[sde](x, v, grid[i], grid[i + 1], args.a, x_next=x)
            normals.append(Normal(step.mean, step.std.expand_as(step.mean)))
        wanted = kl_divergence(*normals).mean()
        assert wanted > 1e-6
        assert_close(stats["kl_ref"], wanted, rtol=1e-4, atol=1e-8)
        assert_close(value.detach(), 0.7 * wanted, rtol=1e-4, atol=1e-8)


def test_official_kl_is_the_step_size_times_the_exact_one(policy, args):
    args = dataclasses.replace(args, beta=1.0)
    data, A = stored(policy, args), torch.zeros(4)
    grid, steps = data[1], data[2]
    official = [stats["kl_ref"] for _, stats in losses(policy, data, A, args)]
    exactly = [
        stats["kl_ref"]
        for _, stats in losses(policy, data, A, dataclasses.replace(args, kl="exact"))
    ]
    for i, a, b in zip(steps, official, exactly):
        assert_close(a, (grid[i] - grid[i + 1]) * b, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sde", ["cps", "dance"])
def test_only_the_sde_has_an_official_kl_of_its_own(policy, args, sde):
    args = dataclasses.replace(args, beta=1.0, sde=sde)
    data, A = stored(policy, args), torch.zeros(4)
    official = losses(policy, data, A, args)
    exactly = losses(policy, data, A, dataclasses.replace(args, kl="exact"))
    for (_, a), (_, b) in zip(official, exactly):
        exact(a["kl_ref"], b["kl_ref"])


def test_kl_pulls_to_the_base(policy, args):
    args = dataclasses.replace(args, beta=1.0, updates=1)
    data, A = stored(policy, args), torch.zeros(4)
    before = sum(float(s["kl_ref"]) for _, s in losses(policy, data, A, args))
    optimizer, _ = update(policy, data, A, args, Counting(policy.params, lr=1e-2))
    assert len(optimizer.gradients) == 1  # no advantage, but a KL to descend
    assert sum(float(s["kl_ref"]) for _, s in losses(policy, data, A, args)) < before


# ---- updates ----


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_number_of_optimizer_steps(policy, args, updates):
    data = stored(policy, args)
    A = torch.tensor([1.0, -1.0, 0.5, -0.5])
    optimizer, logs = update(policy, data, A, dataclasses.replace(args, updates=updates))
    assert len(optimizer.gradients) == updates
    assert sum("grad_norm" in row for row in logs) == updates
    assert len(logs) == updates * (1 + len(data[2]))


def test_every_image_is_used_once_whatever_the_number_of_updates(policy, args):
    """With the weights held still, the shares' mean gradient is the gradient of the whole."""
    data, A = stored(policy, args), torch.tensor([1.0, -1.0, 0.5, -0.5])
    whole = update(policy, data, A, dataclasses.replace(args, updates=1))[0].gradients
    halves = update(policy, data, A, dataclasses.replace(args, updates=2))[0].gradients
    assert_close(sum(halves) / 2, whole[0], rtol=1e-4, atol=1e-7)


def test_shares_are_shuffled_by_iteration_and_seed(policy, args):
    data, A = stored(policy, args), torch.tensor([1.0, -1.0, 0.5, -0.5])
    args = dataclasses.replace(args, updates=4)
    runs = [
        update(policy, data, A, dataclasses.replace(args, seed=s), iteration=i)[0].gradients[0]
        for s, i in ((0, 0), (0, 0), *((s, i) for s in range(3) for i in range(3)))
    ]
    exact(runs[0], runs[1])
    assert len({tuple(g[g != 0][:3].tolist()) for g in runs}) > 1


def test_failed_samples_do_not_reach_the_gradient(policy, args):
    args = dataclasses.replace(args, updates=1, beta=0.1)
    data = stored(policy, args)
    valid = torch.tensor([True, False, True, True])
    for name in ("x0", "x_t", "x_s", "logp"):
        data[3][name][1] = math.nan
    A = torch.tensor([1.0, 0.0, -1.0, 0.5])
    optimizer, logs = update(policy, data, A, args, valid=valid)
    assert optimizer.gradients[0].isfinite().all()
    assert optimizer.gradients[0].abs().max() > 0
    assert all(math.isfinite(x) for row in logs for x in row.values())


def test_nothing_to_learn_changes_nothing(policy, args):
    data = stored(policy, args)
    before = [p.detach().clone() for p in policy.params]
    optimizer = torch.optim.AdamW(policy.params, lr=0.1, weight_decay=0.1)
    _, logs = update(policy, data, torch.zeros(4), args, optimizer)
    exact([p.detach() for p in policy.params], before)
    assert logs == []
    assert not optimizer.state


def test_a_rank_with_nothing_to_learn_takes_part(policy, args):
    ranks = OtherRank()
    optimizer, logs = update(policy, stored(policy, args), torch.zeros(4), args, ranks=ranks)
    assert ranks.calls == 2
    assert all((g == 0).all() for g in optimizer.gradients)
    assert all(math.isfinite(x) for row in logs for x in row.values())


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_two_ranks_make_the_same_updates_as_one(policy, args, updates):
    args = dataclasses.replace(args, updates=updates, max_grad_norm=1e9)
    data, A = stored(policy, args), torch.tensor([1.0, -1.0, 0.5, 0.0])
    one = update(policy, data, A, args)[0].gradients
    c, grid, steps, batch = data
    halves = []
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        mine = (
            {k: x[rows] for k, x in c.items()},
            grid,
            steps,
            {k: x[rows] for k, x in batch.items()},
        )
        halves.append(update(policy, mine, A[rows], args, ranks=Half(rank))[0].gradients)
    assert_close([(a + b) / 2 for a, b in zip(*halves, strict=True)], one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [1e-6, 1e6])
def test_gradient_norm(policy, args, max_grad_norm):
    data, A = stored(policy, args), torch.tensor([1.0, -1.0, 0.5, -0.5])
    args = dataclasses.replace(args, max_grad_norm=max_grad_norm, updates=1)
    optimizer, logs = update(policy, data, A, args)
    norm = optimizer.gradients[0].norm()
    assert norm <= 1.001 * max_grad_norm
    logged = logs[-1]["grad_norm"]
    assert logged > 1e-5  # before clipping
    assert norm == pytest.approx(min(logged, max_grad_norm), rel=1e-3)


# ---- rollout and windows ----


def test_stored_transitions_form_the_chain(policy, args):
    args = dataclasses.replace(args, T=6, window=3, window_lo=1, window_schedule="frozen")
    c, grid, steps, batch = stored(policy, args)
    assert steps == range(1, 4)
    assert batch["x_t"].shape == batch["x_s"].shape == (4, 3, 4, 16, 16)
    assert batch["logp"].shape == (4, 3)
    exact(batch["t"], grid[1:4].expand(4, 3))
    exact(batch["s"], grid[2:5].expand(4, 3))
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", 0, range(4))
    with torch.no_grad():
        for i in range(6):
            v = policy.velocity(x, grid[i], c)
            if i in steps:
                exact(batch["x_t"][:, i - 1], x)
                eps = common.keyed_noise(policy.latent_shape, args.seed, "step", 0, range(4), i)
                x, logp, _, std = common.flow_sde_step(x, v, grid[i], grid[i + 1], 0.7, noise=eps)
                assert (std > 0).all()
                exact(batch["logp"][:, i - 1], logp)
                exact(batch["x_s"][:, i - 1], x)
            else:
                x = common.euler_step(x, v, grid[i], grid[i + 1])
    exact(batch["x0"], x)


def test_outside_the_window_nothing_is_random(policy, args):
    args = dataclasses.replace(args, T=6, window=2, window_lo=3, window_schedule="frozen")
    c, grid, _, batch = stored(policy, args)
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", 0, range(4))
    with torch.no_grad():
        for i in range(3):
            x = common.euler_step(x, policy.velocity(x, grid[i], c), grid[i], grid[i + 1])
        exact(batch["x_t"][:, 0], x)
        x = batch["x_s"][:, -1]
        x = common.euler_step(x, policy.velocity(x, grid[5], c), grid[5], grid[6])
    exact(batch["x0"], x)


def test_the_last_step_is_never_stochastic(policy, args):
    for T in (2, 3, 10):
        assert trained_steps(0, dataclasses.replace(args, T=T)) == range(T - 1)


def test_a_window_of_all_steps_is_the_plain_rollout(policy, args):
    plain = stored(policy, args)
    for schedule in ("random", "frozen", "progressive"):
        whole = dataclasses.replace(args, window=3, window_schedule=schedule)
        data = stored(policy, whole)
        assert data[2] == plain[2]
        exact(data[3], plain[3])


def test_same_latent_shares_the_first_noise_only(policy, args):
    args = dataclasses.replace(args, same_latent=True, G=3)
    x = chain(stored(policy, args)[3]).unflatten(0, (2, 3))
    exact(x[:, 1:, 0], x[:, :1, 0].expand_as(x[:, 1:, 0]))
    assert (x[0, 0, 0] - x[1, 0, 0]).abs().max() > 0.1
    assert (x[:, 1:, 1] - x[:, :1, 1]).flatten(2).abs().amax(2).min() > 0.1
    parts = chain(stored(policy, args, micro_batch=2)[3]).unflatten(0, (2, 3))
    assert_close(parts, x, rtol=1e-5, atol=1e-5)


def start(iteration, **changes):
    base = dict(schedule="progressive", window=4, lo=0, hi=24, every=25, stride=1)
    flags = {f"window_{k}": v for k, v in {**base, **changes}.items() if k in base}
    flags["window"] = flags.pop("window_window")
    return window_start(iteration, Args(T=25, seed=changes.get("seed", 0), **flags))


def test_progressive_window_is_that_of_mixgrpo():
    """MixGRPO: 25 steps, one further every 25 iterations; it. 299 covers 11..14, it. 550 only 22."""
    assert [start(i) for i in (0, 24, 25, 299, 300, 550)] == [0, 0, 1, 11, 12, 22]
    own = Args(T=25, window=4, window_schedule="progressive", window_hi=23)  # MixGRPO's end: T - 2
    assert trained_steps(299, own) == range(11, 15)
    assert trained_steps(550, own) == range(22, 23)
    for iteration in range(0, 1300, 5):
        assert len(trained_steps(iteration, own)) > 0
    assert trained_steps(575, own) == range(4)  # MixGRPO's own window is empty here
    assert [start(i, every=2, stride=3, hi=9) for i in range(8)] == [0, 0, 3, 3, 6, 6, 0, 0]


def test_frozen_window():
    assert {start(i, schedule="frozen", lo=3) for i in range(100)} == {3}


def test_random_window_covers_its_range():
    starts = [start(i, schedule="random", lo=2, hi=9, window=3) for i in range(300)]
    assert set(starts) == set(range(2, 7))
    assert starts != [start(i, schedule="random", lo=2, hi=9, window=3, seed=1) for i in range(300)]
    assert starts == [start(i, schedule="random", lo=2, hi=9, window=3) for i in range(300)]


@given(st.data())
def test_a_window_is_never_empty_and_stays_inside(data):
    T = data.draw(st.integers(2, 30))
    lo = data.draw(st.integers(0, T - 2))
    hi = data.draw(st.integers(lo + 1, T - 1))
    args = Args(
        T=T, window_lo=lo, window_hi=hi, window=data.draw(st.integers(0, hi - lo)),
        window_schedule=data.draw(st.sampled_from(["random", "progressive", "frozen"])),
        window_every=data.draw(st.integers(1, 30)), window_stride=data.draw(st.integers(1, 5)),
        seed=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    flow_grpo.check_own(args)
    steps = trained_steps(data.draw(st.integers(0, 2000)), args)
    assert lo <= steps.start < steps.stop <= hi
    if args.window_schedule != "progressive" and args.window:
        assert len(steps) == args.window


# ---- whole iterations ----


def read(args):
    lines = (Path(args.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("flags", "nfe"),
    [
        (dict(), 3 + 2),
        (dict(guidance=2.0, eval_guidance=1.0), 2 * (3 + 2)),
        (dict(beta=0.1), 3 + 2 + 2),
        (dict(guidance=2.0, beta=0.1), 2 * (3 + 2 + 2)),
        (dict(window=1), 3 + 1),
        (dict(T=5, window=2, beta=0.1), 5 + 2 + 2),
        (dict(guidance=2.0, train_guidance=1.0), 2 * 3 + 2),
        (dict(gradient_checkpointing=True, updates=1, G=3, micro_batch=2), 3 + 2),
    ],
    ids=str,
)
def test_number_of_network_calls(quick, flags, nfe):
    args = quick(**flags)
    flow_grpo.main(args)
    assert read(args)[0]["nfe"] == nfe


def test_first_update_is_on_policy(quick):
    args = quick(P=2, G=3, micro_batch=4, updates=1, beta=0.1)
    flow_grpo.main(args)
    row = read(args)[0]
    assert row["log_rho_max"] <= 1e-6
    assert row["clip_fraction"] == 0
    assert row["kl_ref"] == 0
    assert row["rho_mean"] == pytest.approx(1, abs=1e-6)
    assert row["grad_norm"] > 0


def test_the_second_update_is_off_policy(quick):
    args = quick(P=2, G=3, lr=1e-2)
    flow_grpo.main(args)
    assert read(args)[0]["log_rho_max"] > 1e-6


def constant(monkeypatch, value=1.0):
    factory = lambda device, dtype: rewards.Reward(lambda i, p, m: [value] * len(i))  # noqa: E731
    monkeypatch.setitem(rewards.REWARDS, "constant", factory)
    return "constant"


def test_equal_rewards_leave_the_parameters_bit_unchanged(quick, monkeypatch):
    kept = []
    original = common.load_policy

    def load(*args):
        kept.append(original(*args))
        kept.append([p.detach().clone() for p in kept[0].params])
        return kept[0]

    monkeypatch.setattr(common, "load_policy", load)
    args = quick(reward=constant(monkeypatch), iterations=2, lr=1.0, weight_decay=0.5)
    flow_grpo.main(args)
    exact([p.detach() for p in kept[0].params], kept[1])
    rows = read(args)
    assert [row["reward/mean"] for row in rows[:2]] == [1, 1]
    assert "grad_norm" not in rows[0]
    assert rows[0]["nfe"] == 3


def test_training_raises_the_reward(quick):
    """Sign and plumbing of the whole loop: a few iterations on `red` make pictures redder."""
    args = quick(
        iterations=12, P=2, G=8, micro_batch=16, lr=2e-2, clip=1e-2, adv_std="group", T=4,
        eval_every=12, eval_prompts=8, eval_T=4,
    )  # fmt: skip
    flow_grpo.main(args)
    rows = read(args)
    first, last = rows[0]["eval/red"], rows[-1]["eval/red"]
    assert last - first > 1, (first, last)  # of 255
