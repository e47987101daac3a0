"""The exercise system itself."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
import torch

from nanoteach import block_manager, cost_model, model, paged_attention
from nanoteach.cli import main
from nanoteach.course import parts, progress
from nanoteach.course.build import execute
from nanoteach.course.checking import Wrong, expect, expect_equal
from nanoteach.course.display import Live, show
from nanoteach.course.exercises import exercise, submit
from nanoteach.course.limits import TimeUp, time_limit
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduled

KV = "nanoteach.cost_model.kv_bytes_per_token"
BLOCKS = "nanoteach.block_manager.blocks_needed"
TAKE = "nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block"

RIGHT = """
def kv_bytes_per_token(config, bytes_per_value=2):
    return config.num_layers * config.kv_size * bytes_per_value * 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOTEACH_PROGRESS", str(tmp_path / "progress"))
    yield tmp_path / "progress"
    parts.reset_to({})


def body(text: str) -> str:
    return f"def kv_bytes_per_token(config, bytes_per_value=2):\n    {text}\n"


# --- what becomes of an answer ------------------------------------------------------------------


@pytest.mark.parametrize(
    "stub",
    ["...", "pass", "raise NotImplementedError", 'raise NotImplementedError("later")',
     '"""What it does."""', '"""What it does."""\n    ...'],
)  # fmt: skip
def test_a_stub_is_no_attempt(stub, folder):
    outcome = submit(KV, body(stub))
    assert outcome.state == "absent"
    assert outcome.message == (
        "kv_bytes_per_token: not written here yet, the package's version is used."
    )
    assert not folder.exists() and not parts.live()


def test_half_an_answer_that_ends_in_not_implemented_is_no_attempt():
    outcome = submit(KV, body("size = config.kv_size\n    raise NotImplementedError"))
    assert outcome.state == "absent"


def test_a_right_answer_goes_into_the_engine_and_is_kept(folder):
    package = cost_model.kv_bytes_per_token
    outcome = submit(KV, RIGHT)
    assert outcome.state == "right"
    assert cost_model.kv_bytes_per_token is parts.live()[KV] is not package
    assert parts.package_version(KV) is package
    assert (folder / f"{KV}.py").read_text() == RIGHT


def test_a_wrong_answer_is_explained_and_leaves_the_package_in_place(folder):
    package = cost_model.kv_bytes_per_token
    message = submit(
        KV, body("return config.num_layers * config.kv_size * bytes_per_value")
    ).message
    assert message.splitlines() == [
        "kv_bytes_per_token: not right yet.",
        "  case      3 layers, 10 query heads, 2 K/V heads of 7 values, 1 byte each",
        "  expected  84",
        "  got       42",
        "  likely    K and V are two: each layer keeps both.",
        "The notebook goes on with the package's version.",
    ]
    assert cost_model.kv_bytes_per_token is package
    assert not folder.exists()


def test_a_wrong_answer_after_a_right_one_keeps_the_right_one_on_disk(folder):
    submit(KV, RIGHT)
    message = submit(KV, body("return 1")).message
    assert "Your last right answer is still kept." in message
    assert not parts.live() and (folder / f"{KV}.py").read_text() == RIGHT


@pytest.mark.parametrize("stub", ["...", "size = 1\n    raise NotImplementedError"])
def test_a_stub_after_a_wrong_answer_brings_the_kept_one_back(stub):
    submit(KV, RIGHT)
    submit(KV, body("return 1"))
    outcome = submit(KV, body(stub))
    assert outcome.state == "absent"
    assert "your saved version is used" in outcome.message
    assert cost_model.kv_bytes_per_token is parts.live()[KV]


