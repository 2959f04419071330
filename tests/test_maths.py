"""Part I of common.py against torch.distributions, diffusers, closed forms and plain loops."""

import copy
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import common

ROOT = Path(__file__).parent.parent
SHAPES = [(3, 4, 2, 5), (3, 6, 4)]  # SD and SD3 latents; FLUX's packed ones
STEPS = {  # name: (step, levels now and next at which std > 0, noise level)
    "sde": (common.flow_sde_step, (0.7, 0.55), 0.8),
    "sde at 1": (common.flow_sde_step, (1.0, 0.9), 0.8),
    "cps": (common.flow_cps_step, (0.7, 0.55), 0.8),
    "dance": (common.flow_dance_step, (0.7, 0.55), 0.3),
    "ddim": (common.ddim_step, (0.3, 0.45), 0.9),
}
every_step = pytest.mark.parametrize("name", STEPS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["rank 4", "rank 3"])


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def latents(shape, n=3, dtype=torch.float32):
    return [randn(*shape, seed=i, dtype=dtype) for i in range(n)]


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def elementwise_mean(x):
    return torch.stack([row.mean() for row in x])


# ---- import ----


def test_import_loads_torch_and_the_standard_library_only():
    code = (
        "import sys, torch; before = set(sys.modules); import common;"
        "print('\\n'.join(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    new = {name.split(".")[0] for name in run.stdout.split()}
    assert "common" in new
    assert new - {"common"} <= set(sys.stdlib_module_names)


def test_part_one_works_when_copied_alone():
    part_one = (ROOT / "common.py").read_text().split("\n# ---- Part II")[0]
    names = {}
    exec(compile(part_one, "copied.py", "exec"), names)
    x, v = latents((2, 3, 2), n=2)
    assert torch.equal(
        names["flow_sde_step"](x, v, 0.5, 0.4, 0.7).mean,
        common.flow_sde_step(x, v, 0.5, 0.4, 0.7).mean,
    )


# ---- conversions ----

level = st.floats(0.05, 0.95)


@given(level, st.integers(0, 99))
def test_flow_round_trip_and_error_identities(t, seed):
    x0, eps, x_hat = (randn(2, 3, 2, 2, seed=seed + i, dtype=torch.float64) for i in range(3))
    x_t = common.interpolate(x0, eps, t)
    v = eps - x0
    assert_close(common.velocity_to_x0(x_t, v, t), x0, rtol=0, atol=1e-12)
    assert_close(common.velocity_to_eps(x_t, v, t), eps, rtol=0, atol=1e-12)
    v_hat = (x_t - x_hat) / t
    eps_hat = common.velocity_to_eps(x_t, v_hat, t)
    assert_close(common.interpolate(x_hat, eps_hat, t), x_t, rtol=0, atol=1e-12)
    mse_x, mse_eps, mse_v = (
        common.denoising_error(a, b) for a, b in [(x_hat, x0), (eps_hat, eps), (v_hat, v)]
    )
    assert_close(mse_x, t**2 * mse_v, rtol=1e-10, atol=0)
    assert_close(mse_eps, (1 - t) ** 2 * mse_v, rtol=1e-10, atol=1e-15)
    assert_close(mse_x, (t / (1 - t)) ** 2 * mse_eps, rtol=1e-10, atol=1e-15)


@given(level, st.integers(0, 99))
def test_variance_preserving_round_trip_and_error_identities(abar, seed):
    x0, eps, x_hat = (randn(2, 3, 2, 2, seed=seed + i, dtype=torch.float64) for i in range(3))
    a, b = math.sqrt(abar), math.sqrt(1 - abar)
    x_t = a * x0 + b * eps
    assert_close(common.eps_to_x0(x_t, eps, abar), x0, rtol=0, atol=1e-12)
    v = common.eps_to_velocity(x_t, eps, abar)
    assert_close(v, a * eps - b * x0, rtol=0, atol=1e-12)
    assert_close(a * x_t - b * v, x0, rtol=0, atol=1e-12)
    assert_close(b * x_t + a * v, eps, rtol=0, atol=1e-12)
    eps_hat = (x_t - a * x_hat) / b
    v_hat = common.eps_to_velocity(x_t, eps_hat, abar)
    mse_x, mse_eps, mse_v = (
        common.denoising_error(p, q) for p, q in [(x_hat, x0), (eps_hat, eps), (v_hat, v)]
    )
    assert_close(mse_x, (b / a) ** 2 * mse_eps, rtol=1e-10, atol=1e-15)
    assert_close(mse_x, b**2 * mse_v, rtol=1e-10, atol=1e-15)
    assert_close(mse_eps, a**2 * mse_v, rtol=1e-10, atol=1e-15)


def test_conversions_match_diffusers():
    x0, eps, _ = latents((3, 4, 2, 2))
    ddpm, timesteps = DDPMScheduler(), torch.tensor([3, 500, 990])
    abar = ddpm.alphas_cumprod[timesteps]
    x_t = ddpm.add_noise(x0, eps, timesteps)
    expected = ddpm.get_velocity(x0, eps, timesteps)
    # rel: at 990 fp32 rounding of eps is amplified by 1/sqrt(abar) = 150
    assert_close(common.eps_to_velocity(x_t, eps, abar), expected, rtol=1e-3, atol=1e-4)
    assert_close(common.eps_to_x0(x_t, eps, abar), x0, rtol=1e-3, atol=1e-4)
    flow = FlowMatchEulerDiscreteScheduler()
    t = flow.timesteps[[10, 400, 900]]
    assert_close(common.interpolate(x0, eps, t / 1000), flow.scale_noise(x0, t, eps))


def test_interpolate_ends():
    x0, eps, _ = latents((2, 3, 4))
    assert torch.equal(common.interpolate(x0, eps, 0.0), x0)
    assert torch.equal(common.interpolate(x0, eps, 1.0), eps)


FUNCTIONS = {  # every function of two latents and levels, for what all of them must keep
    "interpolate": (common.interpolate, 1),
    "velocity_to_x0": (common.velocity_to_x0, 1),
    "velocity_to_eps": (common.velocity_to_eps, 1),
    "eps_to_x0": (common.eps_to_x0, 1),
    "eps_to_velocity": (common.eps_to_velocity, 1),
    "euler_step": (common.euler_step, 2),
    "flow_sde_step": (lambda x, v, t, s: common.flow_sde_step(x, v, t, s, 0.7).mean, 2),
    "flow_cps_step": (lambda x, v, t, s: common.flow_cps_step(x, v, t, s, 0.7).mean, 2),
    "flow_dance_step": (lambda x, v, t, s: common.flow_dance_step(x, v, t, s, 0.7).mean, 2),
    "ddim_step": (lambda x, e, s, t: common.ddim_step(x, e, t, s, 0.7).mean, 2),
    "std of sde": (lambda x, v, t, s: common.flow_sde_step(x, v, t, s, 0.7).std + 0 * x, 2),
    "logp of sde": (
        lambda x, v, t, s: common.flow_sde_step(x, v, t, s, 0.7, x_next=v.flip(-1)).logp,
        2,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@every_shape
def test_levels_may_be_floats_0d_or_per_sample(name, shape):
    function, n_levels = FUNCTIONS[name]
    x, y, _ = latents(shape, dtype=torch.float64)
    now, then = f64([0.9, 0.5, 0.3]), f64([0.7, 0.4, 0.1])
    levels = (now, then)[:n_levels]
    batched = function(x, y, *levels)
    assert batched.shape == (x.shape[:1] if name.startswith("logp") else x.shape)
    for i in range(3):
        alone = slice(i, i + 1)
        as_floats = function(x[alone], y[alone], *(c[i].item() for c in levels))
        as_0d = function(x[alone], y[alone], *(c[i] for c in levels))
        assert_close(batched[alone], as_floats, rtol=1e-14, atol=1e-14)
        assert torch.equal(as_floats, as_0d)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_and_float64_kept(name, half):
    function, n_levels = FUNCTIONS[name]
    x, y, _ = latents((2, 3, 4), dtype=half)
    now, then = torch.tensor([0.75, 0.5]), torch.tensor([0.5, 0.25])  # exact in half
    levels = (now, then)[:n_levels]
    result = function(x, y, *(c.to(half) for c in levels))
    assert result.dtype == torch.float32
    assert torch.equal(result, function(x.float(), y.float(), *levels))
    for mixed in [(x.double(), y), (x, y.double()), (x.double(), y.float())]:
        assert function(*mixed, *levels).dtype == torch.float64


@pytest.mark.parametrize("name", FUNCTIONS)
def test_levels_follow_the_latents_to_their_device(name):
    function, n_levels = FUNCTIONS[name]
    x = torch.empty(2, 3, 4, device="meta")  # stands for a GPU: it refuses to meet a CPU tensor
    levels = (torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.4]))[:n_levels]
    assert function(x, x, *levels).device.type == "meta"


# ---- Gaussians ----


@every_shape
def test_logp_and_kl_are_means_over_elements_of_torch_distributions(shape):
    x, mean, other = latents(shape, dtype=torch.float64)
    full = randn(*shape, seed=9, dtype=torch.float64).exp()
    per_sample = full.flatten(1)[:, 0].view(-1, *[1] * (len(shape) - 1))
    for std in (0.3, f64(0.3), per_sample, full):
        p, q = Normal(mean, std), Normal(other, std)
        logp, kl = common.gaussian_logp(x, mean, std), common.gaussian_kl(mean, other, std)
        assert logp.shape == kl.shape == (3,)
        assert_close(logp, elementwise_mean(p.log_prob(x)), rtol=1e-12, atol=0)
        assert_close(kl, elementwise_mean(kl_divergence(p, q)), rtol=1e-12, atol=0)


def test_logp_gradient():
    x, mean, _ = latents((3, 2, 2), dtype=torch.float64)
    mean.requires_grad_()
    std = f64([0.5, 0.0, 2.0]).view(3, 1, 1)
    assert torch.autograd.gradcheck(lambda m: common.gaussian_logp(x, m, std), mean)
    assert torch.autograd.gradcheck(lambda m: common.gaussian_kl(m, x, std), mean)
    common.gaussian_logp(x, mean, std).sum().backward()
    expected = (x - mean.detach()) / std**2 / 4
    expected[1] = 0
    assert_close(mean.grad, expected)


@pytest.mark.parametrize("std", [0.0, torch.tensor(0.0), torch.tensor([0.0, 0.5]).view(2, 1, 1)])
def test_zero_std_is_deterministic_without_nan_in_value_or_gradient(std):
    x, mean, _ = latents((2, 3, 4))
    x[0, 0, 0] = math.inf  # the element is not looked at
    mean[0, 1, 1] = math.nan
    mean.requires_grad_()
    logp, kl = common.gaussian_logp(x, mean, std), common.gaussian_kl(mean, x, std)
    assert logp[0] == kl[0] == 0
    (logp.sum() + 3 * kl.sum()).backward()  # 3: their gradients would cancel
    assert torch.equal(mean.grad[0], torch.zeros(3, 4))
    assert mean.grad.isfinite().all()
    moving = torch.as_tensor(std).expand(2, 1, 1)[1].item() > 0
    assert [bool(o[1].any()) for o in (logp, kl, mean.grad)] == [moving] * 3


def test_logp_and_kl_of_half_precision_are_computed_in_fp32():
    x, mean, _ = latents((2, 3, 4), dtype=torch.bfloat16)
    for function in (common.gaussian_logp, common.gaussian_kl):
        expected = function(x.float(), mean.float(), 0.3)
        assert expected.dtype == torch.float32
        assert torch.equal(function(x, mean, 0.3), expected)
        assert torch.equal(function(x.float(), mean, 0.3), expected)
        assert function(x, mean.double(), 0.3).dtype == torch.float64
    per_sample = torch.tensor([0.5, 0.25]).view(2, 1, 1)  # moves with the latents
    meta = torch.empty(2, 3, 4, device="meta")
    assert common.gaussian_logp(meta, meta, per_sample).device.type == "meta"


def test_std_that_is_zero_for_some_elements_only():
    x, mean, _ = latents((1, 2, 2), dtype=torch.float64)
    std = f64([[[0.0, 1.5], [1.5, 0.0]]])
    live = Normal(mean, 1.5).log_prob(x) * (std > 0)
    assert_close(common.gaussian_logp(x, mean, std), live.mean().view(1))


def test_std_gradient_is_finite_at_zero():
    x, mean, _ = latents((2, 3), dtype=torch.float64)
    std = f64([[0.0], [0.7]]).requires_grad_()
    common.gaussian_logp(x, mean, std).sum().backward()
    d = (x - mean)[1]
    assert std.grad[0] == 0
    assert_close(std.grad[1], (d.square() / 0.7**3 - 1 / 0.7).mean().view(1))


def test_one_dimensional_problems_keep_their_batch():
    x = torch.tensor([0.0, 1.0, 3.0])
    assert_close(common.gaussian_logp(x, torch.zeros(3), 1.0), Normal(0.0, 1.0).log_prob(x))


@given(st.floats(0.01, 3), st.floats(-4, 4), st.integers(0, 99))
def test_kl_is_quadratic(std, scale, seed):
    mean = randn(2, 3, 2, seed=seed, dtype=torch.float64)
    d = randn(2, 3, 2, seed=seed + 1, dtype=torch.float64)
    one = common.gaussian_kl(mean + d, mean, std)
    assert (one > 0).all()
    assert_close(common.gaussian_kl(mean + scale * d, mean, std), scale**2 * one)
    assert torch.equal(common.gaussian_kl(mean, mean, std), torch.zeros(2).double())


def test_repeating_the_latent_leaves_logp_unchanged():
    x, mean, _ = latents((2, 3, 4, 4), dtype=torch.float64)
    big = [z.repeat(1, 1, 2, 3) for z in (x, mean)]
    assert_close(common.gaussian_logp(*big, 0.4), common.gaussian_logp(x, mean, 0.4))


# ---- what every step keeps ----


@every_step
@every_shape
def test_step_draws_and_scores(name, shape):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents(shape)
    drawn = step(x, v, now, then, eta, noise=z)
    assert all(o.dtype == torch.float32 for o in drawn)
    assert drawn.mean.shape == drawn.x_next.shape == shape
    assert drawn.logp.shape == (3,)
    assert torch.equal(drawn.x_next, drawn.mean + drawn.std * z)
    # closed form at x' = mean + std z
    expected = -0.5 * elementwise_mean(z.square()) - drawn.std.log() - math.log(2 * math.pi) / 2
    assert_close(drawn.logp, expected, rtol=1e-5, atol=1e-5)
    # scoring the stored transition again gives the same bits: rho = 1
    again = step(x, v, now, then, eta, x_next=drawn.x_next)
    assert torch.equal(again.logp, drawn.logp)
    assert torch.equal(again.x_next, drawn.x_next)
    # no noise: the mean, where the density is highest
    mode = step(x, v, now, then, eta)
    assert torch.equal(mode.x_next, mode.mean)
    assert torch.equal(mode.mean, drawn.mean)
    assert (mode.logp > drawn.logp).all()
    # a given x_next wins over noise
    other = step(x, v, now, then, eta, noise=z, x_next=v)
    assert torch.equal(other.x_next, v)


@every_step
def test_step_is_equivariant_and_samples_are_independent(name):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents((3, 4, 2, 5))
    whole = step(x, v, now, then, eta, noise=z)
    order = torch.tensor([2, 0, 1])
    shuffled = step(x[order], v[order], now, then, eta, noise=z[order])
    assert torch.equal(shuffled.x_next, whole.x_next[order])
    assert torch.equal(shuffled.logp, whole.logp[order])
    changed = v.clone()
    changed[1] += 1
    other = step(x, changed, now, then, eta, x_next=whole.x_next)
    assert torch.equal(other.logp[[0, 2]], whole.logp[[0, 2]])
    assert other.logp[1] != whole.logp[1]
    flipped = step(x.flip(3), v.flip(3), now, then, eta, noise=z.flip(3))
    assert torch.equal(flipped.x_next, whole.x_next.flip(3))
    assert_close(flipped.logp, whole.logp)


@every_step
def test_log_ratio_closed_form(name):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents((3, 4, 2, 5), dtype=torch.float64)
    old = step(x, v, now, then, eta, noise=z)
    new = step(x, v + 0.1 * v.flip(1), now, then, eta, x_next=old.x_next)
    d = new.mean - old.mean
    expected = elementwise_mean(z * d) / old.std - elementwise_mean(d**2) / (2 * old.std**2)
    assert_close(new.logp - old.logp, expected, rtol=1e-9, atol=1e-12)
    kl = common.gaussian_kl(new.mean, old.mean, old.std)
    assert_close(kl, elementwise_mean(d**2) / (2 * old.std**2))


@every_step
def test_gradient_of_logp_is_the_policy_gradient_also_while_drawing(name):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents((2, 3, 4), dtype=torch.float64)
    v.requires_grad_()
    drawn = step(x, v, now, then, eta, noise=z)
    stored = step(x, v, now, then, eta, x_next=drawn.x_next.detach())
    attached = step(x, v, now, then, eta, x_next=drawn.x_next)
    grads = [
        torch.autograd.grad(o.logp.sum(), v, retain_graph=True)[0]
        for o in (drawn, stored, attached)
    ]
    # d mean / d v is one number: the same for every element
    gain = torch.autograd.grad(drawn.mean.sum(), v, retain_graph=True)[0].flatten()[0]
    assert_close(grads[0], z / stored.std * gain / 12)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    # while x_next itself stays differentiable, for those who push a reward's gradient through it
    assert torch.autograd.grad(drawn.x_next.sum(), v)[0].abs().min() > 0


@every_step
def test_step_upcasts_noise_and_stored_latents(name):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents((2, 3, 4), dtype=torch.bfloat16)
    drawn = step(x, v, now, then, eta, noise=z)
    assert [o.dtype for o in drawn] == [torch.float32] * 4
    assert torch.equal(drawn.x_next, drawn.mean + drawn.std * z.float())
    scored = step(x, v, now, then, eta, x_next=z)
    assert [o.dtype for o in scored] == [torch.float32] * 4
    assert torch.equal(scored.logp, step(x, v, now, then, eta, x_next=z.float()).logp)
    wide = step(x.float(), v.float(), now, then, eta, noise=z.double())
    assert wide.x_next.dtype == wide.logp.dtype == torch.float64


@every_step
def test_mixed_levels_and_a_noise_level_per_sample(name):
    step, (now, then), eta = STEPS[name]
    x, v, z = latents((3, 2, 4), dtype=torch.float64)
    etas = f64([0.0, eta, eta / 2])
    batched = step(x, v, now, then, etas, noise=z)
    for i, e in enumerate(etas.tolist()):
        alone = step(x[i : i + 1], v[i : i + 1], now, then, e, noise=z[i : i + 1])
        assert_close(batched.x_next[i : i + 1], alone.x_next)
        assert_close(batched.logp[i : i + 1], alone.logp)
    assert batched.logp[0] == 0


@every_step
def test_no_noise_level_is_deterministic_and_finite(name):
    step, (now, then), _ = STEPS[name]
    x, v, z = latents((3, 2, 4))
    v.requires_grad_()
    out = step(x, v, now, then, 0.0, noise=z)
    assert out.std.abs().max() == 0
    assert torch.equal(out.x_next, out.mean)
    out.logp.sum().backward()
    assert torch.equal(out.logp, torch.zeros(3))
    assert torch.equal(v.grad, torch.zeros_like(v))


@every_step
@pytest.mark.parametrize("noise_level", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("now", [1.0, 0.9999, 0.999, 0.998, 0.5, 1e-4, 0.0])
def test_every_end_of_the_schedule_is_finite_in_value_and_gradient(name, now, noise_level):
    step = STEPS[name][0]
    x, v, z = latents((2, 3, 4))
    v.requires_grad_()
    for then in (0.0, now / 2, now):
        levels = (now, then)
        if name == "ddim":  # x0 is undefined at abar = 0; no scheduler goes there
            levels = (max(1 - now, 1e-3), max(1 - then, 1e-3))
        for kwargs in ({"noise": z}, {"x_next": x}):
            out = step(x, v, *levels, noise_level, **kwargs)
            loss = (out.logp.exp() + out.logp).sum() + out.mean.square().sum()
            grad = torch.autograd.grad(loss, v)[0]
            assert all(o.isfinite().all() for o in (*out, grad)), levels


# ---- Euler and the flow SDE ----


def euler_scheduler(grid):
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=list(grid[:-1]))
    return scheduler


@every_shape
def test_euler_and_a_0_equal_diffusers_bit_for_bit(shape):
    scheduler = euler_scheduler([1.0, 0.9, 0.55, 0.2, 0.01, 0.0])
    x = y = randn(*shape)
    for i, timestep in enumerate(scheduler.timesteps):
        v = randn(*shape, seed=i + 1)
        t, s = scheduler.sigmas[i], scheduler.sigmas[i + 1]
        euler = common.euler_step(x, v, t, s)
        assert torch.equal(common.flow_sde_step(x, v, t, s, 0.0).mean, euler)
        assert torch.equal(common.flow_dance_step(x, v, t, s, 0.0).mean, euler)
        cps = common.flow_cps_step(x, v, t, s, 0.0).mean
        assert_close(cps, euler, rtol=0, atol=1e-6)
        x, y = euler, scheduler.step(v, timestep, y).prev_sample
        assert torch.equal(x, y)


@given(st.floats(0.01, 0.998), st.floats(0, 1), st.floats(0, 2), st.integers(0, 99))
def test_flow_sde_is_the_formula_of_the_paper(t, fraction, a, seed):
    s = t * fraction
    x, v = (randn(2, 3, 2, seed=seed + i, dtype=torch.float64) for i in range(2))
    sigma, h = a * math.sqrt(t / (1 - t)), t - s
    score = -(x + (1 - t) * v) / t  # of the marginal
    drift = v - 0.5 * sigma**2 * score
    step = common.flow_sde_step(x, v, t, s, a)
    assert_close(step.mean, x - h * drift, rtol=1e-9, atol=1e-9)
    assert step.std.item() == pytest.approx(sigma * math.sqrt(h), abs=1e-12)


@pytest.mark.parametrize("t", [1.0, 0.9999, 0.99937, 0.999])
@pytest.mark.parametrize("s", [0.96, 0.5, 0.0, 0.9985])
@pytest.mark.parametrize("a", [0.7, 1.3, 0.1])
def test_flow_sde_counts_t_near_one_as_one(t, s, a):
    x, v, _ = latents((2, 3, 2), dtype=torch.float64)
    for level in (t, f64([t, 0.5])):
        step = common.flow_sde_step(x, v, level, s if s < 0.5 else min(s, t), a)
        std = step.std.flatten()[0].item()
        assert std == a  # exactly, however long the step
        expected = x * (1 - a**2 / 2) - (t - s) * v
        assert_close(step.mean[0], expected[0], rtol=1e-13, atol=1e-13)
    in_fp32 = common.flow_sde_step(x.float(), v.float(), t, s, a)
    assert torch.equal(in_fp32.std, torch.tensor(a))
    in_half = common.flow_sde_step(x, v, torch.tensor(t, dtype=torch.bfloat16), s, a)
    assert in_half.std.item() == a


def test_flow_sde_just_below_the_singular_end_is_the_formula():
    x, v, _ = latents((2, 3, 2), dtype=torch.float64)
    t, s, a = 0.9989, 0.9, 0.7
    assert common.flow_sde_step(x, v, t, s, a).std.item() == pytest.approx(
        a * math.sqrt(t * (t - s) / (1 - t)), rel=1e-12
    )


# ---- CPS, Dance ----


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_cps_formula(t, fraction, eta, seed):
    s = t * fraction
    x, v = (randn(2, 3, 2, seed=seed + i, dtype=torch.float64) for i in range(2))
    step = common.flow_cps_step(x, v, t, s, eta)
    std = s * math.sin(eta * math.pi / 2)
    x0, eps = x - t * v, x + (1 - t) * v
    expected = (1 - s) * x0 + math.sqrt(max(s**2 - std**2, 0)) * eps
    assert_close(step.mean, expected, rtol=0, atol=1e-7)  # sqrt(s^2 - std^2) cancels at eta = 1
    assert step.std.item() == pytest.approx(std, abs=1e-15)


def test_cps_last_step_gives_x0():
    x, v, z = latents((2, 3, 2))
    last = common.flow_cps_step(x, v, 0.1, 0.0, 0.8, noise=z)
    assert torch.equal(last.x_next, common.velocity_to_x0(x, v, 0.1))
    assert torch.equal(last.logp, torch.zeros(2))


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_dance_formula(t, fraction, eta, seed):
    s = t * fraction
    x, v = (randn(2, 3, 2, seed=seed + i, dtype=torch.float64) for i in range(2))
    step = common.flow_dance_step(x, v, t, s, eta)
    score = -(x + (1 - t) * v) / t
    assert_close(step.mean, x - (t - s) * (v - 0.5 * eta**2 * score), rtol=1e-10, atol=1e-12)
    assert step.std.item() == pytest.approx(eta * math.sqrt(t - s), abs=1e-15)


# ---- DDIM ----


def ddim_scheduler(offset, alpha_one, n=10):
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=offset,
        set_alpha_to_one=alpha_one,
        clip_sample=False,
    )
    scheduler.set_timesteps(n)
    return scheduler


