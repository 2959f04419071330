"""The embedded world: scenes of 1 to 4 coloured shapes, their captions, a renderer and a detector.

Small enough for two CPU cores and real enough to be scored by GenEval's rules (Ghosh et al., arXiv
2310.11513): its six tasks, its JSONL metadata, and a detector that returns labelled, scored boxes.

    python -m tiny.world        # writes tiny/prompts/{train,heldout}.jsonl
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage

SIZE = 64  # pixels
SHAPES = ("circle", "square", "triangle")
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 190),
}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
# The same content in five wordings, so that a text can be held out while its words are known.
PREFIXES = ("", "draw ", "paint ", "show ", "sketch ")
GAP = 5  # pixels between bounding boxes; at 4 the anti-aliased rims of 3 % of the scenes touch


class Shape(NamedTuple):
    """One object: centre and radius in pixels (a square's half side is 0.88 radius)."""

    kind: str
    color: str
    x: float
    y: float
    radius: float


class Scene(NamedTuple):
    """Shapes on a light grey ground (0..1)."""

    shapes: tuple[Shape, ...]
    ground: float


class Detection(NamedTuple):
    """Box is (x0, y0, x1, y1) in pixels, x1 and y1 exclusive; score in [0, 1]."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    color: str


# ---- Captions -----------------------------------------------------------------------------------


def contents(task: str) -> list[dict[str, Any]]:
    """All contents of one task as GenEval metadata, the caption under `prompt` without a prefix."""
    pairs = list(itertools.permutations(SHAPES, 2))

    def meta(prompt: str, *include: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"tag": task, "include": list(include), **more, "prompt": prompt}

    def one(kind: str, **more: Any) -> dict[str, Any]:
        return {"class": kind, "count": 1, **more}

    if task == "single_object":
        return [meta(f"a {s}", one(s)) for s in SHAPES]
    if task == "two_object":
        return [meta(f"a {a} and a {b}", one(a), one(b)) for a, b in pairs]
    if task == "counting":
        return [
            meta(f"{word} {s}s", {"class": s, "count": n}, exclude=[{"class": s, "count": n + 1}])
            for n, word in NUMBERS.items()
            for s in SHAPES
        ]
    if task == "colors":
        return [meta(f"a {c} {s}", one(s, color=c)) for c in COLORS for s in SHAPES]
    if task == "position":  # the second clause stands in the relation to clause 0, as in GenEval
        return [
            meta(f"a {a} {rel} a {b}", one(b), one(a, position=[rel, 0]))
            for rel in RELATIONS
            for a, b in pairs
        ]
    return [
        meta(f"a {ca} {a} and a {cb} {b}", one(a, color=ca), one(b, color=cb))
        for a, b in pairs
        for ca, cb in itertools.permutations(COLORS, 2)
    ]


@functools.cache
def split_prompts() -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """(train, held-out) metadata per task; no held-out text occurs in train.

    Held out are one wording in five of every content and, where a task has enough contents,
    whole compositions: every fifth of colors and color_attr, every sixth of position.
    """
    train: dict[str, list[dict[str, Any]]] = {}
    heldout: dict[str, list[dict[str, Any]]] = {}
    whole = {"colors": 5, "color_attr": 5, "position": 6}
    for task in TASKS:
        rows = contents(task)
        random.Random(task).shuffle(rows)
        train[task], heldout[task] = [], []
        for i, row in enumerate(rows):
            for j, prefix in enumerate(PREFIXES):
                out = i % whole.get(task, len(rows) + 1) == whole.get(task, 0) - 1
                side = heldout if out or j == i % len(PREFIXES) else train
                side[task].append({**row, "prompt": prefix + row["prompt"]})
    return train, heldout


def interleave(rows: dict[str, list[dict[str, Any]]], n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows, the six tasks in turn (any prefix is balanced), each task shuffled and repeated."""
    rng = random.Random(seed)
    queues: dict[str, list[dict[str, Any]]] = {task: [] for task in TASKS}
    out = []
    for i in range(n):
        task = TASKS[i % len(TASKS)]
        if not queues[task]:
            queues[task] = rng.sample(rows[task], len(rows[task]))
        out.append(queues[task].pop())
    return out


def write_prompts(folder: Path) -> None:
    """Write train.jsonl (1,200 lines) and heldout.jsonl (512 lines)."""
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = split_prompts()
    for name, rows in (
        ("train", interleave(train, 1200, 0)),
        ("heldout", interleave(heldout, 512, 1)),
    ):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


# ---- Scenes and pictures ------------------------------------------------------------------------


def half_extent(kind: str, radius: float) -> tuple[float, float]:
    """Half width and half height of a shape's bounding box, pixels."""
    if kind == "circle":
        return radius, radius
    if kind == "square":
        return 0.88 * radius, 0.88 * radius
    return 1.05 * radius, 0.95 * radius  # triangle: nearly equilateral, centred on its box


def sample_scene(meta: dict[str, Any], rng: random.Random) -> Scene:
    """A scene that the caption describes exactly: nothing missing, nothing more."""
    wanted = [(c["class"], c.get("color")) for c in meta["include"] for _ in range(c["count"])]
    relation = next((c["position"][0] for c in meta["include"] if "position" in c), None)
    while True:
        shapes: list[Shape] = []
        for kind, color in wanted:
            placed = _place(kind, color or rng.choice(list(COLORS)), shapes, rng)
            if placed is None:
                break
            shapes.append(placed)
        if len(shapes) == len(wanted) and (relation is None or _stands(relation, *shapes)):
            return Scene(tuple(shapes), rng.uniform(0.88, 1.0))


def _place(kind: str, color: str, others: list[Shape], rng: random.Random) -> Shape | None:
    for _ in range(40):
        radius = rng.uniform(8, 11)
        w, h = half_extent(kind, radius)
        x, y = rng.uniform(w + 1, SIZE - w - 1), rng.uniform(h + 1, SIZE - h - 1)
        if all(_apart(x, y, w, h, o) for o in others):
            return Shape(kind, color, x, y, radius)
    return None


def _apart(x: float, y: float, w: float, h: float, other: Shape) -> bool:
    ow, oh = half_extent(other.kind, other.radius)
    return abs(x - other.x) > w + ow + GAP or abs(y - other.y) > h + oh + GAP


def _stands(relation: str, anchor: Shape, subject: Shape) -> bool:
    """A clear relation: at least 12 px along its axis, at most 45 degrees off it."""
    dx, dy = subject.x - anchor.x, subject.y - anchor.y
    along, across = {
        "left of": (-dx, dy),
        "right of": (dx, dy),
        "above": (-dy, dx),
        "below": (dy, dx),
    }[relation]
    return along > 12 and abs(across) < along


_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5


def render(scene: Scene) -> torch.Tensor:
    """uint8 (3, 64, 64), anti-aliased by signed distance."""
    image: np.ndarray = np.full((SIZE, SIZE, 3), scene.ground * 255, dtype=np.float32)
    for s in scene.shapes:
        cover = np.clip(0.5 - _distance(s), 0, 1)[..., None]
        image = image * (1 - cover) + np.asarray(COLORS[s.color], dtype=np.float32) * cover
    return torch.from_numpy(image.round().astype(np.uint8)).permute(2, 0, 1).contiguous()


def _distance(s: Shape) -> np.ndarray:
    """Signed distance in pixels, negative inside."""
    x, y = _X - s.x, _Y - s.y
    w, h = half_extent(s.kind, s.radius)
    if s.kind == "circle":
        return np.hypot(x, y) - s.radius
    if s.kind == "square":
        return np.maximum(np.abs(x) - w, np.abs(y) - h)
    side = (np.abs(x) * 2 * h - (y + h) * w) / np.hypot(2 * h, w)  # two slanted edges, apex on top
    return np.maximum(side, y - h)


# ---- Detector -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _template(kind: str, h: int, w: int) -> np.ndarray:
    """The ideal shape filling an h x w box, bool."""
    y = (np.arange(h, dtype=np.float32)[:, None] + 0.5) / h
    x = np.abs((np.arange(w, dtype=np.float32)[None] + 0.5) / w - 0.5) * 2
    if kind == "circle":
        return x**2 + (2 * y - 1) ** 2 <= 1
    if kind == "square":
        return np.broadcast_to(np.array(True), (h, w))
    return x <= y


class ShapeDetector:
    """Connected components of saturated pixels, labelled by the best-fitting ideal shape.

    The score is 1 for a clean shape of one palette colour. It falls to 0 as the outline's overlap
    (IoU) with the ideal shape in its own box falls from 0.78 to 0.60, as the lead over the second
    best shape shrinks below 0.1, and with the share of pixels of other colours: a blob, a rounded
    square or a two-coloured shape scores low, so soft shapes are no way to a reward.
    """

    saturation = 0.25  # max - min channel, 0..1
    min_pixels = 60
    iou_range = (0.60, 0.78)
    lead = 0.1

    def __call__(
        self, images: torch.Tensor, metadata: list[dict[str, Any]]
    ) -> list[list[Detection]]:
        """`images` uint8 (B, 3, H, W); one list of detections an image, in reading order."""
        return [self._detect(image) for image in images.permute(0, 2, 3, 1).cpu().numpy()]

    def _detect(self, image: np.ndarray) -> list[Detection]:
        pixels = image.astype(np.int16)
        mask = pixels.max(-1) - pixels.min(-1) > self.saturation * 255
        labels, _ = ndimage.label(mask)
        found = []
        for i, (rows, cols) in enumerate(ndimage.find_objects(labels), start=1):
            inside = labels[rows, cols] == i
            if inside.sum() >= self.min_pixels:
                box = (cols.start, rows.start, cols.stop, rows.stop)
                found.append(self._classify(inside, pixels[rows, cols][inside], box))
        return found

    def _classify(
        self, inside: np.ndarray, pixels: np.ndarray, box: tuple[float, float, float, float]
    ) -> Detection:
        h, w = inside.shape
        ious = []
        for kind in SHAPES:
            ideal = _template(kind, h, w)
            ious.append((inside & ideal).sum() / (inside | ideal).sum())
        palette = np.asarray(list(COLORS.values()), dtype=np.int32)
        nearest = ((pixels[:, None].astype(np.int32) - palette) ** 2).sum(-1).argmin(-1)
        counts = np.bincount(nearest, minlength=len(palette))
        low, high = self.iou_range
        second, best = sorted(ious)[-2:]
        outline = np.clip((best - low) / (high - low), 0, 1) * min(1.0, (best - second) / self.lead)
        if not 0.7 <= w / h <= 1.45:  # a stretched shape is none of the three
            outline = 0.0
        return Detection(
            label=SHAPES[int(np.argmax(ious))],
            score=float(outline * min(1.0, counts.max() / counts.sum() / 0.9)),
            box=box,
            color=list(COLORS)[int(counts.argmax())],
        )

    def self_test_case(self) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """One picture with a known answer: (uint8 (1, 3, 64, 64), metadata)."""
        meta = contents("color_attr")[0]
        return render(sample_scene(meta, random.Random(0)))[None], [meta]


if __name__ == "__main__":
    write_prompts(Path(__file__).parent / "prompts")
