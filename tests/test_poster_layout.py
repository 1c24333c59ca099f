"""Tests of grpo/poster/layout.py: what counts as a poster, whose fault it is if there is none, and bounded time."""

import contextlib
import json
import math
import pickle
import random
import time

import pytest

from grpo.poster import layout
from grpo.poster.layout import Malformed

TEXT = {"type": "text", "text": "Night Market", "x": 48, "y": 64, "width": 504, "height": 54, "font_size": 40,
        "color": "#FFF", "align": "left"}  # fmt: skip
PANEL = {"type": "underlay", "x": 48, "y": 684, "width": 240, "height": 52, "fill": "#F4A259"}
POSTER = {"canvas": {"width": 600, "height": 800, "background": "#1B2A41"}, "layers": [PANEL, TEXT]}
TRUTH = layout.ground_truth(POSTER)
GOLD = json.dumps(POSTER)
DRAFT = json.dumps({"layers": [{**PANEL, "x": 1}]})


def solution(*layers, **canvas) -> str:
    return json.dumps({"canvas": {**POSTER["canvas"], **canvas}, "layers": list(layers)})


def reason(text, **kwargs) -> str:
    with pytest.raises(Malformed) as caught:
        layout.parse(text, TRUTH, **kwargs)
    return caught.value.reason


def test_boxes_are_fractions_of_the_canvas():
    panel, text = layout.parse(GOLD, TRUTH).layers
    assert panel.box == pytest.approx((0.08, 0.855, 0.48, 0.92))
    assert panel.area == pytest.approx(0.4 * 0.065)
    assert (panel.kind, panel.color, panel.opacity) == ("underlay", (244, 162, 89), 1.0)
    assert (text.text, text.lines, text.color, text.align) == ("Night Market", ("Night Market",), (255,) * 3, "left")
    assert text.font_size == pytest.approx(0.05)
    assert TRUTH.background == (27, 42, 65)


def test_thousandths_give_the_same_poster_as_pixels():
    layers = []
    for layer in (PANEL, TEXT):
        scaled = {**layer, "x": layer["x"] / 0.6, "width": layer["width"] / 0.6, "y": layer["y"] / 0.8}
        scaled["height"] = layer["height"] / 0.8
        if layer is TEXT:
            scaled["font_size"] = 50
        layers.append(scaled)
    for ours, theirs in zip(layout.parse(solution(*layers), TRUTH, "rel1000").layers, TRUTH.layers, strict=True):
        assert ours.box == pytest.approx(theirs.box)
        assert (ours.kind, ours.text, ours.color) == (theirs.kind, theirs.text, theirs.color)
        assert ours.font_size == pytest.approx(theirs.font_size)
    with pytest.raises(ValueError, match="coord_space = 'cm': must be one of px, rel1000"):
        layout.parse(GOLD, TRUTH, "cm")


