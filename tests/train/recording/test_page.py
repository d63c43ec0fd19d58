"""The report in a real browser: every section is there and filled, and nothing is complained of."""

from __future__ import annotations

import json
import math
import re
import sys
import types

import pytest

from unisono.cli import main
from unisono.errors import PlatformError
from unisono.train import build_report
from unisono.train.recording.figures import averaging_table, log_tail, report_data, thinned
from unisono.train.recording.reading import RecordedRun, Series

SECTIONS = ("metrics", "throughput", "communication", "timeline", "ranks", "facts", "logs")


def section(dom, name):
    """Return what the browser made of one section."""
    return dom.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_all_sections_are_filled_and_the_console_is_silent(chromium, a_run, tmp_path):
    many, alone = a_run("many", ranks=3), a_run("alone", ranks=1, step_s=0.25)
    page = build_report(many, against=[alone])
    dom, complaints = chromium.dom(page.as_uri())
    assert complaints == []
    assert all(section(dom, name) for name in SECTIONS)
    assert section(dom, "metrics").count('class="curve"') == 2  # this run and the other one
    assert 'class="band"' in section(dom, "metrics")
    assert "the curves differ by at most" in section(dom, "metrics")
    assert "samples/s" in section(dom, "throughput")
    assert "7.50 ×" in section(dom, "throughput")  # 3 ranks, steps 2.5 times as quick
    assert section(dom, "communication").count("in communication") >= 3
    assert "train.py:31" in section(dom, "communication")
    costs = ("Digits", "3 ranks", "1.25 MB", "12.5 ms", "2.5 ms", "13 % + 2.5 %")
    assert all(section(dom, "communication").count(f">{cost}<") == 3 for cost in costs)
    assert all(f">rank {rank}<" in section(dom, "timeline") for rank in range(3))
    assert "all_reduce" in section(dom, "timeline")
    assert "forward" in section(dom, "timeline")
    assert section(dom, "ranks").count("200 MB") == 3
    facts = ("2.13.0", "0123456789ab", "files changed since", "a processor", "lr")
    assert all(fact in section(dom, "facts") for fact in facts)
    assert "rank 0 says &lt;b&gt;hello&lt;/b&gt; &amp; &lt;/script&gt;" in section(dom, "logs")
    picture = tmp_path / "page.png"
    chromium.screenshot(page.as_uri(), picture, size="1180,2400", dark=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 40_000  # an empty page of this size has some 10 KB


def test_a_run_that_logged_nothing_or_failed_has_a_page_too(chromium, a_run):
    bare = a_run("bare", ranks=1, steps=0, trouble=None)
    failed = a_run(
        "failed",
        trouble="Traceback ...\nKeyError: '<img src=x onerror=alert(1)>'",
        loss=lambda step: math.nan if step else 1.0,
    )
    for directory, words in (
        (
            bare,
            ["Nothing was logged", "No steps were counted", "rank 0"],
        ),
        (failed, ["pill failed", "rank 1: KeyError", "points are not finite"]),
    ):
        dom, complaints = chromium.dom(build_report(directory).as_uri())
        assert complaints == []
        assert all(word in dom for word in words)
        assert "<img" not in dom


USE = """<script>
const told = [];
HTMLAnchorElement.prototype.click = function () { told.push(`saved ${this.download}`); };
const press = (where, word) =>
  [...document.querySelectorAll(`${where} button`)]
    .find((b) => b.textContent.includes(word)).click();
const lanes = () => document.querySelector("#timeline svg");
const shown = () => [...lanes().querySelectorAll("text")].pop().textContent.split(" shown")[0];
const box = lanes().getBoundingClientRect();
told.push(`one step ${shown()}`);
const at = { clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true };
lanes().dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -1, cancelable: true }));
told.push(`closer ${shown()}`);
lanes().dispatchEvent(new MouseEvent("dblclick", at));
told.push(`all ${shown()}`);
press("#metrics", "log");
press("#metrics", "time");
press("#metrics", "SVG");
const words = [...document.querySelectorAll("#metrics svg text")].map((t) => t.textContent);
told.push(`axis ${words.pop()}`);
document.querySelector("main").style.width = "360px";
const cell = document.querySelector("#communication th").getBoundingClientRect();
const figures = [...document.querySelectorAll("figure")];
const inside = figures.every((f) => f.scrollWidth <= f.clientWidth);
told.push(`narrow: words ${cell.height < 40 ? "whole" : "cut"}, ${inside ? "inside" : "outside"}`);
document.title = told.join("; ");
</script></body>"""


def test_figures_can_be_zoomed_switched_saved_and_narrowed(chromium, a_run):
    page = build_report(a_run("used"))
    page.write_text(page.read_text().replace("</body>", USE))
    dom, complaints = chromium.dom(page.as_uri())
    assert complaints == []
    title = re.search("<title>(.*?)</title>", dom)
    assert title is not None
    assert title[1] == (
        "one step 100 ms; closer 80 ms; all 900 ms; saved loss.svg; axis seconds; "
        "narrow: words whole, inside"
    )


def test_the_page_needs_no_network_and_keeps_its_data_inside(a_run):
    text = build_report(a_run("alone")).read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1])["logs"][0]["text"].endswith("</script>")


