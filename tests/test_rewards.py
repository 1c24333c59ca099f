"""Rewards: answers are read and compared as stated, hostile text cannot stop a run, bad values never pass."""

import concurrent.futures
import functools
import math
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from bounds import assert_rounded
from test_teacher_server import wait_for

from common.model import reward_models
from common.tasks import answer_numbers, math_verify_process, rewards, scoring
from common.tasks import answers as answers_module
from common.tasks.rewards import answers_match, extract_answer, last_boxed, last_number

ROOT = Path(__file__).resolve().parents[1]
TOWER = r"\boxed{5^{5^{5^{5^5}}}}"  # no computer finishes this one
LONG = "and 7 more words " * 30
nan = math.nan


@pytest.fixture
def no_math_verify(monkeypatch):
    monkeypatch.setattr(answers_module, "evaluate", lambda *questions: pytest.fail(f"asked {questions}"))


@pytest.mark.parametrize(("text", "boxed"), [
    (r"\boxed {42}", "42"), (r"so \boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"), (r"\fbox{4}", "4"),
    (r"\boxed 42", "42"), (r"I first got \boxed{3}, no: \boxed{4}.", "4"), (r"\boxed{3}, so \boxed{4", "3"),
    (r"\boxed{3, so \boxed{4}", "4"), (r"\boxed{\boxed{4}}", "4"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"} \boxed{4} {", "4"), (r"\boxed{4", None), (r"\boxedness{4}", None), ("42", None),
])  # fmt: skip
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(("text", "number"), [
    ("the grid is 2x3", None), ("at 7:30", None), ("The answer is 3.14.", "3.14"), ("**42**", "42"), ("42。", "42"),
    ("costs $1,234.00", "1234.00"), ("1,234,567 ants", "1234567"), ("1,234,56", "56"), ("12345,678", "678"),
    ("The final value is 13.20%.", "13.20%"), (r"up 60\%", "60%"), ("a half is 1/2", "1/2"), ("on 3/4/2020", None),
    (r"it is $-\dfrac34$.", "-3/4"), ("takes 2 1/2 cups", "2 1/2"), ("it is \N{MINUS SIGN}5", "-5"), ("10-5", None),
    ("a loss of -$5", "-5"), ("about .5 m", ".5"), ("it is 1e5 m", "1e5"), ("48/2 = <<48/2=24>>24", "24"),
    ("=> 42", "42"), ("it is <b>42</b>", "42"), (r"it is $\mathbf{42}$", "42"), ("(40, and then 2, so 42)", "42"),
    (r"42^\circ C", "42"), ("42 cm^2.", "42"), (r"42\text{ m}^{3}", "42"), ("9.8 m/s^2", "9.8"), ("7 m\xb2", "7"),
    (r"it is $1.5\times10^{3}$", "1.5e3"), (r"it is $0.1\overline{6}$", "15/90"),
    ("it is 10^3", None),  # a part of an expression is not the answer
    ("it is 10\xb3", None), ("it is 5x^2", None), (r"it is $2\sqrt{3}$", None), ("it is 2\N{SQUARE ROOT}3", None),
    (r"it is $\frac{\sqrt{3}}{2}$", None), ("it is x/2", None), (r"it is $2\pi$", None), ("so x > 4.", None),
    (r"so $x \le 4$", None), ("it is (3, 4).", None), (r"it is $[2, \infty)$", None), ("", None),
])  # fmt: skip
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(("text", "value"), [
    ("1,234.50", Fraction(2469, 2)), ("-1/2", Fraction(-1, 2)), (r"2\frac{1}{2}", Fraction(5, 2)),
    ("60%", Fraction(3, 5)), ("2e3", Fraction(2000)), ("1/0", None), (r"-1.5 \cdot 10^{-3}", Fraction(-3, 2000)),
    ("12 x 10^3", None),  # not the usual form of a number
    (r"-0.\overline{3}", Fraction(-1, 3)), (r"12.3\overline{45}", Fraction(679, 55)), ("1,23", None), ("", None),
    ("(1,234)", None), ("5 apples", None), ("3 4", None), ("1e999999999", None), ("9" * 5000, None),
])  # fmt: skip
def test_to_fraction_is_exact_and_refuses_everything_else(text, value):
    assert answer_numbers.to_fraction(text) == value


