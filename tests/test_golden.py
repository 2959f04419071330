"""Part I and the x0 family against numbers from the papers' official code (tests/golden/*.json)."""

import json
import math
from pathlib import Path

import pytest
import torch

import common
import dgpo
import vgrpo

GOLDEN = Path(__file__).parent / "golden"
TRAJECTORY = json.loads((GOLDEN / "trajectory.json").read_text())
FORWARD = json.loads((GOLDEN / "forward_process.json").read_text())
TABLES = TRAJECTORY["tables"]
VECTORS = {v["name"]: v for v in TRAJECTORY["vectors"]} | {v["id"]: v for v in FORWARD["vectors"]}

# A vector is checked here by the function named after it, or it is someone else's, and why.
ELSEWHERE = {
    "rwr sparse masks": "the masks of baselines/rwr.py: tests/test_rwr.py",
    "nft_optimum": "DiffusionNFT's own loss: no script of this project implements it",
}
TABLES_ELSEWHERE = {"flux512_mu": "the shift of a time grid belongs to Policy.grid"}
CHECKS = {}
TABLE_CHECKS = {}
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def checks(*names, into=CHECKS):
    def register(function):
        into.update(dict.fromkeys(names, function))
        return function

    return register


def f32(x):
    return torch.tensor(x, dtype=torch.float32)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(actual, expected, atol):
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(actual.shape)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


def alphas(v):
    """abar at the timesteps of the vector and 20 earlier; the official code never goes below 0."""
    at = TABLES["sd15_ddim50"]["alphas_cumprod_at"]
    now = [int(t) for t in v["timestep"]]
    return f64([at[str(t)] for t in now]), f64([at[str(max(t - 20, 0))] for t in now])


@checks("ddim eta=1.0 t=501", "ddim eta=1.0 t=1", "ddim eta=0.5 t=21")
def ddim(v):
    x, eps, (now, then) = f32(v["sample"]), f32(v["model_output"]), alphas(v)
    drawn = common.ddim_step(x, eps, now, then, v["eta"], noise=f32(v["noise"]))
    close(drawn.x_next, v["prev_sample_sampled"], 1e-6)
    close(drawn.logp, v["log_prob_sampled"], 2e-5)
    given = common.ddim_step(x, eps, now, then, v["eta"], x_next=f32(v["prev_sample_given"]))
    close(given.logp, v["log_prob_given"], 6e-6)
    close(given.mean, v["ref64_mean"], 3e-6)
    exact = common.ddim_step(
        x.double(), eps.double(), now, then, v["eta"], x_next=f64(v["prev_sample_given"])
    )
    close(exact.mean, v["ref64_mean"], 1e-12)
    close(exact.std.flatten(), v["ref64_std"], 1e-12)
    close(exact.logp, v["ref64_log_prob_given"], 1e-9)


@checks("ddim mixed timesteps")
def ddim_mixed(v):
    x, eps, (now, then) = f64(v["sample"]), f64(v["model_output"]), alphas(v)
    assert now[0] != now[1]
    step = common.ddim_step(x, eps, now, then, v["eta"], x_next=f64(v["prev_sample_given"]))
    close(step.logp, v["ref64_log_prob_given"], 1e-9)
    close(step.logp, v["log_prob_given"], 1e-5)


@checks("ddim eta=0 t=501")
def ddim_deterministic(v):
    now, then = alphas(v)
    step = common.ddim_step(f32(v["sample"]), f32(v["model_output"]), now, then, 0.0)
    assert torch.equal(step.mean, f32(v["library_prev_sample"]))
    assert torch.equal(step.mean, f32(v["prev_sample"]))
    assert v["log_prob_is_nan"]  # the official one
    assert torch.equal(step.logp, torch.zeros(2))