@pytest.mark.parametrize(
    "text, fmt",
    [
        (GOLD, 1.0),
        (f"  {GOLD}\n", 1.0),
        (f"```json\n{GOLD}\n```", 1.0),
        (f"```\r\n{GOLD}```", 1.0),
        (f"<answer>{GOLD}</answer>", 1.0),
        (f'<think>maybe {{"layers": [] }}</think>{GOLD}', 1.0),
        (f"<think>a</think>b</think>\n```json\n{GOLD}\n```", 1.0),
        (f"Here it is: {GOLD}", 0.8),
        (f"{GOLD} Done.", 0.8),
        (f"{GOLD}{GOLD}", 0.8),
        (f"```\n```json\n{GOLD}\n```\n```", 0.8),
        (f"<answer>```json\n{GOLD}\n```</answer>", 0.8),  # one wrapper, not two
        (f'{{"poster": {GOLD}}}', 0.8),
        (f"{DRAFT}\n{GOLD}", 0.8),  # of several the last
        (f"Draft: {DRAFT} Final: {GOLD}", 0.8),
        (f"[{DRAFT}, {GOLD}]", 0.8),
        (f'{GOLD} {{"layers": [{{"type"', 0.8),  # this one is none
        (f'{GOLD}\nThe "layers" are listed bottom to top.', 0.8),
        (f'Here: {GOLD[:-1]}, "a": {{"b": 1}}, "c": {{}}, "d": {{}}, "e": {{}}}}. The "layers" are in order.', 0.8),
        ('Here: {"a": {"b": {"c": {}}, "d": {}}, "e": {}, ' + GOLD[1:] + " and more", 0.8),
        ('Here: {"a": "{ {", "b": "}", ' + GOLD[1:], 0.8),
        (f"a {{ b }} {{ {GOLD}", 0.8),
        (f'He said "5 {GOLD}', 0.8),
        (f"Result: {GOLD}. See note [1].", 0.8),
        (f"# a poster\n{GOLD} // done", 0.8),
        (f'```python\nd = {{"layers": []}}\n```\nand\n```json\n{GOLD}\n```', 0.8),
        (f"```python\nx = {{'a': [1]}}\nprint(\"{{\")\n```\n```json\n{GOLD}\n```", 0.8),  # a brace in code
    ],
)
def test_format(text, fmt):
    poster = layout.parse(text, TRUTH)
    assert (poster.format, poster.layers, poster.emitted) == (fmt, TRUTH.layers, 2)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "no_json"),
        ("I cannot do that", "no_json"),
        (GOLD[:-1], "no_json"),
        (GOLD[: len(GOLD) // 2], "no_json"),
        (GOLD.replace(", ", ",, ", 1), "no_json"),
        (GOLD.replace('"', "'"), "no_json"),
        ('["layers"]', "no_json"),
        (f'{{"layers": [{{"type": "group", "group": {GOLD}}}, {{', "no_json"),  # what is inside of a broken one
        (f'Here: {{"poster": {GOLD}, "x":', "no_json"),
        ('{"layers":[{"type":"text","text":"a","x":1,"y":1,"width":5,"height":5}], "canvas": {', "no_json"),
        (f"{{'poster': {GOLD}", "no_json"),  # broken wholes that are not even JSON up to there
        (f"{{poster: {GOLD}, x: {{", "no_json"),
        (f'{{ /* all */ "poster": {GOLD}, "x":', "no_json"),
        (f'{{"poster": {GOLD},}}', "no_json"),
        ('{"layers":[{"x":1,},]}', "no_json"),  # nothing is repaired
        ("{'layers':[]}", "no_json"),
        (GOLD.replace('"layers"', '// bottom first\n"layers"'), "no_json"),
        (GOLD.replace('"layers"', '/* bottom first */ "layers"'), "no_json"),
        (GOLD.replace('"layers"', "layers"), "no_json"),
        (GOLD.replace("Night Market", "Night\nMarket"), "no_json"),
        (f"<think>{GOLD}</think>", "no_json"),  # the thoughts are no answer
        (f"<think>{GOLD}", "no_json"),  # nor are those that do not end
        (f"<think>a</think> <think>{GOLD}", "no_json"),
        ('{"layers": []}', "no_layers"),
        ('{"layers": {"0": 1}}', "no_layers"),
        ('{"layers": null}', "no_layers"),
        ('{"layers": [1, null, "x", [], {}]}', "no_valid_layers"),
        (GOLD.replace('"x": 48', '"x": NaN', 1), "not_finite"),
        (GOLD.replace('"x": 48', '"x": -Infinity', 1), "not_finite"),
        (GOLD.replace('"x": 48', '"x": 1e400', 1), "not_finite"),
        (GOLD.replace('"x": 48', '"x": 1' + 5000 * "0", 1), "not_finite"),
        (GOLD.replace('"x": 48', '"unused": [{"a": -1e999}], "x": 48', 1), "not_finite"),
        (GOLD.replace('"x": 48', '"x": 48, "x": 49', 1), "duplicate_key"),
        (GOLD[:-1] + ', "layers": []}', "duplicate_key"),
        ('{"layers":' * 17, "too_deep"),
        ('{"layers": ' + "[" * 16 + "]" * 16 + "}", "too_deep"),
        ("[" * 60_000, "no_json"),
        ("{" * 60_000, "too_deep"),
        (GOLD + " " * 65_536, "too_long"),
    ],
)
def test_malformed(text, expected):
    assert reason(text) == expected