@pytest.mark.parametrize(("text", "answer"), [
    ("<think>1</think> 2 <think>3</think>the answer is 4", "4"), ("<think>the answer is 4", None),
    ("<answer>1</answer> no, <answer>\n\\boxed{2}\n</answer>", "2"), ("5 <answer>The answer is 42.</answer> 7", "42"),
    ("<answer>Paris</answer>", "Paris"), ("<answer>42", None), ("4 <answer></answer>", None),
    ("<answer><answer>42</answer></answer>", "42"), (r"#### 7, that is \boxed{8}", "8"), (r"4 in \boxed{}", None),
    (r"\boxed{4", None), ("2+40=42\n#### 42\n" + LONG, "42"), ("#### 42\n" + "7" * 480, "42"),
    ("#### 1\n#### 2", "2"), ("#### The answer is 42, not 7", "42"), ("#### x^2 + 1", "x^2 + 1"),
    ("#### 42个苹果", "42个苹果"), ("2 #### ,", None),
    ("first 5, then 1,234 clips.", "1234 clips"), ("[1, 2)", "[1, 2)"),
    ("3 are left out.\nThe answer is (B).", "B"), ("**Answer:** B", "B"), ("so it is option C", "C"),
    ("\u7b54\u6848\u662fB\u3002", "B"),  # Chinese: the answer is B
    ("Answer: A total of 42 apples", "42 apples"), ("Answer: B) 42 apples", "B) 42 apples"),
    ("The answer is True.", "True"),
    ("2 + 2 = 4, so the answer is correct", "4"),  # no word answers where there is a number
    ("x = 4", "x = 4"), ("no idea", None),
])  # fmt: skip
def test_extract_answer_follows_the_stated_order(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("completion", "gold", "expected"), [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{4", "4", 0),
    (r"\boxed{70{,}000}", "70000", 1), ("$1,234.00", "1234", 1), ("1,23", "123", 0), ("(42)", "42", 1),
    ("\uff08\uff0d\uff14\uff12\uff09", "-42", 1),  # full-width forms
    ("42\u2026", "42", 1), ("\u201c42\u201d", "42", 1), ("(so we have\n#### 42)", "42", 1),
    ("\ufeff42\u200b", "42", 1),  # nobody sees what stands around it
    ("\u2066\u0664\u0662\u2069", "42", 1),  # Arabic digits
    ("1\u066c234\u066b5", "1234.5", 1), (r"\boxed{1~234\ 567}", "1234567", 1), ("12345\xa0678", "12345678", 0),
    ("1 234", "1234", 0), ("1\u3001234", "1234", 0),  # two things in Chinese
    ("1\u3001234", "1, 234", 1), ("60\uff05", "60%", 1), ("60 percent", "60%", 1), ("60 percent", "60", 0),
    (r"\boxed{60\%}", "60%", 1), ("0.6", "60%", 1), ("60", "60%", 0), ("60%", "60", 0),
    (r"\frac12", "1/2", 1), ("0.5", "1/2", 1), ("-1\xbd", "-3/2", 1), ("1\u20442", "1/2", 1), ("\xbd", "2", 0),
    ("The answer is 10", "1", 0), ("-4", "4", 0), ("ABCD", "A", 0), ("[1,2]", "(1,2)", 0), ("(1, 2]", "(1,2)", 0),
    (r"\left(1, \frac12\right)", "(1, 0.5)", 1), ("(2,1)", "(1,2)", 0), ("(1,2,3)", "(1,2)", 0), ("3, 2", "2, 3", 1),
    ("2, 2", "2, 3", 0), ("2, 3", "3", 0), (r"\boxed{x=2 \text{ or } x=3}", "2, 3", 1), ("2 and 3", "2, 3", 1),
    (r"\boxed{\{3,2\}}", r"\{2,3\}", 1), ("{3, 2}", "(3, 2)", 0), ("{3}", "3", 1),
    (r"\{3\}", "3", 0), ("((1,2),3)", "((2,1),3)", 0),
    ("(x, y) = (1, 2)", "(1, 2)", 1), ("(x, y) = (2, 1)", "(1, 2)", 0), ("(1, 2)", "(x, y) = (1, 2)", 1),
    ("S = [1, 2]", "(1, 2)", 0), ("\N{MINUS SIGN}3", "-3", 1), (r"\boxed{x = 42}", "42", 1),
    (r"\boxed{C}", r"\text{(C)}", 1), (r"\boxed{London}", "Paris", 0), (r"\boxed{Yes}", "yes", 1),
    (r"\boxed{\textbf{(B) }42}", "B", 1), ("#### B. 42", "B", 1), (r"\boxed{b}", "B", 0), (r"\boxed{B, C}", "B", 0),
    (r"\boxed{42^\circ}", "42", 1), ("\\boxed{42\xb0}", "42", 1), (r"\boxed{42\text{ cm}^2}", "42", 1),
    (r"\boxed{x \approx 3.14}", "3.14", 1), ("~42", "42", 1), (r"\boxed{1.5 \times 10^3}", "1500", 1),
    (r"\boxed{10^3}", "1000", 0), ("0.(3)", "1/3", 1), ("2024-1-5", "2024-01-05", 1),
    ("2024-05-01", "2024-01-05", 0),  # as differences these would be equal
    ("6/8/2020", "3/4/2020", 0), ("4-6", "3-5", 0), ("3 \N{EN DASH} 5", "3-5", 1), (r"\boxed{5:10}", "10:20", 0),
    (r"\boxed{07:30}", "7:30", 1), (r"\boxed{7:30\text{ a.m.}}", r"7:30\text{ am}", 1),
    (r"\boxed{7:30 am}", "7:30 pm", 0), (r"\boxed{101_3}", "101_2", 0), (r"\boxed{101}", "101_2", 1), ("", "1", 0),
    ("no idea", "see figure", nan), ("see figure", "see figure", nan), ("6", "", nan), ("1", "#### see figure", nan),
    ("#### 18", "16 - 3 - 4 = 9 eggs\n9 * 2 = $18\n#### 18", 1), ("#### 9", "9 eggs\n9 * 2 = $18\n#### 18", 0),
])  # fmt: skip
def test_answers_match_without_math_verify(completion, gold, expected, no_math_verify):
    assert answers_match(completion, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("completion", "gold", "expected"), [
    (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1), ("\\boxed{x\xb2 + 2x + 1}", "x^2 + 2x + 1", 1),
    ("2\N{SQUARE ROOT}3", r"2\sqrt{3}", 1), ("(\u2212\N{INFINITY}, 3]", r"(-\infty, 3]", 1),
    ("(\u2212\N{INFINITY}, 3)", "(\u2212\N{INFINITY}, 3]", 0), (r"\boxed{x^2 + 2x}", "x^2 + 2x + 1", 0),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1), (r"\boxed{18\text{ dollars}}", "#### 18", 1),
    (r"\boxed{\sqrt{16}}", "4", 0),  # only a number answers a number
    ("95 + 65 =", "160", 0), ("95 + 65 = 160", "160", 1), (r"\boxed{x \le 4}", "4", 0), (r"\boxed{x + 10}", "10", 0),
    (r"\boxed{(3,4)\cup(1,2)}", r"(1,2)\cup(3,4)", 1), (r"(\frac{\sqrt2}{2}, 3)", r"(\frac{1}{\sqrt2}, 3)", 1),
    ("no idea", r"\foo{3}", nan), (r"\boxed{\foo{3}}", "3", 0), ("\\boxed{\ud800 + x}", "3", 0), (TOWER, "1", 0),
])  # fmt: skip
def test_answers_match_with_math_verify(completion, gold, expected):
    assert answers_match(completion, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("n", "hostile"), [(10, TOWER), (20, r"\boxed{\input{/etc/passwd}}")])