@pytest.mark.parametrize(
    "definition",
    ["def kv_bytes_per_token(config):",
     "def kv_bytes_per_token(config, bytes_per_value):",
     "def kv_bytes_per_token(config, bytes_per_value=4):",
     "def kv_bytes_per_token(bytes_per_value, config=2):"],
)  # fmt: skip
def test_other_arguments_than_the_stub_s_are_named(definition):
    source = f"{definition}\n    return 2 * config.num_layers * config.kv_size * bytes_per_value\n"
    message = submit(KV, source).message
    assert message.splitlines() == [
        "kv_bytes_per_token: its arguments changed.",
        "  expected  def kv_bytes_per_token(config, bytes_per_value=2)",
        f"  got       {definition[:-1]}",
        "  likely    Keep the stub's arguments: their names, order and defaults.",
        "The notebook goes on with the package's version.",
    ]


@pytest.mark.parametrize("more", ["seen={}", "*rest", "**options"])
def test_more_arguments_than_the_stub_s_do_no_harm(more):
    right = RIGHT.replace("bytes_per_value=2", f"bytes_per_value=2, {more}")
    assert submit(KV, right).state == "right"


def test_where_the_course_wraps_an_answer_is_not_seen():
    source = body("def inner(x):\n        return x\n    return inner()")
    message = submit(KV, source).message
    assert "kv_bytes_per_token.<locals>.inner() missing 1" in message and "make" not in message


def test_an_exception_shows_the_learner_s_lines_alone():
    source = body("def inner():\n        return [][3]\n    return inner()")
    message = submit(KV, source).message
    assert "raised IndexError" in message and "list index out of range" in message
    assert "your line 4:  return inner()\n  your line 3:  return [][3]" in message
    assert "checks_00" not in message and "File" not in message


def test_a_line_that_calls_itself_is_said_once():
    message = submit(KV, body("return cost_model_of(config)")).message
    assert message.count("your line") == 1
    message = submit(KV, body("def f(n):\n        return f(n + 1)\n    return f(0)")).message
    assert "raised RecursionError" in message and message.count("your line 3:") == 1


@pytest.mark.parametrize(
    "code", ["exit()", "raise KeyError('a')", "return kv_bytes_per_token(config)"]
)
def test_what_would_end_a_program_ends_in_words(code):
    assert submit(KV, body(code)).state == "wrong"


def test_a_name_of_the_notebook_is_not_there_and_the_message_says_so():
    message = submit(KV, body("return helper(config)")).message
    assert "name 'helper' is not defined" in message
    assert "Your function runs inside nanoteach.cost_model" in " ".join(message.split())


@pytest.mark.parametrize(
    "loop",
    ["while True: pass",
     "while True:\n        try:\n            x = 1\n        except Exception: pass",
     "while True:\n        try:\n            x = 1\n        except: pass"],
)  # fmt: skip
def test_an_endless_loop_ends(loop, monkeypatch):
    from nanoteach.course import checking, exercises

    quick = checking.check_of(KV)
    quick = type(quick)(**{**vars(quick), "seconds": 0.3})
    monkeypatch.setattr(exercises, "check_of", lambda target: quick)
    began = time.monotonic()
    message = submit(KV, body(loop)).message
    assert time.monotonic() - began < 5
    assert "took too long" in message and "within 0.3 seconds" in message
    assert "your line" in message


def test_time_that_is_not_the_learner_s_counts_less_and_an_import_not_at_all(tmp_path, monkeypatch):
    with time_limit(0.1, "<nobody>"):
        time.sleep(0.3)
    with pytest.raises(TimeUp), time_limit(0.05, "<nobody>"):
        while True:
            pass
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.3)\ndone = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with time_limit(0.1):
        import slow_to_import
    assert slow_to_import.done


def test_the_time_limit_works_in_another_thread():
    ended = []

    def loop() -> None:
        while True:
            pass

    def work() -> None:
        try:
            with time_limit(0.2):
                loop()
        except TimeUp:
            ended.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert ended


def test_a_target_that_is_none_is_an_error():
    with pytest.raises(ValueError, match=r"no function or method of the package"):
        submit("nanoteach.cost_model.no_such", RIGHT)
    with pytest.raises(ValueError, match=r"is no exercise; these are: .*kv_bytes_per_token"):
        submit("nanoteach.cost_model.num_parameters", RIGHT)


