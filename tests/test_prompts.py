"""prompts/: generators, the converter, and the files that are shipped."""

import json
import re
import sys
from collections import Counter

import pytest

from prompts import convert, generate
from rewards import check_metadata, read_prompts

MIX = generate.Args.mix
ROOT = generate.Path(generate.__file__).parent


def row(task, *include, prompt="a photo of something", **more):
    return {"tag": task, "include": list(include), "prompt": prompt, **more}


# ---- GenEval ----


def test_geneval_has_its_six_tasks_in_turn_and_sound_metadata():
    rows = generate.geneval(600, 0, MIX, [])
    for each in rows:
        check_metadata(each)
        names = [clause["class"] for clause in each["include"]]
        assert {*names} <= {*generate.OBJECTS}
        assert len({*names}) == len(names)
        colors = [clause["color"] for clause in each["include"] if "color" in clause]
        assert len(colors) == {"colors": 1, "color_attr": 2}.get(each["tag"], 0)
        assert not colors or "person" not in names
        for word in (*colors, *(name.split()[-1][:4] for name in names if name != "person")):
            assert word in each["prompt"].replace("mice", "mouse").replace("kniv", "knif")
    assert Counter(each["tag"] for each in rows) == dict.fromkeys(generate.TASKS, 100)
    assert all({r["tag"] for r in rows[i : i + 6]} == {*generate.TASKS} for i in range(0, 600, 6))
    assert len(generate.OBJECTS) == len({*generate.OBJECTS}) == 80


def test_each_task_says_what_its_metadata_says():
    for each in generate.geneval(300, 1, MIX, []):
        include, words = each["include"], each["prompt"]
        if each["tag"] == "counting":
            (clause,), (limit,) = include, each["exclude"]
            assert limit == {"class": clause["class"], "count": clause["count"] + 1}
            number = generate.NUMBERS[clause["count"]]
            assert words == f"a photo of {number} {generate.plural(clause['class'])}"
        if each["tag"] == "position":
            anchor, subject = include
            relation, target = subject["position"]
            assert target == 0
            first, second = (generate.with_article(c["class"]) for c in (subject, anchor))
            assert words == f"a photo of {first} {relation} {second}"
        if each["tag"] == "color_attr":
            phrases = [generate.with_article(f"{c['color']} {c['class']}") for c in include]
            assert words == f"a photo of {phrases[0]} and {phrases[1]}"


def test_the_same_arguments_write_the_same_file(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "nothing"}))
    texts = []
    for number, seed in enumerate((3, 3, 4)):
        for kind, suffix in (("geneval", "jsonl"), ("ocr", "txt")):
            out = tmp_path / f"{number}.{suffix}"
            exclude = str(tmp_path / "test.jsonl")
            generate.main(generate.Args(kind, str(out), n=60, seed=seed, exclude=exclude))
            texts.append(out.read_text())
            assert len(read_prompts(out)) == 60
    assert texts[:2] == texts[2:4]
    assert texts[0] != texts[4]
    assert texts[1] != texts[5]


def test_no_test_prompt_is_trained_on_in_any_order():
    """What was drawn once becomes the test set: then nothing of it is drawn again."""
    test = generate.geneval(1200, 5, MIX, [])
    rows = generate.geneval(1200, 5, MIX, test)
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in test}
    banned = {generate.content(r) for r in test if r["tag"] != "single_object"}
    assert not banned & {generate.content(r) for r in rows}
    assert {r["tag"] for r in rows} == {*generate.TASKS}


def test_contents_are_the_same_from_either_side():
    one, two = {"class": "cat", "count": 1}, {"class": "dog", "count": 1}
    same = [
        (row("two_object", one, two), row("two_object", two, one)),
        (
            row("color_attr", one | {"color": "red"}, two | {"color": "blue"}),
            row("color_attr", two | {"color": "blue"}, one | {"color": "red"}),
        ),
    ]
    for here, there in (("left of", "right of"), ("above", "below")):
        same.append(
            (
                row("position", one, two | {"position": [here, 0]}),
                row("position", two, one | {"position": [there, 0]}),
            )
        )
        assert generate.content(same[-1][0]) != generate.content(
            row("position", one, two | {"position": [there, 0]})
        )
    for a, b in same:
        assert generate.content(a) == generate.content(b)
    assert generate.content(
        row("color_attr", one | {"color": "blue"}, two | {"color": "red"})
    ) != generate.content(same[1][0])
    assert len({generate.content(a) for a, _ in same}) == 4