def test_hostile_expression_is_wrong_within_the_limit_in_a_thread_and_the_next_one_is_scored(n, hostile):
    assert answers_match(rf"\boxed{{{n}+x}}", f"x+{n}") == 1  # the process is up: its start is not part of the limit
    handler = signal.getsignal(signal.SIGALRM)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert pool.submit(answers_match, hostile, f"x+{n}", limit=1.0).result(timeout=60) == 0
        pairs = [(rf"\boxed{{{n + right}+x}}", f"x+{n + 1}") for right in (1, 2, 1, 3)]
        assert list(pool.map(lambda pair: answers_match(*pair), pairs)) == [1, 0, 1, 0]
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


STUB = """
import os, sys, time
LatexExtractionConfig = str
def verify(gold, found, **options):
    return gold == found
def parse(text, *args, **options):
"""


@pytest.fixture
def stub_grader(tmp_path, monkeypatch):
    """Makes graders whose Math-Verify has a `parse` of our own."""
    graders = []

    def make(parse):
        (tmp_path / "math_verify.py").write_text(f"{STUB}    {parse}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        graders.append(math_verify_process.Grader())
        monkeypatch.setattr(math_verify_process, "_grader", graders[-1])
        return graders[-1]

    yield make
    for grader in graders:
        if grader.child:
            grader.child.kill()


def test_grader_that_dies_leaves_the_row_unscored_and_comes_back(stub_grader, monkeypatch):
    grader = stub_grader("return [text]")
    assert answers_match(r"\boxed{6+x}", "6+x") == 1
    grader.child.kill()
    grader.child.wait()
    assert answers_match(r"\boxed{7+x}", "x+7") == 0  # found dead before the question: started again

    with monkeypatch.context() as patch:
        patch.setattr(grader.child, "poll", lambda: os.kill(grader.child.pid, signal.SIGKILL))
        assert math.isnan(answers_match(r"\boxed{8+x}", "x+8"))
    assert answers_match(r"\boxed{8+x}", "x+8") == 0


@pytest.mark.parametrize("bomb", ["bytes(5 << 30)", "(lambda f: f(f))(lambda f: [f(f)])"])
def test_memory_and_depth_are_limits_like_the_time_and_what_a_parser_prints_is_no_reply(stub_grader, bomb):
    more_than_a_pipe_holds = "print('true\\n' * 200_000); sys.stderr.write('true\\n' * 200_000)"
    grader = stub_grader(f"{more_than_a_pipe_holds}; return [{bomb} if 'bomb' in text else text]")
    questions = [("a", "a"), ("a", "bomb"), ("a", "b"), ("bomb", None)]
    assert list(grader.evaluate(questions, 20.0).values()) == [True, False, False, False]


def test_a_batch_takes_bounded_time_and_hostile_pairs_do_not_make_honest_ones_wrong(stub_grader):
    hostile_if_z = "while 'z' in text: pass\n    os._exit(3) if 'die' in text else 0\n    return [text]"
    grader = stub_grader(hostile_if_z)
    grader.evaluate([("up", "up")], 20.0)
    hostile = [("x", f"z^{i}") for i in range(4)]  # towers come last
    honest = [("a", "a"), ("a", "b"), ("c", "c"), ("b", None)]
    start = time.monotonic()
    verdicts = grader.evaluate([*hostile, ("z", None), ("x", "z1"), ("a", "die"), *honest], 1.0)
    assert time.monotonic() - start < 1.0 + 5.0  # the second number is for a busy machine
    assert [verdicts[pair] for pair in honest] == [True, False, True, True]
    assert not any(verdicts[pair] for pair in hostile)
    assert verdicts["a", "die"] is None and verdicts["z", None]  # a gold answer is not blamed for the time
    # of more than the time allows, those that had no turn are not judged
    many = grader.evaluate([*(("x", f"zz{i}") for i in range(400)), ("q", "q")], 1.0)
    assert many["q", "q"] is None and set(many.values()) == {False, None}
    asked = mock.Mock(return_value=[True])
    with mock.patch.object(grader, "ask", asked):  # what is known is not asked again
        assert grader.evaluate([*hostile, *honest, ("n", "n")], 2.0)["n", "n"]
    assert asked.call_args.args[0] == [("n", "n")]


def test_threads_get_the_answers_to_their_own_questions(stub_grader):
    grader = stub_grader("time.sleep(0.002); return [text]")

    def ask(i):
        return list(grader.evaluate([(f"{i}", f"{i}"), (f"{i}", "x")], 20.0).values())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(20))) == [[True, False]] * 20


