"""The benchmarks: their arithmetic on invented runs, and one small run of each."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flow_grpo
from bench import learn, plot, speed, variance

SETTINGS = dict(script="flow_grpo", model="tiny", seed=0, P=2, G=4, out="runs/x", iterations=4)


def make_rows(start: float, end: float, n: int = 4) -> list[dict[str, float]]:
    """A log as a run leaves it: evaluated at 0 and 2, and once more in a row of its own."""
    rows: list[dict[str, float]] = []
    for i in range(n):
        seconds = 13.0 if i % 2 == 0 else 3.0
        row = {"iteration": i, "reward/mean": 0.1 * i, "nfe": 2.5, "seconds": seconds}
        if i % 2 == 0:
            row |= {"eval/strict": start, "eval/soft": start + 0.2, "eval/kl_ref": 0.0}
        rows.append(row)
    last = {"eval/strict": end, "eval/soft": end + 0.25, "eval/kl_ref": 0.01}
    return [*rows, {"iteration": n, **last}]


def write_run(folder: Path, rows: list[dict[str, float]], **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({**SETTINGS, **changes}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# ---- learn ----


def test_a_run_is_summarised_from_its_log(tmp_path):
    out = learn.summarise(*learn.read_run(write_run(tmp_path / "run", make_rows(0.25, 0.5))))
    assert out["start"] == {"strict": 0.25, "soft": 0.45, "kl_ref": 0.0}
    assert out["end"] == {"strict": 0.5, "soft": 0.75, "kl_ref": 0.01}
    assert out["gain"] == {"strict": 0.25, "soft": 0.3}
    assert (out["iterations"], out["images"], out["network_calls"]) == (4, 32, 80)
    assert out["minutes"] == pytest.approx(32 / 60, abs=1e-3)
    assert out["minutes_without_evaluation"] == pytest.approx(12 / 60, abs=1e-3)
    assert [(p["iteration"], p["images"]) for p in out["curve"]] == [(0, 0), (2, 16), (4, 32)]


def test_a_run_without_a_second_evaluation_is_refused():
    with pytest.raises(SystemExit, match="two evaluations"):
        learn.summarise(SETTINGS, make_rows(0.2, 0.5)[:2])


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"no run folder: no args\.json"):
        learn.read_run(tmp_path)


def test_the_table_has_a_line_a_seed_and_their_mean():
    runs = [learn.summarise({**SETTINGS, "seed": s}, make_rows(0.2, 0.4 + s / 5)) for s in (0, 1)]
    lines = learn.table("demo", runs).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[:5] == ["demo", "mean", "0.200", "0.500", "0.300"]


def test_the_mean_leaves_out_what_a_seed_lacks():
    runs = [learn.summarise(SETTINGS, make_rows(0.2, 0.4)) for _ in range(2)]
    del runs[1]["end"]["soft"]
    assert set(learn.average(runs)["end"]) == {"strict", "kl_ref"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_is_strict_and_a_bad_number_writes_nothing(tmp_path, value):
    path = tmp_path / "new" / "x.json"
    with pytest.raises(ValueError, match="JSON"):
        learn.write_json(path, {"ratio": value})
    assert not path.exists()
    learn.write_json(path, {"ratio": 1.0})
    assert json.loads(path.read_text()) == {"ratio": 1.0}


def test_flags_reach_the_script_and_extra_ones_come_last():
    args = learn.Args(script="vgrpo", iterations=7, extra="--lr 3e-4 --P 3")
    command = learn.command_line(args, 2, "runs/bench/vgrpo-s2")
    assert command[1] == "vgrpo.py"
    assert command[-4:] == ["--lr", "3e-4", "--P", "3"]
    assert command[command.index("--iterations") + 1] == "7"
    assert command[command.index("--seed") + 1] == "2"
    command = learn.command_line(replace(args, script="baselines.rwr"), 2, "runs/x")
    assert command[1:3] == ["-m", "baselines.rwr"]


def test_a_script_that_is_not_there_is_refused():
    with pytest.raises(SystemExit, match=r"^--script: no baselines/ppo\.py here$"):
        learn.main(learn.Args(script="baselines.ppo"))


FAKE_RUN = """
import pathlib, signal, sys, time
folder, stop = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
(folder / "args.json").write_text("{}")
while not stop:
    time.sleep(0.05)