@pytest.mark.parametrize("words", ["use ```json here", "a\n```\nb ```", "``` {", '```json\n{"layers": []}\n```'])
@pytest.mark.parametrize("around", ["```json\n{}\n```", "{}", "<answer>{}</answer>", "```\n{}```"])
def test_a_fence_inside_of_a_text_is_text(words, around):
    poster = layout.parse(around.replace("{}", solution({**TEXT, "text": words})), TRUTH)
    assert (poster.format, poster.emitted, poster.layers[0].text) == (1.0, 1, " ".join(words.split()))


def test_brackets_inside_of_a_text_do_not_nest():
    poster = layout.parse(solution({**TEXT, "text": '[[{"' * 40}), TRUTH)
    assert poster.layers[0].text == '[[{"' * 40
    assert layout.parse('{"layers": [' + json.dumps({**TEXT, "more": 14 * [[]]}) + "]}", TRUTH).emitted == 1


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"type": "video"}, "unknown_type"),
        ({"type": ["text"]}, "unknown_type"),
        ({"x": True}, "bad_box"),
        ({"x": "48"}, "bad_box"),
        ({"x": None}, "bad_box"),
        ({"y": -1_000_001}, "bad_box"),
        ({"x": 10**200}, "bad_box"),
        ({"width": 0}, "bad_box"),
        ({"height": -5}, "bad_box"),
        ({"width": 2401}, "box_too_large"),
        ({"text": ""}, "bad_text"),
        ({"text": " \n\u200b"}, "bad_text"),
        ({"text": "x" * 501}, "bad_text"),
        ({"text": "a" + "\u200b" * 1000}, "bad_text"),
        ({"text": 5}, "bad_text"),
        ({"font_size": 0}, "bad_font_size"),
        ({"font_size": "big"}, "bad_font_size"),
        ({"font_size": True}, "bad_font_size"),
        ({"color": "white"}, "bad_color"),
        ({"color": "#12345"}, "bad_color"),
        ({"color": "#FFFFFF\n"}, "bad_color"),
        ({"color": [0, 0, 0]}, "bad_color"),
        ({"align": "justify"}, "bad_align"),
        ({"align": ["left"]}, "bad_align"),
        ({"opacity": 1.01}, "bad_opacity"),
        ({"opacity": False}, "bad_opacity"),
        ({"z": "top"}, "bad_z"),
        ({"type": "image", "src": 5}, "bad_src"),
        ({"type": "shape", "fill": "url(#x)"}, "bad_color"),
    ],
)
def test_a_bad_layer_is_dropped_and_still_counts(change, expected):
    poster = layout.parse(solution(PANEL, {**TEXT, **change}), TRUTH)
    assert poster.invalid == {expected: 1}
    assert (poster.emitted, poster.layers) == (2, TRUTH.layers[:1])
    assert expected in layout.RULES
    with pytest.raises(ValueError, match=r"layer 1, .*; correct the record"):
        layout.ground_truth({**POSTER, "layers": [PANEL, {**TEXT, **change}]})


def test_what_may_be_left_out():
    bare = {"type": " Headline ", "text": "A\u00a0\ufb01ne\n \nday\u200b", "x": 0, "y": 0, "width": 10, "height": 100}
    (layer,) = layout.parse(solution({**bare, "font_family": "Arial", "rotation": 4, "opacity": None}), TRUTH).layers
    assert (layer.kind, layer.text, layer.lines) == ("text", "A fine day", ("A fine", "day"))
    assert layer.font_size == pytest.approx(70 / 800)
    assert (layer.color, layer.align, layer.opacity) == ((0, 0, 0), "left", 1.0)
    assert layout.parse(json.dumps({"layers": [bare]}), TRUTH).background == (255, 255, 255)


def test_normalised_texts():
    assert layout.normalise(" a\tb\u2028c\u3000d\n") == "a b c d"
    assert layout.normalise("\ud800a\x00b\u200b\u202ec\udfff") == "abc"  # half a surrogate pair is no character
    assert layout.normalise("\uff21\ufb01 e\u0301") == "Afi \u00e9"