def test_a_grader_that_cannot_start_stops_the_run(stub_grader):
    grader = stub_grader("return [text]\nraise ImportError('broken')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"status 1.*`import math_verify`"):
            grader.evaluate([("a", "a")], 5.0)
    with pytest.raises(RuntimeError, match="math_match raised RuntimeError on rows 0 to 0"):
        arguments = {"completions": [r"\boxed{y}"], "answers": ["y - 1 + 1 + 0"]}
        scoring.score([(rewards.math_match, 1.0)], arguments)


def test_forked_process_starts_its_own_grader(monkeypatch):
    grader = math_verify_process._grader
    monkeypatch.setattr(grader, "child", object())
    with grader.lock:
        if (pid := os.fork()) == 0:
            os._exit(0 if grader.child is None and not grader.lock.locked() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_missing_math_verify_is_named_and_so_is_a_limit_that_is_no_time(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr(math_verify_process, "_grader", math_verify_process.Grader())
    with pytest.raises(ImportError, match="pip install math-verify"):
        answers_match(r"\boxed{x}", "x - 1 + 1 + 0")
    assert answers_match("0.5", "1/2") == 1  # numbers do not need it
    for limit in (0.0, math.inf):
        with pytest.raises(ValueError, match=f"limit = {limit}.* positive and finite"):
            answers_match(r"\boxed{x}", "x + 0", limit=limit)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_grader_ends_with_its_parent_and_does_not_run_the_script_again(tmp_path):
    (tmp_path / "stub").mkdir()
    parse = "    if 'h' in text: open('hangs', 'w').close(); time.sleep(600)\n    return [text]\n"
    (tmp_path / "stub" / "math_verify.py").write_text(STUB + parse)
    (tmp_path / "math_verify.py").write_text("raise SystemExit('a file of the working folder was imported')")
    (tmp_path / "train.py").write_text(r"""  # no main guard
import sys
from unittest import mock
sys.modules["torch"] = mock.MagicMock()  # takes seconds to import, and the grader does not need it
open(sys.argv[1], "a").write("started\n")
from common.tasks import answers, math_verify_process
assert answers.answers_match(r"\boxed{x+1}", "1+x") == 0
print(math_verify_process._grader.child.pid, flush=True)
answers.answers_match(rf"\boxed{{{sys.argv[1]}+x}}", "x+1", limit=2.0)
""")
    run = "import runpy, sys; sys.path.pop(0); runpy.run_path('train.py', run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stub"), str(ROOT)])}
    options = dict(cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment)
    runs = {mode: subprocess.Popen([sys.executable, "-c", run, mode], **options) for mode in ("e", "h")}
    graders = [int(run.stdout.readline()) for run in runs.values()]
    wait_for((tmp_path / "hangs").exists, 60)
    runs["h"].kill()  # in the middle of an evaluation
    assert [run.wait(timeout=60) for run in runs.values()] == [0, -signal.SIGKILL]
    wait_for(lambda: not any(map(is_running, graders)), 60)
    assert [(tmp_path / mode).read_text() for mode in runs] == ["started\n"] * 2


