"""rewards.py: the judge over HTTP, against a real server on loopback that misbehaves."""

import base64
import hashlib
import io
import json
import math
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_rewards import VECTORS, inputs, noise
from torch.testing import assert_close

import rewards
from rewards import (
    BertRecall,
    RewardUnavailable,
    jpeg_bytes,
    load_rewards,
    make_reward,
    parse_final_score,
    yes_probability,
)

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("unifiedreward", "vlm_yesno", "llava_bertscore")


# ---- the scores in an answer ----

OURS = {"final score: 4": 0.8, "Final Score: **4**": 0.8}  # official: 0
UNSCORED = {"Final Score: 0.5", "Final Score: 10", "no score"}  # official: 0, 0.2, 0


@pytest.mark.parametrize(
    ("text", "official"), VECTORS["ocr"]["unifiedreward_parse_flow_grpo"].items()
)
def test_final_score_vectors(text, official):
    if text in UNSCORED:
        with pytest.raises(ValueError, match=r"no final score in 1..5 in the answer"):
            parse_final_score(text)
    else:
        assert parse_final_score(text) / 5 == OURS.get(text, official)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 1", 1),
        ("Final Score: 5", 5),
        ("Final Score: 5.0.", 5),
        ("Final Score: 3, because", 3),
        ("Final Score: 4/5", 4),
        ("**Final Score:** 4.5", 4.5),
        ("**Final Score**: 4.5", 4.5),
        ("*Final  Score* : _4_", 4),
        ("## FINAL SCORE:\n\n**4**\n", 4),
        ("Final Score (1-5): 2", 2),
        ("a score after 'Final Score:'.\nFinal Score: 2", 2),
        ("Final Score: 5.01", None),
        ("Final Score: 0.99", None),
        ("Final Score: -3", None),
        ("Final Score: 45", None),
        ("Final Score: 4,5", None),
        ("Final Score: 1e3", None),
        ("Final Score: four", None),
        ("Final Score: 9. Final Score: 3", None),
        ("The score is 4", None),
        ("", None),
    ],
)
def test_final_score(text, score):
    if score is None:
        with pytest.raises(ValueError, match="no final score"):
            parse_final_score(text)
    else:
        assert parse_final_score(text) == score


def first_token(**probabilities: float) -> dict:
    """A choice whose first token has these probabilities."""
    top = [{"token": t.replace("_", " "), "logprob": math.log(p)} for t, p in probabilities.items()]
    return {"logprobs": {"content": [{"top_logprobs": top}]}}


@pytest.mark.parametrize(
    ("choice", "value"),
    [
        (first_token(Yes=0.6, No=0.2), 0.75),
        (first_token(Yes=0.3, _yes=0.2, YES=0.1, No=0.1, no_=0.1), 0.75),
        (first_token(Maybe=0.9, Yes=0.01, Yesterday=0.05, No=0.03), 0.25),
        (first_token(Yes=1e-300, No=3e-300), 0.25),
        (first_token(Yes=0.9, Nope=0.1), 1),
        (first_token(No=0.9), 0),
    ],
)
def test_yes_probability(choice, value):
    assert yes_probability(choice) == pytest.approx(value)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (first_token(Maybe=0.9), "neither yes nor no"),
        (first_token(), "neither yes nor no"),
        ({}, "no top_logprobs"),
        ({"logprobs": None}, "no top_logprobs"),
        ({"logprobs": {"content": []}}, "no top_logprobs"),
        ({"logprobs": {"content": [{"top_logprobs": [{"token": "Yes"}]}]}}, "no top_logprobs"),
        ({"logprobs": {"content": [{"top_logprobs": [["Yes", -1]]}]}}, "no top_logprobs"),
    ],
)
def test_yes_probability_needs_the_probabilities(choice, reason):
    with pytest.raises(ValueError, match=reason):
        yes_probability(choice)


# ---- a server ----


