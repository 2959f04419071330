"""Learning curves of runs: reward and held-out success against iterations and images seen.

    python -m bench.plot runs/bench/*-s? --out curves.png

Runs that differ in their seed alone make one curve: the mean, in a band from the lowest to the
highest seed. Seeds of unequal length are compared as far as the shortest goes, linearly
interpolated between their own points. The training reward is a trailing mean over --smooth points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bench.learn import read_run

# Settings that may differ between the seeds of one curve.
PER_RUN = {"seed", "out", "resume", "overwrite", "track", "iterations", "save_every", "max_fail"}
PANELS = {"reward/mean": "training reward", "eval/strict": "held-out success (strict)"}


@dataclass
class Args:
    """Settings of the figure."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders"""
    out: Path = Path("curves.png")
    """file to write"""
    smooth: int = 10
    """points of the trailing mean over the training reward"""


class Curve:
    """The runs of one setting: their points (x, y) of a metric, over iterations."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.batch: int = settings["P"] * settings["G"]
        self.rows: list[list[dict[str, float]]] = []

    def points(self, key: str, smooth: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
        """(iterations, values) of every run that has the metric."""
        out = []
        for rows in self.rows:
            x = np.array([row["iteration"] for row in rows if key in row], dtype=float)
            y = np.array([row[key] for row in rows if key in row], dtype=float)
            if len(x):
                out.append((x, trailing_mean(y, smooth)))
        return out


def trailing_mean(y: np.ndarray, n: int) -> np.ndarray:
    """Mean of each value and up to n - 1 before it."""
    return np.array([y[max(0, i + 1 - n) : i + 1].mean() for i in range(len(y))])


def band(
    runs: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, min, max) over runs, at every point of any of them up to the shortest's end."""
    end = min(x[-1] for x, _ in runs)
    x = np.unique(np.concatenate([x[x <= end] for x, _ in runs]))
    y = np.stack([np.interp(x, xs, ys) for xs, ys in runs])
    return x, y.mean(0), y.min(0), y.max(0)


def group(runs: Sequence[tuple[dict[str, Any], list[dict[str, float]]]]) -> dict[str, Curve]:
    """Curves by label: the script, and whatever settings tell it from others of that script."""
    curves: list[Curve] = []
    for settings, rows in runs:
        own = {k: v for k, v in settings.items() if k not in PER_RUN}
        curve = next((c for c in curves if c.settings == own), None)
        if curve is None:
            curve = Curve(own)
            curves.append(curve)
        curve.rows.append(rows)
    return {label(curve, curves): curve for curve in curves}


def label(curve: Curve, curves: Sequence[Curve]) -> str:
    """The script, the settings in which its curves differ, the number of seeds."""
    same = [c.settings for c in curves if c.settings["script"] == curve.settings["script"]]
    differ = [k for k, v in curve.settings.items() if any(s.get(k) != v for s in same)]
    flags = "".join(f" --{k.replace('_', '-')} {curve.settings[k]}" for k in differ)
    n = len(curve.rows)
    return f"{curve.settings['script']}{flags} ({n} seed{'s' if n > 1 else ''})"


def draw(curves: dict[str, Curve], out: Path, smooth: int) -> None:
    """Two rows (reward, success), two columns (iterations, images seen)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.2), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for row, (key, title) in enumerate(PANELS.items()):
        for column, name in enumerate(("iterations", "images seen")):
            axis = axes[row, column]
            for k, (text, curve) in enumerate(curves.items()):
                points = curve.points(key, smooth if key == "reward/mean" else 1)
                if not points:
                    continue
                x, mean, low, high = band(points)
                x = x if column == 0 else x * curve.batch
                axis.plot(x, mean, color=f"C{k}", label=text, marker="." if row else None)
                axis.fill_between(x, low, high, color=f"C{k}", alpha=0.2, linewidth=0)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            if row == 1:
                axis.set_xlabel(name)
        axes[row, 0].set_ylabel(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(labels)))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(args: Args) -> None:
    """Read, draw, write."""
    if not args.folders:
        raise SystemExit("give at least one run folder")
    draw(group([read_run(folder) for folder in args.folders]), args.out, args.smooth)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