def test_math_match_numeric_match_and_exact_match():
    completions = ["#### 1,234", r"\boxed{0.5}", "4", "6", "3+4=7", r"\boxed{\frac{12}{2}}"]
    answers = ["1234", "1/2", "5", "see figure", "7", "6"]
    expected = [1, 1, 0, nan, 1, 1]
    for function in (rewards.math_match, rewards.numeric_match):
        assert function(completions, answers, prompts=["p"] * 6) == pytest.approx(expected, nan_ok=True)
    assert rewards.numeric_match([r"\boxed{x <= 5}", "5"], ["5", "x"]) == pytest.approx([0, nan], nan_ok=True)
    assert rewards.exact_match([" 42\n", "is 42", "42.0"], ["42"] * 3, prompts=[1, 2, 3]) == [1, 0, 0]


@pytest.mark.parametrize(("completion", "accepted", "expected"), [
    ("The number is 21.", ["14", "21"], 1), ("first 14, then 15", ["14", "21"], 0),
    ("x, y = 14", ["14"], 0), (r"\boxed{14\text{ m}}", ["14"], 1), ("7 + 7", ["14", "21"], 0), ("", ["14"], 0),
    ("0.5", [8, 0.5], 1), ("50%", [8, "1/2"], 1), ("rome", ["Paris", "Rome", 3], 1), ("b", ["A", "B"], 0),
    ("2, 1", ["(3, 4)", "1, 2"], 1),
    ("5", ["the long way", "#### 5"], nan),  # whatever the completion: what it makes right would count as wrong
    ("6", ["5", ""], nan), ("5", ["5", "see figure"], nan),
])  # fmt: skip
def test_math_match_takes_any_accepted_answer(completion, accepted, expected, no_math_verify):
    values = rewards.math_match([completion], ["99"], accepted=[accepted], prompts=["p"])
    assert values == pytest.approx([expected], nan_ok=True)


