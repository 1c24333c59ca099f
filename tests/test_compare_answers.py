"""scripts/compare_answers.py: paired differences and ratios of models that answered the same rows."""

import json

import numpy as np
import pytest
from test_tools import load_script

from common.tasks import accuracy

pytestmark = pytest.mark.tools
comparing = load_script("compare_answers")


def write_answers(path, scores):
    """As evaluate.py --out writes them; None: unscored; a list: several samples of a row."""
    lines = []
    for row, score in enumerate(scores):
        for one in score if isinstance(score, list) else [score]:
            lines.append({"row": row, "score": one, "right": one is not None and one >= 1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table_of(capsys) -> dict[str, list[str]]:
    """Cells by model, without brackets of intervals."""
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    return {row[0]: [cell.split(" ")[0] for cell in row[1:]] for row in rows}


def test_accuracy_change_ratio_and_p_by_hand(tmp_path, capsys):
    base = [1] * 10 + [0] * 90
    better = [1] * 8 + [0] * 2 + [1] * 12 + [0] * 78  # loses 2, gains 12
    files = [write_answers(tmp_path / f"{name}.jsonl", scores) for name, scores in (("a", base), ("b", better))]
    comparing.main(list(map(str, files)))
    found = table_of(capsys)
    assert found["a"] == ["0.100", "-", "-", "-"]
    # both tails of 2 of 14: 2 (1 + 14 + 91) / 2^14
    assert found["b"] == ["0.200", "+0.100", "2.00", f"{2 * 106 / 2**14:.2g}"]


def test_intervals_are_paired_and_hold_what_they_should():
    """Models whose answers agree in most rows differ surely, although their own intervals overlap."""
    rng = np.random.default_rng(1)
    base = (rng.random(1000) < 0.3).astype(float)
    other = base.copy()
    other[np.flatnonzero(base == 0)[:30]] = 1.0
    first, second = comparing.compare(np.stack([base, other]), 0)
    assert first["accuracy_interval"][1] > second["accuracy_interval"][0]
    low, high = second["change_interval"]
    # 30 of 1000 rows changed: mean 0.03, standard error sqrt(0.03 * 0.97 / 1000) = 0.0054; bootstrap adds 1 %
    assert low == pytest.approx(0.03 - 1.96 * 0.0054, abs=0.0015)
    assert high == pytest.approx(0.03 + 1.96 * 0.0054, abs=0.0015)
    assert first["change"] == first["change_interval"][0] == first["change_interval"][1] == 0
    assert first["ratio_interval"] == (1, 1) and first["p"] == 1
    assert second["accuracy_interval"] == accuracy.interval(other.tolist())


def test_without_a_right_answer_of_the_base_there_is_no_ratio(tmp_path, capsys):
    files = [write_answers(tmp_path / f"{name}.jsonl", scores) for name, scores in (("a", [0] * 9), ("b", [1] * 9))]
    comparing.main([*map(str, files), "--of", str(files[0])])
    assert table_of(capsys)["b"] == ["1.000", "+1.000", "-", f"{2 / 2**9:.2g}"]


def test_samples_of_a_row_count_as_their_mean_and_unscored_rows_not_at_all(tmp_path, capsys):
    one = write_answers(tmp_path / "one.jsonl", [[1, 0], [1, 1], [0, 0], [1, None]])
    other = write_answers(tmp_path / "other.jsonl", [[1, 1], [1, 1], [1, 0], [0, 0]])
    comparing.main([str(one), str(other)])
    captured = capsys.readouterr()
    assert "| 3 rows |" in captured.out and "compared on the 3 rows" in captured.err
    assert "| one | 0.500 " in captured.out and "| other | 0.833 " in captured.out


@pytest.mark.parametrize(("write", "said"), [
    (lambda folder: [folder / "none.jsonl"], "none.jsonl does not exist; write it with scripts/evaluate.py"),
    (lambda folder: [write_answers(folder / "a.jsonl", [1]), folder / "b.jsonl"], "b.jsonl does not exist"),
    (lambda folder: [write_answers(folder / "a.jsonl", [None])], "the files share no row; evaluate all models"),
], ids=["missing", "second missing", "nothing scored"])  # fmt: skip
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, write, said):
    with pytest.raises(SystemExit) as ended:
        comparing.main(list(map(str, write(tmp_path))))
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("broken", ["\u2028", "\u2029", "\x85"])
def test_an_answer_may_hold_what_ends_a_line_elsewhere(broken, tmp_path):
    lines = [
        json.dumps({"row": row, "score": 1.0, "right": True, "completion": f"a{broken}b"}, ensure_ascii=False) + "\n"
        for row in range(3)
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    assert comparing.read_scores(tmp_path / "a.jsonl") == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_line_of_another_kind_is_named(tmp_path, capsys):
    path = write_answers(tmp_path / "a.jsonl", [1, 0])
    path.write_text(path.read_text() + '{"step": 3}\n')
    with pytest.raises(SystemExit):
        comparing.main([str(path)])
    assert f"{path}, line 3 is" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        comparing.main([str(write_answers(path, [1])), "--of", "other.jsonl"])
    assert "--of other.jsonl: must be one of the files" in " ".join(capsys.readouterr().err.split())