@checks(
    "flow_grpo sde a=0.7 sd3-10 idx=0",
    "flow_grpo sde a=0.7 sd3-10 idx=5",
    "flow_grpo sde a=0.9 flux512-6 packed idx=0",
)
def flow_sde(v):
    a = float(v["name"].split("a=")[1].split()[0])
    x, vel, noise = f32(v["sample"]), f32(v["model_output"]), f32(v["noise"])
    step = common.flow_sde_step(x, vel, v["sigma"], v["sigma_next"], a, noise=noise)
    close(step.x_next, v["prev_sample"], 1e-6)
    close(step.mean, v["prev_sample_mean"], 1e-6)
    close(step.logp, v["log_prob"], 1e-6)
    close(step.std, v["ref64_step_std"], 1e-7)
    # the official std_dev_t lacks the step size: ours is what multiplies the noise
    h = v["sigma"] - v["sigma_next"]
    close(f64(v["std_dev_t"]) * math.sqrt(h), step.std.item(), 1e-6)
    if "sqrt_dt" in v:
        close(f64(v["sqrt_dt"]), math.sqrt(h), 1e-7)
    if "ref64_mean" in v:
        args = (x.double(), vel.double(), v["sigma"], v["sigma_next"], a)
        exact = common.flow_sde_step(*args, x_next=f64(v["prev_sample"]))
        close(exact.mean, v["ref64_mean"], 1e-12)
        close(exact.logp, v["ref64_log_prob"], 1e-9)


@checks("flow_grpo cps eta=0.8 sd3-10 idx=4")
def flow_cps(v):
    x, vel = f32(v["sample"]), f32(v["model_output"])
    args = (v["sigma"], v["sigma_next"], 0.8)
    step = common.flow_cps_step(x, vel, *args, noise=f32(v["noise"]))
    close(step.x_next, v["prev_sample"], 1e-6)
    close(step.mean, v["prev_sample_mean"], 1e-6)
    close(step.std, v["std_dev_t"][0], 1e-7)
    exact = common.flow_cps_step(
        x.double(), vel.double(), *args, x_next=f64(v["prev_sample_given"])
    )
    close(exact.mean, v["ref64_mean"], 1e-12)
    close(exact.std, v["ref64_std"], 1e-12)
    # the conversion the docstring speaks of: official = -mean (x' - mean)^2
    for logp, std, key, atol in [
        (step.logp, step.std, "log_prob", 1e-6),
        (exact.logp, exact.std, "log_prob_given", 1e-7),
        (exact.logp, exact.std, "ref64_log_prob_given", 1e-11),
    ]:
        close((logp + std.log() + HALF_LOG_2PI) * 2 * std**2, v[key], atol)


@checks("flow_grpo noise_level=0 idx=4")
def no_noise(v):
    x, vel, grid = f32(v["sample"]), f32(v["model_output"]), f32(TABLES["sd3_sigmas_10"])
    euler = common.euler_step(x, vel, grid[4], grid[5])
    assert torch.equal(euler, f32(v["euler"]))
    sde = common.flow_sde_step(x, vel, grid[4], grid[5], 0.0)
    assert torch.equal(sde.mean, euler)
    assert torch.equal(sde.logp, torch.zeros(2))
    close(common.flow_cps_step(x, vel, grid[4], grid[5], 0.0).mean, v["euler"], 2e-7)


@checks(
    "mixgrpo flow_grpo_step eta=0.7 idx=10 deterministic=False",
    "mixgrpo flow_grpo_step eta=0.7 idx=10 deterministic=True",
)
def mixgrpo(v):
    x, vel, noise, t = f32(v["sample"]), f32(v["model_output"]), f32(v["noise"]), v["sigma"]
    if v["name"].endswith("True"):  # an ODE step, whose official log-prob is that of the SDE
        noise, x_next = None, f32(v["prev_sample"])
        close(common.euler_step(x, vel, t, v["sigma_next"]), v["prev_sample"], 1e-6)
    else:
        x_next = None
    step = common.flow_sde_step(x, vel, t, v["sigma_next"], 0.7, noise, x_next)
    close(step.x_next, v["prev_sample"], 1e-6)
    close(step.mean, v["ref64_mean"], 1e-6)
    close(step.mean, v["prev_sample_mean"], 1e-6)
    close(step.std, v["ref64_step_std"], 1e-7)
    close(step.std, v["step_std"], 1e-7)
    close(step.logp, v["log_prob"], 3e-6)
    close(common.velocity_to_x0(x, vel, t), v["pred_original"], 1e-6)