@every_shape
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("alpha_one", [False, True])
def test_ddim_equals_diffusers_down_to_the_last_step(shape, eta, offset, alpha_one):
    scheduler = ddim_scheduler(offset, alpha_one)
    x = randn(*shape)
    for i, t in enumerate(scheduler.timesteps.tolist()):
        eps, z = randn(*shape, seed=i + 1), randn(*shape, seed=i + 50)
        then = t - 100
        abar_s = scheduler.final_alpha_cumprod if then < 0 else scheduler.alphas_cumprod[then]
        abar_t = scheduler.alphas_cumprod[t]
        theirs = scheduler.step(eps, t, x, eta=eta, variance_noise=z).prev_sample
        ours = common.ddim_step(x, eps, abar_t, abar_s, eta, noise=z)
        if eta == 0:
            assert torch.equal(ours.x_next, theirs)
        else:
            assert_close(ours.x_next, theirs, rtol=1e-4, atol=1e-4)
        assert ours.logp.isfinite().all()
        x = theirs
    # offset 0 ends at timestep 0 and alpha_one at abar = 1: deterministic steps
    assert (ours.std == 0) == (eta == 0 or alpha_one or offset == 0)


def test_ddim_with_levels_per_sample_equals_diffusers_one_by_one():
    scheduler = ddim_scheduler(1, False)
    x, eps, z = latents((3, 4, 2, 2))
    now = torch.tensor([901, 501, 1])
    abar = scheduler.alphas_cumprod
    batched = common.ddim_step(x, eps, abar[now], abar[(now - 100).clamp(min=0)], 1.0, noise=z)
    for i, t in enumerate(now.tolist()):
        one = slice(i, i + 1)
        step = scheduler.step(eps[one], t, x[one], eta=1.0, variance_noise=z[one])
        assert_close(batched.x_next[one], step.prev_sample, rtol=1e-4, atol=1e-4)


