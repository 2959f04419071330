"""Prompt files made by rule: GenEval's six tasks, pictures of text, animals that do something.

    python -m prompts.generate geneval --exclude evaluation_metadata.jsonl --out geneval.jsonl
    python -m prompts.generate ocr --n 2000 --out ocr.txt
    python -m prompts.generate activities --out activities.txt      # DDPO's 45 animals x 3

GenEval (arXiv 2310.11513) is trained on what its 553 test prompts do not ask for. They are not part
of this repository: without --exclude, one line says where to get them. The same arguments write
the same file; a prompt repeats once its task has no new ones.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from rewards import COLORS, OBJECTS, RELATIONS, read_prompts

Row = dict[str, Any]
GENEVAL_TEST = (
    "https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/evaluation_metadata.jsonl"
)


@dataclass
class Args:
    """Settings."""

    kind: tyro.conf.Positional[Literal["geneval", "ocr", "activities"]]
    """what to write"""
    out: str
    """file to write: .jsonl, or .txt where a prompt has no metadata"""
    n: int = 5000
    """prompts (activities: at most all)"""
    seed: int = 0
    """seed of the draws"""
    exclude: str | None = None
    """prompt file whose prompts are left out, GenEval's in whatever order and wording"""
    mix: str = "single_object:1,two_object:1,counting:1,colors:1,position:1,color_attr:1"
    """geneval: prompts of each task in a turn, for instance position:7,counting:5,color_attr:3"""


# ---- GenEval -------------------------------------------------------------------------------------

MIRRORED = {"right of": "left of", "below": "above"}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
NUMBERS = {2: "two", 3: "three", 4: "four"}
# The test asks for "a photo of" each class alone: only other wordings are left to train on.
SINGLE = ("a picture of", "an image of", "a close-up of", "a snapshot of")
TRIES = 200  # draws before a prompt repeats
PLURALS = {
    "person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice",
    "skis": "skis", "scissors": "scissors",
}  # fmt: skip


def with_article(words: str) -> str:
    """a bench, an oven; scissors and skis take none."""
    if words.split()[-1] in ("skis", "scissors"):
        return words
    return f"an {words}" if words[0].lower() in "aeiou" else f"a {words}"


def plural(name: str) -> str:
    """benches, knives. # differs: GenEval adds an s or, after an s, es: three benchs."""
    es = name.endswith(("s", "x", "ch", "sh"))
    return PLURALS.get(name, f"{name}es" if es else f"{name}s")


def draw(task: str, rng: random.Random) -> Row:
    """A prompt of one task in GenEval's JSONL format."""
    a, b = rng.sample(OBJECTS, 2)
    one: Row = {"class": a, "count": 1}
    other: Row = {"class": b, "count": 1}
    more: Row = {}
    if task == "single_object":
        include, prompt = [one], f"{rng.choice(SINGLE)} {with_article(a)}"
    elif task == "two_object":
        include, prompt = [one, other], f"a photo of {with_article(a)} and {with_article(b)}"
    elif task == "counting":
        n = rng.choice(list(NUMBERS))
        include, more = [one | {"count": n}], {"exclude": [{"class": a, "count": n + 1}]}
        prompt = f"a photo of {NUMBERS[n]} {plural(a)}"
    elif task == "position":  # the second clause stands in the relation to clause 0
        relation = rng.choice(RELATIONS)
        include = [other, one | {"position": [relation, 0]}]
        prompt = f"a photo of {with_article(a)} {relation} {with_article(b)}"
    else:  # a person has no colour
        a, b = rng.sample(OBJECTS[1:], 2)
        colors = rng.sample(COLORS, 2)
        pairs = list(zip((a, b), colors))[: 1 if task == "colors" else 2]
        include = [{"class": name, "count": 1, "color": color} for name, color in pairs]
        phrases = [with_article(f"{color} {name}") for name, color in pairs]
        prompt = f"a photo of {' and '.join(phrases)}"
    return {"tag": task, "include": include, **more, "prompt": prompt}


def content(row: Row) -> tuple[Any, ...]:
    """What a prompt asks for, whatever the order and the side it is told from.

    Flow-GRPO leaves out test prompts with their objects swapped as well (flow_grpo issue 4).
    """
    clauses = [(c["class"], c["count"], c.get("color", "")) for c in row["include"]]
    relation = next((c["position"][0] for c in row["include"] if "position" in c), None)
    if relation is None:
        clauses.sort()
    elif relation in MIRRORED:
        relation, clauses = MIRRORED[relation], clauses[::-1]
    return relation, *clauses


def parse_mix(text: str) -> list[str]:
    """The tasks of one turn, each as often as its share says."""
    turn: list[str] = []
    for part in text.split(","):
        task, _, share = part.strip().partition(":")
        if task not in TASKS or not share.isdecimal():
            raise SystemExit(f"--mix: {part!r} is not TASK:INTEGER; tasks: {', '.join(TASKS)}")
        turn += [task] * int(share)
    if not turn:
        raise SystemExit(f"--mix: {text!r} has no prompts; use {Args.mix}")
    return turn


