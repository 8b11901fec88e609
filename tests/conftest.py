"""What every test shares: one thread, one seed, and the list of cases that nothing covers yet."""

from collections import Counter

import pytest
import torch

# Two workers share two cores (`make test`), and the shapes are too small to gain from more threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A test skipped with the reason `not covered: ...` is listed by that line, however it was run.

    Those skipped as `native not built: ...` are counted.
    """
    unbuilt: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "not covered: " in reason:
            terminalreporter.write_line(reason[reason.index("not covered: ") :])
        if "native not built: " in reason:
            unbuilt[reason[reason.index("native not built: ") :]] += 1
    for reason, count in unbuilt.items():
        terminalreporter.write_line(f"{reason} ({count} tests)")
