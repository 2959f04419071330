"""Learning at an equal budget: base against trained LoRA, same held-out prompts, same noise.

    python -m bench.learn                                          # flow_grpo, 3 seeds x 15 minutes
    python -m bench.learn --script vgrpo --iterations 60 --seeds 0
    python -m bench.learn --name flow_grpo-fast --extra="--window 3 --sde cps --a 0.8"

Every seed is one run of the script at its default preset, in runs/bench/NAME-sSEED. The clock
starts when the models are loaded; evaluations count, imports do not. When the time is up the run
finishes its iteration, and a second call evaluates what it saved, off the clock. Finished seeds are
kept, so that an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parent.parent
ENDLESS = 1_000_000  # iterations of a run that the clock ends


@dataclass
class Args:
    """Settings of the benchmark."""

    script: str = "flow_grpo"
    """script to run, or a module: baselines.rwr"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """one run each"""
    minutes: float = 15.0
    """budget of a run, evaluations included"""
    iterations: int = 0
    """budget in iterations instead of minutes"""
    eval_prompts: int = 256
    """held-out prompts per evaluation"""
    eval_every: int = 25
    """iterations between the points of the curve"""
    extra: str = ""
    """more flags of the script, as one string: --extra="--lr 3e-4 --G 8" """
    name: str = ""
    """name of the result (default: the script)"""
    out: str = ""
    """file to write (default: bench/results/NAME.json)"""
    redo: bool = False
    """delete the runs of this name and train again"""


# ---- runs ----------------------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """(settings, rows of metrics.jsonl) of a run folder; SystemExit in one line if it is none."""
    try:
        settings = json.loads((folder / "args.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError as error:
        raise SystemExit(f"{folder} is no run folder: no {Path(error.filename).name}") from None
    return settings, [json.loads(line) for line in lines]


def command_line(args: Args, seed: int, folder: str) -> list[str]:
    """The run of one seed; settings nobody names are those of the script's default preset."""
    flags = {
        "iterations": args.iterations or ENDLESS,
        "eval-prompts": args.eval_prompts,
        "eval-every": args.eval_every,
        "seed": seed,
        "out": folder,
    }
    own = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    script = ["-m", args.script] if "." in args.script else [f"{args.script}.py"]
    return [sys.executable, *script, *own, *shlex.split(args.extra)]


def train(command: Sequence[str], folder: Path, minutes: float | None) -> float:
    """Run to the end, or interrupt when the minutes are over -> minutes of the whole process.

    The clock starts with args.json, which a run writes when its models are loaded.
    """
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)  # signals: ours alone
    started: float | None = None
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if started is None and (folder / "args.json").exists():
                started = time.monotonic()
            if minutes and started and time.monotonic() - started >= 60 * minutes:
                break
    finally:  # the time is over, or this process was stopped
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it finishes its iteration, saves and exits
        code = process.wait()
    if code != 0:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {code}")
    return (time.monotonic() - begin) / 60


def version() -> str:
    """The commit, or "unknown" outside a git checkout."""
    call = ["git", "describe", "--always", "--dirty"]
    out = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return out.stdout.strip() or "unknown"


def run_seed(args: Args, seed: int) -> Path:
    """Train one seed and evaluate the result, unless that is already done; the run folder."""
    name = f"runs/bench/{args.name or args.script}-s{seed}"
    folder = ROOT / name
    command = command_line(args, seed, name)
    order = {"command": command[1:], "minutes": 0 if args.iterations else args.minutes}
    done = folder / "bench.json"
    if done.exists() and not args.redo:
        saved = json.loads(done.read_text())
        if {key: saved[key] for key in order} != order:
            raise SystemExit(f"--name: {name} holds a run with other flags; add --redo")
        return folder
    if folder.exists():
        shutil.rmtree(folder)
    print(f"# {shlex.join(command[1:])}", flush=True)
    commit = version()
    wall = train(command, folder, None if args.iterations else args.minutes)
    if not args.iterations:
        _, rows = read_run(folder)
        trained = str(int(rows[-1]["iteration"]) + 1)
        resume = [*command[:2], "--resume", name, "--iterations", trained]
        train(resume, folder, None)
    write_json(done, {**order, "commit": commit, "minutes_wall": round(wall, 3)})
    return folder


