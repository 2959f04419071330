"""--curriculum: stages that change prompts, rewards and settings inside one run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from test_runs import assert_same_run, exact, launch, lora, read, state, without_time

import common
import ddpo
import dgpo
import flow_grpo
import rewards
import vgrpo
from baselines import rwr

ROOT = Path(__file__).parent.parent
SCRIPTS = [ddpo, flow_grpo, vgrpo, dgpo, rwr]
SMALL = {
    ddpo: dict(baseline="group"),
    flow_grpo: {},
    vgrpo: dict(M=2),
    dgpo: dict(M=2, t_min=0.0),
    rwr: dict(updates=1, epochs=1),
}
REWARDS = {
    "jpeg_compressibility", "jpeg_incompressibility", "aesthetic", "clipscore", "pickscore",
    "hpsv2", "imagereward", "ocr", "geneval", "geneval_soft", "unifiedreward", "llava_bertscore",
    "vlm_yesno",
}  # fmt: skip
PROMPTS = {"tiny/prompts", "prompts/pickapic.txt", "prompts/geneval", "prompts/ocr"}

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def write(folder, *stages, **table):
    path = folder / "stages.json"
    path.write_text(json.dumps({"stages": [*stages], **table}))
    return str(path)


def load(args, script=flow_grpo):
    return common.load_stages(args, script.check_own, "cpu")


def run(script, args):
    """The saved state and the metrics, but for the time and the number of the stage."""
    script.main(args)
    rows = [{k: v for k, v in row.items() if k != "stage"} for row in without_time(read(args.out))]
    saved = state(args.out)
    return saved["params"], saved["optimizer"], rows


# ---- the files that are shipped ----


@pytest.mark.parametrize("path", sorted(ROOT.glob("curricula/*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_complete(path, monkeypatch, tmp_path):
    """Every stage passes the checks of its script, and names rewards and prompts that exist."""
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    for name in REWARDS - rewards.REWARDS.keys():
        monkeypatch.setitem(rewards.REWARDS, name, None)
    assert "arXiv" in json.loads(path.read_text())["source"] or path.stem == "tiny"
    for script in SCRIPTS if path.stem == "tiny" else [vgrpo]:
        model = "tiny" if path.stem == "tiny" else "sd35m"
        args = script.Args(
            **{**script.PRESETS[model], "model": model, "out": str(tmp_path / "new")}
        )
        for _, stage in rewards.read_stages(str(path), None):
            own = common.override(args, stage, script.check_own)
            assert rewards.parse_rewards(own.reward).keys() <= REWARDS
            assert own.prompts in PROMPTS


def test_the_example_of_the_readme_is_accepted(quick, tmp_path):
    text = (ROOT / "README.md").read_text()
    (tmp_path / "stages.json").write_text(text[text.index('{\n "source"') :].partition("```")[0])
    stages, _, _ = load(quick(vgrpo, curriculum=str(tmp_path / "stages.json")), vgrpo)
    assert [(s.args.T, s.args.soft_clip) for s in stages] == [(8, 3.0), (8, None)]


def stages_of(name):
    return [
        {"K": 1, **stage}
        for _, stage in rewards.read_stages(str(ROOT / f"curricula/{name}.json"), None)
    ]


def test_the_stages_of_vgrpo_are_those_of_the_paper():
    stages = stages_of("vgrpo")
    assert [s["iterations"] * s["K"] for s in stages] == [150, 200, 150, 50, 30]
    assert [s["M"] for s in stages] == [4, 10, 4, 10, 10]
    assert [s["soft_clip"] for s in stages] == [3, None, 3, None, None]
    assert [s.get("kl_old", 0) > 0 for s in stages] == [False] * 4 + [True]
    assert all(s["K"] > 1 for s in stages if "kl_old" in s or "clip" in s)  # inert with one step
    assert {(s["P"], s["G"], s["T"], s["combine"]) for s in stages} == {(48, 24, 40, "reward")}


def test_the_stages_of_diffusion_nft_are_those_of_the_paper():
    stages = stages_of("diffusion_nft")
    assert [s["iterations"] for s in stages] == [800, 300, 200, 200, 100]
    assert {(s["M"], s["T"], s["adv_clip"], s["soft_clip"]) for s in stages} == {(39, 40, 5, None)}
    asked = [set(rewards_of(s)) for s in stages]
    base = {"pickscore", "hpsv2", "clipscore"}
    soft = base | {"geneval_soft"}
    assert asked == [base, soft, base, soft, base | {"ocr"}]
    assert asked == [set(rewards_of(s)) for s in stages_of("vgrpo")]


def rewards_of(stage):
    return [part.partition(":")[0] for part in stage["reward"].split(",")]


# ---- what a file may say ----

STAGE = {"iterations": 2}
# what is wrong: (table or text of the file, words of the one line)
BAD = {
    "missing": (None, ["stages.json", "should hold"]),
    "no JSON": ('{"stages": [', ["stages.json", "should hold"]),
    "a list": ([STAGE], ["stages.json", "should hold"]),
    "no stages": ({"stages": []}, ["stages.json", "should hold"]),
    "another key": ({"stages": [STAGE], "stagse": []}, ["stages.json", "stagse"]),
    "stage is no object": ({"stages": [3]}, ["stages.json", "should hold"]),
    "a name of two lines": ({"stages": [{"name": "a\nb"}]}, ["stage 1 a b, iterations: "]),
    "no iterations": ({"stages": [STAGE, {"name": "late"}]}, ["stage 2 late, iterations: "]),
    "zero iterations": ({"stages": [{"iterations": 0}]}, ["stage 1, iterations: "]),
    "unknown field": ({"stages": [{**STAGE, "warmth": 1}]}, ["stage 1, warmth: ", "lr", "clip"]),
    "of another script": ({"stages": [{**STAGE, "kl_old": 1}]}, ["stage 1, kl_old: "]),
    "model": ({"stages": [STAGE, {**STAGE, "model": "sd15"}]}, ["stage 2, model: cannot change"]),
    "lora_r": ({"all": {"lora_r": 8}, "stages": [STAGE]}, ["stage 1, lora_r: cannot change"]),
    "out": ({"stages": [{**STAGE, "out": "x"}]}, ["stage 1, out: cannot change"]),
    "seed": ({"stages": [{**STAGE, "seed": 1}]}, ["stage 1, seed: cannot change"]),
    "held-out": ({"stages": [{**STAGE, "heldout_reward": "red"}]}, ["stage 1, heldout_reward: "]),
    "type": ({"stages": [{**STAGE, "lr": "fast"}]}, ["stage 1, lr: 'fast' is not float"]),
    "float for int": ({"stages": [{**STAGE, "P": 1.5}]}, ["stage 1, P: 1.5 is not int"]),
    "bool for int": ({"stages": [{**STAGE, "T": True}]}, ["stage 1, T: True is not int"]),
    "null": ({"stages": [{**STAGE, "clip": None}]}, ["stage 1, clip: None is not float"]),
    "choice": ({"stages": [{**STAGE, "sde": "ode"}]}, ["stage 1, sde: 'ode' is not ", "cps"]),
    "list": ({"stages": [{**STAGE, "sde": ["cps"]}]}, ["stage 1, sde: ['cps'] is not "]),
    "range": ({"stages": [{**STAGE, "adv_clip": -1}]}, ["stage 1, adv_clip: -1 is not a positive"]),
    "own check": ({"stages": [STAGE, {**STAGE, "window": 9}]}, ["stage 2, window: 9 steps"]),
    "reward": ({"stages": [{**STAGE, "reward": "beauty"}]}, ["stage 1, reward: ", "'beauty'"]),
    "prompts": ({"stages": [{**STAGE, "prompts": "no.txt"}]}, ["stage 1, prompts: ", "no.txt"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(quick, tmp_path, monkeypatch, name):
    table, words = BAD[name]
    path = tmp_path / "stages.json"
    if table is not None:
        path.write_text(table if isinstance(table, str) else json.dumps(table))
    for module, function in ((common, "load_policy"), (rewards, "load_rewards")):
        monkeypatch.setattr(module, function, lambda *inputs: pytest.fail("something is loaded"))
    with pytest.raises(SystemExit) as stop:
        flow_grpo.main(quick(curriculum=str(path)))
    line = str(stop.value)
    assert line.startswith(f"--curriculum: {path}"), line
    assert "\n" not in line
    for word in words:
        assert word in line, line


def test_prompts_that_a_reward_of_a_stage_cannot_score_are_refused(quick, tmp_path):
    (tmp_path / "plain.txt").write_text("a circle\n")
    stage = {**STAGE, "prompts": str(tmp_path / "plain.txt"), "reward": "geneval"}
    with pytest.raises(SystemExit, match=r"^--prompts: 'a circle' is no prompt for [^\n]*geneval"):
        load(quick(curriculum=write(tmp_path, stage)))


@pytest.mark.parametrize("field", ["prompts", "reward"])
def test_a_file_of_pairs_leaves_no_stage_its_own_prompts_or_reward(quick, tmp_path, field):
    """They would do nothing."""
    value = {"prompts": "prompts/animals.txt", "reward": "jpeg_compressibility"}[field]
    path = write(tmp_path, STAGE, {**STAGE, field: value})
    args = quick(dgpo, curriculum=path, pairs="pairs.jsonl", **SMALL[dgpo])
    with pytest.raises(SystemExit, match=rf"^--pairs: brings its own {field}; [^\n]*$"):
        dgpo.main(args)


def test_a_stage_wins_over_what_all_stages_share_and_that_over_the_flags(quick, tmp_path):
    path = write(tmp_path, {"iterations": 3, "T": 5}, {"iterations": 4, "lr": 1},
                 all={"T": 4, "adv_clip": None}, source="here")  # fmt: skip
    args = quick(curriculum=path, T=3, G=4, adv_clip=1.0)
    stages, _, _ = load(args)
    assert [s.first for s in stages] == [0, 3]
    assert [(s.args.T, s.args.G, s.args.adv_clip) for s in stages] == [(5, 4, None), (4, 4, None)]
    assert [s.args.lr for s in stages] == [1e-3, 1]
    assert args.iterations == 7


def test_evaluations_keep_their_prompts_and_leave_out_what_cannot_score_them(quick, tmp_path):
    """GenEval's reward in one stage, other prompts as the held-out ones."""
    (tmp_path / "plain.txt").write_text("a cat\na dog\n")
    geneval = {**STAGE, "reward": "geneval_soft,red", "prompts": "tiny/prompts"}
    path = write(tmp_path, {**STAGE, "reward": "jpeg_compressibility"}, geneval)
    args = quick(curriculum=path, prompts=str(tmp_path / "plain.txt"), heldout_reward="red")
    stages, watched, heldout = load(args)
    assert [row["prompt"] for row in heldout] == ["a cat", "a dog"]
    assert [*watched] == ["jpeg_compressibility", "red"]
    assert [[*s.rewards] for s in stages] == [["jpeg_compressibility"], ["geneval_soft", "red"]]
    assert stages[1].rewards["red"] is watched["red"]  # loaded once
    assert [len(s.train) > 2 for s in stages] == [False, True]
    args.heldout_reward = "geneval"
    with pytest.raises(SystemExit, match=r"^--prompts: 'a cat' is no prompt for [^\n]*geneval"):
        load(args)
    args.heldout_reward, args.curriculum = None, write(tmp_path, geneval | {"reward": "geneval"})
    with pytest.raises(SystemExit, match=r"^--heldout-reward: [^\n]*$"):
        load(args)


