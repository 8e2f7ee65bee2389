"""After the matrix: a table of the largest errors, as docs/numerics.md shows it."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = []
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        errors = dict(report.user_properties).get("errors")
        if report.when == "call" and errors:
            test, layout = report.nodeid.split("::")[1].rstrip("]").split("[", 1)
            rows.append((test, layout, errors))
    if rows:
        terminalreporter.section("largest relative errors against the equation in float64")
        terminalreporter.write_line("| layout | metric | gradient | after two steps |")
        terminalreporter.write_line("|---|---|---|---|")
    for test, layout, errors in rows:
        kind = {"test_a_layout_of_experts_computes_the_equation": "experts: ", "test_a_layout_in_bf16": "bf16: "}
        prefix = "tied: " if "tied" in test else kind.get(test, "")
        cells = " | ".join(f"{errors[name]:.1e}" for name in ("metric", "gradient", "after"))
        terminalreporter.write_line(f"| {prefix}{layout} | {cells} |")