def test_ddim_std_is_accurate_in_fp32():
    A, A_next = torch.tensor(0.9982960224151611), torch.tensor(0.9991499781608582)
    x = torch.zeros(1, 1, 1)
    exact = math.sqrt((1 - A_next.item()) / (1 - A.item()) * (1 - A.item() / A_next.item()))
    assert common.ddim_step(x, x, A, A_next, 1.0).std.item() == pytest.approx(exact, rel=3e-6)


@pytest.mark.parametrize(("abar_t", "abar_s"), [(1.0, 1.0), (0.9, 0.9), (0.9, 1.0), (0.9, 0.8)])
def test_ddim_degenerate_levels(abar_t, abar_s):
    x, eps, z = latents((2, 3, 2), dtype=torch.float64)
    out = common.ddim_step(x, eps, abar_t, abar_s, 1.0, noise=z)
    assert out.std == 0
    x0 = (x - math.sqrt(1 - abar_t) * eps) / math.sqrt(abar_t)
    assert_close(out.x_next, math.sqrt(abar_s) * x0 + math.sqrt(1 - abar_s) * eps)


def test_ddim_eta_above_one_clips_the_direction():
    x, eps, _ = latents((2, 3, 2), dtype=torch.float64)
    out = common.ddim_step(x, eps, 0.01, 0.9, 1.5)
    assert out.std**2 > 0.1
    assert_close(out.mean, math.sqrt(0.9) * (x - math.sqrt(0.99) * eps) / 0.1)


