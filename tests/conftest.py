"""What the exactness tests have compared and what was skipped, told at the end of a run."""

import os
from collections import Counter

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Sum up what passed tests recorded as numbers (see `record_property`), in all processes."""
    totals: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        numbers = {key: n for key, n in report.user_properties if isinstance(n, int)}
        if "tokens" in numbers:
            totals.update(numbers, runs=1)
    if totals:
        told = ", ".join(f"{totals[key]:,} {key}" for key in ("runs", "requests", "tokens"))
        terminalreporter.write_line(
            f"compared with transformers: {told}; {totals['ties']} ties, "
            f"{totals['preemptions']:,} preemptions"
        )
    reports = terminalreporter.stats.get("skipped", [])
    for reason in sorted({r.longrepr[-1] for r in reports if isinstance(r.longrepr, tuple)}):
        terminalreporter.write_line(reason)
