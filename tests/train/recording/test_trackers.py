"""Runs that are sent to experiment trackers: real ones, with stores on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import warnings

import pytest

from unisono import train
from unisono.errors import MissingExtra
from unisono.train.recording import report
from unisono.train.recording.reading import RecordedRun

LOCAL = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}

RECORDED = """
import json

import mlflow
from unisono import train

with train.record("digits", config={"lr": 0.1}, to=["mlflow", "wandb"]):
    for step in range(1500):  # more than MLflow takes at once
        train.log(loss=float("nan") if step == 3 else 1 / (step + 1), samples=8)

client = mlflow.MlflowClient()
(run,) = client.search_runs(["0"])
history = client.get_metric_history(run.info.run_id, "loss")
print(json.dumps({
    "name": run.info.run_name,
    "status": run.info.status,
    "params": run.data.params,
    "steps": sorted(point.step for point in history),
    "last": max((point.step, point.value) for point in history)[1],
    "artifacts": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
}))
"""


def test_trackers_get_metrics_settings_and_the_report(warm_python, tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("wandb", reason="wandb is not installed")
    done = subprocess.run(
        [warm_python, "-c", RECORDED],
        cwd=tmp_path,
        env=os.environ | LOCAL | {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/store"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not sent" not in done.stderr
    found = json.loads(done.stdout)
    assert (found["name"], found["status"]) == ("digits", "FINISHED")
    assert found["params"] == {"ranks": "1", "lr": "0.1"}
    assert found["steps"] == [step for step in range(1500) if step != 3]
    assert found["last"] == pytest.approx(1 / 1500)
    assert found["artifacts"] == ["metrics.csv", "report.html"]
    (kept,) = (tmp_path / "runs" / "digits" / "wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 10_000


def test_a_tracker_that_is_away_costs_a_warning_and_not_the_run(a_run, monkeypatch):
    sent = []

    def away(run):
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(report._SENDERS, "mlflow", away)
    monkeypatch.setitem(report._SENDERS, "wandb", sent.append)
    directory = a_run("kept")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"to": ["mlflow", "wandb"]}))
    with pytest.warns(UserWarning, match="not sent to mlflow: nobody answers"):
        path = report.conclude(directory)
    assert path.is_file()
    assert [run.directory for run in sent] == [directory]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.send(RecordedRun.read(a_run("asked_for_none")))


def test_unknown_and_missing_trackers_are_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="one of 'tensorboard', 'mlflow', 'wandb'"):
        train.record("x", to="comet")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[wandb\]"'):
        train.record("x", to=["wandb"])
    assert not list(tmp_path.iterdir())