# ---- advantages ----

reward = st.floats(-50, 50, width=32)


def reference_advantages(r, G, std, eps):
    """Plain python, for finite rewards."""
    out = []
    everything = statistics.pstdev(r)
    for g in range(0, len(r), G):
        group = r[g : g + G]
        mean = statistics.fmean(group)
        scale = {"group": statistics.pstdev(group) + eps, "global": everything + eps, "none": 1}
        out += [0.0 if len(set(group)) == 1 else (x - mean) / scale[std] for x in group]
    return torch.tensor(out, dtype=torch.float64)


groups = st.integers(2, 6).flatmap(
    lambda G: st.tuples(
        st.just(G),
        st.integers(1, 4).flatmap(lambda P: st.lists(reward, min_size=P * G, max_size=P * G)),
    )
)
every_std = pytest.mark.parametrize("std", ["group", "global", "none"])


@every_std
@given(groups, st.sampled_from([1e-4, 1e-2, 1.0]))
def test_advantages_equal_a_plain_loop(std, case, eps):
    G, r = case
    A = common.group_advantages(torch.tensor(r, dtype=torch.float64), G, std, eps)
    assert A.dtype == torch.float64
    assert_close(A, reference_advantages(r, G, std, eps), rtol=1e-9, atol=1e-9)
    assert A.view(-1, G).sum(1).abs().max() < 1e-7 * (1 + max(map(abs, r)))
    in_fp32 = common.group_advantages(torch.tensor(r), G, std, eps)
    assert in_fp32.dtype == torch.float32
    assert_close(in_fp32, A.float())  # r is exact in fp32, the arithmetic float64


