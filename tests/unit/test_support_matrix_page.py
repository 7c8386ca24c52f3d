"""docs/support-matrix.md shows exactly what docs/support-matrix.json records, and a "no" never without its reason."""

from __future__ import annotations

import json

import pytest

from tools import support_matrix

RECORDED = json.loads(support_matrix.OUTCOME.read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_the_recorded_outcome():
    assert support_matrix.main(["--check"]) == 0


@pytest.mark.parametrize("item", RECORDED["engines"], ids=lambda item: item["engine"])
def test_every_scenario_of_every_engine_has_a_result(item):
    assert set(item["results"]) == set(support_matrix.SCENARIOS)
    assert all(result == "yes" or result.endswith(".") for result in item["results"].values())


def test_a_changed_outcome_changes_the_table(tmp_path, monkeypatch):
    document = json.loads(json.dumps(RECORDED))
    document["engines"][0]["results"]["run_with_gpu"] = "Its daemon has no time."
    outcome = tmp_path / "outcome.json"
    outcome.write_text(json.dumps(document))
    monkeypatch.setattr(support_matrix, "OUTCOME", outcome)
    assert support_matrix.main(["--check"]) == 1


def test_a_reason_is_written_once_below_the_table():
    engine = {"engine": "E", "isTested": False, "results": {}, "reason": "Nobody has it."}
    text = support_matrix.table({"engines": [engine]})
    assert text.count("no (1)") == len(support_matrix.SCENARIOS)
    assert text.count("Nobody has it.") == 1


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="support matrix: begin"):
        support_matrix.with_table("# Support matrix\n", "| a |\n")