def geneval(n: int, seed: int, mix: str, test: Sequence[Row]) -> list[Row]:
    """n prompts, the tasks in turn, none of them in `test`."""
    rng, turn = random.Random(seed), parse_mix(mix)
    rng.shuffle(turn)
    texts = {row["prompt"] for row in test}
    contents = {content(row) for row in test if "include" in row}
    used: dict[str, set[str]] = {task: set() for task in turn}

    def allowed(row: Row) -> bool:
        alone = row["tag"] == "single_object"  # the test has them all, in one wording
        return row["prompt"] not in texts and (alone or content(row) not in contents)

    def fresh(task: str) -> Row:
        old = None
        for row in (draw(task, rng) for _ in range(TRIES)):
            if allowed(row) and row["prompt"] not in used[task]:
                used[task].add(row["prompt"])
                return row
            old = row if allowed(row) else old
        if old is None:
            raise SystemExit(f"--exclude: leaves nothing of the task {task}; drop it from --mix")
        used[task] = {old["prompt"]}  # nearly all were used: begin again
        return old

    return [fresh(turn[i % len(turn)]) for i in range(n)]


# ---- text and animals ----------------------------------------------------------------------------

SURFACES = """
a neon sign above a bar|a wooden sign at a trailhead|a chalkboard in front of a cafe|a movie poster
a book cover on a desk|a street sign at a crossroads|a t-shirt on a hanger|a birthday cake
a billboard beside a highway|a coffee mug in a kitchen|a shop window at night|a newspaper front page
a protest banner held up in a crowd|a label on a glass jar|a license plate of a parked car
a brass plaque on a stone wall|a train station display|graffiti on a brick wall
a postcard on a fridge|a sticky note on a monitor
""".strip().replace("\n", "|").split("|")  # fmt: skip
FIRST = """
Open|Last|Fresh|Silent|Golden|Lost|Happy|Welcome|Grand|Secret|Slow|Free|Wild|Bright
""".strip().split("|")
SECOND = """
Garden|Harbor|Coffee|Night|Books|Station|Mountain|Market|Music|River|Summer|Bakery
""".strip().split("|")
THIRD = ("", " Club", " Ahead", " Only Today", " Since 1987", " 24 Hours", " This Way")
ACTIVITIES = ("washing the dishes", "riding a bike", "playing chess")  # arXiv 2305.13301


def ocr(n: int, seed: int, texts: set[str]) -> list[Row]:
    """At most n pictures of a text of 9 to 27 characters in straight double quotes."""
    words = itertools.product(SURFACES, FIRST, SECOND, THIRD)
    every = [f'{surface} that says "{" ".join(two)}{more}"' for surface, *two, more in words]
    return sample([{"prompt": text} for text in every if text not in texts], n, seed)


def activities(n: int, seed: int, texts: set[str]) -> list[Row]:
    """DDPO's animals times activities: a cat washing the dishes."""
    animals = read_prompts(Path(__file__).parent / "animals.txt")
    every = [f"{with_article(row['prompt'])} {what}" for row in animals for what in ACTIVITIES]
    return sample([{"prompt": text} for text in every if text not in texts], n, seed)


def sample(rows: Sequence[Row], n: int, seed: int) -> list[Row]:
    """At most n of the rows, shuffled."""
    return random.Random(seed).sample(rows, min(n, len(rows)))


# ---- main ----------------------------------------------------------------------------------------


def write_prompts(rows: Sequence[Row], out: str) -> None:
    """A prompt a line; .txt has no place for metadata."""
    path = Path(out)
    if path.suffix == ".txt":
        lines = [row["prompt"] for row in rows]
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines)} prompts")


def excluded(path: str | None) -> list[Row]:
    """Prompts of a file, none without one; SystemExit in one line if it is no prompt file."""
    try:
        return read_prompts(path) if path else []
    except ValueError as error:
        raise SystemExit(f"--exclude: {error}") from None


def main(args: Args) -> None:
    """Draw and write."""
    suffixes = (".jsonl",) if args.kind == "geneval" else (".jsonl", ".txt")
    if Path(args.out).suffix not in suffixes:
        raise SystemExit(f"--out: {args.out} must end in {' or '.join(suffixes)}")
    if args.n < 1:
        raise SystemExit(f"--n: {args.n} prompts; use 1 or more")
    if args.kind == "geneval" and args.exclude is None:
        raise SystemExit(f"--exclude: name GenEval's test prompts, from {GENEVAL_TEST}")
    if args.kind != "geneval" and args.mix != Args.mix:
        raise SystemExit(f"--mix: belongs to geneval, not to {args.kind}")
    rows = excluded(args.exclude)
    texts = {row["prompt"] for row in rows}
    if args.kind == "geneval":
        rows = geneval(args.n, args.seed, args.mix, rows)
    else:
        rows = (ocr if args.kind == "ocr" else activities)(args.n, args.seed, texts)
    write_prompts(rows, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