@given(groups)
def test_group_std_gives_the_closed_forms(case):
    G, r = case
    A = common.group_advantages(f64(r), G).view(-1, G)
    sd = torch.tensor([statistics.pstdev(r[i : i + G]) for i in range(0, len(r), G)]).double()
    expected = (sd / (sd + 1e-4)).square() * G
    assert_close(A.square().sum(1), expected, rtol=1e-6, atol=1e-9)
    assert A.abs().max() <= math.sqrt(G - 1) + 1e-9


@every_std
def test_advantages_permute_shift_scale_and_keep_groups_apart(std):
    r = randn(12, dtype=torch.float64)
    A = common.group_advantages(r, 4, std, 1e-9)
    assert_close(common.group_advantages(r + 3, 4, std, 1e-9), A, rtol=1e-7, atol=1e-7)
    scaled = common.group_advantages(7 * r, 4, std, 1e-9)
    assert_close(scaled, 7 * A if std == "none" else A, rtol=1e-6, atol=1e-6)
    order = torch.tensor([3, 1, 0, 2, 6, 7, 5, 4, 8, 9, 11, 10])
    assert_close(common.group_advantages(r[order], 4, std, 1e-9), A[order])
    changed = r.clone()
    changed[:4] *= 2
    others = common.group_advantages(changed, 4, std, 1e-9)[4:]
    assert torch.equal(others, A[4:]) == (std != "global")


def test_global_std_is_that_of_all_rewards_about_their_own_mean():
    r = torch.tensor([0.0, 1.0, 10.0, 11.0])
    A = common.group_advantages(r, 2, "global", 0.0)
    assert_close(A, torch.tensor([-0.5, 0.5, -0.5, 0.5]) / statistics.pstdev(r.tolist()))


@every_std
@pytest.mark.parametrize("value", [26.1, 0.1, -1e-3, 1e6, 0.0, 1e30])
@pytest.mark.parametrize("eps", [1e-4, 1e-8, 0.0])
def test_equal_rewards_give_exactly_zero(std, value, eps):
    for G in (2, 3, 7, 24):
        r = torch.cat([torch.full((G,), value), torch.full((G,), value * 1.1)])
        A = common.group_advantages(r, G, std, eps)
        assert torch.equal(A, torch.zeros(2 * G))
    # beside a group that differs, too
    r = torch.tensor([value] * 3 + [1.0, 2.0, 3.0])
    A = common.group_advantages(r, 3, std)
    assert torch.equal(A[:3], torch.zeros(3))
    assert A[5] > 0 > A[3]


@every_std
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bad_reward_gets_zero_and_touches_no_other(std, bad, dtype):
    r = torch.tensor([1.0, bad, 3.0, 8.0, 5.0, 5.5, bad, bad, bad, bad, 2.0, bad], dtype=dtype)
    A = common.group_advantages(r, 3, std).double()
    finite = [1.0, 3.0, 8.0, 5.0, 5.5, 2.0]
    everything = statistics.pstdev(finite)
    expected = torch.zeros(12).double()
    for members in ([0, 2], [3, 4, 5]):
        group = [r[i].item() for i in members]
        scale = {"group": statistics.pstdev(group), "global": everything}.get(std)
        for i in members:
            d = r[i].item() - statistics.fmean(group)
            expected[i] = d if std == "none" else d / (scale + 1e-4)
    assert_close(A, expected, rtol=1e-6, atol=1e-7)
    # nothing but bad ones, and a group with one member left: exactly 0
    assert torch.equal(A[6:], torch.zeros(6).double())
    nothing = common.group_advantages(torch.full((4,), bad), 2, std)
    assert torch.equal(nothing, torch.zeros(4))


@every_std
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("value", [0.1, -0.1])
def test_equal_rewards_beside_a_bad_one_give_exactly_zero(std, bad, value):
    assert sum([0.1] * 3) / 3 != 0.1  # the mean alone would not do
    r = torch.tensor([value, value, bad, value], dtype=torch.float64)
    A = common.group_advantages(r, 4, std, eps=0.0)
    assert torch.equal(A, torch.zeros(4, dtype=torch.float64))


