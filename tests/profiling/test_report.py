from __future__ import annotations

import io
from dataclasses import replace

from profiling.bench import compare, report
from profiling.measure.accuracy import Accuracy, Errors
from profiling.measure.record import Cell, Result
from profiling.measure.tables import Table, markdown, show
from tests.profiling.fakes import cell, failures, notes, result, run


def rows_of(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


RUN = run(
    cell(512, cute_flash=result(400.0, 2.1e-3), sdpa_flash=result(200.0), fa3=result(500.0)),
    cell(1024, cute_flash=result(900.0), sdpa_flash=result(225.0, spread=0.2), fa3=result(600.0, is_wrong=True)),
    cell(2048, cute_flash=result(None), sdpa_flash=result(230.0), fa3=result(650.0)),
)


def test_cells_show_speed_ratios_error_and_marks():
    (table,) = report.cell_tables(RUN)
    assert table.title == "fwd bf16, D=128, full"
    rows = rows_of(table)
    assert rows["512"] == {
        "S": "512",
        "cute_flash": "400",
        "sdpa-flash": "200",
        "fa3": "500",
        "ours/ref": "2.00",
        "ours/best": "0.80",
        "best": "fa3",
        "err/ref": "1.05",
    }
    assert (rows["1024"]["sdpa-flash"], rows["1024"]["fa3"]) == ("225~", "600!")
    assert (rows["1024"]["best"], rows["1024"]["ours/best"]) == ("sdpa-flash", "4.00")
    assert (rows["2048"]["cute_flash"], rows["2048"]["ours/ref"]) == ("x", "-")


def gradients(*errors: float, **fields) -> Result:
    """A result whose dq, dk and dv have these errors."""
    accuracy = {
        f"normal d{x}": Accuracy(error, 1e-2, 0, 3e-3, error > 0.01) for x, error in zip("qkv", errors, strict=True)
    }
    return replace(result(400.0, is_repeatable=None), accuracy=accuracy, **fields)


def backward_cell(**results: Result) -> Cell:
    yardstick = {f"normal d{x}": Errors(2.5e-3, 1.5e-2) for x in "qkv"}
    return replace(cell(512, **results), direction="bwd", yardstick=yardstick)


BACKWARD = run(
    backward_cell(cute_flash=gradients(2e-3, 3e-3, 1e-3), sdpa_flash=gradients(2e-3, 2e-3, 2e-3, tflops=200.0))
)


def test_the_worst_gradient_counts():
    (table,) = report.cell_tables(BACKWARD)
    assert table.title == "bwd bf16, D=128, full"
    assert rows_of(table)["512"]["err/ref"] == "1.50" and rows_of(table)["512"]["ours/ref"] == "2.00"
    assert report.summary_table(BACKWARD).title.startswith("All cells, bwd (")
    accuracy = report.accuracy_table(BACKWARD)
    assert accuracy is not None and accuracy.title.startswith("Worst error against fp64, bwd: ")
    assert accuracy.columns[1::4] == tuple(f"normal {name}: Frobenius" for name in ("dq", "dk", "dv"))
    ours, _, yardstick = accuracy.rows
    assert ours[1::4] == ("2.00e-03", "3.00e-03", "1.00e-03") and ours[2::4] == ("1.00", "1.50", "0.50")
    # The largest difference of an element is another number.
    assert accuracy.columns[3::4] == tuple(f"normal {name}: largest element" for name in ("dq", "dk", "dv"))
    assert ours[3::4] == ("1.00e-02",) * 3 and ours[4::4] == ("1.00",) * 3
    assert yardstick[1] == "2.50e-03"
    assert failures(BACKWARD) == notes(BACKWARD) == []


def test_a_wrong_gradient_is_named_and_one_that_is_no_number_has_no_ratio():
    wrong = gradients(2e-3, 0.5, 1e-3)
    broken = run(backward_cell(cute_flash=wrong, sdpa_flash=gradients(2e-3, 2e-3, 2e-3)))
    (failure,) = failures(broken)
    assert failure.startswith(f"{broken.cells[0].key}, cute_flash: wrong in dk on normal inputs: relative error 0.5")
    assert rows_of(report.cell_tables(broken)[0])["512"]["cute_flash"] == "400!"
    nan = {**wrong.accuracy, "normal dv": Accuracy(None, None, 5, None, True)}
    cells = backward_cell(cute_flash=replace(wrong, accuracy=nan), sdpa_flash=gradients(2e-3, 2e-3, 2e-3))
    assert rows_of(report.cell_tables(run(cells))[0])["512"]["err/ref"] == "-"


def test_summary_has_geometric_means_the_lowest_cell_and_the_share_of_the_ceiling():
    table = report.summary_table(RUN)
    assert table.title == "All cells, fwd (matmul bf16 8192^3: 800 TFLOP/s)"
    rows = rows_of(table)
    assert rows["cute_flash"]["geomean TFLOP/s"] == "600"
    assert rows["fa3"]["best % of matmul"] == "81"
    # Ratios 2 and 4; 0.8 and 1.5; against the best right peer 0.8 and 4.
    assert rows["sdpa-flash"]["ours/it geomean"] == "2.83"
    assert rows["fa3"]["ours at least as fast"] == "1/2"
    assert rows["fa3"]["lowest ours/it"] == "0.80 (d128-full-s512-b32h16)"
    assert rows["best peer of each cell"]["ours/it geomean"] == "1.79"


def test_accuracy_shows_the_worst_cell_and_the_yardstick():
    table = report.accuracy_table(RUN)
    assert table is not None
    rows = rows_of(table)
    assert rows["cute_flash"]["normal: Frobenius"] == "2.10e-03"
    assert rows["cute_flash"]["Frobenius err/ref"] == "1.05"
    assert rows["unfused PyTorch"]["normal: Frobenius"] == "2.40e-03"


def test_peers_alone_make_a_report_without_ratios():
    alone = run(cell(sdpa_flash=result(200.0), fa3=result(500.0)))
    assert report.cell_tables(alone)[0].columns == ("S", "sdpa-flash", "fa3")
    assert "ours/it geomean" not in report.summary_table(alone).columns


def test_a_missing_cute_flash_is_a_failure_and_a_missing_peer_is_not():
    absent = run(cell(sdpa_flash=result(1.0)), unavailable={"cute_flash": "broken", "fa3": "no folder"})
    assert failures(absent) == ["all cells, cute_flash: not available: broken"]
    assert notes(absent) == []


def test_the_same_error_in_many_cells_is_one_line():
    many = run(*(cell(s, cute_flash=result(1.0), sdpa_flash=result(None)) for s in (512, 1024, 2048)))
    assert failures(many) == []
    assert notes(many) == [f"{many.cells[0].key} and 2 more, sdpa-flash: failed: RuntimeError: no kernel"]


def test_changes_name_the_regression():
    found = [compare.Change("a", 1.0, 0.9), compare.Change("b", 1.0, 1.2), compare.Change("c", 1.0, None)]
    rows = rows_of(report.change_table(found, 0.05))
    assert (rows["a"]["change"], rows["a"][""]) == ("-10.0 %", "regression")
    assert (rows["b"]["change"], rows["b"][""]) == ("+20.0 %", "")
    assert (rows["c"]["change"], rows["c"][""]) == ("failed now", "regression")


TABLE = Table("Title", ("S", "speed"), (("512", "7"), ("16384", "1234")))


def test_plain_tables_are_aligned_markdown():
    assert markdown(TABLE).splitlines() == [
        "Title",
        "",
        "| S     | speed |",
        "|-------|------:|",
        "| 512   |     7 |",
        "| 16384 |  1234 |",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_drawn_table():
    pretty = Terminal()
    show([TABLE], pretty)
    assert all(text in pretty.getvalue() for text in ("┏━", "Title", "1234"))


def test_a_file_gets_markdown():
    plain = io.StringIO()
    show([TABLE], plain)
    assert plain.getvalue() == markdown(TABLE) + "\n"
