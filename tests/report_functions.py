"The figures that a report notebook draws by functions of its own, to be called without the report."

from types import SimpleNamespace

import nbformat

from chunk_grpo.reporting.reports import find_report_notebook


def functions_of_report(name: str) -> SimpleNamespace:
    """What the two code cells after a report's parameters define: its imports, and its figures."""
    cells = [
        cell.source
        for cell in nbformat.read(find_report_notebook(name), 4).cells
        if cell.cell_type == "code"
    ]
    exec("\n".join(cells[1:3]), found := {})
    return SimpleNamespace(**found)
