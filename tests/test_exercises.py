"""Every exercise: its right answers are accepted, its wrong ones rejected with words that help."""

import inspect
from collections import Counter

import pytest
from course_cases import Answer, all_answers, solutions

from nanoteach.course import parts
from nanoteach.course.checking import Check, all_checks
from nanoteach.course.exercises import submit
from nanoteach.course.progress import Trial, make_trial, report, run_stage

CHECKS = all_checks()
ANSWERS = all_answers()


def label(value: Check | Answer) -> str:
    """Begins with the notebook's number, for -k."""
    if isinstance(value, Check):
        return f"{value.notebook:02d}-{value.target.removeprefix('nanoteach.')}"
    numbers = {check.target: check.notebook for check in CHECKS}
    return f"{numbers.get(value.target, 99):02d}-{value}"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Progress goes to a folder of the test, and no part stays in place."""
    monkeypatch.setenv("NANOTEACH_PROGRESS", str(tmp_path))
    yield
    parts.reset_to({})


@pytest.fixture(scope="module")
def trial() -> Trial:
    return make_trial()


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_it_has_answers_of_every_kind(check):
    kinds = Counter(answer.kind for answer in ANSWERS if answer.target == check.target)
    assert kinds["exercise"] == 1, f"{check.target} needs one solution"
    assert kinds["second"] >= 1, f"{check.target} needs a second right answer"
    assert kinds["wrong"] >= 3, f"{check.target} needs three wrong answers"


@pytest.mark.parametrize("answer", [a for a in ANSWERS if a.kind != "wrong"], ids=label)
def test_a_right_answer_is_accepted(answer):
    outcome = submit(answer.target, answer.source)
    assert outcome.state == "right", outcome.message


@pytest.mark.parametrize("answer", [a for a in ANSWERS if a.kind == "wrong"], ids=label)
def test_a_wrong_answer_is_told_why(answer):
    outcome = submit(answer.target, answer.source)
    assert outcome.state == "wrong", outcome.message
    said = " ".join(outcome.message.split())
    assert answer.words in said, outcome.message
    failed = ": raised " in said or ": took too long." in said
    assert ("your line" in said) is failed, outcome.message
    assert answer.target not in parts.live()


class Reached(Exception):
    """The target was called."""


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_every_stage_that_claims_it_runs_it(check, trial):
    def raiser(*args, **kwargs):
        raise Reached

    assert check.stages, "an exercise is a part of some stage"
    for number in check.stages:
        run = run_stage(trial, number, {check.target: raiser})
        assert "Reached" in run.error, f"stage {number} does not run {check.target}"


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_the_package_passes_its_own_check(check):
    source = parts.source_of(parts.package_version(check.target))
    assert submit(check.target, source).state == "right"


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_the_solution_has_the_package_s_signature(check):
    package = parts.package_version(check.target)
    package = package.fget if isinstance(package, property) else inspect.unwrap(package)
    own = parts.build(parts.resolve(check.target), solutions()[check.target], "<solution>")

    def shape(function):
        return [
            (p.name, p.kind, p.default)
            for p in inspect.signature(function).parameters.values()
        ]  # fmt: skip

    assert shape(inspect.unwrap(own)) == shape(package)
    assert own.__name__ == package.__name__


def test_no_answer_is_to_something_else():
    assert {a.target for a in ANSWERS} <= {check.target for check in CHECKS}


def test_the_whole_engine_runs_on_the_solutions(capsys):
    """Given one by one, as a learner would; then proved against transformers."""
    for check in CHECKS:
        assert submit(check.target, solutions()[check.target]).state == "right"
    assert parts.live().keys() == {check.target for check in CHECKS}
    assert report() == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "to do" not in shown
    assert "NO" not in shown