def chat(text: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server. The caption "4" is answered by the score 4; `behave`, given the
    caption and how often it was asked, may return other (status, body), or None to hang up.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = (200, json.dumps({"data": [{"id": "judge"}, {"id": "other"}]}).encode())
        self.behave = lambda caption, nth: (200, chat(f"Final Score: {caption}"))
        self.bodies, self.asked, self.paths = [], Counter(), []
        self.lock, self.open = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a client that no longer waits


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        self.send(self.server.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"][1]["text"]
        caption = text.rpartition("Text Caption: [")[2].removesuffix("]")
        with self.server.lock:
            self.server.paths.append(self.path)
            self.server.bodies.append(body)
            self.server.asked[caption] += 1
            nth = self.server.asked[caption]
        self.send(self.server.behave(caption, nth))

    def send(self, answer):
        if answer is None:
            self.close_connection = True
            return
        status, body = answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in NAMES:
        monkeypatch.delenv(f"REWARD_{name.upper()}_URL", raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.open.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, in seconds; none is made."""
    made = []
    monkeypatch.setattr(rewards.time, "sleep", made.append)
    return made


@pytest.fixture
def nowhere(server) -> str:
    """The address of a port at which nothing listens."""
    with Server() as other:
        return other.url


def unified(server, **opts):
    return make_reward("unifiedreward", url=server.url, **opts)


CAPTIONS = ["4", "1", "2.5", "5", "3"]
SCORES = torch.tensor([4, 1, 2.5, 5, 3])


def test_what_is_sent(server):
    image = torch.from_numpy(inputs.test_image("gradient", 24)).permute(2, 0, 1)[None]
    reward = unified(server)
    assert server.paths == ["/v1/models"]
    assert reward(image, ["3"]).tolist() == [3]
    assert server.paths[1:] == ["/v1/chat/completions"]
    (body,) = server.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0, 1024)
    (message,) = body["messages"]
    assert message["role"] == "user"
    picture, text = message["content"]
    assert text == {"type": "text", "text": rewards.UNIFIED_QUESTION.replace("{prompt}", "3")}
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert (picture["type"], kind) == ("image_url", "data:image/jpeg;base64")
    jpeg = base64.b64decode(data)
    assert jpeg == jpeg_bytes(image[0])
    shown = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), dtype=float)
    assert abs(shown - image[0].permute(1, 2, 0).numpy()).max() < 16


def test_the_question_is_the_official_one():
    """The digest of the text in unifiedreward_score_sglang, rewards.py of flow_grpo@ac4c86e."""
    digest = hashlib.sha256(rewards.UNIFIED_QUESTION.encode()).hexdigest()
    assert digest == "d68ab1dcf4dc3a39ec5dfab963d17fe30a6e5f713eb49f743ed88a4c8ce4317f"


def test_captions_are_text_and_nothing_else(server):
    server.behave = lambda caption, nth: (200, chat("Final Score: 2"))
    captions = ["{prompt} {0}", 'a "quoted" ] \n{', "%s \\n ☂"]
    assert unified(server)(noise(3), captions).tolist() == pytest.approx([2.0] * 3)
    texts = {body["messages"][0]["content"][1]["text"] for body in server.bodies}
    head = rewards.UNIFIED_QUESTION.removesuffix("{prompt}]")
    assert texts == {f"{head}{caption}]" for caption in captions}


def test_scale(server):
    values = unified(server, scale=5)(noise(5), CAPTIONS).tolist()
    assert values == pytest.approx([0.8, 0.2, 0.5, 1, 0.6])
    assert_close(unified(server)(noise(5), CAPTIONS), SCORES)


def test_a_model_is_chosen_by_name(server):
    unified(server, model="other")(noise(1), ["3"])
    assert server.bodies[0]["model"] == "other"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_where_the_server_is(server, nowhere, monkeypatch, end):
    assert unified(server).kind == "http"
    assert make_reward("unifiedreward", url=server.url + end)(noise(1), ["3"]).isfinite()
    monkeypatch.setenv("REWARD_UNIFIEDREWARD_URL", server.url + end)
    assert make_reward("unifiedreward")(noise(1), ["3"]).isfinite()
    monkeypatch.setenv("REWARD_UNIFIEDREWARD_URL", nowhere)  # the option wins
    assert make_reward("unifiedreward", url=server.url)(noise(1), ["3"]).isfinite()


# ---- the contract ----


def test_the_batch_changes_nothing(server):
    captions = [str(1 + i % 4 + i / 20) for i in range(17)]
    images, whole = noise(17), unified(server)(noise(17), captions)
    assert len(whole.unique()) > 10
    for batch_size, workers in ((1, 1), (5, 2), (17, 16), (100, 3)):
        reward = unified(server, batch_size=batch_size, workers=workers)
        assert torch.equal(reward(images, captions), whole)
    order = [(5 * i + 3) % 17 for i in range(17)]
    permuted = unified(server)(images[order], [captions[i] for i in order])
    assert torch.equal(permuted, whole[order])


def test_each_caption_goes_with_its_picture(server):
    images = torch.stack([torch.full((3, 8, 8), 50 * i, dtype=torch.uint8) for i in range(5)])
    unified(server)(images, CAPTIONS)
    sent = {}
    for body in server.bodies:
        picture, text = body["messages"][0]["content"]
        data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
        sent[text["text"][-4:].strip(" []")] = np.asarray(Image.open(io.BytesIO(data))).mean()
    assert [sent[caption] for caption in CAPTIONS] == pytest.approx([0, 50, 100, 150, 200], abs=1)


def test_questions_are_asked_at_once_and_answers_may_come_in_any_order(server):
    waiting = {caption: threading.Event() for caption in CAPTIONS}

    def behave(caption, nth):
        """Each answer waits for the one to the next caption: with fewer in flight it never comes."""
        later = CAPTIONS.index(caption) + 1
        if later < len(CAPTIONS):
            assert waiting[CAPTIONS[later]].wait(60)
        waiting[caption].set()
        return 200, chat(f"Final Score: {caption}")

    server.behave = behave
    assert_close(unified(server, workers=5)(noise(5), CAPTIONS), SCORES)


def test_no_more_than_workers_are_asked_at_once(server):
    now, most = 0, 0

    def behave(caption, nth):
        nonlocal now, most
        with server.lock:
            now += 1
            most = max(most, now)
        server.open.wait(0.05)
        with server.lock:
            now -= 1
        return 200, chat(f"Final Score: {caption}")

    server.behave = behave
    assert_close(unified(server, workers=2)(noise(5), CAPTIONS), SCORES)
    assert most == 2


# ---- a server that misbehaves ----

HANG_UP = None
FAULTS = {
    "500 always": ((500, b"out of\nmemory"), "HTTP 500: out of memory"),
    "404": ((404, b"no such model"), "HTTP 404: no such model"),
    "not JSON": ((200, b"<html>"), "JSONDecodeError"),
    "empty": ((200, b""), "JSONDecodeError"),
    "hangs up": (HANG_UP, "ConnectionError"),
    "a list": ((200, b"[]"), "not one choice in the answer []"),
    "null": ((200, b"null"), "not one choice in the answer null"),
    "no choices": ((200, b'{"error": "busy"}'), 'not one choice in the answer {"error": "busy"}'),
    "choices are text": ((200, b'{"choices": "4"}'), "not one choice"),
    "none of them": ((200, b'{"choices": []}'), 'not one choice in the answer {"choices": []}'),
    "two of them": ((200, b'{"choices": [{}, {}]}'), "not one choice"),
    "a number": ((200, b'{"choices": [4]}'), "no text in the answer 4"),
    "no message": ((200, b'{"choices": [{}]}'), "no text in the answer {}"),
    "a list in place of a message": ((200, b'{"choices": [{"message": []}]}'), "no text"),
    "no content": ((200, chat(None)), "no text in the answer"),
    "content is a list": ((200, chat(["Final Score: 4"])), "no text in the answer"),
    "no score": ((200, chat("a nice picture")), "no final score in 1..5"),
}
ANSWERED = {"a number", "no message", "a list in place of a message", "no content",
            "content is a list", "no score"}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_question_that_fails_is_nan_and_the_others_keep_their_score(
    server, pauses, caplog, fault
):
    answer, reason = FAULTS[fault]
    well = server.behave
    server.behave = lambda caption, nth: answer if caption == "2.5" else well(caption, nth)
    values = unified(server)(noise(5), CAPTIONS)
    assert values.isnan().tolist() == [False, False, True, False, False]
    assert_close(values, SCORES.masked_fill(values.isnan(), math.nan), equal_nan=True)
    (record,) = caplog.records
    assert "1 of 5 samples not scored (NaN); sample 2: " in record.getMessage()
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()
    tries = 1 if fault in ANSWERED else 3  # the same question gets the same answer
    assert server.asked == {"4": 1, "1": 1, "2.5": tries, "5": 1, "3": 1}
    assert pauses == [0.5, 1][: tries - 1]


def test_a_server_that_is_slow_for_one(server, pauses, caplog):
    well = server.behave

    def behave(caption, nth):
        if caption == "2.5":
            server.open.wait(60)
        return well(caption, nth)

    server.behave = behave
    values = unified(server, timeout=2, tries=2)(noise(5), CAPTIONS)
    assert values.isnan().tolist() == [False, False, True, False, False]
    assert "ReadTimeout" in caplog.text
    assert server.asked["2.5"] == 2


@pytest.mark.parametrize("fault", [(500, b""), (200, b"<html>"), (200, b"{}"), HANG_UP], ids=str)
def test_a_fault_that_passes_is_forgotten(server, pauses, caplog, fault):
    well = server.behave
    server.behave = lambda caption, nth: fault if nth == 1 else well(caption, nth)
    assert_close(unified(server)(noise(5), CAPTIONS), SCORES)
    assert set(server.asked.values()) == {2}
    assert not caplog.records


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_the_number_of_tries(server, pauses, tries):
    server.behave = lambda caption, nth: (500, b"")
    assert unified(server, tries=tries)(noise(1), ["3"]).isnan().all()
    assert server.asked["3"] == tries
    assert len(pauses) == tries - 1


def test_a_server_that_is_gone(server, pauses, caplog):
    reward = unified(server)
    server.shutdown()
    server.server_close()
    assert reward(noise(3), CAPTIONS[:3]).isnan().all()
    assert "3 of 3 samples not scored" in caplog.text
    assert "ConnectionError" in caplog.text


# ---- at the start ----


@pytest.mark.parametrize("name", NAMES)
def test_no_server_is_one_line_with_the_remedy(name, nowhere):
    with pytest.raises(RewardUnavailable) as caught:
        make_reward(name, url=nowhere)
    text = str(caught.value)
    serve = "sglang.launch_server" if name == "unifiedreward" else "vllm serve"
    for part in (nowhere, serve, "url=", f"REWARD_{name.upper()}_URL", "ConnectionError"):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "models",
    [(500, b""), (404, b""), (200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b'{"data": []}'),
     (200, b'{"data": ["judge"]}'), (200, b'{"data": null}'), HANG_UP],
    ids=str,
)  # fmt: skip
def test_another_server_at_that_place_is_refused(server, models):
    server.models = models
    with pytest.raises(RewardUnavailable, match="no OpenAI-compatible server at") as caught:
        unified(server)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_slow_at_the_start(server):
    class Slow(Handler):
        def do_GET(self):
            self.server.open.wait(60)

    server.RequestHandlerClass = Slow
    with pytest.raises(RewardUnavailable, match="ReadTimeout"):
        unified(server, timeout=0.3)


def test_a_model_that_is_not_served(server):
    with pytest.raises(RewardUnavailable, match=r"no model 'x' at .*; model= may be judge, other"):
        unified(server, model="x")


def test_a_run_ends_in_one_line_without_a_server(nowhere, monkeypatch):
    monkeypatch.setenv("REWARD_UNIFIEDREWARD_URL", nowhere)
    with pytest.raises(SystemExit, match=r"^--reward unifiedreward: .*REWARD_UNIFIEDREWARD_URL"):
        load_rewards(["unifiedreward"], {}, "cpu")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("workers", 0, "workers must be an integer >= 1"),
        ("tries", 0, "tries must be an integer >= 1"),
        ("tries", 1.5, "tries must be an integer >= 1"),
        ("timeout", 0, "timeout must be a finite number > 0"),
        ("timeout", math.inf, "timeout must be a finite number > 0"),
        ("scale", 0, "scale must be a finite number > 0"),
        ("scale", "5", "scale must be a finite number > 0"),
    ],
)
def test_bad_options_are_refused(option, value, rule):
    with pytest.raises(ValueError, match=f"{rule}, got {value!r}"):
        make_reward("unifiedreward", **{option: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("module", ["requests", "PIL.Image"])
def test_a_missing_package_is_one_line_with_the_remedy(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RewardUnavailable, match="pip install requests pillow") as caught:
        make_reward(name)
    assert "\n" not in str(caught.value)


# ---- vlm_yesno ----


def test_yes_or_no(server):
    chances = {'a "cat"': (0.6, 0.2), "a dog": (0.1, 0.3)}

    def behave(caption, nth):
        prompt = next(prompt for prompt in chances if f'show "{prompt}"?' in caption)
        yes, no = chances[prompt]
        return 200, json.dumps({"choices": [first_token(Yes=yes, No=no)]}).encode()

    server.behave = behave
    reward = make_reward("vlm_yesno", url=server.url)
    assert reward.kind == "http"
    prompts = ["a dog", 'a "cat"', "a dog"]
    assert reward(noise(3), prompts).tolist() == pytest.approx([0.25, 0.75, 0.25])
    body = server.bodies[0]
    assert [body[k] for k in ("max_tokens", "logprobs", "top_logprobs", "temperature")] == [
        1, True, 20, 0,
    ]  # fmt: skip
    texts = {body["messages"][0]["content"][1]["text"] for body in server.bodies}
    assert 'Does this figure show "a "cat""? Please answer yes or no.' in texts


def test_another_question(server):
    server.behave = lambda caption, nth: (
        200,
        json.dumps({"choices": [first_token(no=1)]}).encode(),
    )
    reward = make_reward("vlm_yesno", url=server.url, question="Is {prompt} {red}?")
    assert reward(noise(1), ["it"]).tolist() == [0]
    assert server.bodies[0]["messages"][0]["content"][1]["text"] == "Is it {red}?"


def test_yes_or_no_without_probabilities_is_nan(server, caplog):
    server.behave = lambda caption, nth: (200, chat("Yes"))
    assert make_reward("vlm_yesno", url=server.url)(noise(2), ["", ""]).isnan().all()
    assert "no top_logprobs in the answer" in caplog.text


# ---- llava_bertscore ----


def save_tiny_deberta(path) -> None:
    """A DeBERTa of four layers whose tokens are the characters, filled by the rule of the vectors."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import DebertaConfig, DebertaModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocab = {t: i for i, t in enumerate([*special, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        unk_token="[UNK]", model_max_length=64, padding_side="left",
    ).save_pretrained(path)  # fmt: skip
    config = DebertaConfig(
        vocab_size=len(vocab), hidden_size=32, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, relative_attention=True,
        pos_att_type="c2p|p2c", position_biased_input=False, pad_token_id=0,
    )  # fmt: skip
    model = DebertaModel(config).eval()
    inputs.put(model)
    model.save_pretrained(path)


GOLD_PAIRS = [
    ("a cat", "The image contains a cat"),
    ("The image contains a dog on a beach.", "The image contains a cat"),
    ("  two dogs \n", "The image contains two dogs"),
    (
        "A painting of a lighthouse in the storm, seen from afar, at night and in the rain, blue",
        "x",
    ),
]


@pytest.fixture(scope="module")
def deberta(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("deberta")
    save_tiny_deberta(path)
    return str(path)


@pytest.mark.parametrize("layer", [2, 4])
def test_recall_equals_bert_score(deberta, layer):
    golden = json.loads((GOLDEN / "bertscore.json").read_text())
    assert [tuple(pair) for pair in golden["pairs"]] == GOLD_PAIRS
    recall = BertRecall(deberta, "cpu", torch.float32, layer)
    assert len(recall.model.encoder.layer) == layer
    wanted = pytest.approx(golden["recall"][str(layer)], abs=1e-5)
    assert recall(*zip(*GOLD_PAIRS)) == wanted
    assert [recall([x], [y])[0] for x, y in GOLD_PAIRS] == wanted
    assert recall(*zip(*GOLD_PAIRS[::-1]))[::-1] == wanted


def test_recall_of_the_same_and_of_nothing(deberta):
    recall = BertRecall(deberta, "cpu", torch.float32, 2)
    same, nothing, blank = recall(["a cat", "", " \n"], ["a cat", "a cat", "a cat"])
    assert same == pytest.approx(1, abs=1e-6)
    assert (nothing, blank) == (0, 0)


def test_the_network_of_the_recall_is_found_in_this_order(deberta, monkeypatch, tmp_path):
    def load(path: str | None) -> BertRecall:
        return BertRecall(path, "cpu", torch.float32, 2)

    monkeypatch.setenv("REWARD_LLAVA_BERTSCORE_PATH", str(tmp_path))  # the option wins
    load(deberta)
    for path, reason in ((None, "no AutoTokenizer in"), (str(tmp_path / "none"), "hf download")):
        with pytest.raises(RewardUnavailable, match=reason) as caught:
            load(path)
        assert str(path or tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("REWARD_LLAVA_BERTSCORE_PATH", deberta)
    load(None)
    monkeypatch.delenv("REWARD_LLAVA_BERTSCORE_PATH")
    remedy = "hf download microsoft/deberta-xlarge-mnli .* or set REWARD_LLAVA_BERTSCORE_PATH"
    with pytest.raises(RewardUnavailable, match=remedy):
        load(None)


@pytest.mark.parametrize(
    ("layer", "reason"), [(5, "layer must be 1..4 for"), (0, "layer must be an integer >= 1")]
)
def test_a_layer_that_the_network_has_not_is_refused(deberta, layer, reason):
    with pytest.raises(ValueError, match=reason):
        BertRecall(deberta, "cpu", torch.float32, layer)


def level_of(body: dict) -> int:
    """The grey level of the picture in a request, in steps of 50."""
    data = base64.b64decode(body["messages"][0]["content"][0]["image_url"]["url"].split(",")[1])
    return round(float(np.asarray(Image.open(io.BytesIO(data))).mean()) / 50)


def test_llava_bertscore(server, pauses, deberta, caplog):
    said = ["a cat", None, "The image contains a dog on a beach.", "", "a cat"]

    def behave(question, nth):
        assert question == rewards.LLAVA_QUESTION
        with server.lock:
            body = next(b for b in server.bodies if b is not None)
            server.bodies[server.bodies.index(body)] = None  # each request once
        return 200, chat(said[level_of(body)])

    server.behave = behave
    reward = make_reward(
        "llava_bertscore", url=server.url, path=deberta, layer=2, workers=1, batch_size=4
    )
    assert reward.kind == "http"
    images = torch.stack([torch.full((3, 8, 8), 50 * i, dtype=torch.uint8) for i in range(5)])
    prompts = ["a cat", "a cat", "a cat", "nothing", "a dog"]
    values = reward(images, prompts)
    first, second = BertRecall(deberta, "cpu", torch.float32, 2)(
        ["a cat", said[2]], ["The image contains a cat"] * 2
    )
    (third,) = BertRecall(deberta, "cpu", torch.float32, 2)(["a cat"], ["The image contains a dog"])
    wanted = torch.tensor([first, math.nan, second, 0, third])
    assert_close(values, wanted, equal_nan=True, rtol=0, atol=1e-5)
    assert len({first, second, third}) == 3
    assert len(server.bodies) == 5  # none is asked again
    assert "sample 1: ValueError: no text in the answer" in caplog.text


def test_the_question_of_llava_bertscore(server, deberta):
    server.behave = lambda caption, nth: (200, chat(None))
    reward = make_reward("llava_bertscore", url=server.url, path=deberta, layer=2)
    assert reward(noise(2), ["a", "b"]).isnan().all()
    for body in server.bodies:
        text = body["messages"][0]["content"][1]["text"]
        assert text == "Answer concisely: what is going on in this image?"
        assert (body["max_tokens"], body["temperature"]) == (64, 0)
