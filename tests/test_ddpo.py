"""ddpo.py: ratio, SF and IS, steps in any order, histories, guidance in training, DPOK's parts."""

import dataclasses
import functools
import inspect
import json
import re

import conftest
import diffusers
import pytest
import torch
from conftest import PROMPTS, Counting, randomise
from torch.testing import assert_close

import common
import ddpo
from ddpo import Args

exact = functools.partial(assert_close, rtol=0, atol=0)
A4 = torch.tensor([1.0, -0.5, 2.0, -1.5])
families = pytest.mark.parametrize("family", ["tiny", "sd15"])


@pytest.fixture
def args():
    return Args(T=4, G=2, P=2, micro_batch=64, updates=1, max_grad_norm=1e9)


def stored(policy, args, micro_batch=64, iteration=0):
    c = policy.encode([PROMPTS[i // args.G % 2] for i in range(args.P * args.G)])
    batch = common.cat_batches(
        ddpo.rollout(policy, part, policy.grid(args.T), iteration, indices, args)
        for part, indices in common.micro_batches(c, range(args.P * args.G), micro_batch)
    )
    return c, batch


update = functools.partial(conftest.update, ddpo)


# ---- rollout ----


@families
def test_a_rollout_follows_its_own_steps(policies, family, args):
    policy = policies(family)
    _, batch = stored(policy, args)
    S = 4 if family == "sd15" else 3  # a flow ends with a step of its ODE
    assert batch["logp"].shape == (4, S)
    exact(batch["x_t"][:, 1:], batch["x_s"][:, :-1])
    exact(batch["t"][0], policy.grid(4)[:S])
    exact(batch["s"][0], policy.grid(4)[1 : S + 1])
    if family == "sd15":
        exact(batch["x0"], batch["x_s"][:, -1])
    assert all(x.isfinite().all() for x in batch.values())
    assert_close(stored(policy, args, micro_batch=1)[1], batch, rtol=1e-4, atol=1e-4)


def test_a_step_of_an_eps_model_is_that_of_diffusers(load, args):
    """DDIM with eta = 1 and given noise: the same x_s as the scheduler's step."""
    policy = load("sd15")
    c, batch = stored(policy, args)
    scheduler = policy.scheduler("euler", args.T)
    for k, timestep in enumerate(scheduler.timesteps):
        with torch.no_grad():
            eps = policy.predict(batch["x_t"][:, k], batch["t"][:, k], c)
        noise = common.keyed_noise(policy.latent_shape, args.seed, "step", 0, range(4), k)
        theirs = scheduler.step(
            eps, timestep, batch["x_t"][:, k], eta=1.0, variance_noise=noise
        ).prev_sample
        assert_close(batch["x_s"][:, k], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_the_last_step_is_finite_also_where_it_has_no_noise(load, args, eta):
    """A grid that ends at abar = 1 (set_alpha_to_one) has std 0 there: no gradient, no NaN."""
    policy = load("sd15")
    args = dataclasses.replace(args, eta=eta)
    grid = policy.grid(4)
    grid[-1] = 0
    c = policy.encode([PROMPTS[0]] * 4)
    batch = ddpo.rollout(policy, c, grid, 0, range(4), args)
    exact(batch["logp"][:, -1], torch.zeros(4))
    optimizer, _ = update(policy, (c, batch), A4, args)
    assert optimizer.gradients[0].isfinite().all()
    assert optimizer.gradients[0].abs().max() > 0


# ---- ratio ----


@families
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_ratio_is_one_before_any_update(policies, family, args, guidance):
    policy = policies(family)
    args = dataclasses.replace(args, guidance=guidance)
    for size in (3, 64):
        c, batch = stored(policy, args, micro_batch=size)
        S = batch["t"].shape[1]
        for k in (0, S - 1, torch.tensor([0, 2, 1, 0])):
            for rows in (torch.arange(4), torch.tensor([3, 1, 0, 2])):
                part = common.take(c, rows), common.take(batch, rows)
                value, stats = ddpo.loss(policy, *part, k, A4[rows], args)
                assert stats["log_rho_max"] <= 2e-6
                assert value.item() == pytest.approx(-A4.mean().item(), abs=1e-5)


@families
def test_one_update_is_the_score_function_estimator(policies, family, args):
    """DDPO_SF: with one update the gradient is that of -A logp, averaged over images and steps."""
    policy = policies(family)
    c, batch = stored(policy, args)
    optimizer, _ = update(policy, (c, batch), A4, args)
    total = 0.0
    for k in range(batch["t"].shape[1]):
        x_t, x_s, t, s = (batch[name][:, k] for name in ("x_t", "x_s", "t", "s"))
        pred = policy.predict(x_t, t, c)
        total = total - (A4 * ddpo.step(policy, x_t, pred, t, s, args, x_next=x_s).logp).mean()
    wanted = torch.autograd.grad(total / batch["t"].shape[1], policy.params)
    wanted = torch.cat([g.flatten() for g in wanted])
    assert wanted.abs().max() > 1e-6
    assert_close(optimizer.gradients[0], wanted, rtol=1e-3, atol=1e-7)


def test_several_updates_take_a_share_each_and_leave_the_ratio(policy, args):
    data = stored(policy, args)
    args = dataclasses.replace(args, updates=2)
    optimizer, logs = update(policy, data, A4, args, Counting(policy.params, lr=0.5))
    assert len(optimizer.gradients) == 2
    seen = [row for row in logs if "log_rho_max" in row]
    assert [row["images"] for row in seen] == [2] * 6  # three steps of two images, twice
    assert max(row["log_rho_max"] for row in seen[:3]) <= 1e-6
    assert max(row["log_rho_max"] for row in seen[3:]) > 1e-6


# ---- order of the steps ----


def orders(policy, data, args, monkeypatch, **more):
    """The steps (B,) that every call of the loss was given."""
    seen, original = [], ddpo.loss

    def spy(policy, c, batch, k, A, args):
        seen.append(k)
        return original(policy, c, batch, k, A, args)

    monkeypatch.setattr(ddpo, "loss", spy)
    update(policy, data, A4, args, **more)
    monkeypatch.setattr(ddpo, "loss", original)
    return torch.stack(seen, 1)  # (B, steps)


def test_every_image_trains_every_step_once_in_an_order_of_its_own(load, args, monkeypatch):
    policy = load("sd15")
    data = stored(policy, args)
    drawn = orders(policy, data, args, monkeypatch)
    exact(drawn.sort(1).values, torch.arange(4).expand(4, 4))
    assert len({*map(tuple, drawn.tolist())}) > 1
    other = orders(policy, data, args, monkeypatch, iteration=1)
    assert (other != drawn).any()
    half = orders(policy, data, dataclasses.replace(args, timestep_fraction=0.5), monkeypatch)
    assert half.shape == (4, 2)


@families
def test_steps_below_the_smallest_level_are_not_trained(policies, family, args, monkeypatch):
    policy = policies(family)
    data = stored(policy, args)
    levels = data[1]["t"][0].tolist()
    for n in (1, 2, 3):
        some = dataclasses.replace(args, t_min=levels[n - 1])  # the level itself is trained
        drawn = orders(policy, data, some, monkeypatch)
        exact(drawn.sort(1).values, torch.arange(n).expand(4, n))
    noisiest = orders(policy, data, dataclasses.replace(args, t_min=1.0), monkeypatch)
    exact(noisiest, torch.zeros(4, 1, dtype=torch.long))  # one is always trained


@families
def test_micro_batch_changes_nothing(policies, family, args):
    policy = policies(family)
    data = stored(policy, args)
    wanted = update(policy, data, A4, args)[0].gradients[0]
    for size in (1, 3):
        found = update(policy, data, A4, dataclasses.replace(args, micro_batch=size))[0]
        assert_close(found.gradients[0], wanted, rtol=1e-4, atol=1e-6)


# ---- signs, failures ----


@families
def test_an_update_moves_the_densities_apart(policies, family, args):
    policy = policies(family, random=False)
    data = stored(policy, args)
    c, batch = data

    def logp():
        with torch.no_grad():
            x_t, x_s, t, s = (batch[name][:, 0] for name in ("x_t", "x_s", "t", "s"))
            return ddpo.step(policy, x_t, policy.predict(x_t, t, c), t, s, args, x_next=x_s).logp

    for sign in (1.0, -1.0):
        before, kept = logp(), [p.detach().clone() for p in policy.params]
        A = sign * torch.tensor([1.0, -1.0, 0.0, 0.0])
        update(policy, data, A, args, Counting(policy.params, lr=0.1))
        change = sign * (logp() - before)
        assert change[0] > change[1]
        common.copy_into(policy.params, kept)


def test_without_advantage_nothing_moves(policy, args):
    optimizer, logs = update(policy, stored(policy, args), torch.zeros(4), args)
    assert optimizer.gradients == []
    assert logs == []


def test_a_failed_sample_poisons_nothing(policy, args):
    data = stored(policy, args)
    wanted = update(policy, data, torch.tensor([1.0, 0.0, 2.0, -1.5]), args)[0].gradients[0]
    for name in ("x0", "x_t", "x_s"):
        data[1][name][1] = torch.nan
    valid = torch.tensor([True, False, True, True])
    A = torch.tensor([1.0, 0.0, 2.0, -1.5])
    found = update(policy, data, A, args, valid=valid)[0].gradients[0]
    assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    found = update(policy, data, A, dataclasses.replace(args, beta=0.1), valid=valid)[0]
    assert found.gradients[0].isfinite().all()


# ---- guidance in training ----


@families
def test_training_with_guidance_goes_through_both_halves(policies, family, args):
    """Gradient of u + g (c - u); without it only the conditional branch, at half the calls."""
    policy = policies(family)
    args = dataclasses.replace(args, guidance=5.0)
    data = stored(policy, args)
    steps = data[1]["t"].shape[1]
    policy.calls = 0
    both = update(policy, data, A4, args)[0].gradients[0]
    assert policy.calls == 2 * 4 * steps
    policy.calls = 0
    optimizer, logs = update(policy, data, A4, dataclasses.replace(args, train_cfg=False))
    assert policy.calls == 4 * steps
    assert max(row.get("log_rho_max", 0) for row in logs) > 1e-4  # the ratio is not 1 by design
    assert not torch.allclose(optimizer.gradients[0], both, rtol=1e-2)


# ---- DPOK ----


def test_dpok_clamps_the_ratio_whatever_the_sign(policy, args):
    """Outside the range nothing has a gradient; PPO keeps the way back into it."""
    c, batch = stored(policy, args)
    randomise(policy, 3, 0.02)
    args = dataclasses.replace(args, clip=1e-7)  # every ratio is outside
    grads = {}
    for objective in ("ddpo", "dpok"):
        each = dataclasses.replace(args, objective=objective)
        value, stats = ddpo.loss(policy, c, batch, 0, A4, each)
        assert stats["clip_fraction"] == 1
        grads[objective] = torch.autograd.grad(value, policy.params, allow_unused=True)
    assert all(g is None or not g.any() for g in grads["dpok"])
    assert any(g is not None and g.any() for g in grads["ddpo"])
    wide = dataclasses.replace(args, clip=0.5)
    assert_close(
        ddpo.loss(policy, c, batch, 0, A4, dataclasses.replace(wide, objective="dpok"))[0],
        ddpo.loss(policy, c, batch, 0, A4, wide)[0],
    )


@families
def test_the_kl_of_dpok_compares_predictions(policies, family, args):
    policy = policies(family)
    c, batch = stored(policy, args)
    args = dataclasses.replace(args, beta=0.5)
    value, stats = ddpo.loss(policy, c, batch, 1, torch.zeros(4), args)
    x_t, t = batch["x_t"][:, 1], batch["t"][:, 1]
    with torch.no_grad():
        now = policy.predict(x_t, t, c)
        with policy.reference():
            base = policy.predict(x_t, t, c)
    assert_close(stats["kl_ref"], (now - base).square().mean(), rtol=1e-4, atol=1e-9)
    assert value.item() == pytest.approx(0.5 * stats["kl_ref"].item(), rel=1e-5)


# ---- runs ----


@pytest.fixture
def small(quick, load):
    def make(family, **flags):
        more = dict(weights=load.folders["sd15"]) if family == "sd15" else {}
        preset = {k: v for k, v in ddpo.PRESETS[family].items() if k in ("eta", "clip")}
        return quick(ddpo, model=family, dtype="float32", **{**preset, **more, **flags})

    return make


def rows_of(args):
    with open(args.out + "/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


@families
def test_a_run_learns_resumes_and_keeps_its_histories(small, family, tmp_path):
    """Four iterations are two, a stop and two, bit for bit: the histories are part of the state."""
    flags = dict(P=2, G=2, micro_batch=3, min_count=2, history=6, save_every=1, updates=2)
    whole = small(family, iterations=4, out=str(tmp_path / "whole"), **flags)
    ddpo.main(whole)
    half = small(family, iterations=2, out=str(tmp_path / "half"), **flags)
    ddpo.main(half)
    ddpo.main(dataclasses.replace(half, iterations=4, resume=half.out))
    timeless = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(args)]
        for args in (whole, half)
    ]
    trained = [[row for row in rows if "grad_norm" in row] for rows in timeless]
    assert len(trained[0]) == 4
    keep = [{k: v for k, v in row.items() if "eval" not in k} for row in trained[0]]
    assert [{k: v for k, v in row.items() if "eval" not in k} for row in trained[1]] == keep
    one, other = (torch.load(f"{a.out}/state.pt", weights_only=True) for a in (whole, half))
    exact(one["params"], other["params"])
    assert one["histories"] == other["histories"]
    (history,) = one["histories"]
    assert sum(map(len, history["rewards"].values())) > 0


def test_histories_compare_with_the_past_of_the_prompt():
    """Appended first, then normalised; too short a history: the whole iteration."""
    histories = [common.RewardHistory(4, 3)]
    combine = functools.partial(
        common.combine_rewards, weights=[1.0], G=2, mode="advantage", histories=histories
    )
    first = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    A = combine(first, ids=[0, 0, 1, 1])
    assert_close(A, ((first[0] - 4) / 5**0.5).float(), rtol=1e-5, atol=1e-5)
    second = torch.tensor([[5.0, 7.0]])
    A = combine(second, ids=[0, 0])
    known = torch.tensor([1.0, 3.0, 5.0, 7.0])
    assert_close(A, (second[0] - 4) / known.std(correction=0), rtol=1e-5, atol=1e-5)
    failed = combine(torch.tensor([[torch.nan, 9.0]]), ids=[0, 0])
    assert failed[0] == 0
    assert failed[1] > 0


def test_two_rewards_have_a_history_each_or_one_for_their_sum():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [40.0, 30.0, 20.0, 0.0]])
    make = lambda n: [common.RewardHistory(8, 1) for _ in range(n)]  # noqa: E731
    ids = [0, 0, 1, 1]
    each = common.combine_rewards(values, [3.0, 1.0], 2, "advantage", histories=make(2), ids=ids)
    alone = [make(1)[0].advantages(ids, row) for row in values.double()]
    assert_close(each, ((3 * alone[0] + alone[1]) / 4).float())
    total = common.combine_rewards(values, [3.0, 1.0], 2, "reward", histories=make(2), ids=ids)
    assert_close(total, make(1)[0].advantages(ids, (3 * values[0] + values[1]).double()).float())


@families
def test_the_call_printed_at_the_end_is_one_of_the_stock_pipeline(small, family, capsys):
    ddpo.main(small(family, P=2, iterations=1))
    out = capsys.readouterr().out
    pipeline = getattr(diffusers, re.search(r"diffusers\.(\w+)", out)[1])
    call = re.search(r"pipe\(PROMPT, (.+)\)\.images", out)[1]
    assert {*re.findall(r"(\w+)=", call)} <= {*inspect.signature(pipeline.__call__).parameters}


def test_the_baseline_of_the_group_needs_no_history(small):
    args = small("tiny", baseline="group", P=2)
    ddpo.main(args)
    assert torch.load(f"{args.out}/state.pt", weights_only=True)["histories"] == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(T=1), "--T: 1 leaves"),
        (dict(updates=0), "--updates: 0 is not"),
        (dict(updates=1000), "--updates: 1000 is above"),
        (dict(eta=0.0), "--eta: 0.0 is not"),
        (dict(timestep_fraction=1.5), "--timestep-fraction/--t-min: above 1"),
        (dict(timestep_fraction=0.0), "--timestep-fraction: 0.0 is not"),
        (dict(t_min=-0.1), "--t-min: -0.1 is not"),
        (dict(t_min=1.5), "--timestep-fraction/--t-min: above 1"),
        (dict(history=0), "--history: 0 is not"),
        (dict(min_count=0), "--min-count: 0 is not"),
        (dict(clip=-1.0), "--clip: -1.0 is not"),
        (dict(beta=-1.0), "--beta: -1.0 is not"),
        (dict(p_mix=2.0), "--p-mix: 2.0 is outside"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_one_line(flags, line):
    with pytest.raises(SystemExit) as stop:
        ddpo.check_own(Args(**flags))
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code