def test_advantage_clip_and_defaults():
    r = torch.tensor([0.0] * 9 + [1.0])
    A = common.group_advantages(r, 10)
    assert A[-1].item() == pytest.approx(0.9 / (0.3 + 1e-4), rel=1e-6)
    assert common.group_advantages(r, 10, clip=2.0)[-1] == 2
    assert torch.equal(common.group_advantages(r, 10, clip=2.0)[:-1], A[:-1])
    assert common.group_advantages(-r, 10, clip=2.0)[-1] == -2
    assert torch.equal(common.group_advantages(r, 10, clip=0.0), torch.zeros(10))


def test_advantages_of_integer_rewards_are_not_truncated():
    expected = common.group_advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), 4)
    assert expected[0].item() == pytest.approx(-math.sqrt(3), rel=1e-3)
    for r in (torch.tensor([0, 1, 1, 1]), torch.tensor([False, True, True, True])):
        A = common.group_advantages(r, 4)
        assert A.dtype == torch.float32
        assert torch.equal(A, expected)


def test_advantages_carry_no_gradient_and_leave_rewards_alone():
    r = torch.tensor([1.0, math.nan, 3.0, 4.0], requires_grad=True)
    before = r.detach().clone()
    assert not common.group_advantages(r, 2).requires_grad
    assert torch.equal(r.detach().nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize(
    ("n", "G", "message"), [(4, 1, "G = 1"), (4, 0, "G = 0"), (4, -2, "G = -2"), (5, 2, "divide")]
)
def test_bad_group_size_is_refused(n, G, message):
    with pytest.raises(ValueError, match=message):
        common.group_advantages(torch.zeros(n), G)


def test_bad_std_and_shape_are_refused():
    with pytest.raises(ValueError, match="std = 'batch'"):
        common.group_advantages(torch.zeros(4), 2, "batch")
    with pytest.raises(ValueError, match=r"\(B,\)"):
        common.group_advantages(torch.zeros(2, 2), 2)


# ---- DDPO's history ----


def reference_history(buffers, ids, r, size, min_count, eps=1e-6):
    """Plain python, for finite rewards: append everything, then normalise."""
    for i, x in zip(ids, r, strict=True):
        buffers[i] = [*buffers.get(i, []), x][-size:]
    out = []
    for i, x in zip(ids, r, strict=True):
        known = buffers[i] if len(buffers[i]) >= min_count else r
        spread = 0.0 if len(set(known)) == 1 else statistics.pstdev(known)
        out.append((x - statistics.fmean(known)) / (spread + eps) if spread else 0.0)
    return torch.tensor(out, dtype=torch.float64)


batch = st.lists(st.tuples(st.integers(0, 3), reward), min_size=1, max_size=8)


@given(st.lists(batch, min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 6))
def test_history_equals_a_plain_loop(batches, size, min_count):
    history, buffers = common.RewardHistory(size, min_count), {}
    for rows in batches:
        ids, r = [i for i, _ in rows], [x for _, x in rows]
        A = history.advantages(ids, torch.tensor(r, dtype=torch.float64))
        expected = reference_history(buffers, ids, r, size, min_count)
        assert_close(A, expected, rtol=1e-6, atol=1e-6)
    assert history.state_dict()["rewards"] == buffers
    assert all(len(b) <= size for b in buffers.values())


def test_fresh_full_history_is_group_normalisation():
    r = randn(12, dtype=torch.float64)
    ids = torch.arange(3).repeat_interleave(4)
    A = common.RewardHistory(16, 4).advantages(ids, r)
    assert_close(A, common.group_advantages(r, 4, "group", 1e-6))
    # one more needed than there is: the whole batch, as one group
    A = common.RewardHistory(16, 5).advantages(ids, r)
    assert_close(A, common.group_advantages(r, 12, "group", 1e-6))


def test_history_appends_before_it_normalises():
    history = common.RewardHistory(4, 2, eps=0.5)
    history.advantages([7, 7], torch.tensor([1.0, 3.0]))
    A = history.advantages([7], torch.tensor([5.0]))
    assert_close(A, torch.tensor([(5 - 3) / (statistics.pstdev([1, 3, 5]) + 0.5)]))


def test_history_ignores_bad_rewards():
    history = common.RewardHistory(8, 2)
    r = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 2.0])
    A = history.advantages([5, 5, 5, 5, 6, 6], r)
    assert history.state_dict()["rewards"] == {5: [1.0, 3.0], 6: [2.0]}
    assert_close(A, torch.tensor([-1.0, 0, 1.0, 0, 0, 0]), rtol=1e-5, atol=1e-5)
    nothing = history.advantages([5, 9], torch.full((2,), math.nan))
    assert torch.equal(nothing, torch.zeros(2))
    assert history.state_dict()["rewards"] == {5: [1.0, 3.0], 6: [2.0]}


def test_history_of_equal_rewards_gives_exactly_zero():
    history = common.RewardHistory(8, 3)
    for _ in range(3):
        for r in ([26.1, 26.1], [26.1]):
            A = history.advantages([0] * len(r), torch.tensor(r))
            assert torch.equal(A, torch.zeros(len(r)))
    # and no explosion for a reward that has already left a constant buffer
    small = common.RewardHistory(2, 1)
    A = small.advantages([0, 0, 0], torch.tensor([5.0, 1.0, 1.0]))
    assert torch.equal(A, torch.zeros(3))


def test_history_dtypes_and_errors():
    assert common.RewardHistory(4, 1).advantages([0, 0], torch.tensor([1, 2])).tolist() == (
        pytest.approx([-1, 1], rel=1e-5)
    )
    ids = torch.tensor([0, 0])
    for dtype in (torch.float32, torch.float64):
        assert common.RewardHistory(4, 1).advantages(ids, torch.zeros(2).to(dtype)).dtype == dtype
    with pytest.raises(ValueError, match=r"prompt_ids \(3,\)"):
        common.RewardHistory(4, 1).advantages([0, 0, 0], torch.zeros(2))
    with pytest.raises(ValueError, match="size = 0"):
        common.RewardHistory(0, 1)
    assert common.RewardHistory(1, 1).size == 1


def test_history_resumes_exactly(tmp_path):
    first = common.RewardHistory(3, 2)
    first.advantages([0, 0, 1, 1, 1, 1], randn(6))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = common.RewardHistory(3, 2)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    through_json = common.RewardHistory(3, 2)
    through_json.load_state_dict(json.loads(json.dumps(first.state_dict())))
    saved = copy.deepcopy(first.state_dict())
    for i in range(3):
        ids, r = [0, 1, 1, 2], randn(4, seed=i)
        expected = first.advantages(ids, r)
        assert torch.equal(resumed.advantages(ids, r), expected)
        assert torch.equal(through_json.advantages(ids, r), expected)
    assert resumed.state_dict() == first.state_dict() != saved
    # a state dict is a copy, both ways
    frozen = resumed.state_dict()
    resumed.advantages([0], torch.tensor([9.0]))
    assert frozen == first.state_dict()
    with pytest.raises(ValueError, match="size 3, this one 4"):
        common.RewardHistory(4, 2).load_state_dict(frozen)


# ---- the clipped surrogate ----