def test_the_command_builds_again_and_remembers_the_other_run(a_run, capsys, monkeypatch):
    many, alone = a_run("many"), a_run("alone", ranks=1)
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    browser = types.SimpleNamespace(open=opened.append)
    monkeypatch.setitem(sys.modules, "webbrowser", browser)
    assert main(["report", str(many), "--against", str(alone), "--no-open"]) == 0
    assert capsys.readouterr().out == f"{many / 'report.html'}\n"
    assert opened == []
    (many / "report.html").unlink()
    assert main(["report", str(many)]) == 0
    assert opened == [(many / "report.html").as_uri()]
    assert '"against": [{"name": "alone"' in (many / "report.html").read_text()
    assert main(["trace", str(many)]) == 0
    assert "train.py:31" in capsys.readouterr().out


def test_a_directory_without_a_run_is_refused_with_those_that_there_are(
    a_run, tmp_path, monkeypatch
):
    a_run("runs/known") if (tmp_path / "runs").mkdir() is None else None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlatformError, match="HINT: runs here: runs/known"):
        build_report(tmp_path / "nothing")
    with pytest.raises(PlatformError, match="against"):
        build_report(tmp_path / "runs" / "known", against=[tmp_path])


def test_a_run_whose_ranks_were_killed_is_told_from_what_they_left(a_run):
    directory = a_run("killed", status="running")
    (directory / "rank-1.json").unlink()
    run = RecordedRun.read(directory)
    data = report_data(run)
    assert data["status"] == "running"
    assert data["steps"] == 40
    assert data["timeline"] is None
    assert [log["rank"] for log in data["logs"]] == [0, 1]


def test_averaging_is_told_by_rank_by_step_and_as_a_share_of_the_run(a_run):
    row = {"module": "Digits", "ranks": 2, "steps": 40, "buckets": 3, "bytes_per_step": 1_250_000}
    waits = {"backward_s_per_step": 0.0125, "forward_s_per_step": 0.0025}
    shares = {"backward_share": 0.5 / 4.0, "forward_share": 0.1 / 4.0}
    wanted = [pytest.approx({"rank": rank, **row, **waits, **shares}) for rank in range(2)]
    parts = RecordedRun.read(a_run("both")).parts
    assert averaging_table(parts) == wanted
    parts[0]["averaging"][0] |= {"steps": 0, "bytes": 0, "wait_backward_s": 0.0}  # it never stepped
    assert averaging_table(parts)[0]["bytes_per_step"] == 0
    assert averaging_table(RecordedRun.read(a_run("alone", ranks=1)).parts) == []
    assert averaging_table(RecordedRun.read(a_run("cut", status="running")).parts) == []


def test_time_counts_from_the_first_attempt(a_run):
    directory = a_run("again", ranks=1)
    path = directory / "rank-0.json"
    part = json.loads(path.read_text()) | {"attempt": 1, "began_s": 100.0, "ended_s": 120.0}
    path.write_text(json.dumps(part))
    run = RecordedRun.read(directory)
    assert run.merged.seconds[0] == 0.0
    assert run.seconds == pytest.approx(118.9)


def test_the_cause_is_told_before_what_followed_from_it(a_run):
    directory = a_run("failed", trouble="ValueError: negative")
    path = directory / "rank-0.json"
    part = json.loads(path.read_text()) | {"status": "failed", "trouble": "RankFailed: rank 1 ..."}
    path.write_text(json.dumps(part))
    assert RecordedRun.read(directory).trouble == "rank 1: ValueError: negative"


def test_long_curves_are_thinned_and_keep_their_extremes():
    size = 10_000
    values = [0.0] * size
    values[5_000] = 7.0
    series = Series(list(range(size)), [float(i) for i in range(size)], values, values, values)
    thin = thinned(series, 100)
    assert len(thin["steps"]) == 100
    assert max(thin["high"]) == 7.0
    assert thin["steps"][-1] == size - 1


def test_of_a_progress_bar_the_log_shows_the_last_state(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_text("start\n 10%|#   \r 50%|##  \r100%|####\nend\n")
    assert log_tail(path) == "start\n100%|####\nend"
    assert log_tail(path, limit=4) == "end"
    assert log_tail(tmp_path / "none") == ""