def test_math_match_of_rows_with_and_without_accepted():
    completions, answers = ["21", "14", "21", "14", "99"], ["14", "14", "14", "see figure", "99"]
    accepted = [["14", "21"], None, None, None, ["14", "21"]]  # the list counts alone where there is one
    values = rewards.math_match(completions, answers, accepted=accepted)
    assert values == pytest.approx([1, 1, 0, nan, 0], nan_ok=True)
    with pytest.raises(ValueError, match="shorter"):
        rewards.math_match(completions, answers, accepted=accepted[:4])
    accepted = [["x + 2", "x^2 + 2x + 1"]] * 3 + [["x + 2", r"\foo{3}"]]  # compared as mathematics
    completions = [r"\boxed{(x+1)^2}", r"\boxed{2 + x}", r"\boxed{x + 3}", r"\boxed{x + 2}"]
    assert rewards.math_match(completions, ["1"] * 4, accepted=accepted) == pytest.approx([1, 1, 0, nan], nan_ok=True)


@pytest.mark.parametrize(("accepted", "message"), [
    ([], r"row 1, .*'14': accepted is \[\]: .*at least one"), ("14, 21", "accepted is '14, 21': must be a list"),
    (["14", None], "row 1, .*'14': accepted holds None: .*text or a finite number"), ([1, True], "accepted holds True"),
    ([14, nan], "accepted holds nan"),
])  # fmt: skip
def test_unusable_accepted_answers_are_refused(accepted, message):
    with pytest.raises(ValueError, match=message):
        rewards.math_match(["14", "14"], ["14", "14"], accepted=[["14"], accepted])


def test_a_batch_asks_each_pair_once_and_a_dead_grader_is_no_score(monkeypatch):
    asked = mock.Mock(side_effect=lambda questions, seconds: {q: q[1] in (None, "x+1") for q in questions})
    monkeypatch.setattr(answers_module, "evaluate", asked)
    completions = [r"\boxed{x+1}", r"\boxed{y}", r"\boxed{x+1}", "7", r"\boxed{1 + x}"]
    assert rewards.math_match(completions, ["1 + x", "1 + x", "1 + x", "7", "1 + x"]) == [1, 0, 1, 1, 1]
    questions, seconds = asked.call_args.args
    assert asked.call_count == 1 and seconds == 2.0
    assert questions == [("1 + x", None), ("1 + x", "x+1"), ("1 + x", "y")]  # the same text is not asked
    monkeypatch.setattr(answers_module, "evaluate", lambda questions, seconds: dict.fromkeys(questions))
    assert rewards.math_match(completions, ["1 + x"] * 5) == pytest.approx([nan] * 5, nan_ok=True)
    assert math.isnan(answers_module.any_answer_matches("3", ["x", "y"]))


def test_accepted_answers_are_not_read_again_for_every_right_answer(monkeypatch):
    completions = [f"The number is {number}." for number in range(10, 100)] * 2
    accepted = [[str(number) for number in range(10, 100)]] * len(completions)
    rewards.math_match(completions[:1], ["10"], accepted=accepted[:1])
    texts, read = [], answers_module.read
    monkeypatch.setattr(answers_module, "read", lambda text: texts.append(text) or read(text))
    assert rewards.math_match(completions, ["10"] * len(completions), accepted=accepted) == [1.0] * len(completions)
    assert len(texts) < 10 * len(completions)  # 90 right answers each: read anew, they would be 90 times as many