@pytest.mark.parametrize(
    ("A", "rho", "loss", "slope"),
    [  # at clip 0.1; slope is d loss / d logp
        (1.0, 1.2, -1.1, 0.0),
        (1.0, 0.8, -0.8, -0.8),
        (1.0, 1.05, -1.05, -1.05),
        (1.0, 1.0, -1.0, -1.0),
        (-1.0, 1.2, 1.2, 1.2),
        (-1.0, 0.8, 0.9, 0.0),
        (-1.0, 0.95, 0.95, 0.95),
        (-1.0, 1.0, 1.0, 1.0),
        (2.0, 1.2, -2.2, 0.0),
        (0.0, 5.0, 0.0, 0.0),
    ],
)
def test_surrogate_table(A, rho, loss, slope):
    logp_old = f64([-1.3])
    logp = (logp_old + math.log(rho)).requires_grad_()
    value, stats = common.clipped_surrogate(logp, logp_old, torch.tensor([A]), 0.1)
    value.backward()
    assert value.shape == ()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert logp.grad.item() == pytest.approx(slope, abs=1e-12)
    if slope == 0:
        assert logp.grad.item() == 0  # exactly
    assert stats["rho_mean"].item() == pytest.approx(rho)
    assert stats["clip_fraction"].item() == float(abs(rho - 1) > 0.1)
    assert stats["kl_old"].item() == pytest.approx(math.log(rho) ** 2 / 2)
    assert stats["log_rho_max"].item() == pytest.approx(abs(math.log(rho)))


samples = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-5, 5)), min_size=1, max_size=6
)


@given(samples, st.sampled_from([1e-4, 0.1, 0.5]))
def test_surrogate_equals_a_plain_loop(rows, clip):
    logp, logp_old, A = (f64(column) for column in zip(*rows, strict=True))
    logp.requires_grad_()
    loss, stats = common.clipped_surrogate(logp, logp_old, A, clip)
    loss.backward()
    losses, slopes, log_rhos = [], [], []
    for new, old, a in rows:
        rho = math.exp(new - old)
        losses.append(max(-a * rho, -a * min(max(rho, 1 - clip), 1 + clip)))
        masked = (a > 0 and rho > 1 + clip) or (a < 0 and rho < 1 - clip)
        slopes.append(0.0 if masked else -a * rho / len(rows))
        log_rhos.append(new - old)
        assert losses[-1] >= -a * rho
    assert loss.item() == pytest.approx(statistics.fmean(losses), abs=1e-12)
    assert_close(logp.grad, f64(slopes), rtol=1e-9, atol=1e-12)
    rhos = [math.exp(x) for x in log_rhos]
    assert stats["rho_mean"].item() == pytest.approx(statistics.fmean(rhos))
    assert stats["clip_fraction"].item() == pytest.approx(
        statistics.fmean(abs(rho - 1) > clip for rho in rhos)
    )
    assert stats["kl_old"].item() == pytest.approx(statistics.fmean(x * x / 2 for x in log_rhos))
    assert stats["log_rho_max"].item() == pytest.approx(max(map(abs, log_rhos)))


@pytest.mark.parametrize("clip", [1e-5, 0.2])
def test_first_update_is_reinforce(clip):
    """DDPO_SF = DDPO_IS while rho = 1: the gradient is that of -mean(A logp), whatever the clip."""
    logp, A = randn(8, dtype=torch.float64).requires_grad_(), randn(8, seed=1, dtype=torch.float64)
    # logp passed twice, attached: the behaviour policy is a constant all the same
    loss, stats = common.clipped_surrogate(logp, logp, A, clip)
    surrogate = torch.autograd.grad(loss, logp)[0]
    reinforce = torch.autograd.grad(-(A * logp).mean(), logp)[0]
    assert torch.equal(surrogate, reinforce)
    assert loss.item() == pytest.approx(-A.mean().item())
    assert stats["rho_mean"] == 1
    assert stats["clip_fraction"] == stats["kl_old"] == stats["log_rho_max"] == 0


def test_clip_fraction_does_not_count_the_edge():
    logp = torch.tensor([0.0, 0.0, 1.0, -1.0])
    stats = common.clipped_surrogate(logp, torch.zeros(4), torch.ones(4), 0.0)[1]
    assert stats["clip_fraction"] == 0.5


def test_surrogate_gradient_goes_to_logp_only():
    logp, logp_old, A = (randn(4, seed=i).requires_grad_() for i in range(3))
    loss, stats = common.clipped_surrogate(logp, logp_old, A, 0.2)
    loss.backward()
    assert logp.grad.abs().sum() > 0
    assert logp_old.grad is None
    assert A.grad is None
    assert not any(s.requires_grad for s in stats.values())
    assert all(s.shape == () for s in stats.values())


@pytest.mark.parametrize("gap", [30.0, -30.0, 1e4, -1e4, math.inf])
def test_surrogate_never_overflows(gap):
    logp = torch.tensor([gap] * 3, requires_grad=True)
    loss, stats = common.clipped_surrogate(
        logp, torch.zeros(3), torch.tensor([1.0, 0.0, -1.0]), 0.1
    )
    loss.backward()
    assert loss.isfinite()
    assert torch.equal(logp.grad, torch.zeros(3))
    assert stats["rho_mean"].item() == pytest.approx(math.exp(math.copysign(20, gap)), rel=1e-5)
    assert stats["clip_fraction"] == 1
    assert stats["log_rho_max"] == abs(gap)


def test_surrogate_dtypes_and_shapes():
    logp = torch.tensor([0.25, -0.25])
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, stats = common.clipped_surrogate(logp, logp, A, 0.1)
    assert loss.dtype == torch.float32  # a float64 reward does not make the loss float64
    half = logp.bfloat16()
    loss, stats = common.clipped_surrogate(half, half, A.bfloat16(), 0.1)
    assert loss.dtype == stats["clip_fraction"].dtype == torch.float32
    assert common.clipped_surrogate(logp.double(), half, A, 0.1)[0].dtype == torch.float64
    for shapes in [((2,), (2,), (2, 1)), ((2,), (2, 1), (2,)), ((2, 1), (2,), (2,))]:
        with pytest.raises(ValueError, match="shapes differ"):
            common.clipped_surrogate(*(torch.zeros(s) for s in shapes), 0.1)


# ---- strata ----


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_one_index_per_chunk(case):
    n, M = case
    indices = common.stratified_indices(n, M, torch.Generator().manual_seed(n))
    assert indices.shape == (M,)
    assert indices.dtype == torch.int64
    # chunk sizes by hand: the first n % M chunks have one more
    start = 0
    for k, i in enumerate(indices.tolist()):
        size = n // M + (k < n % M)
        assert start <= i < start + size
        start += size
    assert start == n


