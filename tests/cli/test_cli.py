"""The command: every subcommand, what it prints and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import unisono
from unisono.cli import doctor, doctor_mpi, main
from unisono.cli.run import parse_words

SCRIPT = """
import sys
import unisono

comm = unisono.world()
print(f"rank {comm.rank} of {comm.size} {sys.argv[1:]} {__name__}")
if "--fail" in sys.argv and comm.rank == 1:
    raise KeyError("missing")
if "--hang" in sys.argv:
    comm.barrier()
    import time
    time.sleep(60)
results = unisono.run(lambda: unisono.world().rank)  # joins the world it is in, if it is in one
assert list(results) == [0, 1], results
sys.exit(0)
"""


def unisono_command(*words, cwd):
    """Run the installed command as a user does."""
    env = {**os.environ, "TMPDIR": str(cwd)}
    return subprocess.run(
        [sys.executable, "-m", "unisono", *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def script(tmp_path):
    (tmp_path / "work.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_runs_as_main_on_every_rank(script):
    done = unisono_command("run", "--ranks", "2", "work.py", "--", "--lr", "0.1", cwd=script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2 ['--lr', '0.1'] __main__",
        "[1] rank 1 of 2 ['--lr', '0.1'] __main__",
    ]
    assert done.stderr.startswith("unisono: 2 ranks on cpu, ")
    assert [path.name for path in script.iterdir()] == ["work.py"]


def test_a_failing_script_is_one_block_and_exit_code_1(script):
    done = unisono_command("run", "--ranks", "2", "work.py", "--", "--fail", cwd=script)
    assert done.returncode == 1
    assert "unisono: rank 1 of 2 on " in done.stderr
    assert "KeyError: 'missing'" in done.stderr
    assert "work.py" in done.stderr
    assert "unisono/launch/" not in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_a_script_past_its_deadline_is_exit_code_124(script):
    words = ("run", "-m", "work", "--ranks", "2", "--timeout-s", "1", "--console", "none")
    done = unisono_command(*words, "--", "--hang", cwd=script)
    assert done.returncode == 124, done.stderr
    assert "work.py" in done.stderr
    assert done.stdout == ""


def test_the_same_script_runs_under_torchrun_and_plain_python(script):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for words, size in ((launch, 2), ([], 1)):
        done = subprocess.run(
            [sys.executable, *words, "work.py"],
            cwd=script,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert all(f"rank {rank} of {size}" in done.stdout for rank in range(size)), done.stdout


def test_a_function_gets_literals_and_its_values_are_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "mylib.py").write_text(
        "def scale(x, by=1, tag=''):\n    return tag + str(x * by)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["run", "--on", "inline", "mylib:scale", "--", "3", "by=2.5", "tag=x"]
    assert main(words) == 0
    monkeypatch.delitem(sys.modules, "mylib")
    assert capsys.readouterr().out == "[0] 'x7.5'\n"


def test_words_are_read_as_python_where_they_can_be():
    positional, keywords = parse_words(["3", "[1, 2]", "adam", "a/b=c", "lr=1e-3", "name=x=y"])
    assert positional == [3, [1, 2], "adam", "a/b=c"]
    assert keywords == {"lr": 1e-3, "name": "x=y"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothere.py"], "no such file"),
        (["run"], "no script, module or function"),
        (["run", "-m", "json.tool", "x.py"], "a script and a module"),
        (["run", "--ranks", "0", "json:dumps", "--", "1"], "ranks=0"),
        (["run", "--on", "moon", "json:dumps", "--", "1"], "on='moon'"),
        (["run", "json:dump5"], "no 'dump5' in json"),
        (["run", "no_such_module:f"], "No module named 'no_such_module'"),
        (["run", "--console", "loud", "json:dumps", "--", "1"], "console='loud'"),
        (["run", "--set", "sed=1", "json:dumps", "--", "1"], "did you mean seed?"),
        (["run", "--env", "A", "json:dumps", "--", "1"], "--env NAME=value"),
        (["run", "--nodes", "2", "json:dumps", "--", "1"], "torchrun"),
        (["job", "status", "nothing-here"], "no such job"),
    ],
)
def test_bad_usage_is_exit_code_2_with_a_message(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_and_a_check_start_nothing(capsys):
    words = ["json:dumps", "--", "1"]
    assert main(["run", "--ranks", "2", "--dry-run", *words]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["rank", "0", "1"]
    assert main(["run", "--ranks", "2", "--check", *words]) == 0
    assert "2 ranks on cpu can be started" in capsys.readouterr().out


def test_fields_variables_and_other_libraries_names_reach_the_ranks(tmp_path):
    (tmp_path / "old.py").write_text(
        "import os, torch\n"
        "from ddpw import Platform, Wrapper\n"
        "from ddpw import functional as DF\n"
        "assert os.environ['MODE'] == 'x=y' and DF.has_batch_norm\n"
        "def task(global_rank, local_rank, process_group, args):\n"
        "    print('rank', global_rank, args, torch.initial_seed())\n"
        "Wrapper(Platform(device='gpu', n_gpus=2, verbose=False)).start(task, ('a',))\n"
    )
    fields = ("--set", "seed=7", "--set", "seed_per_rank=False", "--env", "MODE=x=y")
    # The script asks for GPUs, but it is in a world already, and that counts.
    done = unisono_command("run", "--compat", "ddpw", *fields, "old.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] rank {r} ('a',) 7" for r in range(2)]


def test_a_detached_job_is_followed_and_waited_for(tmp_path):
    (tmp_path / "job.py").write_text("import unisono\nprint('at', unisono.world().rank)\n")
    started = unisono_command("run", "--ranks", "2", "--detach", "job.py", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    name = started.stdout.strip()
    waited = unisono_command("job", "wait", name, "--timeout-s", "60", cwd=tmp_path)
    assert (waited.returncode, waited.stdout) == (0, "done\n")
    logs = unisono_command("job", "logs", name, "--rank", "all", cwd=tmp_path)
    assert logs.stdout == "[0] at 0\n[1] at 1\n"
    status = unisono_command("job", "status", name, cwd=tmp_path)
    assert status.stdout == "done, attempt 0\n"


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["run", "--ranks", "two", "x.py"]])
def test_argparse_errors_are_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert "usage: unisono" in capsys.readouterr().err


def test_options_of_the_script_without_the_two_dashes_are_explained(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--ranks", "2", "train.py", "--epochs", "3"])
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert "unrecognized arguments: --epochs 3" in message
    assert "HINT: unisono run ... train.py -- --epochs 3" in message
    with pytest.raises(SystemExit):
        main(["doctor", "--epochs"])
    assert "HINT" not in capsys.readouterr().err


def test_a_script_that_cannot_import_shows_its_own_line(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    done = unisono_command("run", "--ranks", "2", "broken.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in done.stderr
    assert 'broken.py", line 1' in done.stderr
    assert "unisono/launch/" not in done.stderr


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"unisono {unisono.__version__}\n"


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "execute", interrupt)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_demo_trains_two_replicas_that_agree(tmp_path):
    done = unisono_command("demo", "--ranks", "2", "--epochs", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[0] training: 100%|" in done.stderr
    assert "[1] training" not in done.stderr
    report = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert float(report["test accuracy"].split("%")[0]) > 90
    assert report["replicas agree"].strip().startswith("yes")
    assert report["as in one process"].strip().startswith("yes")
    assert "samples/s" in report["speed"]


def test_the_demo_without_scikit_learn_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 2
    assert 'pip install "unisono[examples]"' in capsys.readouterr().err


def test_the_doctor_finds_this_machine_ready(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert {"python", "torch", "backends", "cores", "/dev/shm", "two ranks"} <= set(found)
    assert found["two ranks"]["status"] == "ok"


def test_a_check_that_breaks_is_a_fail_with_its_message_and_exit_code_1(monkeypatch, capsys):
    def check_the_moon():
        raise OSError("no moon today")

    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, check_the_moon))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ok    python" in out
    assert "FAIL  the moon     OSError: no moon today" in out


def test_an_import_that_fails_gets_a_fix_that_can_be_typed(monkeypatch, capsys):
    def check_torch():
        raise ImportError("libtorch.so: file too short", name="torch._C")

    monkeypatch.setattr(doctor, "CHECKS", (check_torch,))
    assert main(["doctor"]) == 1
    assert "-m pip install --force-reinstall torch\n" in capsys.readouterr().out


def test_the_doctor_looks_closer_at_a_place(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", ())
    assert main(["doctor", "--on", "inline"]) == 0
    assert "ok    on inline    1 of 1 ranks right" in capsys.readouterr().out
    assert main(["doctor", "--on", "moon"]) == 1
    assert (
        "FAIL  place        PlatformError: unisono.run(..., on='moon')" in capsys.readouterr().out
    )


def test_an_mpiexec_of_another_mpi_than_mpi4py_is_a_warning(monkeypatch, tmp_path):
    pytest.importorskip("mpi4py")
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.8'\n")
    other.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(other))
    monkeypatch.setattr(doctor_mpi, "_library_of_mpi4py", lambda: "MPICH Version: 5.0")
    check = doctor_mpi.check_mpi()
    assert (check.status, check.found.endswith("but mpi4py uses mpich")) == ("warn", True)
    monkeypatch.setenv("MPIEXEC", "/nowhere/mpiexec")
    assert doctor_mpi.check_mpi().status == "skip"


def test_a_host_name_that_does_not_resolve_is_a_warning_with_a_fix(monkeypatch):
    def refuse(*_args):
        raise OSError("unknown host")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    check = doctor.check_host_name()
    assert check.status == "warn"
    assert "/etc/hosts" in doctor.render(check)