@pytest.mark.parametrize("alias, kind", layout.ALIASES.items())
def test_aliases(alias, kind):
    assert layout.parse(solution({**TEXT, "type": alias.upper()}), TRUTH).layers[0].kind == kind


@pytest.mark.parametrize("size, expected", [(0.001, 4), (3.9, 4), (40, 40), (400.5, 400), (1e300, 400)])
def test_font_sizes_are_clamped(size, expected):
    assert layout.parse(solution({**TEXT, "font_size": size}), TRUTH).layers[0].font_size * 800 == pytest.approx(
        expected
    )


def test_z_is_a_stable_sort_key():
    named = [{**TEXT, "text": name, **extra} for name, extra in
             (("a", {"z": 2}), ("b", {}), ("c", {}), ("d", {"z": -1.5}), ("e", {"z": 2}))]  # fmt: skip
    # keys 2, 1, 2, -1.5, 2: a layer without z has its place in the list
    assert [layer.text for layer in layout.parse(solution(*named), TRUTH).layers] == ["d", "b", "a", "c", "e"]


def test_at_most_4m_plus_8_layers_and_4000_characters_are_painted():
    poster = layout.parse(solution(*[PANEL] * 30), TRUTH)
    assert (len(poster.layers), poster.emitted, poster.warnings) == (16, 30, ("layers_cut",))
    poster = layout.parse(solution(*[{**TEXT, "text": "x" * 500}] * 9), TRUTH)
    assert (len(poster.layers), poster.emitted) == (8, 9)
    wide = layout.ground_truth({**POSTER, "layers": [PANEL] * 60})
    assert len(layout.parse(solution(*[PANEL] * 100), wide).layers) == 64


def test_the_canvas_of_the_policy_has_no_say():
    poster = layout.parse(solution(PANEL, width=1, height=1), TRUTH)
    assert (poster.width, poster.height, poster.layers) == (600, 800, TRUTH.layers[:1])
    assert poster.warnings == ("canvas_differs",)
    assert layout.parse(solution(PANEL, background="red"), TRUTH).warnings == ("canvas_invalid",)
    assert layout.parse(json.dumps({"canvas": 5, "layers": [PANEL]}), TRUTH).warnings == ("canvas_invalid",)


def test_boxes_in_another_unit_are_pointed_out():
    box = {"x": 0.1, "y": 0.1, "width": 0.8, "height": 0.5}
    assert layout.parse(solution({**PANEL, **box}), TRUTH).warnings == ("fractions",)
    assert layout.parse(solution({**PANEL, **box}), TRUTH, "rel1000").warnings == ("fractions",)
    assert layout.parse(solution({**PANEL, **box}, PANEL), TRUTH).warnings == ()
    assert layout.parse(solution({**PANEL, "x": 640, "y": 880}), TRUTH).warnings == ("off_canvas", "beyond_canvas")
    wide = {**PANEL, "x": 80, "width": 840}
    assert layout.parse(solution(wide), TRUTH).warnings == ("beyond_canvas",)
    assert layout.parse(solution(wide, PANEL), TRUTH).warnings == ()
    assert layout.parse(solution(wide), TRUTH, "rel1000").warnings == ()
    assert layout.parse(solution({**PANEL, "x": 640, "y": 880}), TRUTH, "rel1000").warnings == ()


