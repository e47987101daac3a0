"""What sampling costs, measured on a toy: every row is there, and is what it says."""

import json
from pathlib import Path

import pytest
import torch

from nanoteach.bench import sampling
from nanoteach.bench.sampling import WISHES, main, step_times


def test_it_writes_a_row_for_each_batch_and_wish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sampling.json"
    main(["--device", "cpu", "--small", "--save", str(path)])
    found = json.loads(path.read_text())
    assert [(row["batch"], row["wish"]) for row in found["rows"]] == [
        (batch, wish) for batch in (1, 4) for wish in WISHES
    ]
    assert all(len(row["step_ms"]) == 4 and min(row["step_ms"]) > 0 for row in found["rows"])
    command = ["python", "-m", "nanoteach.bench.sampling", "--device", "cpu", "--small"]
    assert found["command"].split()[:6] == command
    assert found["environment"]["sources"] and found["shape"] == "toy"
    assert capsys.readouterr().out.count("x\n") == 8


def test_the_requests_ask_for_what_the_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are timed draw, filter and tell logprobs; afterwards nothing is left."""
    core = sampling.build("toy", torch.device("cpu"), 3, 40)
    seen = []
    step = core.step

    def watched() -> list:
        seen[:] = [(seq.params, len(seq.logprobs)) for seq in core.sequences.values()]
        return step()

    monkeypatch.setattr(core, "step", watched)
    for wish in WISHES.values():
        step_times(core, 3, 5, 2, **wish)
        assert len(seen) == 3
        for params, told in seen:
            assert {name: getattr(params, name) for name in wish} == wish
            assert bool(told) is ("logprobs" in wish)
        assert not core.has_unfinished_requests() and core.check() == []