def test_a_prompt_repeats_only_once_its_task_is_used_up():
    rows = generate.geneval(700, 0, "colors:1", [])
    assert len({r["prompt"] for r in rows}) == 700  # of 790
    rows = generate.geneval(700, 0, "counting:1", [])
    counts = Counter(r["prompt"] for r in rows)
    assert 220 <= len(counts) <= 240
    assert max(counts.values()) <= 4
    mix = generate.geneval(170, 0, "position:7,counting:5,color_attr:3,colors:1,two_object:1", [])
    assert Counter(r["tag"] for r in mix) == dict(
        position=70, counting=50, color_attr=30, colors=10, two_object=10
    )


@pytest.mark.parametrize(
    ("mix", "line"),
    [
        ("cats:1", "--mix: 'cats:1' is not TASK:INTEGER; tasks: single_object"),
        ("colors", "--mix: 'colors' is not"),
        ("colors:-1", "--mix: 'colors:-1' is not"),
        ("colors:²", "--mix: 'colors:²' is not"),
        ("colors:0", "--mix: 'colors:0' has no prompts"),
    ],
)
def test_a_bad_mix_is_refused_in_one_line(mix, line):
    with pytest.raises(SystemExit) as stop:
        generate.geneval(5, 0, mix, [])
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code


def test_a_test_set_that_leaves_nothing_is_refused():
    every = [
        row("counting", {"class": name, "count": n})
        for name in generate.OBJECTS for n in generate.NUMBERS
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"^--exclude: leaves nothing of the task counting"):
        generate.geneval(1, 0, "counting:1", every)


# ---- grammar ----


def test_articles():
    articles = {
        "bench": "a bench", "oven": "an oven", "umbrella": "an umbrella", "tv": "a tv",
        "orange cat": "an orange cat", "skis": "skis", "red scissors": "red scissors",
    }  # fmt: skip
    assert {words: generate.with_article(words) for words in articles} == articles


def test_plurals():
    plurals = {
        "bench": "benches", "knife": "knives", "sheep": "sheep", "bus": "buses", "skis": "skis",
        "sandwich": "sandwiches", "person": "people", "toothbrush": "toothbrushes",
        "donut": "donuts", "scissors": "scissors", "wine glass": "wine glasses",
        "computer mouse": "computer mice", "teddy bear": "teddy bears", "tv": "tvs",
    }  # fmt: skip
    assert {name: generate.plural(name) for name in plurals} == plurals


# ---- text and animals ----


def test_every_ocr_prompt_quotes_one_text():
    rows = generate.ocr(100_000, 0, set())
    prompts = [r["prompt"] for r in rows]
    assert len({*prompts}) == len(prompts) == 23_520
    for prompt in prompts:
        before, text, after = prompt.split('"')
        assert before
        assert after == ""
        assert 9 <= len(text) <= 27
        assert re.fullmatch(r"[A-Za-z0-9 ]+", text)
        assert text == text.strip()
    without = generate.ocr(100_000, 0, {*prompts[:100]})
    assert len(without) == len(rows) - 100
    assert not {*prompts[:100]} & {r["prompt"] for r in without}


def test_activities_are_all_animals_times_three():
    prompts = [r["prompt"] for r in generate.activities(5000, 0, set())]
    assert len({*prompts}) == len(prompts) == 135
    assert {"a cat washing the dishes", "an ant playing chess"} <= {*prompts}
    assert len(generate.activities(10, 0, set())) == 10