def test_golds_that_cannot_be_graded_are_found_before_training(no_math_verify, monkeypatch):
    golds = [
        "18",
        "",
        "see figure",
        "18 apples",
        "80元",
        "#### see figure",
        "Paris",
        "#### 5",
        "the long way",
        "(1, 2)",
    ]
    assert answers_module.ungradable(golds * 1000) == [
        row for row in range(10_000) if golds[row % 10] in ("", "see figure", "#### see figure", "the long way")
    ]
    monkeypatch.undo()
    assert answers_module.ungradable(["x + 1", r"\foo{3}", "x + 1", r"(\foo{3}, 1)"]) == [1, 3]


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{x = 49.0}", "49"), ("**+49**", "49"), ("50%", "1/2"), (r"\frac{2}{4}", "1/2"), ("Paris", "Paris"),
    (r"\boxed{x+1}", "x+1"), ("9" * 5000, "9" * 5000), ("<think>49", None),  # too long for a number; no answer
])  # fmt: skip
def test_normal_answer_has_one_form_for_a_number(text, answer):
    assert answers_module.normal_answer(text) == answer


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>a\nb</think><answer>1</answer>", 1), ("\n<think>a</think>\n\n<answer>\n1\n</answer>\n", 1),
    ("<think>x</think><think>y</think><answer>1</answer><answer>2</answer>", 0), ("<think>x</think><answer>1", 0),
    ("<think>x<answer>1</answer></think>", 0), ("well <think>x</think><answer>1</answer>", 0),
    ("<think>x</think> so <answer>1</answer>", 0), ("<think>x</think><answer>1</answer>.", 0),
    ("<think>\n<think>x</think><answer>1</answer>", 0), ("[THINK]x[/THINK]\n<answer>1</answer>", 1),
    ("<thinking>x</think><answer>1</answer>", 0), ("<|START_THINKING|>x<|END_THINKING|><answer>1</answer>", 1),
    ("x</think><answer>1</answer>", 0), ("<think>x</think></answer>1<answer>", 0),
])  # fmt: skip
def test_format_reward(text, expected):
    assert rewards.format_reward([text], ["1"]) == [expected]


def word_tokenizer(between=r"\s+", **special):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<pad>", "user", "assistant", ":", "word", "a", "b", "c", "d", "好"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(between), "removed")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **special)


def test_length_reward_is_highest_at_the_target_and_width_moves_the_far_end():
    def values(lengths, *args):
        n = len(lengths)
        return rewards.length_reward(*args)(["x"] * n, ["1"] * n, completion_tokens=lengths, prompts=["p"] * n)

    assert values([20, 10, 30, 40, 200, 0], 20) == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert values([20, 10, 30, 60, 100, 0], 20, 80) == [1.0, 0.875, 0.875, 0.5, 0.0, 0.75]
    with pytest.raises(ValueError, match="no column completion_tokens"):
        rewards.length_reward(20)(["x"], ["1"])
    for bad in [(0,), (20, 0), (nan,), (20, math.inf)]:
        with pytest.raises(ValueError, match="at least 1"):
            rewards.length_reward(*bad)
    # of a tokenizer, tokens are counted, and not characters; the column wins
    function = rewards.length_reward(256, 100, word_tokenizer(r"\s+|(?<=好)(?=好)"))
    texts = ["好" * 256, "word " * 256, "word " * 206]
    assert function(texts, ["1"] * 3) == [1.0, 1.0, 0.5]
    assert function(texts, ["1"] * 3, completion_tokens=[306, 256, 256]) == [0.5, 1.0, 1.0]
    # the penalty falls in a straight line to -1 at the limit
    found = rewards.overlong_penalty(torch.tensor([0, 60, 70, 80, 100, 120]), max_new_tokens=100, cache=40)
    assert found.dtype == torch.float32 and found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


TEMPLATE = "{% for m in messages %}{{ '<s> ' if loop.first }}{{ m.role }} : {{ m.content }} {% endfor %}</s>"