def test_the_decorator_reads_the_cell_and_gives_what_is_in_place(capsys):
    @exercise(KV)
    def kv_bytes_per_token(config, bytes_per_value=2):
        return 2 * config.num_layers * config.kv_size * bytes_per_value

    assert "right. (Kept only when run in a notebook.)" in capsys.readouterr().out
    assert kv_bytes_per_token is cost_model.kv_bytes_per_token is parts.live()[KV]
    parts.reset_to({})

    @exercise(KV)
    def kv_bytes_per_token(config, bytes_per_value=2): ...

    assert kv_bytes_per_token is cost_model.kv_bytes_per_token is parts.package_version(KV)


def test_a_solution_run_as_a_script_writes_nothing(tmp_path):
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    del environment["NANOTEACH_PROGRESS"]
    run = subprocess.run(
        [sys.executable, str(root / "solutions/00_measure_first.py")],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert run.stdout.count(": right. ") == 5, run.stdout + run.stderr
    assert not list(tmp_path.iterdir())


# --- exchanging parts -----------------------------------------------------------------------------


def test_every_module_that_imported_a_function_gets_the_new_one():
    package = block_manager.blocks_needed
    with parts.installed({BLOCKS: lambda num_tokens, block_size: 99}):
        assert block_manager.blocks_needed(1, 1) == 99
        assert paged_attention.blocks_needed(1, 1) == 99
    assert block_manager.blocks_needed is paged_attention.blocks_needed is package


def test_a_table_of_functions_gets_the_new_one():
    target, package = "nanoteach.model.rms_norm", model.rms_norm
    with parts.installed({target: lambda x, weight, eps: x}):
        assert model.TORCH_OPS.rms_norm is model.rms_norm is not package
    assert model.TORCH_OPS.rms_norm is model.rms_norm is package


def test_an_answer_sees_its_target_s_module_and_super():
    target = parts.resolve(TAKE)
    source = "def f(self):\n    assert sha256\n    return -super().take_free_block()\n"
    manager = PrefixCachingBlockManager(4, 2)
    with parts.installed({TAKE: parts.build(target, source, "<f>")}):
        assert manager.take_free_block() == 0 and manager.take_free_block() == -1
    assert manager.take_free_block() == 2
    assert "f" not in vars(target.module)


def test_a_property_stays_one():
    target = "nanoteach.scheduler.Scheduled.gives_token"
    with parts.installed({target: lambda self: "mine"}):
        assert Scheduled(None, 1).gives_token == "mine"
    assert isinstance(vars(Scheduled)["gives_token"], property)


def test_installed_means_exactly_these_and_comes_back_to_what_was():
    submit(KV, RIGHT)
    mine = parts.live()[KV]
    with pytest.raises(RuntimeError), parts.installed({BLOCKS: max}):
        assert cost_model.kv_bytes_per_token is parts.package_version(KV)
        raise RuntimeError
    assert cost_model.kv_bytes_per_token is mine
    assert block_manager.blocks_needed(17, 16) == 2


# --- comparing ------------------------------------------------------------------------------------


def test_expect_equal_knows_tensors_lists_and_floats():
    x = torch.arange(24.0).view(4, 6)
    expect_equal("same", x, x + 1e-7)
    expect_equal("a tuple for a list", [1, 2], (1, 2))
    expect_equal("floats", 0.1 + 0.2, 0.3)
    with pytest.raises(Wrong) as caught:
        expect_equal("other", x, x.clone().index_fill_(0, torch.tensor(2), 0.0))
    assert "6 values differ, first at [2, 0]: expected 12, got 0" in caught.value.got
    with pytest.raises(Wrong, match=r"shape \[6, 4\]"):
        expect_equal("turned", x, x.T)


def test_a_missing_return_is_named_and_an_attribute_that_is_none_is_not_one():
    with pytest.raises(Wrong, match=r"got None\. Your function returned None"):
        expect("nothing", lambda: None, to_be=3)
    with pytest.raises(Wrong, match=r"got None\. $"):
        expect_equal("an attribute", 3, None, lambda got: got.words)
    with pytest.raises(Wrong, match=r"got None\. Nobody set it"):
        expect_equal("an attribute", 3, None, "Nobody set it.")


@pytest.mark.parametrize(
    "expected, got, words",
    [
        (43232, 8256, ("43,232", "8,256")),
        (1.7279232740402222, 1.0, ("1.728", "1.0")),
        (34, 34.5, ("34", "34.5")),
        (1.00001, 1.00003, ("1.00001", "1.00003")),
        (123456.7, 2.5e20, ("123,457.0", "2.5e+20")),
        ([1.0, 0.33333333], [1.0, 0.5], ("[1.0, 0.3333]", "[1.0, 0.5]")),
        ((1, 2000), (1,), ("(1, 2000)", "(1,)")),
        (torch.tensor([1.0, 0.5]), torch.tensor([0.99987, 0.5]),
         ("tensor([1.0, 0.5]), shape [2]", "tensor([0.9999, 0.5]), shape [2]")),
    ],
)  # fmt: skip
def test_numbers_are_short_and_alike_on_both_sides(expected, got, words):
    with pytest.raises(Wrong) as caught:
        expect_equal("numbers", expected, got)
    assert (caught.value.expected, caught.value.got) == words


def test_a_learner_s_function_gets_copies():
    numbers = [1, 2]
    expect("pops", list.pop, numbers, to_be=2)
    assert numbers == [1, 2]


# --- progress -------------------------------------------------------------------------------------


def test_kept_parts_come_back_with_the_next_notebook(capsys):
    submit(KV, RIGHT)
    parts.reset_to({})
    progress.open_notebook(0)
    assert "yours so far: 1 of" in capsys.readouterr().out
    assert parts.live().keys() == {KV}
    assert "your saved version is used" in submit(KV, body("...")).message


def test_predictions_are_kept(capsys):
    progress.predict("speed", ..., "tokens/s")
    assert progress.predictions() == {}
    progress.predict("speed", 100, "tokens/s")
    progress.predict("other", 2)
    assert progress.predictions() == {"speed": 100, "other": 2}
    assert "Kept: speed: 100 tokens/s." in capsys.readouterr().out


@pytest.mark.parametrize("value", ["lots", True, [1]])
def test_a_prediction_is_a_number(value, capsys):
    progress.predict("speed", value, "tokens/s")
    assert progress.predictions() == {}
    assert "Not kept: speed: write a number" in capsys.readouterr().out


def test_a_prediction_is_held_beside_what_came(capsys):
    progress.reveal("speed", 31656.4, "tokens/s")
    progress.predict("speed", 60000, "tokens/s")
    progress.reveal("speed", 31656.4, "tokens/s")
    progress.reveal("factor", 4.236)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "speed: it is 31,656 tokens/s."
    assert shown[2] == "speed: you said 60,000; it is 31,656 tokens/s."
    assert shown[3] == "factor: it is 4.24."


def test_progress_names_the_part_the_request_and_the_step(capsys):
    submit(KV, RIGHT)
    target = "nanoteach.cost_model.num_attended"

    def broken(work):
        raise OSError("planted")

    own = {KV: parts.live()[KV], target: broken}
    assert progress.report(own) == 1
    shown = capsys.readouterr().out
    assert "it raised OSError: planted" in shown
    assert f"the part: {target}" in shown


def test_blame_finds_the_part_that_changes_a_token():
    trial = progress.make_trial()

    def off_by_one(block_table, block_size, start, stop):
        slots = [block_table[i // block_size] * block_size + i % block_size
                 for i in range(start, stop)]  # fmt: skip
        return slots[1:] + slots[:1] if stop > 20 else slots

    bad = "nanoteach.block_manager.slot_mapping"
    own = {BLOCKS: parts.package_version(BLOCKS), bad: off_by_one}
    run = progress.run_stage(trial, 6, own)
    assert "request" in run.fault and "step" in run.fault
    assert progress.blame(trial, 6, own, 60) == [bad]


def test_reset_says_what_it_removes_and_asks(folder, capsys, monkeypatch):
    submit(KV, RIGHT)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main(["progress", "--reset"]) == 1
    assert f"{KV}.py" in capsys.readouterr().out and list(folder.iterdir())
    assert main(["progress", "--reset", "--yes"]) == 0
    assert not list(folder.iterdir())
    assert main(["progress", "--reset", "--yes"]) == 0
    assert "Nothing is kept" in capsys.readouterr().out


def test_start_copies_unpaired_and_never_overwrites(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NANOTEACH_PROGRESS")
    mine = tmp_path / "class"
    assert main(["start", str(mine)]) == 0
    notebook = mine / "00_measure_first.ipynb"
    assert "jupytext" not in json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    notebook.write_text("mine")
    assert main(["start", str(mine)]) == 0
    assert notebook.read_text() == "mine"
    (mine / "sub").mkdir()
    monkeypatch.chdir(mine / "sub")
    assert progress.progress_folder() == mine / ".nanoteach"


def test_show_gives_the_package_s_version_whatever_is_in_place(capsys):
    submit(KV, RIGHT)
    show(KV)
    assert "return 2 * config.num_layers" in capsys.readouterr().out


# --- in a kernel --------------------------------------------------------------------

CELLS = [
    """
from dataclasses import replace
from nanoteach.course import checking, exercise
name = "nanoteach.cost_model.kv_bytes_per_token"
checking._checks[name] = replace(checking.check_of(name), seconds=0.5)
""",
    """
@exercise(name)
def kv_bytes_per_token(config, bytes_per_value=2):
    total = 0
    while total < 10:
        total += 0
    return total
""",
    """
@exercise(name)
def kv_bytes_per_token(config, bytes_per_value=2):
    return config.layers
""",
    """
@exercise(name)
def kv_bytes_per_token(config, bytes_per_value=2):
    return 2 * config.num_layers * config.kv_size * bytes_per_value
""",
    "from nanoteach import cost_model\nprint(kv_bytes_per_token is cost_model.kv_bytes_per_token)",
]


def test_in_a_kernel_loops_and_faults_end_in_words(tmp_path):
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    execute(notebook, tmp_path / "kept")
    _, loop, fault, right, last = (
        "".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells
    )
    assert "took too long" in loop and ("your line 4" in loop or "your line 5" in loop)
    assert "raised AttributeError" in fault and "your line 3:  return config.layers" in fault
    assert "right. Your version now runs in the engine" in right
    assert last == "True\n"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [f"{KV}.py"]


def test_a_broken_notebook_fails_under_nbval(tmp_path):
    root = Path(__file__).parents[1]
    shutil.copy(root / "notebooks/conftest.py", tmp_path)

    def printing(text: str) -> nbformat.NotebookNode:
        output = nbformat.v4.new_output("stream", name="stdout", text=text)
        return nbformat.v4.new_code_cell("print(1 + 1)", outputs=[output], execution_count=1)

    cells = [printing("2\n"), printing("3\n"), nbformat.v4.new_code_cell("1 / 0")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", str(tmp_path), "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert run.returncode == 1 and "2 failed, 1 passed" in run.stdout, run.stdout


def test_a_live_place_shows_what_came_last_and_nothing_in_a_script(capsys, tmp_path):
    Live().update("not shown")
    assert capsys.readouterr().out == ""
    code = "from nanoteach.course import Live\nplace = Live()\nplace.update('a')\nplace.update('b')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute(notebook, tmp_path)
    (output,) = notebook.cells[0].outputs
    assert output["data"]["text/plain"] == "'b'"