def test_strata_are_uniform_within_their_chunk():
    generator, n, M, draws = torch.Generator().manual_seed(0), 10, 4, 4000
    counts = torch.zeros(n)
    for _ in range(draws):
        counts[common.stratified_indices(n, M, generator)] += 1
    expected = draws / torch.tensor([3, 3, 3, 3, 3, 3, 2, 2, 2, 2])
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_strata_are_independent_and_seeded():
    draws = torch.stack(
        [
            common.stratified_indices(20, 2, g)
            for g in [torch.Generator().manual_seed(0)]
            for _ in range(500)
        ]
    )
    assert torch.corrcoef(draws.T.float())[0, 1].abs() < 0.2
    same = [common.stratified_indices(40, 8, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*same)
    before = torch.random.get_rng_state()
    common.stratified_indices(40, 8, torch.Generator().manual_seed(3))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("n", "M"), [(4, 5), (4, 0), (0, 1), (4, -1)])
def test_impossible_strata_are_refused(n, M):
    with pytest.raises(ValueError, match=f"M = {M} chunks of {n}"):
        common.stratified_indices(n, M, torch.Generator())


# ---- denoising error ----


@every_shape
def test_denoising_error_is_a_mean_of_squares(shape):
    pred, target, _ = latents(shape)
    plain = common.denoising_error(pred, target)
    for i in range(3):
        assert_close(plain[i], torch.nn.functional.mse_loss(pred[i], target[i]))
    weight = torch.tensor([0.5, 0.0, 3.0])
    assert_close(common.denoising_error(pred, target, weight), plain * weight)
    assert_close(common.denoising_error(pred, target, torch.tensor(2.0)), plain * 2)
    per_element = torch.zeros(shape)
    per_element[:, 0] = 1
    first = torch.stack([d[0].square().sum() / d.numel() for d in pred - target])
    assert_close(common.denoising_error(pred, target, per_element), first)


@given(st.integers(0, 99), st.floats(0.01, 100))
def test_self_weight(seed, c):
    target = randn(2, 3, 4, seed=seed, dtype=torch.float64)
    e = randn(2, 3, 4, seed=seed + 1, dtype=torch.float64).requires_grad_()
    err = common.denoising_error(target + e, target, "self")
    m = torch.stack([row.abs().mean() for row in e.detach()])
    assert_close(err, torch.stack([row.square().mean() for row in e]) / m)
    assert (m <= err + 1e-12).all()
    assert (err <= e.detach().flatten(1).abs().amax(1) + 1e-12).all()
    scaled = common.denoising_error(target + c * e, target, "self")
    assert_close(scaled, c * err, rtol=1e-8, atol=0)
    err.sum().backward()  # the denominator is constant: 2 e / (d m), and <e, grad> = 2 err
    assert_close(e.grad, 2 * e.detach() / (12 * m.view(2, 1, 1)))
    inner = (e.detach() * e.grad).flatten(1).sum(1)
    assert_close(inner, 2 * err.detach())


def test_self_weight_of_a_perfect_prediction():
    target = randn(2, 3, 4)
    pred = target.clone().requires_grad_()
    err = common.denoising_error(pred, target, "self")
    err.sum().backward()
    assert torch.equal(err, torch.zeros(2))
    assert torch.equal(pred.grad, torch.zeros(2, 3, 4))
    # below the floor the denominator is 1e-5
    tiny = common.denoising_error(target.double() + 1e-6, target.double(), "self")
    assert_close(tiny, torch.full((2,), 1e-12 / 1e-5).double(), rtol=1e-6, atol=0)


def test_denoising_error_dtypes_and_errors():
    pred, target, _ = latents((2, 3, 4), dtype=torch.bfloat16)
    for weight in ("none", "self", torch.tensor([1.0, 2.0])):
        err = common.denoising_error(pred, target, weight)
        assert err.dtype == torch.float32
        assert torch.equal(err, common.denoising_error(pred.float(), target.float(), weight))
    assert common.denoising_error(pred, target.double()).dtype == torch.float64
    with pytest.raises(ValueError, match=r"pred \(2, 3, 4\) and target \(2, 4, 3\)"):
        common.denoising_error(pred, target.mT)
    with pytest.raises(ValueError, match="weight = 'sum'"):
        common.denoising_error(pred, target, "sum")


# ---- reward-weighted regression ----


@given(st.lists(reward, min_size=1, max_size=12), st.floats(0, 3))
def test_rwr_weights(rows, beta):
    r = f64(rows)
    w = common.rwr_weights(r, beta)
    top = max(rows)
    raw = [math.exp(beta * (x - top)) for x in rows]
    assert_close(w, f64([len(rows) * x / sum(raw) for x in raw]))
    assert w.mean().item() == pytest.approx(1)
    assert (w >= 0).all()
    assert_close(common.rwr_weights(r + 11, beta), w, rtol=1e-9, atol=1e-12)


def test_rwr_limits():
    r = torch.tensor([1.0, 3.0, 3.0, -2.0, 3.0, 0.0])
    assert torch.equal(common.rwr_weights(r, 0.0), torch.ones(6))
    assert_close(common.rwr_weights(r, 1e6), torch.tensor([0.0, 2, 2, 0, 2, 0]))
    assert_close(common.rwr_weights(r * 1e30, 1e30), torch.tensor([0.0, 2, 2, 0, 2, 0]))


def test_rwr_within_groups():
    r = torch.tensor([1.0, 2.0, 5.0, 100.0, 101.0])
    ids = torch.tensor([4, 9, 4, 9, 4])
    w = common.rwr_weights(r, 0.2, ids)
    for g in (4, 9):
        assert_close(w[ids == g], common.rwr_weights(r[ids == g], 0.2))
    assert_close(common.rwr_weights(r, 0.2, torch.ones(5)), common.rwr_weights(r, 0.2))


def test_rwr_bad_rewards_weigh_nothing():
    bad = math.nan, math.inf, -math.inf
    r = torch.tensor([1.0, bad[0], 2.0, bad[1], bad[2], 4.0, bad[0]])
    good = torch.tensor([0, 2, 5])
    w = common.rwr_weights(r, 0.5)
    assert_close(w[good], common.rwr_weights(r[good], 0.5))
    assert w.sum().item() == pytest.approx(3)
    assert torch.equal(w[[1, 3, 4, 6]], torch.zeros(4))
    grouped = common.rwr_weights(r, 0.5, torch.tensor([0, 0, 0, 0, 1, 1, 2]))
    assert_close(
        grouped[:4],
        torch.tensor([2, 0, 2, 0]) * torch.tensor([0, 0, 0.5, 0]).exp() / (1 + math.exp(0.5)),
    )
    assert grouped[4:].tolist() == [0, 1, 0]
    assert torch.equal(common.rwr_weights(torch.full((3,), math.nan), 1.0), torch.zeros(3))


def test_rwr_dtypes_and_errors():
    assert common.rwr_weights(torch.tensor([1, 2]), 1.0).dtype == torch.float32
    assert common.rwr_weights(torch.zeros(2).bfloat16(), 1.0).dtype == torch.float32
    assert common.rwr_weights(torch.zeros(2).double(), 1.0).dtype == torch.float64
    with pytest.raises(ValueError, match=r"groups \(3,\)"):
        common.rwr_weights(torch.zeros(2), 1.0, torch.zeros(3))
