"""scripts/report_runs.py: sums, peaks and evaluations of runs, from metrics written by hand."""

import json

import pytest
from test_tools import load_script

pytestmark = pytest.mark.tools
report = load_script("report_runs")
STEP = {"seconds_rollout": 1.5, "seconds_update": 0.5, "seconds": 2.0}


def write_run(folder, lines, tail="", **options):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (folder / "config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def runs(tmp_path):
    first = [
        {"step": 0, "eval_reward": 0.25, "seconds_eval": 4.0},
        {"step": 1, **STEP, "tokens_per_second": 100.0, "memory_gib": [1.0, 3.5]},
        {"step": 2, **STEP, "tokens_per_second": 50.5, "memory_gib": [2.0, 2.5]},
        {"step": 2, "eval_reward": 0.75, "eval_reward_a": 0.9},
        {"step": 2, "seconds_save": 0.25},
        {"step": 3, **STEP, "tokens_per_second": 10.0, "memory_gib": [2.0, 2.5]},
        {"step": 3, "eval_reward": 0.5},
        {"step": 3, "seconds_save": 0.25},
    ]
    second = [{"step": 1, "seconds": 8.0, "tokens_per_second": 2.0, "memory_gib": []}]
    return [
        write_run(tmp_path / "first", first, '{"step": 4, "sec', batch_size=16, group_size=8),
        write_run(tmp_path / "second", second, batch_size=32),
    ]


def test_a_run_is_the_sum_of_its_lines(runs, capsys):
    report.main([*map(str, runs), "--json"])
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["runs"][0] == {
        "run": str(runs[0]), "steps": 3, "samples": 3 * 16 * 8, "tokens": 200 + 101 + 20,
        "seconds": 3 * 2.0 + 4.0 + 2 * 0.25, "memory_gib": 3.5,
        "first_eval_reward": 0.25, "best_eval_reward": 0.75, "last_eval_reward": 0.5,
    }  # fmt: skip
    assert str(runs[0]) in told.err and "cut off" in told.err
    # a run without groups, GPU or evaluation
    second = found["runs"][1]
    assert (second["samples"], second["tokens"], second["seconds"]) == (32, 16, 8.0)
    assert [second[name] for name in ("memory_gib", "first_eval_reward", "last_eval_reward")] == [None] * 3
    assert found["total"] == {"steps": 4, "samples": 416, "tokens": 337, "seconds": 18.5, "memory_gib": 3.5}


def test_the_table_has_a_row_per_run_and_a_total(runs, capsys):
    report.main([str(run) for run in runs])
    head, first, second, total = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "steps", "samples", "tokens", "seconds", "GiB", "first", "best", "last"]
    assert first == [str(runs[0]), "3", "384", "321", "10.5", "3.50", "0.250", "0.750", "0.500"]
    assert second == [str(runs[1]), "1", "32", "16", "8.0", "-", "-", "-", "-"]
    assert total == ["total", "4", "416", "337", "18.5", "3.50", "-", "-", "-"]


def test_a_repeated_step_counts_once_and_a_number_that_was_not_finite_not_at_all(tmp_path):
    lines = [
        {"step": 1, **STEP, "tokens_per_second": 1.0, "memory_gib": [1.0]},
        {"step": 1, "seconds": 5.0, "tokens_per_second": None, "memory_gib": [1.0]},
        {"step": 1, "eval_reward": None},
    ]
    found = report.summarise(write_run(tmp_path / "run", lines, batch_size=4, group_size=2))
    assert (found["steps"], found["samples"], found["tokens"], found["seconds"]) == (1, 8, 0, 5.0)
    assert found["best_eval_reward"] is None


@pytest.mark.parametrize(("metrics", "options", "error", "said"), [
    (None, "{}", FileNotFoundError, r"metrics\.jsonl does not exist"),
    ('{"step": 0, "eval_reward": 0.5}\n', "{}", ValueError, "no finished step"),
    ('{"step": 1, "sec\n{"step": 2, "seconds": 1.0}\n', "{}", ValueError, "line 1"),
    ('{"seconds": 1.0}\n', "{}", ValueError, "line 1"), ("[1]\n", "{}", ValueError, "line 1"),
    ('{"step": true}\n', "{}", ValueError, "line 1"), ('{"step": 1, "seconds": "x"}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "seconds": 1, "tokens_per_second": "x"}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "seconds": 1, "seconds_update": [1]}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "seconds": 1, "memory_gib": 3}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "seconds": 1, "memory_gib": ["x"]}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "eval_reward": "x"}\n', "{}", ValueError, "line 1"),
    ('{"step": 1, "seconds": 1.0}\n', '{"batch_size": "4", "group_size": 2}', ValueError, r"config\.json.*sizes"),
    ('{"step": 1, "seconds": 1.0}\n', None, ValueError, r"config\.json"),
    ('{"step": 1, "seconds": 1.0}\n', "{}", ValueError, "batch_size"),
    ('{"step": 1, "seconds": 1.0}\n', "[", ValueError, r"config\.json"),
])  # fmt: skip
def test_what_is_missing_or_broken_is_named(tmp_path, metrics, options, error, said):
    for name, text in (("metrics.jsonl", metrics), ("config.json", options)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(error, match=said):
        report.main([str(tmp_path)])