@checks("dancegrpo flux_step eta=0.3 idx=7")
def dance(v):
    x, vel, t = f64(v["sample"]), f64(v["model_output"]), v["sigma"]
    x_next = f64(v["prev_sample_given"])
    step = common.flow_dance_step(x, vel, t, v["sigma_next"], 0.3, x_next=x_next)
    close(step.mean, v["ref64_mean"], 1e-12)
    close(step.mean, v["prev_sample_mean"], 2e-7)
    close(step.std, v["ref64_step_std"], 1e-12)
    close(step.logp, v["ref64_log_prob"], 1e-9)
    close(step.logp, v["log_prob"], 1e-6)
    close(common.velocity_to_x0(x, vel, t), v["pred_original"], 1e-6)
    without = step.logp + step.std.log() + HALF_LOG_2PI
    close(without, v["mixgrpo_dance_log_prob_without_constants"], 1e-6)


@checks("ppo clipped loss")
def ppo(v):
    logp, A = f64(v["ratio"]).log(), f64(v["advantages"])
    loss, _ = common.clipped_surrogate(logp, torch.zeros(4), A, v["clip_range"])
    close(loss, v["loss"], 1e-7)
    for i, expected in enumerate(v["per_sample"]):
        one = (logp[i : i + 1], torch.zeros(1), A[i : i + 1], v["clip_range"])
        close(common.clipped_surrogate(*one)[0], expected, 1e-7)


@checks("kl forms")
def kl_forms(v):
    grid, x = TABLES["sd3_sigmas_10"], f32(v["sample"])
    for row in v["rows"]:
        t, s = grid[row["idx"]], grid[row["idx"] + 1]
        policy = common.flow_sde_step(x, f32(v["model_output"]), t, s, 0.7)
        ref = common.flow_sde_step(x, f32(v["reference_output"]), t, s, 0.7)
        kl = common.gaussian_kl(policy.mean, ref.mean, policy.std)
        torch.testing.assert_close(kl, f32(row["true_per_dim"]), rtol=1e-5, atol=0)
        # Flow-GRPO's formula is the step size times the true one
        official = kl * row["abs_dt"]
        torch.testing.assert_close(official, f32(row["code_since_2025_07_15"]), rtol=1e-5, atol=0)
        torch.testing.assert_close(official, f32(row["closed_form_of_code"]), rtol=1e-5, atol=0)


class Network:
    """A flow policy that is a function of x_t."""

    abars, device = None, torch.device("cpu")
    noised, coefficients = common.Policy.noised, common.Policy.coefficients

    def __init__(self, velocity):
        self.velocity = lambda x_t, t, c, guidance: velocity(x_t)


def pairs(x0, eps, t):
    """A batch of one (t, eps) pair per image, as vgrpo's rollout draws it."""
    return dict(x0=x0, eps=eps[:, None], t=t[:, None])


def preference(v):
    """dgpo's loss, weights and gradient at the model's velocities of a vector; its errors."""
    inputs = v["inputs"]
    model, target = f64(inputs["model_v"]).requires_grad_(), f64(inputs["target_v"])
    err = common.denoising_error(model, target)
    err_ref = common.denoising_error(f64(inputs["ref_v"]), target)
    if "advantages" in inputs:
        A = f64(inputs["advantages"])
    else:
        A = common.group_advantages(f64(inputs["rewards"]), 2)
    beta, G = inputs.get("beta_dpo", inputs.get("beta")), inputs.get("G", 2)
    loss, w = dgpo.preference_loss(err, err_ref, A, G, beta)
    (grad,) = torch.autograd.grad(loss, model, retain_graph=True)
    return loss, w, grad, err.detach(), err_ref, A, beta


@checks("dgpo_group_loss")
def dgpo_groups(v):
    o = v["outputs"]
    loss, w, grad, err, err_ref, A, beta = preference(v)
    close(err, o["dsm"], 1e-14)
    close(err_ref, o["ref_dsm"], 1e-14)
    close(loss, o["code_loss"], 1e-14)
    close(w, o["group_weights"], 1e-14)
    close(grad, o["grad_model_v"], 1e-14)
    S = beta / 4 * (A * (err - err_ref)).view(2, 4).sum(1)
    close(S, o["group_sums"], 1e-12)
    objective = -torch.nn.functional.logsigmoid(-S).mean()
    close(objective, o["neg_logsigmoid_objective"], 1e-12)


