"""Measurement files are refused when they are wrong, and the page and its plots are what the files say."""

import copy
import json
import xml.etree.ElementTree as ET

import pytest

from bench import measurement
from tools import measurements
from tools.bar_chart import Bar, bar_chart

ROW = {
    "key": "export_phases",
    "what": "export: total",
    "value": 12.5,
    "unit": "s",
    "raw": [12.0, 12.5, 13.0],
    "baseline_what": "plain driver",
    "baseline": 25.0,
    "ratio": 0.5,
}
DOCUMENT = {
    "name": "export-4gib",
    "date": "2026-11-29",
    "machine": "a processor, 2 cores",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "command": "python3 -m bench.export",
    "commit": "abcdef0",
    "rows": [ROW],
}


def put(folder, doc=DOCUMENT, name=None, *, has_log=True):
    name = name or f"{doc['date']}-{doc['name']}"
    (folder / f"{name}.json").write_text(json.dumps(doc))
    if has_log:
        (folder / f"{name}.log").write_text("what the program printed\n")


def changed(where, key, value):
    doc = copy.deepcopy(DOCUMENT)
    target = doc if where == "document" else doc["rows"][0]
    if value is None:
        del target[key]
    else:
        target[key] = value
    return doc


@pytest.mark.parametrize(
    ("doc", "named"),
    [
        pytest.param(changed("document", "machine", None), "machine", id="no machine"),
        pytest.param(changed("document", "rows", []), "rows", id="no rows"),
        pytest.param(changed("document", "extra", 1), "extra", id="unknown field"),
        pytest.param(changed("document", "date", "today"), "date", id="no date"),
        pytest.param(changed("row", "raw", []), "raw", id="no runs"),
        pytest.param(changed("row", "value", "12"), "value", id="text for a number"),
        pytest.param(changed("row", "baseline", None), "baseline", id="ratio to nothing"),
        pytest.param(changed("row", "key", "Export Phases"), "key", id="key with a space"),
        pytest.param(changed("row", "value", 99.0), "outside of its runs", id="value that no run gave"),
        pytest.param(changed("row", "ratio", 0.9), "ratio is not", id="wrong ratio"),
        pytest.param([], "object", id="a list"),
    ],
)
def test_a_wrong_document_is_named_and_nothing_is_written(tmp_path, capsys, doc, named):
    put(tmp_path, doc, name="2026-11-29-export-4gib")
    assert measurements.main([], tmp_path) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "has_log", "named"),
    [("2026-11-30-export-4gib", True, "must be called"), ("2026-11-29-export-4gib", False, ".log is missing")],
)
def test_a_file_of_another_name_or_without_its_log_is_refused(tmp_path, capsys, name, has_log, named):
    put(tmp_path, name=name, has_log=has_log)
    assert measurements.main([], tmp_path) == 1
    assert named in capsys.readouterr().err


def test_a_file_that_is_no_json_is_refused(tmp_path, capsys):
    (tmp_path / "2026-11-29-broken.json").write_text("{")
    assert measurements.main([], tmp_path) == 1
    assert "2026-11-29-broken.json" in capsys.readouterr().err


def test_the_table_has_every_row_with_where_it_was_measured(tmp_path):
    put(tmp_path)
    assert measurements.main([], tmp_path) == 0
    wanted = (
        "| `export_phases` | export: total | 12.5 | s | 25 (plain driver) | 0.5 | 2026-11-29 | NVIDIA H200 | 580.1 |"
    )
    assert wanted in (tmp_path / "README.md").read_text().splitlines()


def test_check_notices_a_new_file_an_edited_page_and_a_plot_of_nothing(tmp_path):
    put(tmp_path)
    assert measurements.main(["--check"], tmp_path) == 1
    assert measurements.main([], tmp_path) == 0
    assert measurements.main(["--check"], tmp_path) == 0
    (tmp_path / "2026-11-28-gone-ratios.svg").write_text("<svg/>")
    assert measurements.main(["--check"], tmp_path) == 1
    assert measurements.main([], tmp_path) == 0
    assert not (tmp_path / "2026-11-28-gone-ratios.svg").exists()
    (tmp_path / "README.md").write_text("edited")
    assert measurements.main(["--check"], tmp_path) == 1


def test_every_plot_of_the_page_is_there(tmp_path):
    put(tmp_path)
    measurements.main([], tmp_path)
    page = (tmp_path / "README.md").read_text()
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == ["2026-11-29-export-4gib-export_phases.svg", "2026-11-29-export-4gib-ratios.svg"]
    assert all(f"]({name})" in page for name in drawn)


def test_a_chart_is_xml_whatever_the_labels_and_its_longest_bar_fills_the_width():
    chart = ET.fromstring(bar_chart("a < b & c", [Bar('"x" <y>', 1, "1"), Bar("z" * 200, 4, "4")], line_at=2.0))
    widths = [float(rect.get("width")) for rect in chart.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == 330
    assert widths[0] == pytest.approx(330 / 4, abs=0.1)


def test_a_chart_of_nothing_but_zeros_is_drawn():
    assert ET.fromstring(bar_chart("none", [Bar("x", 0, "0")])) is not None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.00123, "0.00123"),
        (0.000024, "0.000024"),
        (1.5, "1.5"),
        (12.345, "12.35"),
        (1234.5, "1234"),
        (-20, "-20"),
    ],
)
def test_numbers_are_shown_short(value, shown):
    assert measurements.number(value) == shown


def test_what_bench_writes_is_what_is_read(tmp_path):
    rows = [measurement.row("a_key", "a thing", "s", [1.0, 2.0, 4.0], baseline_what="another", baseline_raw=[4.0])]
    path = measurement.write("a-run", rows, log="what was printed\n", folder=tmp_path)
    assert measurements.read_all(tmp_path)[1] == []
    assert path.with_suffix(".log").read_text() == "what was printed\n"


def test_a_row_without_runs_is_not_written():
    with pytest.raises(ValueError, match="no raw values"):
        measurement.row("a_key", "a thing", "s", [])


def test_the_page_and_plots_of_this_repository_are_up_to_date():
    assert measurements.main(["--check"]) == 0, "run 'make measurements'"