def test_posters_and_errors_can_be_pickled():
    assert pickle.loads(pickle.dumps(TRUTH)) == TRUTH
    assert pickle.loads(pickle.dumps(Malformed("no_json"))).reason == "no_json"


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "ground_truth is a NoneType: pass an object"),
        ("", "is no JSON"),
        ("[1]", "has no canvas"),
        ({"layers": [PANEL]}, "has no canvas: add its width and height"),
        (
            {**POSTER, "canvas": {"width": 600}},
            "canvas of 600 x None: sides must be whole numbers of px",
        ),
        ({**POSTER, "canvas": {"width": 600, "height": 8193}}, "canvas of 600 x 8193"),
        ({**POSTER, "canvas": {"width": True, "height": 800}}, "canvas of True x 800"),
        ({**POSTER, "canvas": {"width": 0.5, "height": 800}}, "canvas of 0.5 x 800"),
        ({**POSTER, "canvas": {"width": 600, "height": 800, "background": "red"}}, "canvas background 'red'"),
        ({**POSTER, "layers": []}, "has 0 layers: must be a list of 1 to 64"),
        ({**POSTER, "layers": "none"}, "has 'none' layers"),
        ({**POSTER, "layers": [PANEL] * 65}, "has 65 layers"),
        ({**POSTER, "extra": "x" * 262_144}, "at most 262144; leave out"),
        ({**POSTER, "layers": [{**PANEL, "x": math.nan}]}, r"ground_truth.layers\[0\].x is NaN, infinite or too long"),
        ('{"canvas": NaN, "x"', r"is no JSON \(not_finite\)"),
        ('{"canvas": 1e999, "x": 1' + "0" * 5000 + "}", "ground_truth.canvas is NaN, infinite or too long"),
        ({**POSTER, "extra": {1, 2}}, "use numbers, texts, lists"),
        ({**POSTER, "layers": [{**PANEL, "x": 0.1, "y": 0.1, "width": 0.8, "height": 0.5}]}, "multiply fractions"),
        ({**POSTER, "layers": [{**PANEL, "x": 700}, PANEL, {**PANEL, "y": -900}]}, "2 of 3 boxes lie off the canvas"),
        (GOLD[:-1] + ', "layers": []}', "duplicate_key"),
        (GOLD[:-1] + ', "x": ' + "[" * 90_000, "too_deep"),
    ],
)
def test_a_bad_ground_truth_is_not_the_policys_fault(value, message):
    with pytest.raises(ValueError, match=message):
        layout.ground_truth(value)


def test_ground_truth_as_text_or_object():
    assert layout.ground_truth(GOLD) == TRUTH
    loop: dict = {**POSTER}
    loop["self"] = loop
    with pytest.raises(ValueError, match="is no JSON"):
        layout.ground_truth(loop)


NASTY = {
    "braces": "{" * 65_536,
    "quotes": '"' * 65_536,
    "escapes": '{"\\' + '"\\' * 32_000,
    "keys": '"layers"{' * 7000,
    "lists": '{"layers":[' * 5900,
    "closed": '{"layers":[]}' * 5000,
    "open string": '{"layers":[{"a":"' + "x" * 65_000,
    "digits": '{"layers":' + "9" * 65_000,
    "elements": '{"layers":[' + "1," * 32_000 + "1]}",
    "thoughts": "</think>" * 8000,
    "fences": "```" * 21_000,
    # sorting marks of descending class takes quadratic time in NFKC
    "marks": '{"layers":[{"type":"text","x":0,"y":0,"width":9,"height":9,"text":"a'
    + "\u0345\u0301\u0316" * 21_000
    + '"}]}',
    "ligatures": '{"layers":[' + '{"type":"text","x":0,"y":0,"width":9,"height":9,"text":"\ufdfa"},' * 1000 + "0]}",
}


@pytest.mark.parametrize("name", NASTY)
def test_time_is_bounded(name):
    assert len(NASTY[name]) > 50_000
    start = time.process_time()
    with contextlib.suppress(Malformed):
        layout.parse(NASTY[name], TRUTH)
    assert time.process_time() - start < 2


def test_mutated_text_is_a_poster_or_malformed():
    rng = random.Random(7)
    pieces = ['"', "\\", "{", "}", "[", "]", ",", ":", "-", "1e999", "NaN", "null", "true", "\ud800", "\x00",
              "</think>", "```", '"layers"', "9" * 400, "<answer>", "\u0301", "text", "0"]  # fmt: skip
    parsed = 0
    for _ in range(2000):
        text = GOLD
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(text) + 1)
            text = text[:start] + rng.choice([*pieces, ""]) + text[start + rng.choice((0, 0, 1, 5)) :]
        try:
            poster = layout.parse(text, TRUTH)
        except Malformed as error:
            assert error.reason.replace("_", "").isalpha()
            continue
        parsed += 1
        assert poster.layers and all(math.isfinite(side) for layer in poster.layers for side in layer.box)
    assert 200 < parsed < 1800  # both kinds were there