@checks("dgpo_equal_rewards")
def equal_rewards(v):
    A = common.group_advantages(torch.full((4,), 0.5), v["inputs"]["G"])
    assert A.tolist() == v["inputs"]["advantages"] == [0.0] * 4
    err = torch.rand(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, w = dgpo.preference_loss(err, torch.zeros(4), A, 4, v["inputs"]["beta_dpo"])
    loss.backward()
    assert loss == v["outputs"]["code_loss"]
    assert w.tolist() == v["outputs"]["group_weights"]
    assert err.grad.abs().max() == v["outputs"]["grad_abs_max"]


@checks("dgpo_g2_equals_diffusion_dpo")
def two_images(v):
    o = v["outputs"]
    loss, w, grad, _, _, A, beta = preference(v)
    close(A, o["advantages"], 1e-14)
    assert A[0].item() == pytest.approx(o["a_closed_form"], rel=1e-12)
    close(loss, o["dgpo_code_loss"], 1e-14)
    close(grad, o["grad_dgpo_code"], 1e-14)
    close(beta * grad, o["grad_diffusion_dpo_beta_a"], 1e-12)
    # -log sigmoid(-S) with w = sigmoid(S), and Diffusion-DPO's loss with a beta
    close(-torch.log1p(-w).squeeze(), o["dgpo_objective"], 1e-12)
    close(-torch.log1p(-w).squeeze(), o["diffusion_dpo_loss_beta_a"], 1e-12)


@checks("nft_onpolicy_equals_vgrpo")
def vgrpo_gradient(v):
    x0, eps, t = (f64(v["inputs"][k]) for k in ("x0", "eps", "t"))
    A = f64(v["inputs"]["advantages"]).clamp(-5, 5)
    for clip in (None, 1e-2):
        vel = f64(v["inputs"]["old_v"]).requires_grad_()
        policy, args = Network(lambda x_t, vel=vel: vel), vgrpo.Args(clip=clip)
        loss, _ = vgrpo.loss(policy, {}, pairs(x0, eps, t), A, {}, args)
        loss.backward()
        close(vel.grad, v["outputs"]["vgrpo_grad"], 1e-14)
        close(vel.grad, v["outputs"]["nft_beta0.5"], 1e-14)


@checks("awm_log_prob")  # huber and a power of 1/2: no setting of vgrpo has them
def awm(v):
    x0, eps, t = (f64(v["inputs"][k]) for k in ("x0", "eps", "t"))
    for name, space, weight in [
        ("Uniform", "v", "none"), ("t", "v", "t"), ("t**2", "x", "none"), ("ghuber", "v", "ghuber"),
    ]:  # fmt: skip
        vel = f64(v["inputs"]["v"]).requires_grad_()
        policy, args = Network(lambda x_t, vel=vel: vel), vgrpo.Args(space=space, weight=weight)
        logp = -vgrpo.errors(policy, {}, pairs(x0, eps, t), args, 1.0)[0].sum(0)
        logp.sum().backward()
        close(logp.detach(), v["outputs"][name]["log_prob"], 1e-13)
        close(vel.grad, v["outputs"][name]["grad"], 1e-13)
    close(logp.detach(), v["outputs"]["flow_factory_ghuber"], 1e-6)


@checks("fpo_ratio")  # its clamp of every difference to +-3 is not vgrpo's: applied beforehand
def fpo(v):
    inputs = v["inputs"]
    err = f64(inputs["cfm_loss"]).T.requires_grad_()
    err_old = err.detach() + (f64(inputs["initial_cfm_loss"]).T - err.detach()).clamp(-3, 3)
    rho = vgrpo.elbo_ratio(err, err_old)
    close(rho.detach(), v["outputs"]["rho"], 1e-13)
    A = f64(inputs["advantages"])
    loss, _ = common.clipped_surrogate(rho.log(), torch.zeros(2), A, inputs["clip"])
    (grad,) = torch.autograd.grad(loss, err)
    close(loss.detach(), v["outputs"]["actor_loss"], 1e-14)
    close(grad.T, v["outputs"]["grad"], 1e-14)


@checks("shared_noise_cancellation")
def shared_noise(v):
    inputs = v["inputs"]
    x0 = f64(inputs["x0"])[:1].repeat(4, 1, 1)
    t = torch.full((4,), inputs["t"], dtype=torch.float64)
    W = f64(0.3).requires_grad_()
    args = vgrpo.Args(space="v", weight="none")

    def gradient(eps):
        policy = Network(lambda x_t: W * x_t)
        loss, _ = vgrpo.loss(policy, {}, pairs(x0, eps, t), f64(inputs["A"]), {}, args)
        return torch.autograd.grad(loss, W)[0].abs().item()

    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert gradient(eps[:1].repeat(4, 1, 1)) < 1e-15
    assert gradient(eps) > 1e-2  # the stored 0.35 is of noise that was not kept


@checks("param_conversions")
def conversions(v):
    x0, eps, x_hat = (f64([v["inputs"][k]]) for k in ("x", "eps", "x_hat"))

    def error(a, b):
        return common.denoising_error(a, b).item()

    for name, o in v["outputs"].items():
        z, v_hat, eps_hat = (f64([o[k]]) for k in ("z", "v_hat", "eps_hat"))
        if name.startswith("rf_t"):
            t = float(name[4:])
            close(common.interpolate(x0, eps, t), o["z"], 1e-14)
            close(common.velocity_to_x0(z, v_hat, t), v["inputs"]["x_hat"], 1e-13)
            close(common.velocity_to_eps(z, v_hat, t), o["eps_hat"], 1e-13)
            mse = error(x_hat, x0), error(eps_hat, eps), error(v_hat, eps - x0)
            assert mse == pytest.approx((o["mse_x"], o["mse_eps"], o["mse_v"]), rel=1e-12)
            assert mse[1] / mse[2] == pytest.approx(o["ratio_eps_over_v"], rel=1e-12)
        else:
            abar = float(name.removeprefix("ddpm_abar"))
            close(common.eps_to_x0(z, eps_hat, abar), v["inputs"]["x_hat"], 1e-12)
            close(common.eps_to_velocity(z, eps_hat, abar), o["v_hat"], 1e-12)
            v_true = common.eps_to_velocity(z, eps, abar)
            mse = error(x_hat, x0), error(eps_hat, eps), error(v_hat, v_true)
            assert mse[0] / mse[1] == pytest.approx(o["ratio_x_over_eps"], rel=1e-10)
            assert mse[1] / mse[2] == pytest.approx(o["ratio_eps_over_v"], rel=1e-10)
        assert mse[0] / mse[2] == pytest.approx(o["ratio_x_over_v"], rel=1e-10)


@checks("vgrpo_strata")
def strata(v):
    generator = torch.Generator().manual_seed(0)
    for n, M in v["inputs"]["cases"]:
        o = v["outputs"][f"N{n}_n{M}"]
        draws = torch.stack([common.stratified_indices(n, M, generator) for _ in range(400)])
        seen = [[chunk.min().item(), chunk.max().item()] for chunk in draws.T]
        assert seen == o["first_last"]  # every index of a chunk comes up, none outside it
        sizes = [len(chunk.unique()) for chunk in draws.T]
        assert sizes == o["chunk_sizes"]
        p = sorted({round(1 / (M * size), 12) for size in sizes}, reverse=True)
        assert p == pytest.approx(sorted(set(o["marginal_prob"]), reverse=True))
        assert o["uniform"] == (len(p) == 1)


@checks("sd15_ddim50", "ddim_std_eta1", into=TABLE_CHECKS)
def ddim_std(tables):
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        set_alpha_to_one=False,
    )
    scheduler.set_timesteps(50)
    assert scheduler.timesteps.tolist() == tables["sd15_ddim50"]["timesteps"]
    for t, abar in tables["sd15_ddim50"]["alphas_cumprod_at"].items():
        assert scheduler.alphas_cumprod[int(t)].item() == pytest.approx(abar, rel=1e-5)
    assert scheduler.final_alpha_cumprod.item() == pytest.approx(
        tables["sd15_ddim50"]["final_alpha_cumprod"], rel=1e-6
    )
    x = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for t, expected in tables["ddim_std_eta1"].items():
        now, then = scheduler.alphas_cumprod[[int(t), max(int(t) - 20, 0)]]
        # rel: the library's table of abar is fp32 and std divides differences of its entries
        std = common.ddim_step(x, x, now, then, 1.0).std.item()
        assert std == pytest.approx(expected, rel=1e-4)