def test_the_shipped_animals():
    from torchvision.models import ResNet50_Weights

    names = [r["prompt"] for r in read_prompts(ROOT / "imagenet_animals.txt")]
    assert names == ResNet50_Weights.IMAGENET1K_V2.meta["categories"][:398]
    assert len({*names}) == 398
    assert len({r["prompt"] for r in read_prompts(ROOT / "animals.txt")}) == 45


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(kind="geneval", out="x.txt"), "--out: x.txt must end in .jsonl"),
        (dict(kind="ocr", out="x.csv"), "--out: x.csv must end in .jsonl or .txt"),
        (dict(kind="ocr", out="x.txt", n=0), "--n: 0 prompts"),
        (dict(kind="ocr", out="x.txt", mix="colors:1"), "--mix: belongs to geneval, not to ocr"),
        (dict(kind="geneval", out="x.jsonl"), "--exclude: name GenEval's test prompts, from http"),
        (dict(kind="ocr", out="x.txt", exclude="nowhere.txt"), "--exclude: nowhere.txt: cannot"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(flags, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        generate.main(generate.Args(**flags))
    assert stop.value.code.startswith(line)
    assert "\n" not in stop.value.code
    assert not [*tmp_path.iterdir()]


# ---- converter ----


def converted(tmp_path, kind, *files, out="out.jsonl", **more):
    args = convert.Args(kind, tuple(map(str, files)), str(tmp_path / out), **more)
    convert.main(args)
    return [r["prompt"] for r in read_prompts(args.out)]


def test_hpdv2_is_converted(tmp_path):
    """The annotations, a list of dicts, and the benchmark, a list of texts."""
    rows = [
        {"prompt": "A cat,\n  sleeping ", "file_path": ["1.jpg"], "human_preference": [1, 0]},
        {"prompt": 'a "quoted" dog, café'}, {"prompt": "A cat, sleeping"}, {"prompt": "  "},
    ]  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "anime.json").write_text(json.dumps(["one", "two", "one"]))
    wanted = ["A cat, sleeping", 'a "quoted" dog, café', "one", "two"]
    files = tmp_path / "train.json", tmp_path / "anime.json"
    assert converted(tmp_path, "hpdv2", *files) == wanted
    assert converted(tmp_path, "hpdv2", *files, out="new/out.txt") == wanted
    (tmp_path / "heldout.txt").write_text("one\nA cat, sleeping\n")
    left = converted(tmp_path, "hpdv2", *files, exclude=str(tmp_path / "heldout.txt"))
    assert left == [wanted[1], "two"]


def test_lines_of_json_are_converted(tmp_path):
    lines = [{"caption": "a cat"}, {"caption": "a dog"}]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    assert converted(tmp_path, "pickapic", tmp_path / "rows.jsonl") == ["a cat", "a dog"]


def test_pickapic_is_converted(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"caption": ["a cat", "a dog", "a cat"], "jpg_0": [b"1", b"2", b"3"]})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    assert converted(tmp_path, "pickapic", tmp_path / "train-0.parquet") == ["a cat", "a dog"]
    parquet.write_table(pyarrow.table({"text": ["a cat"]}), tmp_path / "other.parquet")
    with pytest.raises(SystemExit, match=r"^pickapic: [^\n]*other.parquet [^\n]*caption"):
        converted(tmp_path, "pickapic", tmp_path / "other.parquet")


def test_parquet_without_pyarrow_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").touch()
    with pytest.raises(SystemExit, match="needs pyarrow: pip install pyarrow"):
        converted(tmp_path, "pickapic", tmp_path / "train.parquet")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("nowhere.json", None, "nowhere.json"),
        ("rows.csv", "a,b", "rows.csv must end in .parquet, .json or .jsonl"),
        ("rows.json", "[{", "rows.json is no json file"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prom', "rows.jsonl is no jsonl file"),
        ("rows.json", '{"prompt": "a"}', "holds no list of rows"),
        ("rows.json", '[{"prompt": "a"}, {"text": "b"}]', "row 2: no text under 'prompt'"),
        ("rows.json", '[{"prompt": 3}]', "row 1: no text under 'prompt'"),
        ("rows.json", "[3]", "row 1: no text under 'prompt'"),
        ("rows.jsonl", b"\xff\xfe", "rows.jsonl is no jsonl file"),
    ],
    ids=str,
)
def test_malformed_files_are_refused_in_one_line(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as stop:
        converted(tmp_path, "hpdv2", tmp_path / name)
    assert stop.value.code.startswith("hpdv2: ")
    assert words in stop.value.code
    assert "hf download ymhao/HPDv2" in stop.value.code
    assert "\n" not in stop.value.code
    assert not (tmp_path / "out.jsonl").exists()


def test_no_prompts_left_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^hpdv2: no files are named; to download: hf"):
        converted(tmp_path, "hpdv2")
    (tmp_path / "rows.json").write_text('["a"]')
    (tmp_path / "all.txt").write_text("a")
    with pytest.raises(SystemExit, match=r"^hpdv2: no prompts are left"):
        converted(tmp_path, "hpdv2", tmp_path / "rows.json", exclude=str(tmp_path / "all.txt"))
