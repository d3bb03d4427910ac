# SPDX-License-Identifier: Apache-2.0
"""The parity page says what was measured, of the rows there are."""

from tests.long.parity import layouts, run, table, verdict

ROWS = {row.name: row for row in layouts.ROWS}


def test_the_page_is_made_from_the_kept_figures():
    page = table.PAGE.read_text()
    assert page == table.written_anew(page, table.records()), "run: python -m tests.long.parity --write docs/parity.md"


def test_the_kept_figures_are_of_the_rows_there_are_and_none_fails():
    kept = table.records()
    assert [record["versions"]["megatron-core"] for record in kept] == ["0.16.1", "0.19.2"]
    for record in kept:
        for report in record["rows"]:
            row = ROWS[report["name"]]
            assert report["fingerprint"] == run.fingerprint(row), f"{row.name} was measured as another row"
            if row.refused:
                assert report["verdict"] == "refused", report
            else:
                bounds = verdict.BOUNDS if row.run.precision == "32" else report["bounds"]
                assert report["verdict"] == "holds" and not verdict.broken(report, bounds), report


def test_every_row_was_measured_with_both_versions():
    for record in table.records():
        assert {report["name"] for report in record["rows"]} == set(ROWS), record["versions"]