@checks("sd3_sigmas_10", "flux512_sigmas_6", "flow_step_coefficients", into=TABLE_CHECKS)
def flow_coefficients(tables):
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert len(tables["flow_step_coefficients"]) == 16
    for row in tables["flow_step_coefficients"]:
        grid, a = flow_case(tables, row)
        t, s = grid[row["idx"]], grid[row["idx"] + 1]
        assert t == row["sigma"]
        assert s - t == pytest.approx(row["dt"], abs=1e-7)
        x, v = (common.flow_sde_step(*xv, t, s, a) for xv in [(one, 0 * one), (0 * one, one)])
        assert x.mean.item() == pytest.approx(row["coef_x"], rel=1e-6)
        assert v.mean.item() == pytest.approx(row["coef_v"], rel=1e-6)
        assert x.std.item() == pytest.approx(row["step_std"], rel=1e-6)
        assert x.std.item() == pytest.approx(row["sigma_t"] * math.sqrt(-row["dt"]), rel=1e-6)


@checks("perfect_denoiser_variance_excess_per_step", into=TABLE_CHECKS)
def variance_excess(tables):
    """With data at one point v = (x - x0)/t: the noise std t becomes (c_x + c_v/t) t, plus std."""
    one = torch.ones(1, 1, dtype=torch.float64)
    assert len(tables["perfect_denoiser_variance_excess_per_step"]) == 16
    for row in tables["perfect_denoiser_variance_excess_per_step"]:
        grid, a = flow_case(tables, row)
        t, s = grid[row["idx"]], grid[row["idx"] + 1]
        step = common.flow_sde_step(t * one, one, t, s, a)
        excess = step.mean.item() ** 2 + step.std.item() ** 2 - s**2
        assert excess == pytest.approx(row["closed_form"], rel=1e-9)
        assert excess == pytest.approx(row["excess_from_official_coefs"], abs=1e-6)


