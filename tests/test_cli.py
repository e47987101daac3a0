"""The command line, and the README's own words, tried as a reader would."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoteach import cli, ladder

ROOT = Path(__file__).parent.parent


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_continues_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "There was", "once a fox", "--max-tokens", "12")
    assert code == 0
    assert out.startswith("There was once a fox") and len(out) > len("There was once a fox") + 10


def test_chat_answers_and_remembers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["What is 27 plus 48?", "What is 3 plus 4?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, _ = run(capsys, "chat")
    assert code == 0
    assert "75" in out and "7" in out.splitlines()[-1]


def test_chat_ends_at_the_end_of_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    assert run(capsys, "chat")[0] == 0


def test_doctor_says_what_would_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for word in ("Python", "torch", "GPU", "flash_attn", "triton", "device", "model folder"):
        assert word in out


def test_doctor_goes_on_after_a_wrong_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOTEACH_DEVICE", "tpu")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "it can be cpu, cuda, mps" in out and "model folder" in out


def test_ladder_proves_and_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    argv = ("ladder", "--requests", "4", "--repeats", "1", "--save", str(file))
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert out.count("  yes") == 7  # six stages and transformers' own batches
    assert "Open next" in out
    saved = json.loads(file.read_text())
    assert [row["stage"] for row in saved["rows"]] == [None, None, 1, 2, 3, 4, 5, 6]
    assert all(row["seconds"] for row in saved["rows"])


def test_ladder_says_when_a_stage_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ladder.Ladder.build

    class Wrong:
        def __init__(self, generator: object) -> None:
            self.generator = generator

        def generate(self, prompts: object, params: object) -> list[list[int]]:
            outputs = self.generator.generate(prompts, params)  # type: ignore[attr-defined]
            outputs[1][3] += 1
            return outputs

    monkeypatch.setattr(ladder.Ladder, "build", lambda *args: Wrong(right(*args)))
    argv = ("ladder", "--requests", "2", "--repeats", "1", "--stages", "6")
    code, out, err = run(capsys, *argv)
    assert code == 1
    assert "NO, 1 differ" in out and "please report" in err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("generate", ""), "empty"),
        (("generate", "hello", "--model", "no-such-model"), "smollm2-135m"),
        (("generate", "hello", "--max-tokens", "0"), "max_tokens"),
        (("start", "README.md"), "README.md is a file"),
        (("progress", "--yes"), "--reset"),
        (("ladder", "--requests", "0"), "requests"),
        (("bench", "serve", "--small"), "--small is not for the load test: leave it out"),
        (("bench", "serve", "--repeats", "9"), "--repeats is not for"),
        (("bench", "serve", "--profile", "DIR"), "--profile is not for"),
        (("bench", "nano", "--rates", "1"), "--rates is for the load test, bench serve: leave it"),
        (("bench", "nano", "--seed", "0"), "--seed is for"),
        (("bench", "nano", "--no-core-process"), "--no-core-process is for"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    word: str,
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == ""
    assert word in err and "Traceback" not in err


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanoteach", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "ladder" in done.stdout


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert "27 plus 48 is 75" in capsys.readouterr().out


def test_the_files_that_the_readme_names_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_figures_and_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "figures/draw.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