# ---- results -------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: ValueError for NaN and infinity, before anything is written."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def evaluation(row: dict[str, float]) -> dict[str, float]:
    """The eval/ metrics of a row, by their short names."""
    return {k.removeprefix("eval/"): round(v, 6) for k, v in row.items() if k.startswith("eval/")}


def summarise(settings: dict[str, Any], rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What one run learned and what it cost; the first and the last evaluation are compared."""
    batch = settings["P"] * settings["G"]
    trained = [row for row in rows if "nfe" in row]  # the final evaluation is a row of its own
    points = [row for row in rows if any(key.startswith("eval/") for key in row)]
    if len(points) < 2 or not trained:
        raise SystemExit(f"{settings['out']}: needs an iteration and two evaluations to compare")
    start, end = evaluation(points[0]), evaluation(points[-1])
    gain = {k: round(end[k] - start[k], 6) for k in start if k in end and k != "kl_ref"}
    plain = [row["seconds"] for row in trained if row not in points]
    seconds = median(plain or [row["seconds"] for row in trained])
    return {
        "seed": settings["seed"],
        "start": start,
        "end": end,
        "gain": gain,
        "minutes": round(sum(row["seconds"] for row in trained) / 60, 3),
        "minutes_without_evaluation": round(seconds * len(trained) / 60, 3),  # by the median
        "iterations": len(trained),
        "images": batch * len(trained),
        "network_calls": round(sum(row["nfe"] for row in trained) * batch),
        "curve": [
            {"iteration": int(row["iteration"]), "images": int(row["iteration"]) * batch}
            | evaluation(row)
            for row in points
        ],
    }


def average(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds of everything that is one number or a dict of them."""
    out: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            out[key] = {
                k: round(mean(run[key][k] for run in runs), 6)
                for k in value
                if all(k in run[key] for run in runs)
            }
        elif key not in ("seed", "curve", "commit"):
            out[key] = round(mean(run[key] for run in runs), 3)
    return out


def table(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one line a seed and one for their mean."""
    head = ("run", "seed", "strict", "", "gain", "soft", "", "gain", "minutes", "iterations",
            "images", "network calls")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for run in [*runs, {**average(runs), "seed": "mean"}]:
        cells = [name, str(run["seed"])]
        for key in ("strict", "soft"):
            values = [run[part].get(key) for part in ("start", "end", "gain")]
            cells += ["" if v is None else f"{v:.3f}" for v in values]
        cells += [f"{run['minutes']:.1f}", f"{run['iterations']:.0f}"]
        cells += [f"{run[key]:,.0f}" for key in ("images", "network_calls")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(args: Args) -> None:
    """All seeds in turn, then one file and one table."""
    import torch

    if not (file := ROOT / f"{args.script.replace('.', '/')}.py").is_file():
        raise SystemExit(f"--script: no {file.relative_to(ROOT)} here")
    if not args.seeds or args.iterations < 0 or not (args.iterations or args.minutes > 0):
        raise SystemExit("--seeds, --minutes, --iterations: need a seed and a positive budget")
    for number in (signal.SIGTERM, signal.SIGHUP):  # no run may outlive the benchmark
        signal.signal(number, lambda number, frame: sys.exit(f"stopped by signal {number}"))
    name = args.name or args.script
    folders = [run_seed(args, seed) for seed in args.seeds]
    runs = []
    for folder in folders:
        how = json.loads((folder / "bench.json").read_text())
        kept = {key: how[key] for key in ("minutes_wall", "commit")}
        runs.append(kept | summarise(*read_run(folder)))
    budget = {"iterations": args.iterations} if args.iterations else {"minutes": args.minutes}
    result = {
        "name": name,
        "script": args.script,
        "budget_per_seed": budget,
        "eval_prompts": args.eval_prompts,
        "flags": args.extra,
        "seeds": list(args.seeds),
        "mean": average(runs),
        "runs": runs,
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    out = Path(args.out) if args.out else ROOT / "bench" / "results" / f"{name}.json"
    write_json(out, result)
    print(table(name, runs))
    print(f"written: {out}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
