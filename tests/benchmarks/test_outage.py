import json

from benchmarks import outage


def test_a_stopped_daemon_costs_one_deadline_and_comes_back_by_itself(tmp_path):
    figures = tmp_path / "outage.json"
    options = ["--data", str(tmp_path), "--deadline", "0.5", "--requests", "5", "--arena", "64MiB"]
    assert outage.main([*options, "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    # Twice stopped, twice a deadline; all other requests were refused or hit.
    assert result["circuit_opened"] == 2
    assert result["circuit_refused"] >= 6