(folder / "saved").write_text("yes")
"""


def test_the_clock_interrupts_a_run_and_waits_for_it_to_save(tmp_path):
    start = time.monotonic()
    learn.train([sys.executable, "-c", FAKE_RUN, str(tmp_path)], tmp_path, 0.5 / 60)
    assert (tmp_path / "saved").exists()
    assert 0.5 <= time.monotonic() - start < 20


def test_a_run_that_fails_stops_the_benchmark(tmp_path):
    with pytest.raises(SystemExit, match="exit code 3"):
        learn.train([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, None)


def test_a_finished_seed_is_kept_and_other_flags_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "ROOT", tmp_path)
    calls = []

    def train(command, folder, minutes):
        calls.append((list(command), minutes))
        if "--resume" not in command:
            write_run(folder, make_rows(0.2, 0.5)[:-1])
        return 1.0

    monkeypatch.setattr(learn, "train", train)
    args = learn.Args(minutes=2, seeds=(0,))
    folder = learn.run_seed(args, 0)
    assert [minutes for _, minutes in calls] == [2, None]
    assert calls[1][0][2:] == ["--resume", "runs/bench/flow_grpo-s0", "--iterations", "4"]
    assert learn.run_seed(args, 0) == folder
    assert len(calls) == 2
    with pytest.raises(SystemExit, match="--redo"):
        learn.run_seed(learn.Args(minutes=3, seeds=(0,)), 0)
    learn.run_seed(learn.Args(minutes=3, seeds=(0,), redo=True), 0)
    assert len(calls) == 4


# ---- plot ----


def test_seeds_share_a_curve_and_other_settings_do_not(tmp_path):
    rows = make_rows(0.2, 0.5)
    runs = [({**SETTINGS, "seed": s, "out": str(s), "window": w}, rows)
            for s in (0, 1) for w in (0, 3)]  # fmt: skip
    runs.append(({**SETTINGS, "script": "vgrpo"}, rows))
    names = ["flow_grpo --window 0 (2 seeds)", "flow_grpo --window 3 (2 seeds)", "vgrpo (1 seed)"]
    assert list(plot.group(runs)) == names


def test_the_band_spans_the_seeds_and_ends_with_the_shortest():
    one = (np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 5.0]))
    two = (np.array([0.0, 10.0, 16.0]), np.array([2.0, 3.0, 3.0]))
    x, mean, low, high = plot.band([one, two])
    assert x.tolist() == [0, 10, 16]
    np.testing.assert_allclose(low, [0, 1, 3])
    np.testing.assert_allclose(high, [2, 3, 1 + 4 * 0.6])
    np.testing.assert_allclose(mean, [1, 2, 3.2])


def test_the_trailing_mean_looks_back_only():
    np.testing.assert_allclose(plot.trailing_mean(np.array([1.0, 3, 5, 7]), 2), [1, 2, 4, 6])


def test_plotting_makes_a_picture(tmp_path):
    folders = [write_run(tmp_path / f"s{s}", make_rows(0.2, 0.5 + s / 10), seed=s) for s in (0, 1)]
    out = tmp_path / "deep" / "curves.png"
    plot.main(plot.Args(tuple(folders), out))
    assert out.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    assert np.ptp(imread(out)[..., :3]) > 0.5


# ---- speed ----


def test_the_ratio_is_the_median_over_pairs():
    pairs = [speed.Pair(1.1, 1.0), speed.Pair(12.0, 10.0), speed.Pair(9.0, 3.0)]
    out = speed.summarise(pairs)
    assert out["ratio"] == 1.2
    assert out["ratio_range"] == [1.1, 3.0]
    assert (out["seconds_whole"], out["seconds_bare"], out["repeats"]) == (9.0, 3.0, 3)


def test_bad_settings_end_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="--repeats"):
        speed.script_args(speed.Args(repeats=0), str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="--model"):
        speed.script_args(speed.Args(model="none"), str(tmp_path / "run"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> str:
    from tiny import pretrain

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    tokenizer = pretrain.make_tokenizer(folder / "tokenizer")
    pretrain.export(
        pretrain.make_models(len(tokenizer)), pretrain.make_vae(), folder, folder / "sd3"
    )
    return str(folder / "sd3")


def test_speed_end_to_end(untrained, tmp_path, monkeypatch):
    seen = []
    original = speed.bare

    def watched(policy, passes, inputs):
        with speed.recorded(policy) as again:
            original(policy, passes, inputs)
        seen.append((list(passes), again))

    monkeypatch.setattr(speed, "bare", watched)
    out = tmp_path / "speed.json"
    result = speed.main(
        speed.Args(
            weights=untrained, reward="jpeg_compressibility", P=2, G=4, T=4, repeats=1, out=str(out)
        )
    )
    assert json.loads(out.read_text()) == result
    assert result["ratio"] > 0
    assert result["images"]["forward"] == 4 * 8
    assert result["images"]["decode"] == 8
    assert 0 < result["images"]["update"] <= 3 * 8  # three trained steps
    assert len(seen) == 2  # one to warm up, one that counts
    assert all(passes == again for passes, again in seen)  # the same passes in the same order


def test_the_whole_iteration_is_that_of_main(untrained, tmp_path, monkeypatch):
    small = dict(weights=untrained, reward="jpeg_compressibility", P=1, G=4, T=4)
    a = speed.script_args(speed.Args(**small, repeats=1), str(tmp_path / "speed"))
    monkeypatch.setattr(speed, "bare", lambda *_: None)
    monkeypatch.setattr(speed, "timed", lambda work: work() or 1.0)
    speed.measure(a)
    flow_grpo.main(
        replace(
            flow_grpo.Args(**{**flow_grpo.PRESETS["tiny"], **small}),
            micro_batch=4,
            iterations=2,
            eval_prompts=1,
            out=str(tmp_path / "main"),
        )
    )
    _, ours = learn.read_run(tmp_path / "speed")
    _, theirs = learn.read_run(tmp_path / "main")
    for mine, main in zip(ours, theirs[:2], strict=True):
        main = {k: v for k, v in main.items() if not k.startswith("eval/")}
        assert main.pop("seconds") > 0
        assert mine.pop("seconds") > 0
        assert mine == main


# ---- variance ----


def test_the_techniques_of_vgrpo_steady_its_surrogate():
    """Measured on 8 iterations of 96 images: 0.31 / 0.26 with all of them, 0.75 / 0.70 or more without."""
    found = variance.measure(variance.Args(iterations=1, P=2, G=8))
    assert found.keys() == variance.SETTINGS.keys()
    for key in ("cv", "cv_group"):
        naive = [row[key] for name, row in found.items() if name.startswith("naive")]
        assert 0 < found["V-GRPO"][key] < min(naive)


def test_the_variance_is_written_with_its_settings(tmp_path, capsys):
    out = tmp_path / "variance.json"
    variance.main(variance.Args(iterations=1, P=1, G=2, M=2, out=str(out)))
    saved = json.loads(out.read_text())
    assert (saved["P"], saved["G"], saved["M"], saved["iterations"]) == (1, 2, 2, 1)
    assert capsys.readouterr().out.count("|\n") == len(variance.SETTINGS) + 2