def save_reward_model(folder, num_labels=1, template=None, base_only=False, **special):
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=32, num_labels=num_labels, pad_token_id=None,
                         initializer_range=0.5)  # fmt: skip
    (LlamaForCausalLM if base_only else LlamaForSequenceClassification)(config).save_pretrained(folder)
    tokenizer = word_tokenizer(**special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


# in float64: scores are rounded to fp32 at the end alone
load_reward_model = functools.partial(reward_models.RewardModel, device="cpu", dtype=torch.float64)


def score_by_hand(model, *ids):
    """The head on the last of these tokens."""
    return model.model.score(model.model.model(torch.tensor([ids])).last_hidden_state[0, -1])


@pytest.mark.parametrize("special", [{"unk_token": "<unk>"}, {"bos_token": "<s>"}, {"pad_token": "<pad>"}])
def test_reward_model_scores_do_not_depend_on_the_batch(tmp_path, capsys, special):
    model = load_reward_model(save_reward_model(tmp_path, template=TEMPLATE, **special))
    assert ("no pad token: padding with" in capsys.readouterr().out) == ("pad_token" not in special)
    prompts = ["a", [{"role": "user", "content": "a b"}], "c c c c c", "d"]
    completions = ["b", "c d", "a a a", "b c d a b c"]
    together = model.scores(prompts, completions)
    assert together.shape == (4,) and together.dtype == torch.float32 and together.device.type == "cpu"
    assert not together.is_inference() and not model.model.training
    assert together.std() > 0.01
    for batch_size in (1, 3):
        assert_rounded(model.scores(prompts, completions, batch_size=batch_size), together, terms=1)
    assert_rounded(model.scores(prompts[::-1], completions[::-1]).flip(0), together, terms=1)
    # one start token, the template, and its end token
    assert_rounded(together[:1], score_by_hand(model, 1, 4, 6, 8, 5, 6, 9, 2), terms=1)
    assert model.scores([], []).shape == (0,)
    model.tokenizer.chat_template = None  # the texts are joined
    for prompt in ("a b ", [{"role": "system", "content": "a"}, {"role": "user", "content": "b "}]):
        assert_rounded(model.scores([prompt], ["c"]), score_by_hand(model, 8, 9, 10), terms=1)


def test_reward_model_reads_one_template_and_one_start_token(tmp_path):
    from tokenizers.processors import TemplateProcessing

    def load(folder, **options):
        """A reward model whose tokenizer writes a start token too."""
        model = load_reward_model(save_reward_model(folder, bos_token="<s>", unk_token="<unk>", **options))
        start = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        model.tokenizer.backend_tokenizer.post_processor = start
        model.tokenizer.save_pretrained(folder)
        return load_reward_model(str(folder))

    template = "<s> {% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}"
    chat, text = load(tmp_path / "chat", template=template), load(tmp_path / "text")
    prompts = ["a", "<s> user : a </s> assistant : ", " user : a </s> assistant : "]
    assert [chat._text(prompt, "b") for prompt in prompts] == ["<s> user : a </s> assistant : b </s> "] * 3
    # a token that is only mentioned makes no template, and a thought that the prompt opens comes once
    assert chat._text("a </s> a", "b") == "<s> user : a </s> a </s> assistant : b </s> "
    assert chat._text(prompts[1] + "<think>\n", "<think>\nb") == prompts[1] + "<think>\nb </s> "
    expected = score_by_hand(chat, 1, 4, 6, 8, 2, 5, 6, 9, 2).expand(3)
    assert_rounded(chat.scores(prompts, ["b"] * 3), expected, terms=1)
    expected = score_by_hand(text, 1, 8, 9).expand(2)
    assert_rounded(text.scores(["a ", "<s> a "], ["b", "b"]), expected, terms=1)


def test_reward_model_refuses_what_it_cannot_score(tmp_path):
    for options, message in (dict(num_labels=2), "has 2 labels"), (dict(base_only=True), r"lacks .*'score.weight'"):
        with pytest.raises(ValueError, match=message):
            reward_models.RewardModel(save_reward_model(tmp_path / message[:3], **options))
    model = reward_models.RewardModel(save_reward_model(tmp_path, unk_token="<unk>"))
    for prompts, completions, lengths in [(["", "a"], ["", ""], "0 to 1"), (["a", "a "], ["", "b " * 32], "1 to 33")]:
        with pytest.raises(ValueError, match=f"{lengths} tokens: .*reads 1 to 32"):
            model.scores(prompts, completions)
    with pytest.raises(ValueError):
        model.scores(["a"], ["b", "c"])
    with torch.no_grad():
        model.model.score.weight.fill_(nan)
    with pytest.raises(ValueError, match="scores nan in row 0, 'ab'"):
        model.scores(["a"], ["b"])
