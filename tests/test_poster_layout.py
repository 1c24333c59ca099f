"""Tests of grpo/poster/layout.py: what counts as a poster, whose fault it is if there is none, and bounded time."""

import contextlib
import json
import math
import pickle
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
    for layer in (PANEL, {**TEXT, "font_size": 0.8 * 50}):
        sides = {"x": 0.6, "width": 0.6, "y": 0.8, "height": 0.8, "font_size": 0.8}
        layers.append({**layer, **{key: layer[key] / side for key, side in sides.items() if key in layer}})
    for ours, theirs in zip(layout.parse(solution(*layers), TRUTH, "rel1000").layers, TRUTH.layers, strict=True):
        assert (*ours.box, ours.font_size) == pytest.approx((*theirs.box, theirs.font_size))
        assert (ours.kind, ours.text, ours.color) == (theirs.kind, theirs.text, theirs.color)
    with pytest.raises(ValueError, match="coord_space = 'cm': must be one of px, rel1000"):
        layout.parse(GOLD, TRUTH, "cm")


@pytest.mark.parametrize("text", [
    GOLD, f"  {GOLD}\n", f"```json\n{GOLD}\n```", f"```\r\n{GOLD}```", f"<answer>{GOLD}</answer>",
    f'<think>maybe {{"layers": [] }}</think>{GOLD}', f"<think>a</think>b</think>\n```json\n{GOLD}\n```",
])  # fmt: skip
def test_format_without_anything_around(text):
    poster = layout.parse(text, TRUTH)
    assert (poster.format, poster.layers, poster.emitted) == (1.0, TRUTH.layers, 2)


@pytest.mark.parametrize("text", [
    f"Here it is: {GOLD}", f"{GOLD} Done.", f"{GOLD}{GOLD}", f"```\n```json\n{GOLD}\n```\n```",
    f"<answer>```json\n{GOLD}\n```</answer>",  # one wrapper, not two
    f'{{"poster": {GOLD}}}', f'a {{ b }} {{ He said "5 {GOLD}. See note [1].',
    f"Draft: {DRAFT} Final: {GOLD}", f"[{DRAFT}, {GOLD}]",  # of several the last
    f'{GOLD} {{"layers": [{{"type"',  # this one is none
    f'{GOLD}\nThe "layers" are listed bottom to top.', f"# a poster\n{GOLD} // done",
    f'Here: {GOLD[:-1]}, "a": {{"b": 1}}, "c": {{}}, "d": {{}}, "e": {{}}}}. The "layers" are in order.',
    'Here: {"a": {"b": {"c": {}}, "d": {}}, "e": {}, ' + GOLD[1:] + " and more",
    'Here: {"a": "{ {", "b": "}", ' + GOLD[1:],
    f"```python\nx = {{'layers': [1]}}\nprint(\"{{\")\n```\n```json\n{GOLD}\n```",  # a brace in code
])  # fmt: skip
def test_format(text):
    poster = layout.parse(text, TRUTH)
    assert (poster.format, poster.layers, poster.emitted) == (0.8, TRUTH.layers, 2)


