"""baselines/rwr.py: weights, masks, the weighted denoising loss, guidance in training, runs."""

import dataclasses
import functools
import json
import math

import conftest
import pytest
import torch
from conftest import PROMPTS, Counting, Half, gradient
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_golden import VECTORS
from torch.testing import assert_close

import common
import ddpo
from baselines import rwr
from baselines.rwr import Args

exact = functools.partial(assert_close, rtol=0, atol=0)
update = functools.partial(conftest.update, rwr)
R4 = torch.tensor([1.0, -0.5, 2.0, -1.5])
W4 = torch.tensor([0.0, 2.0, 0.5, 1.5])
families = pytest.mark.parametrize("family", ["tiny", "sd15"])


@pytest.fixture
def args():
    return Args(T=4, G=2, P=2, micro_batch=64, epochs=1, updates=1, max_grad_norm=1e9)


def stored(policy, args, micro_batch=64, script=rwr):
    c = policy.encode([PROMPTS[i // args.G % 2] for i in range(args.P * args.G)])
    batch = common.cat_batches(
        script.rollout(policy, part, policy.grid(args.T), 0, indices, args)
        for part, indices in common.micro_batches(c, range(args.P * args.G), micro_batch)
    )
    return c, batch


def visits(policy, n=4):
    """Noise levels and noises of a pass over n images."""
    levels = torch.tensor([0.2, 0.5, 0.7, 0.999])[:n]
    return levels, common.keyed_noise(policy.latent_shape, 5, "eps", 0, range(n))


def error(policy, data, guidance=1.0):
    """Denoising errors (B,), straight from the definitions."""
    c, batch = data
    t, eps = visits(policy)
    if policy.abars is None:
        a, b, target = 1 - t, t, eps - batch["x0"]
    else:
        abar = policy.pipe.scheduler.alphas_cumprod[(1000 * t).round().long() - 1]
        a, b, target = abar.sqrt(), (1 - abar).sqrt(), eps
    a, b = (x.view(-1, 1, 1, 1) for x in (a, b))
    pred = policy.predict(a * batch["x0"] + b * eps, t, c, guidance)
    return (pred - target).square().mean((1, 2, 3))


# ---- weights and masks ----


def test_masks_of_the_official_code():
    vector = VECTORS["rwr sparse masks"]
    mask = rwr.top_share(torch.arange(32.0), 32, 0.1)
    assert mask.float().tolist() == vector["percentile90_of_0_to_31"]
    mask = rwr.top_share(torch.arange(10.0), 10, 0.1)
    assert mask.float().tolist() == vector["streaming_first_batch_0_to_9"]


@given(
    st.lists(st.integers(-3, 3), min_size=6, max_size=6),
    st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]),
    st.booleans(),
)
def test_a_mask_keeps_the_best_of_each_prompt(values, share, fail):
    r = torch.tensor(values, dtype=torch.float32)
    r[0] = math.nan if fail else r[0]
    mask = rwr.top_share(r, 3, share)
    for rewards, kept in zip(r.view(2, 3), mask.view(2, 3)):
        scored = rewards.isfinite()
        assert kept.any()
        assert not kept[~scored].any()
        left_out = scored & ~kept
        assert not left_out.any() or rewards[kept].min() > rewards[left_out].max()
        assert kept.sum() >= math.floor(share * int(scored.sum() - 1)) + 1
    more = rwr.top_share(r, 3, min(1.0, share + 0.2))
    assert (more | mask).tolist() == more.tolist()
    exact(rwr.top_share(r + 7, 3, share), mask)


def test_masks_count_ties_and_leave_out_failures():
    nan = math.nan
    r = torch.tensor([5.0, 5, 1, 0, 2, 2, 2, 2, nan, 3, 9, math.inf, nan, nan, nan, nan])
    kept = rwr.top_share(r, 4, 0.1).view(4, 4).tolist()
    assert kept[:3] == [[True, True, False, False], [True] * 4, [False, False, True, False]]
    assert kept[3] == [False] * 4
    assert rwr.top_share(torch.arange(12.0), 4, 1.0).all()
    assert rwr.top_share(torch.arange(20.0), 20, 0.25).sum() == 5


def test_weights_follow_the_reward_of_all_or_of_the_prompt(args):
    r = torch.tensor([0.0, 1.0, 5.0, 5.0])
    args = dataclasses.replace(args, inverse_temperature=2.0)
    w, valid = rwr.sample_weights(r, args)  # per prompt: the second one's images are alike
    top = 2 / (1 + math.exp(-2.0))
    assert_close(w, torch.tensor([2 - top, top, 1.0, 1.0]))
    assert valid.all()
    w, _ = rwr.sample_weights(r, dataclasses.replace(args, per_prompt=False))
    assert_close(w, 4 * torch.softmax(2.0 * r, 0))
    w, valid = rwr.sample_weights(torch.tensor([0.0, math.nan, 5.0, 5.0]), args)
    exact(w, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert valid.tolist() == [True, False, True, True]


@pytest.mark.parametrize("per_prompt", [True, False])
def test_equal_rewards_weigh_the_same(args, per_prompt):
    args = dataclasses.replace(args, per_prompt=per_prompt, inverse_temperature=100.0)
    w, valid = rwr.sample_weights(torch.full((4,), 0.3), args)
    exact(w, torch.ones(4))
    assert valid.all()


def test_sparse_has_no_weights(args):
    args = dataclasses.replace(args, objective="rwr-sparse", per_prompt=False)
    w, valid = rwr.sample_weights(R4, args)
    exact(w, torch.ones(4))
    assert valid.tolist() == [True, False, True, False]  # of each prompt


# ---- rollout ----


@families
def test_the_rollout_is_that_of_ddpo(policies, family, args):
    policy = policies(family)
    args = dataclasses.replace(args, eta=0.7, guidance=3.0)
    other = ddpo.Args(T=4, G=2, P=2, eta=0.7, guidance=3.0)
    exact(stored(policy, args)[1]["x0"], stored(policy, other, script=ddpo)[1]["x0"])


@families
def test_without_noise_the_rollout_is_the_stock_sampler(policies, family, args):
    policy = policies(family)
    c, batch = stored(policy, dataclasses.replace(args, eta=0.0), micro_batch=1)
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", 0, range(4))
    assert_close(batch["x0"], policy.sample(x, c, args.T), rtol=1e-4, atol=1e-4)


# ---- loss ----


@families
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_the_loss_is_the_weighted_denoising_error(policies, family, guidance, args):
    policy = policies(family)
    data = stored(policy, args)
    args = dataclasses.replace(args, guidance=guidance)
    value, stats = rwr.loss(policy, *data, *visits(policy), W4, args)
    err = error(policy, data, guidance)
    assert_close(value, (W4 * err).mean(), rtol=1e-4, atol=1e-6)
    assert stats["err"].item() == pytest.approx(err.mean().item(), rel=1e-4)
    assert stats["err_w"].item() == pytest.approx(value.item(), rel=1e-5)


@families
def test_without_train_cfg_the_gradient_is_that_of_the_conditional_branch(policies, family, args):
    policy = policies(family)
    data = stored(policy, args)
    with_cfg = dataclasses.replace(args, guidance=5.0)
    grads = {}
    for name, each in (
        ("both", with_cfg),
        ("conditional", dataclasses.replace(with_cfg, train_cfg=False)),
        ("no guidance", args),
    ):
        policy.calls = 0
        value, _ = rwr.loss(policy, *data, *visits(policy), W4, each)
        assert policy.calls == (8 if name == "both" else 4)
        grads[name] = gradient(policy, value)
    exact(grads["conditional"], grads["no guidance"])
    wanted = gradient(policy, (W4 * error(policy, data)).mean())
    assert_close(grads["conditional"], wanted, rtol=1e-3, atol=1e-6)
    wanted = gradient(policy, (W4 * error(policy, data, 5.0)).mean())  # through both halves
    assert_close(grads["both"], wanted, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(grads["both"], grads["conditional"], rtol=1e-2)


# ---- update ----


@families
def test_one_update_lowers_the_error_of_the_rewarded_images_most(policies, family, args):
    policy = policies(family, random=False)
    data = stored(policy, args)
    side = torch.tensor([1.0, -1.0, 1.0, -1.0])
    data[1]["x0"] = 2 * side.view(4, 1, 1, 1).expand_as(data[1]["x0"])  # bright ones, dark ones
    args = dataclasses.replace(args, epochs=8, inverse_temperature=3.0)
    before, base = error(policy, data).detach(), [p.detach().clone() for p in policy.params]
    changes = []
    for sign in (1.0, -1.0):
        w, valid = rwr.sample_weights(sign * side, args)
        update(policy, data, w, args, Counting(policy.params, lr=0.05), valid=valid)
        changes.append(error(policy, data).detach() - before)
        common.copy_into(policy.params, base)
    good = changes[0][[0, 2]].sum() + changes[1][[1, 3]].sum()
    bad = changes[0][[1, 3]].sum() + changes[1][[0, 2]].sum()
    assert good < bad
    assert good < 0


@pytest.mark.parametrize("objective", ["rwr", "rwr-sparse"])
def test_an_update_is_a_true_weighted_mean(policy, args, objective, monkeypatch):
    """Over the images that are trained on, whatever the micro-batch; the others are not visited."""
    data = stored(policy, args)
    w, valid = rwr.sample_weights(R4, dataclasses.replace(args, objective=objective))
    valid[3] = False  # a failed sample
    data[1]["x0"][3] = math.nan
    kept, seen, original = valid.nonzero().flatten().tolist(), [], rwr.loss

    def spy(policy, c, batch, t, eps, w, args):
        seen.extend(zip(t.tolist(), eps, w.tolist(), batch["x0"]))
        return original(policy, c, batch, t, eps, w, args)

    monkeypatch.setattr(rwr, "loss", spy)
    optimizer, logs = update(policy, data, w, args, valid=valid)
    assert sorted(weight for _, _, weight, _ in seen) == sorted(w[kept].tolist())
    t = torch.tensor([level for level, _, _, _ in seen])
    order = [next(i for i in kept if torch.equal(x0, data[1]["x0"][i])) for _, _, _, x0 in seen]
    part = common.take(data[0], torch.tensor(order)), common.take(data[1], torch.tensor(order))
    eps = torch.stack([eps for _, eps, _, _ in seen])
    value, _ = original(policy, *part, t, eps, w[order], args)
    assert_close(optimizer.gradients[0], gradient(policy, value), rtol=1e-4, atol=1e-7)
    assert [row["images"] for row in logs if "err" in row] == [len(kept)]
    for size in (1, 2):
        small = dataclasses.replace(args, micro_batch=size)
        found = update(policy, data, w, small, valid=valid)[0].gradients[0]
        assert_close(found, optimizer.gradients[0], rtol=1e-4, atol=1e-6)


def test_passes_and_steps(policy, args, monkeypatch):
    """Every pass visits each image once, in another order, at new noise levels with new noises."""
    seen, original = [], rwr.loss

    def spy(policy, c, batch, t, eps, w, args):
        seen.append((w.tolist(), t.tolist(), eps))
        return original(policy, c, batch, t, eps, w, args)

    monkeypatch.setattr(rwr, "loss", spy)
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])  # their names
    args = dataclasses.replace(args, epochs=3, updates=2)
    data = stored(policy, args)
    optimizer, _ = update(policy, data, w, args)
    assert len(optimizer.gradients) == 6
    passes = [(seen[i][0] + seen[i + 1][0], seen[i][1] + seen[i + 1][1]) for i in (0, 2, 4)]
    assert all(sorted(names) == pytest.approx([0.1, 0.2, 0.3, 0.4]) for names, _ in passes)
    assert len({tuple(names) for names, _ in passes}) > 1
    levels = [t for _, each in passes for t in each]
    assert len(set(levels)) == 12
    assert all(0 < t <= 1 and (1000 * t) == pytest.approx(round(1000 * t)) for t in levels)
    noises = torch.cat([eps for _, _, eps in seen])
    assert len({float(eps.sum()) for eps in noises}) == 12
    first = seen[:]
    seen.clear()
    update(policy, data, w, args, iteration=1)
    assert [x[1] for x in seen] != [x[1] for x in first]
    assert len(update(policy, data, w, dataclasses.replace(args, updates=9))[0].gradients) == 12


def test_every_iteration_begins_with_a_fresh_optimizer(policy, args):
    data = stored(policy, args)
    optimizer = torch.optim.AdamW(policy.params, lr=1e-3)
    base = [p.detach().clone() for p in policy.params]
    ends = []
    for _ in range(2):
        common.copy_into(policy.params, base)
        update(policy, data, W4, args, optimizer)
        ends.append([p.detach().clone() for p in policy.params])
    exact(ends[1], ends[0])
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_without_images_nothing_moves(policy, args):
    none = torch.zeros(4, dtype=torch.bool)
    optimizer, logs = update(policy, stored(policy, args), torch.zeros(4), args, valid=none)
    assert optimizer.gradients == logs == []


def test_two_ranks_average_to_one(policy, args):
    """Also where all images that are kept belong to one of them."""
    data = stored(policy, args)
    for valid in (torch.tensor([True] * 4), torch.tensor([False, False, True, True])):
        whole = update(policy, data, W4, args, valid=valid)[0].gradients[0]
        halves = []
        for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
            part = common.take(data[0], rows), common.take(data[1], rows)
            optimizer, _ = update(policy, part, W4, args, valid=valid, ranks=Half(rank))
            halves.append(optimizer.gradients[0])
        assert_close((halves[0] + halves[1]) / 2, whole, rtol=1e-4, atol=1e-6)


# ---- runs ----


@pytest.fixture
def small(quick, load):
    def make(family, **flags):
        more = dict(weights=load.folders["sd15"]) if family == "sd15" else {}
        preset = {k: v for k, v in rwr.PRESETS[family].items() if k in ("eta", "per_prompt")}
        flags = dict(epochs=2, updates=2, inverse_temperature=5.0) | flags
        return quick(rwr, model=family, dtype="float32", **{**preset, **more, **flags})

    return make


def rows_of(args):
    with open(args.out + "/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    return [{k: v for k, v in row.items() if k != "seconds" and "eval/" not in k} for row in rows]


@families
@pytest.mark.parametrize("objective", ["rwr", "rwr-sparse"])
def test_a_run_resumes_bit_for_bit(small, family, objective, tmp_path):
    """Three iterations are one, a stop and two; what they export is the moving average."""
    flags = dict(P=2, G=2, micro_batch=3, save_every=1, objective=objective, guidance=2.0, ema=0.5)
    whole = small(family, iterations=3, out=str(tmp_path / "whole"), **flags)
    rwr.main(whole)
    part = small(family, iterations=1, out=str(tmp_path / "part"), **flags)
    rwr.main(part)
    rwr.main(dataclasses.replace(part, iterations=3, resume=part.out))
    trained = [[row for row in rows_of(args) if "err" in row] for args in (whole, part)]
    assert trained[0] == trained[1]
    assert len(trained[0]) == 3
    assert all(0 < row["w_share"] <= 1 and row["grad_norm"] > 0 for row in trained[0])
    visits = 2 * (0.5 if objective == "rwr-sparse" else 1)  # T = 3; guidance doubles both
    assert [row["nfe"] for row in trained[0]] == pytest.approx([2 * 3 + 2 * visits] * 3)
    one, other = (torch.load(f"{a.out}/state.pt", weights_only=True) for a in (whole, part))
    for key in ("params", "ema", "optimizer"):
        exact(one[key], other[key])
    exported = load_file(f"{whole.out}/lora/pytorch_lora_weights.safetensors").values()
    assert sorted(float(x.sum()) for x in exported) == sorted(float(x.sum()) for x in one["ema"])
    settings = json.loads((tmp_path / "whole/lora/settings.json").read_text())
    assert settings["guidance"] == 2.0


def test_a_failed_reward_is_left_out_of_the_data(small, monkeypatch):
    import rewards

    def score(images, prompts, metas):
        values = images[:, 0].float().mean((1, 2)).tolist()
        return [math.nan if i == 1 and len(values) == 4 else v for i, v in enumerate(values)]

    monkeypatch.setitem(rewards.REWARDS, "flaky", lambda device, dtype: rewards.Reward(score))
    args = small("tiny", reward="flaky:1,red:0.5", P=2, G=2, micro_batch=4)
    rwr.main(args)
    (row, _) = rows_of(args)
    assert row["reward/fail_frac"] == 0.25
    assert row["nfe"] == pytest.approx(3 + 2 * 3 / 4)
    assert all(math.isfinite(value) for value in row.values())


def test_several_rewards_add_up_raw(small, monkeypatch):
    seen, original = [], rwr.sample_weights
    monkeypatch.setattr(rwr, "sample_weights", lambda r, a: seen.append(r) or original(r, a))
    args = small("tiny", reward="red:2,jpeg_compressibility:-1", P=2, G=2, micro_batch=4)
    rwr.main(args)
    (row, _) = rows_of(args)
    assert seen[0].mean().item() == pytest.approx(row["reward/mean"], rel=1e-5)
    wanted = 2 * row["reward/red"] - row["reward/jpeg_compressibility"]
    assert row["reward/mean"] == pytest.approx(wanted, rel=1e-5)


CHANGES = dict(
    objective="rwr-sparse", inverse_temperature=0.5, per_prompt=False, epochs=1, updates=1,
    train_cfg=False, eta=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.mark.parametrize("name", [*CHANGES, "top_share"])
def test_every_flag_of_its_own_changes_the_training(small, tmp_path, outcomes, name):
    flags = dict(P=2, G=2, micro_batch=4, guidance=2.0)
    flags |= dict(objective="rwr-sparse") if name == "top_share" else {}
    value = CHANGES.get(name, 1.0)
    ends = []
    for key, more in ((str(flags), {}), (name, {name: value})):
        if key not in outcomes:
            args = small("tiny", **{**flags, **more}, out=str(tmp_path / f"run{len(ends)}"))
            rwr.main(args)
            outcomes[key] = torch.load(f"{args.out}/state.pt", weights_only=True)["params"]
        ends.append(outcomes[key])
    assert any(not torch.equal(a, b) for a, b in zip(*ends))
    own = {f.name for f in dataclasses.fields(Args)} - {
        f.name for f in dataclasses.fields(ddpo.Args)
    }
    assert own <= {*CHANGES, "top_share"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(inverse_temperature=-1.0), "--inverse-temperature: -1.0 is not"),
        (dict(inverse_temperature=math.nan), "--inverse-temperature: nan is not"),
        (dict(top_share=0.0), "--top-share: 0.0 is not"),
        (dict(top_share=1.5), "--top-share: 1.5 is above 1"),
        (dict(epochs=0), "--epochs: 0 is not"),
        (dict(updates=0), "--updates: 0 is not"),
        (dict(eta=-1.0), "--eta: -1.0 is not"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_one_line(flags, line):
    with pytest.raises(SystemExit) as stop:
        rwr.check_own(Args(**flags))
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code


@pytest.mark.parametrize("model", rwr.PRESETS)
@pytest.mark.parametrize("size", [(), ("--P", "1", "--G", "2")])
def test_presets_are_accepted(monkeypatch, tmp_path, model, size):
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    monkeypatch.setattr(sys, "argv", ["rwr", "--model", model, "--device", "cpu", *size])
    args = rwr.parse_args()
    assert args.out.startswith(f"runs/rwr-{model}-")
    assert args.micro_batch <= args.P * args.G
