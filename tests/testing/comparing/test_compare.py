"""`compare` names the planted cause of another result, and is silent where there is none."""

from __future__ import annotations

import json
import re

import pytest
import torch
from compared_programs import PROGRAMS, net, train

import unisono
from unisono.cli import main
from unisono.errors import PlatformError
from unisono.testing import RankPool, compare
from unisono.testing.comparing import causes, judge
from unisono.testing.comparing.forms import ProgramForm
from unisono.testing.comparing.probe import Recording, record


def record_all() -> dict[str, Recording]:
    """Record all programs on this rank, one after the other."""
    unisono.world()
    return {name: record(fn, (), {}) for name, (fn, _) in PROGRAMS.items()}


@pytest.fixture(scope="module")
def forms(rank_pool: RankPool) -> list[dict[str, ProgramForm]]:
    """All programs on one rank, on one again, and on two; in the same two processes."""
    runs = [
        rank_pool.run(record_all, world=ranks, backend="shm", timeout=100) for ranks in (1, 1, 2)
    ]
    return [{name: ProgramForm([rank[name] for rank in run]) for name in PROGRAMS} for run in runs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_planted_cause_is_named(forms, name):
    base, again, two = (form[name] for form in forms)
    found = judge(name, base, again, {2: two})
    assert found.cause.name == PROGRAMS[name][1], str(found)
    assert found.is_equal == (PROGRAMS[name][1] == causes.EQUAL)
    assert base.steps > 1


def test_there_are_twenty_causes_and_five_programs_without():
    planted = [cause for _, cause in PROGRAMS.values() if cause != causes.EQUAL]
    assert (len(planted), len(PROGRAMS)) == (20, 25)


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        (
            "padded_sampler",
            "11 rows on 1 rank, 12 on 2 (6 + 6); 1 too many: a sampler pads",
        ),
        ("no_sampler", "6 rows are seen by more than one rank (ranks 0-1), 6 of the first form"),
        ("a_shuffle_seeded_by_rank", "rows"),
        ("a_learning_rate_for_each_rank", "lr is 0.1 on 1 rank and 0.1, 0.2 on ranks 0-1 of 2"),
        ("a_loss_divided_by_ranks", "too small by a factor of 2"),
        ("gradients_that_are_summed", "too large by a factor of 2"),
        ("a_collective_without_derivative", "torch.distributed.all_reduce at"),
        ("uneven_batches", "ranks have 8 and 4 rows"),
    ],
)
def test_the_evidence_has_the_numbers(forms, name, evidence):
    base, again, two = (form[name] for form in forms)
    assert evidence in judge(name, base, again, {2: two}).cause.evidence


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A training for torchrun, with DDP and BatchNorm, that knows nothing of unisono."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "rank, size = dist.get_rank(), dist.get_world_size()\n"
        "torch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))\n"
        "model = nn.parallel.DistributedDataParallel(net)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(100):\n"
        "    x = torch.randn(8, 3)[rank::size]\n"
        "    optimizer.zero_grad()\n"
        "    model(x).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    print('step', step)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_a_table_and_keeps_a_record_with_a_report(script, capfd):
    words = ["compare", "--ranks", "1,2", "--steps", "3", "--record", "norms", "train.py"]
    assert main(words) == 1
    said = capfd.readouterr().out
    assert "step 0, output 1" in said
    assert "BatchNorm statistics" in said
    assert "of 32 elements differ" in said, "the second pass has the whole tensor"
    assert "step 99" not in said
    home = script / "runs" / "norms"
    (home / "report.html").unlink()
    assert main(["report", str(home)]) == 0, "the record is enough to make the page again"
    page = (home / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    (form,) = data["comparison"]["forms"]
    assert form["curves"]["parameter"][-1] > 0
    steps = {module["name"]: module["step"] for module in form["modules"]}
    assert steps["0"] is None or steps["0"] > 0
    assert steps["1"] == 0
    assert "BatchNorm statistics" in data["comparison"]["text"]


def test_hooks_and_collectives_are_as_before_a_recording():
    verb, backward = torch.distributed.all_reduce, torch.autograd.backward
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    record(lambda: train_alone(), (), {}, most=2)
    assert torch.distributed.all_reduce is verb
    assert torch.autograd.backward is backward
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks


def train_alone() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(9):
        model(torch.ones(3, 4)).mean().backward()
        optimizer.step()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(PlatformError, match=r"HINT: compare"):
        compare(train, net(), ranks=(1,))
    with pytest.raises(PlatformError, match="no training step"):
        compare(print, ranks=(1, 2))
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "--ranks", "one", "train.py"])