def test_iterations_belong_to_the_stages(monkeypatch, tmp_path, weights):
    path = write(tmp_path, STAGE)
    argv = ["--curriculum", path, "--weights", weights, "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["flow_grpo.py", *argv])
    assert flow_grpo.parse_args().out == "runs/flow_grpo-tiny-stages-s0"
    monkeypatch.setattr("sys.argv", ["flow_grpo.py", *argv, "--iterations", "5"])
    with pytest.raises(SystemExit, match=r"^--iterations: the stages have their own$"):
        flow_grpo.parse_args()


# ---- whole runs ----


@every_script
def test_stages_without_a_change_are_the_run_without_stages(quick, tmp_path, script):
    """LoRA, optimizer, moving averages, noise and order of the prompts go on over the border."""
    same = dict(ema=0.5, P=2, G=3, micro_batch=6, prompts="tiny/prompts", **SMALL[script])
    plain = run(script, quick(script, **same, iterations=3, out=str(tmp_path / "plain")))
    path = write(tmp_path, {"iterations": 1}, {"iterations": 2})
    args = quick(script, **same, curriculum=path, out=str(tmp_path / "staged"))
    exact(run(script, args), plain)
    assert [row["stage"] for row in read(args.out)] == [1, 2, 2, 2]
    assert "stage" not in read(tmp_path / "plain")[0]
    for name in ("lora", "best"):
        exact(lora(args.out, name), lora(tmp_path / "plain", name))


@every_script
def test_the_learning_rate_falls_to_zero_within_each_stage(quick, tmp_path, script, monkeypatch):
    seen, original = [], script.update

    def update(policy, optimizer, *others):
        seen.append(optimizer.param_groups[0]["lr"])
        return original(policy, optimizer, *others)

    monkeypatch.setattr(script, "update", update)
    own = dict(lr=0.1, anneal_lr=True, weight_decay=0.0, **SMALL[script])
    script.main(quick(script, iterations=2, out=str(tmp_path / "alone"), **own))
    assert seen == pytest.approx([0.1, 0.05])
    seen.clear()
    stages = {"iterations": 3}, {"iterations": 1, "lr": 0.4}, {"iterations": 2, "anneal_lr": False}
    script.main(quick(script, curriculum=write(tmp_path, *stages), **own))
    assert seen == pytest.approx([0.1, 0.2 / 3, 0.1 / 3, 0.4, 0.1, 0.1])


@every_script
def test_a_stage_changes_what_it_names_from_its_first_iteration_on(quick, tmp_path, script):
    (tmp_path / "other.txt").write_text("a green square\n")
    seen, original = [], script.update

    def update(policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks):
        (group,) = optimizer.param_groups
        seen.append((iteration, args.max_grad_norm, group["lr"], group["weight_decay"], ema.cap))
        seen[-1] += (len(A), tuple(batch["x0"].shape[:1]))
        return original(policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks)

    second = {"iterations": 2, "lr": 0.01, "weight_decay": 0.5, "ema": 0.9, "max_grad_norm": 0.3,
              "P": 1, "T": 4, "reward": "jpeg_compressibility:2",
              "prompts": str(tmp_path / "other.txt")}  # fmt: skip
    path = write(tmp_path, {"iterations": 1}, second)
    args = quick(script, curriculum=path, P=2, micro_batch=4, ema=0.5, heldout_reward="red",
                 **SMALL[script])  # fmt: skip
    prompts, encode = [], common.Policy.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", update)
        patch.setattr(common.Policy, "encode", lambda p, x: prompts.append([*x]) or encode(p, x))
        script.main(args)
    after = (0.3, 0.01, 0.5, 0.9, 2, (2,))
    assert seen == [(0, 1.0, 1e-3, 1e-4, 0.5, 4, (4,)), (1, *after), (2, *after)]
    assert prompts.count(["a green square"] * 2) == 2
    rows = read(args.out)
    assert [row["stage"] for row in rows] == [1, 2, 2, 2]
    trained = [{k for k in row if k.startswith("reward/")} for row in rows[:3]]
    common_keys = {"reward/mean", "reward/fail_frac"}
    assert trained[0] == common_keys | {"reward/red"}
    assert trained[1] == trained[2] == common_keys | {"reward/jpeg_compressibility"}
    evaluated = {"eval/red", "eval/jpeg_compressibility"}
    evaluated |= {"eval/kl_ref", "eval/diversity", "eval/heldout_se"}
    assert {k for k in rows[-1] if k.startswith("eval/")} == evaluated
    assert rows[1]["nfe"] > rows[0]["nfe"]  # T = 4


def test_the_histories_of_ddpo_belong_to_a_stage(quick, tmp_path):
    """Rewards of an earlier stage are no baseline for those of a later one."""
    path = write(tmp_path, {"iterations": 2, "reward": "red,jpeg_compressibility"},
                 {"iterations": 1}, {"iterations": 1, "baseline": "group"})  # fmt: skip
    args = quick(ddpo, curriculum=path, min_count=2, P=2, G=3, micro_batch=6)
    ddpo.main(args)
    kept = [sum(map(len, h["rewards"].values())) for h in state(args.out)["histories"]]
    assert kept == [12, 12, 6]


@pytest.mark.parametrize("script", [ddpo, vgrpo], ids=lambda script: script.__name__)
def test_resume_inside_a_stage_is_bit_for_bit(quick, tmp_path, monkeypatch, script):
    """Interrupted in the second stage of three; the file is gone by then."""
    own = {ddpo: dict(min_count=2), vgrpo: dict(M=2, kl_ema=0.1)}[script]
    table = [
        {"iterations": 1},
        {"iterations": 2, "lr": 0.01, "reward": "jpeg_compressibility", "ema": 0.9, "T": 4},
        {"iterations": 1, "adv_clip": None, "P": 1},
    ]
    flags = dict(P=2, micro_batch=4, ema=0.5, heldout_reward="red", eval_every=2, **own)
    path = write(tmp_path, *table)
    script.main(quick(script, curriculum=path, out=str(tmp_path / "whole"), **flags))

    original, calls = script.score, []

    def score(*inputs):
        calls.append(1)
        if len(calls) == 2:  # iteration 1, the first of stage 2
            os.kill(os.getpid(), signal.SIGINT)
        return original(*inputs)

    args = quick(script, curriculum=path, out=str(tmp_path / "part"), **flags)
    with monkeypatch.context() as patch:
        patch.setattr(script, "score", score)
        script.main(args)
    assert state(args.out)["done"] == 2
    Path(path).unlink()
    launch(monkeypatch, ["--resume", args.out], script)
    assert_same_run(args.out, tmp_path / "whole")
    assert [row["stage"] for row in read(args.out)] == [1, 2, 2, 3, 3]
    for folder in (args.out, tmp_path / "whole"):
        assert json.loads((Path(folder) / "args.json").read_text())["iterations"] == 4


def test_a_finished_run_resumes_to_its_last_evaluation(quick, tmp_path, monkeypatch):
    args = quick(curriculum=write(tmp_path, {"iterations": 1}, {"iterations": 1, "lr": 0.5}))
    flow_grpo.main(args)
    rows, params = read(args.out), state(args.out)["params"]
    launch(monkeypatch, ["--resume", args.out])
    again = read(args.out)
    assert [row["stage"] for row in again] == [1, 2, 2]
    assert without_time(again) == without_time(rows)
    assert all(torch.equal(a, b) for a, b in zip(params, state(args.out)["params"], strict=True))