@pytest.mark.parametrize("text, expected", [
    *((text, "no_json") for text in (
        "I cannot do that", GOLD[:-1], GOLD[: len(GOLD) // 2], '["layers"]',
        f'{{"layers": [{{"type": "group", "group": {GOLD}}}, {{',  # what is inside of a broken one
        f'Here: {{"poster": {GOLD}, "x":',
        f"{{'poster': {GOLD}", f"{{poster: {GOLD}, x: {{",  # broken wholes that are not even JSON up to there
        f'{{ /* all */ "poster": {GOLD}, "x":', f'{{"poster": {GOLD},}}',
        GOLD.replace('"', "'"), '{"layers":[{"x":1,},]}', GOLD.replace('"layers"', "layers"),  # nothing is repaired
        GOLD.replace('"layers"', '/* bottom first */ "layers"'), GOLD.replace("Night Market", "Night\nMarket"),
        f"<think>{GOLD}</think>",  # the thoughts are no answer
        f"<think>{GOLD}", f"<think>a</think> <think>{GOLD}", "[" * 60_000)),  # nor are those that do not end
    *((text, "no_layers") for text in ('{"layers": []}', '{"layers": {"0": 1}}', '{"layers": null}')),
    ('{"layers": [1, null, "x", [], {}]}', "no_valid_layers"),
    *((GOLD.replace('"x": 48', text, 1), "not_finite") for text in (
        '"x": NaN', '"x": -Infinity', '"x": 1e400', '"x": 1' + 5000 * "0", '"unused": [{"a": -1e999}], "x": 48')),
    (GOLD.replace('"x": 48', '"x": 48, "x": 49', 1), "duplicate_key"), (GOLD[:-1] + ', "layers": []}', "duplicate_key"),
    ('{"layers":' * 17, "too_deep"), ('{"layers": ' + "[" * 16 + "]" * 16 + "}", "too_deep"),
    ("{" * 60_000, "too_deep"), (GOLD + " " * 65_536, "too_long"),
])  # fmt: skip
def test_malformed(text, expected):
    with pytest.raises(Malformed) as caught:
        layout.parse(text, TRUTH)
    assert caught.value.reason == expected == pickle.loads(pickle.dumps(caught.value)).reason


@pytest.mark.parametrize("words", ["use ```json here", "a\n```\nb ```", '```json\n{"layers": []}\n```'])
@pytest.mark.parametrize("around", ["```json\n{}\n```", "{}", "<answer>{}</answer>"])
def test_a_fence_inside_of_a_text_is_text(words, around):
    poster = layout.parse(around.replace("{}", solution({**TEXT, "text": words})), TRUTH)
    assert (poster.format, poster.emitted, poster.layers[0].text) == (1.0, 1, " ".join(words.split()))


def test_brackets_inside_of_a_text_do_not_nest():
    poster = layout.parse(solution({**TEXT, "text": '[[{"' * 40}), TRUTH)
    assert poster.layers[0].text == '[[{"' * 40
    assert layout.parse('{"layers": [' + json.dumps({**TEXT, "more": 14 * [[]]}) + "]}", TRUTH).emitted == 1


@pytest.mark.parametrize("change, expected", [
    ({"type": ["text"]}, "unknown_type"), ({"x": True}, "bad_box"), ({"x": "48"}, "bad_box"), ({"x": None}, "bad_box"),
    ({"y": -1_000_001}, "bad_box"), ({"x": 10**200}, "bad_box"), ({"width": 0}, "bad_box"),
    ({"width": 2401}, "box_too_large"), ({"text": " \n\u200b"}, "bad_text"), ({"text": "x" * 501}, "bad_text"),
    ({"text": "a" + "\u200b" * 1000}, "bad_text"), ({"text": 5}, "bad_text"), ({"font_size": 0}, "bad_font_size"),
    ({"font_size": True}, "bad_font_size"), ({"color": "#12345"}, "bad_color"), ({"color": "#FFFFFF\n"}, "bad_color"),
    ({"color": [0, 0, 0]}, "bad_color"), ({"type": "shape", "fill": "url(#x)"}, "bad_color"),
    ({"align": ["left"]}, "bad_align"), ({"opacity": 1.01}, "bad_opacity"), ({"opacity": False}, "bad_opacity"),
    ({"z": "top"}, "bad_z"), ({"type": "image", "src": 5}, "bad_src"),
])  # fmt: skip
def test_a_bad_layer_is_dropped_and_still_counts(change, expected):
    poster = layout.parse(solution(PANEL, {**TEXT, **change}), TRUTH)
    assert poster.invalid == {expected: 1}
    assert (poster.emitted, poster.layers) == (2, TRUTH.layers[:1])
    assert expected in layout.RULES
    with pytest.raises(ValueError, match=r"layer 1, .*; correct the record"):
        layout.ground_truth({**POSTER, "layers": [PANEL, {**TEXT, **change}]})


def test_what_may_be_left_out_and_how_texts_are_normalised():
    bare = {"type": " Headline ", "text": "A\u00a0\ufb01ne\n \nday\u200b", "x": 0, "y": 0, "width": 10, "height": 100}
    (layer,) = layout.parse(solution({**bare, "font_family": "Arial", "rotation": 4, "opacity": None}), TRUTH).layers
    assert (layer.kind, layer.text, layer.lines) == ("text", "A fine day", ("A fine", "day"))
    assert layer.font_size == pytest.approx(70 / 800)
    assert (layer.color, layer.align, layer.opacity) == ((0, 0, 0), "left", 1.0)
    assert layout.parse(json.dumps({"layers": [bare]}), TRUTH).background == (255, 255, 255)
    assert layout.normalise(" a\tb\u2028c\u3000d\n") == "a b c d"
    assert layout.normalise("\ud800a\x00b\u200b\u202ec\udfff") == "abc"  # half a surrogate pair is no character
    assert layout.normalise("\uff21\ufb01 e\u0301") == "Afi \u00e9"


def test_aliases_and_font_sizes_out_of_range():
    for alias, kind in layout.ALIASES.items():
        assert layout.parse(solution({**TEXT, "type": alias.upper()}), TRUTH).layers[0].kind == kind
    for size, expected in ((3.9, 4), (40, 40), (400.5, 400)):
        (layer,) = layout.parse(solution({**TEXT, "font_size": size}), TRUTH).layers
        assert layer.font_size * 800 == pytest.approx(expected)


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


FRACTIONS = {**PANEL, "x": 0.1, "y": 0.1, "width": 0.8, "height": 0.5}


def test_boxes_in_another_unit_are_pointed_out():
    off, wide = {**PANEL, "x": 640, "y": 880}, {**PANEL, "x": 80, "width": 840}
    for layers, space, warnings in (
        ((FRACTIONS,), "px", ("fractions",)), ((FRACTIONS,), "rel1000", ("fractions",)), ((FRACTIONS, PANEL), "px", ()),
        ((off,), "px", ("off_canvas", "beyond_canvas")), ((off,), "rel1000", ()),
        ((wide,), "px", ("beyond_canvas",)), ((wide, PANEL), "px", ()), ((wide,), "rel1000", ()),
    ):  # fmt: skip
        assert layout.parse(solution(*layers), TRUTH, space).warnings == warnings


@pytest.mark.parametrize("value, message", [
    (None, "is a NoneType: pass an object"), ("", "is no JSON"), ("[1]", "has no canvas"),
    *((dict(POSTER, canvas={"width": width, "height": height}), f"canvas of {width} x {height}: sides must be whole")
      for width, height in ((600, None), (600, 8193), (True, 800), (0.5, 800))),
    (dict(POSTER, canvas={"width": 600, "height": 800, "background": "red"}), "background 'red'"),
    (dict(POSTER, layers=[]), "has 0 layers: must be a list of 1 to 64"),
    (dict(POSTER, layers=[PANEL] * 65), "has 65 layers"), (dict(POSTER, extra="x" * 262_144), "at most 262144"),
    (dict(POSTER, layers=[{**PANEL, "x": math.nan}]), r"ground_truth.layers\[0\].x is NaN"),
    ('{"canvas": 1e999, "x": 1' + "0" * 5000 + "}", "ground_truth.canvas is NaN"),
    (dict(POSTER, extra={1, 2}), "use numbers, texts, lists"), (dict(POSTER, layers=[FRACTIONS]), "multiply fractions"),
    (dict(POSTER, layers=[{**PANEL, "x": 700}, PANEL, {**PANEL, "y": -900}]), "2 of 3 boxes lie off the canvas"),
    (GOLD[:-1] + ', "layers": []}', "duplicate_key"), (GOLD[:-1] + ', "x": ' + "[" * 90_000, "too_deep"),
])  # fmt: skip
def test_a_bad_ground_truth_is_not_the_policys_fault(value, message):
    with pytest.raises(ValueError, match=message):
        layout.ground_truth(value)


def test_ground_truth_as_text_or_object():
    assert layout.ground_truth(GOLD) == TRUTH == pickle.loads(pickle.dumps(TRUTH))
    loop: dict = {**POSTER}
    loop["self"] = loop
    with pytest.raises(ValueError, match="is no JSON"):
        layout.ground_truth(loop)


NASTY = {
    "braces": "{" * 65_536, "quotes": '"' * 65_536, "escapes": '{"\\' + '"\\' * 32_000,
    "keys": '"layers"{' * 7000, "lists": '{"layers":[' * 5900, "closed": '{"layers":[]}' * 5000,
    "open string": '{"layers":[{"a":"' + "x" * 65_000, "digits": '{"layers":' + "9" * 65_000,
    "elements": '{"layers":[' + "1," * 32_000 + "1]}", "thoughts": "</think>" * 8000, "fences": "```" * 21_000,
    # sorting marks of descending class takes quadratic time in NFKC
    "marks": json.dumps({"layers": [{**TEXT, "text": "a" + "\u0345\u0301\u0316" * 21_000}]}, ensure_ascii=False),
    "ligatures": json.dumps({"layers": [{**TEXT, "text": "\ufdfa"}] * 480}, ensure_ascii=False),
}  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_time_is_bounded(name):
    """Milliseconds each; what takes quadratic time takes minutes."""
    assert 50_000 < len(NASTY[name]) <= layout.MAX_SOLUTION
    start = time.process_time()
    with contextlib.suppress(Malformed):
        layout.parse(NASTY[name], TRUTH)
    assert time.process_time() - start < 5