@checks("mixgrpo_sigmas_25_shift3", into=TABLE_CHECKS)
def mixgrpo_grid(tables):
    grid = tables["mixgrpo_sigmas_25_shift3"]
    u = torch.linspace(1, 0, 26, dtype=torch.float64)
    close(f64(grid), 3 * u / (1 + 2 * u), 2e-7)
    for name in ("True", "False"):
        v = VECTORS[f"mixgrpo flow_grpo_step eta=0.7 idx=10 deterministic={name}"]
        assert (v["sigma"], v["sigma_next"]) == pytest.approx((grid[10], grid[11]))


def flow_case(tables, row):
    if row["case"].startswith("sd3-10"):
        grid = tables["sd3_sigmas_10"]
    else:
        grid = tables["flux512_sigmas_6"]
    return grid, float(row["case"].split("a=")[1])


@pytest.mark.parametrize("name", CHECKS)
def test_vector(name):
    CHECKS[name](VECTORS[name])


@pytest.mark.parametrize("name", TABLE_CHECKS)
def test_table(name):
    TABLE_CHECKS[name](TABLES)


def test_every_vector_is_used_or_has_a_reason_not_to_be():
    assert sorted([*CHECKS, *ELSEWHERE]) == sorted(VECTORS)
    assert sorted([*TABLE_CHECKS, *TABLES_ELSEWHERE]) == sorted(TABLES)
    assert len(VECTORS) == len(TRAJECTORY["vectors"]) + len(FORWARD["vectors"])
    assert all((ELSEWHERE | TABLES_ELSEWHERE).values())
