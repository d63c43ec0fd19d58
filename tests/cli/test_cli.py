"""The command: every subcommand, what it prints and its exit code."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import unisono
from unisono.cli import doctor, exit_code_of, main
from unisono.cli.words import SHELL, parse_field, parse_words
from unisono.errors import PlatformError
from unisono.launch.places import mpi

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


def unisono_command(python, *words, cwd):
    """Run the installed command as a user does."""
    env = {**os.environ, "TMPDIR": str(cwd)}
    return subprocess.run(
        [python, "-m", "unisono", *words],
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


def test_a_script_runs_as_main_on_every_rank(forked_python, script):
    done = unisono_command(
        forked_python, "run", "--ranks", "2", "work.py", "--", "--lr", "0.1", cwd=script
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2 ['--lr', '0.1'] __main__",
        "[1] rank 1 of 2 ['--lr', '0.1'] __main__",
    ]
    assert done.stderr.startswith("unisono: 2 ranks on cpu, ")
    assert [path.name for path in script.iterdir()] == ["work.py"]


@pytest.fixture
def unisono_here(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in this process, whose server is warm already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*words):
        code = main(words)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


def test_a_failing_script_is_one_block_and_exit_code_1(script, unisono_here):
    done = unisono_here("run", "--ranks", "2", "work.py", "--", "--fail")
    assert done.returncode == 1
    assert "unisono: rank 1 of 2 on " in done.stderr
    assert "KeyError: 'missing'" in done.stderr
    assert "work.py" in done.stderr
    assert "unisono/launch/" not in done.stderr
    assert "--on inline" in done.stderr
    assert done.stderr.count("Traceback") == 1


TORCH_SCRIPT = """
import sys
import torch
import torch.distributed as dist

assert not dist.is_initialized()
dist.init_process_group("gloo")  # by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
total = torch.ones(2) * (dist.get_rank() + 1)
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise KeyError("missing")
dist.all_reduce(total)
print(total.tolist(), dist.get_world_size())
if "--adopt" in sys.argv:
    import unisono
    from unisono.launch import Platform, Wrapper
    print(unisono.world().backend, list(unisono.run(lambda: unisono.world().rank)))
    task = lambda global_rank, local_rank, process_group, args: process_group is dist.group.WORLD
    print(list(Wrapper(Platform(device="cpu", ranks=2, verbose=False)).start(task)))
dist.destroy_process_group()
if "--adopt" in sys.argv:
    print(unisono.world().size, unisono.world().backend)  # joined anew
"""


def test_a_script_that_starts_torch_distributed_itself_runs_as_under_torchrun(
    tmp_path, unisono_here, monkeypatch
):
    (tmp_path / "plain.py").write_text(TORCH_SCRIPT)
    done = unisono_here("run", "--ranks", "2", "plain.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] [3.0, 3.0] 2", "[1] [3.0, 3.0] 2"]
    words = ("run", "--ranks", "2", "--console", "rank0", "--set", "backend=shm", "plain.py")
    done = unisono_here(*words, "--", "--adopt")  # and unisono in it finds the group that is there
    assert done.returncode == 0, done.stderr
    seen = ["[3.0, 3.0] 2", "gloo [0, 1]", "[True, True]", "2 shm"]
    assert done.stdout.splitlines() == [f"[0] {line}" for line in seen]
    done = unisono_here("run", "--ranks", "2", "plain.py", "--", "--fail")
    assert done.returncode == 1
    assert "unisono: rank 1 of 2 on " in done.stderr
    assert "Stopped as a consequence: rank 0 (at plain.py:" in done.stderr
    monkeypatch.setattr(sys, "argv", ["unisono"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert unisono_here("run", "--on", "inline", "plain.py").stdout == "[1.0, 1.0] 1\n"


FIRST_USES = """
import torch
import torch.distributed as dist
from unisono.comm import Communicator
from unisono.graph_parallel import setup_gp
from unisono.compat.ddpw.functional import average_params_grads
from unisono.topology import Partition

for ask in (
    lambda: Communicator.of(None),
    lambda: Partition((2,)),
    lambda: average_params_grads(torch.nn.Linear(2, 2)),
    lambda: setup_gp({"gp_gpus": 2}),
):
    assert not dist.is_initialized()
    ask()
    assert dist.get_world_size() == 2
    dist.destroy_process_group()  # a script may: then the next use joins anew
dist.barrier()
"""


def test_a_world_is_joined_by_whatever_a_script_asks_first(tmp_path, unisono_here):
    (tmp_path / "first.py").write_text(FIRST_USES)
    done = unisono_here("run", "--ranks", "2", "first.py")
    assert done.returncode == 1
    assert "Default process group has not been initialized" in done.stderr
    assert ", in <module>\n    dist.barrier()\n" in done.stderr
    assert "HINT: unisono.world() first, or torch.distributed.init_process_group()" in done.stderr


def test_a_script_past_its_deadline_is_exit_code_124(script, unisono_here):
    words = ("run", "-m", "work", "--ranks", "2", "--timeout-s", "1", "--console", "none")
    done = unisono_here(*words, "--", "--hang")
    assert done.returncode == 124, done.stderr
    assert "work.py" in done.stderr
    assert "--timeout-s" in done.stderr
    assert done.stdout == ""


def test_words_are_read_as_python_where_they_can_be():
    positional, keywords = parse_words(["3", "[1, 2]", "adam", "a/b=c", "lr=1e-3", "name=x=y"])
    assert positional == [3, [1, 2], "adam", "a/b=c"]
    assert keywords == {"lr": 1e-3, "name": "x=y"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothere.py"], "no such file"),
        (["run"], "no script, module or function"),
        (["run", "x.py", "-m", "json.tool"], "a script and a module"),
        (["run", "--ranks", "0", "json:dumps", "--", "1"], "unisono run --ranks 0\n"),
        (["run", "--on", "moon", "json:dumps", "--", "1"], "unisono run --on moon\n"),
        (["run", "json:dump5"], "HINT: did you mean json:dump"),
        (["run", "json.tool:nothing"], "no 'nothing' in "),
        (["run", "-m", "no_such_module"], "No module named 'no_such_module'"),
        (["run", "json.decodr:f"], "HINT: modules there: json.decoder, "),
        (["run", "--console", "loud", "json:dumps", "--", "1"], "HINT: one of 'auto', 'all'"),
        (["demo", "--epochs", "0"], "--epochs=0\n"),
        (["run", "--set", "sed=1", "json:dumps", "--", "1"], "did you mean seed?"),
        (["run", "--env", "A", "json:dumps", "--", "1"], "--env NAME=value"),
        (["run", "--nodes", "2", "json:dumps", "--", "1"], "torchrun"),
        (["run", "--set", 'env="x"', "json:dumps", "--", "1"], "--set 'env={NAME"),
        (["run", "--set", "mpiexec_args=-v -x", "json:dumps", "--", "1"], 'args=["-v", "-x"]'),
        (["run", "--on", "inline", "--ranks", "2", "os:getpid"], "HINT: --on cpu --ranks 2"),
        (["run", "--partition", "x", "os:getpid"], "only\n  HINT: --on slurm\n"),
        (["doctor", "--on", "moon"], "'mpi', 'ray', 'slurm', 'inline'"),
        (["job", "status", "nothing-here"], "no job of ours"),
        (["run", "os:"], "no name of a function"),
    ],
)
def test_bad_usage_is_exit_code_2_with_a_message(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_settings_of_a_cluster_may_wait_in_a_file(monkeypatch, capsys, tmp_path):
    words = ["--dry-run", "os:getpid"]
    (tmp_path / "unisono.toml").write_text('[run]\npartition = "x"\ntimeout_min = 5\n')
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 0
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    assert main(["run", "--on", "slurm", "--partition", "x", *words]) == 0
    assert capsys.readouterr().err.count("2 ranks on cpu can be started") == 2


def test_the_launchers_own_frames_are_shown_on_demand_only(capsys):
    for option, is_shown in ((), False), (["--debug"], True):
        assert main(["run", *option, "nothere.py"]) == 2
        assert ("Traceback" in capsys.readouterr().err) is is_shown


def test_a_misspelt_script_is_answered_with_the_nearest_name(tmp_path, monkeypatch, capsys):
    for name in (*"abcdefghij", "train"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "trian.py"]) == 2
    assert "HINT: scripts there: train.py, " in capsys.readouterr().err
    assert main(["run", "-m", "trian"]) == 2
    assert "HINT: modules there: train, " in capsys.readouterr().err


def test_a_dry_run_starts_nothing(capsys):
    words = ["json:dumps", "--", "1"]
    assert main(["run", "--ranks", "2", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["rank", "0", "1"]
    assert "2 ranks on cpu can be started" in said.err
    assert main(["run", "--on", "cpu", "--gpus", "2", "--dry-run", *words]) == 0
    assert "--gpus 2 only counts ranks" in capsys.readouterr().err


def test_fields_variables_and_other_libraries_names_reach_the_ranks(tmp_path, unisono_here):
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
    done = unisono_here("run", "--compat", "ddpw", *fields, "old.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] rank {r} ('a',) 7" for r in range(2)]
    assert done.stderr.count('already in a world of 2 ranks on cpu; on="gpu" is not used') == 1


@pytest.mark.parametrize("length", [10, 1_000_000])  # found when it is flushed, or written
def test_a_reader_that_leaves_is_no_error_worth_a_traceback(length, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert exit_code_of(lambda: print("x" * length) or 0) == 141
        monkeypatch.undo()

    def other_pipe():
        raise BrokenPipeError

    with Path(os.devnull).open("w") as fine:
        monkeypatch.setattr(sys, "stdout", fine)
        with pytest.raises(BrokenPipeError):
            exit_code_of(other_pipe)
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_function_of_a_file_is_run_by_ranks_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "hello.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "Path(f'ran-{os.getpid()}').write_text(' '.join(sys.argv))\n"
        "class Model:\n"
        "    def __repr__(self): return 'a model'\n"
        "def build(lr=1, *, name='x'): return Model()\n"
        "if os.getpid(): late = build\n"
        "def steps(): yield 1\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run", "hello.py:build", "--", "name=3"]) == 0
    assert main(["run", "hello.py:built"]) == 2
    message = "it has Model, build, steps\n  HINT: did you mean hello.py:build?"
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("ran-*")] == []
    for target in ("hello.py:late", "hello:build"):
        assert main(["run", "--ranks", "2", target, "--", "0.5", "name=y"]) == 0
        assert capsys.readouterr().out == "[0] a model\n[1] a model\n"
    seen = sorted(path.read_text() for path in tmp_path.glob("ran-*"))
    assert seen == [str(tmp_path / "hello.py")] * 2 + ["hello"] * 2
    assert main(["run", "--ranks", "1", "hello.py:steps"]) == 1
    assert "a generator: calling the function runs nothing" in capsys.readouterr().err
    assert not Path(f"ran-{os.getpid()}").exists()


def test_settings_are_read_as_python_or_toml_or_words():
    values = {
        "slurm_additional_parameters": ('{account = "physics", exclusive = true}', dict),
        "env": ('{"A": "b"}', dict),
        "oversubscribe": ("false", bool),
        "name": ("7", str),
        "seed": ("7", int),
        "stop_signals": ("['SIGUSR2']", list),
    }
    for name, (text, kind) in values.items():
        assert type(parse_field(name, text)) is kind, name
    assert parse_field("env", '{A = "b"}') == {"A": "b"}
    assert parse_field("oversubscribe", "false") is False


def test_errors_spell_arguments_as_the_command_line_does():
    assert SHELL.run(ranks=0) == "unisono run --ranks 0"
    assert SHELL.platform(n_nodes=2, seed="x") == "unisono run --nodes 2 --set seed=x"
    assert SHELL.options(device="cpu", hosts=["a", "b"]) == "--on cpu --hosts a,b"
    assert SHELL.options(env={"A": "b c"}) == "--set 'env={A = \"b c\"}'"
    assert SHELL.options(stop_signals=["SIGUSR2"]) == "--set 'stop_signals=[\"SIGUSR2\"]'"
    assert SHELL.options(detect=False, timeout_s=5) == "--set detect=false --timeout-s 5"
    assert SHELL.run(ranks=(2, 8), elastic=True) == "unisono run --ranks 2:8 --elastic"


@pytest.mark.parametrize(
    ("words", "asked", "hint"),
    [
        (["--ranks", "8:2"], "unisono run --ranks 8:2", "--ranks 2:8"),
        (["--on", "mpi", "--elastic"], "unisono run --on mpi --elastic", "--on cpu or gpu"),
        (["--on", "mpi"], "unisono run --on mpi starts", "--on cpu needs none"),
        (["--on", "slurm", "--detach"], "--on slurm needs the programs", "--on cpu rehearses"),
    ],
)
def test_errors_of_places_are_spelled_so(words, asked, hint, tmp_path, monkeypatch, unisono_here):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MPIEXEC", raising=False)
    if "--elastic" not in words:
        monkeypatch.setattr(mpi, "_NAMES", ("no-mpiexec",))
    (tmp_path / "work.py").write_text("")
    done = unisono_here("run", *words, "work.py")
    assert done.returncode == 2
    assert asked in done.stderr.splitlines()[0]
    assert hint in done.stderr.partition("HINT: ")[2]


class QueuedJob:
    """A job of a scheduler, as `Job.attach` returns it."""

    id, dir, ranks, attempt, reason, state = "17", Path("/jobs/17"), 2, 0, "", "running"

    def status(self):
        return self.state

    def done(self):
        return self.state != "running"

    def wait(self, _timeout_s):
        return self.done()

    def stacks(self):
        return {0: "in <module>"}

    def cancel(self):
        self.state, self.reason = "cancelled", "by you"


def test_a_queued_job_is_looked_at_and_cancelled(tmp_path, monkeypatch, capsys):
    job = QueuedJob()
    job.dir = tmp_path
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").write_text(f"at {rank}\n")
    monkeypatch.setattr(unisono.Job, "attach", lambda _id: job)

    def ask(*words):
        code = main(["job", *words])
        return code, *capsys.readouterr()

    assert ask("logs", "17", "--rank", "all")[1] == "[0] at 0\n[1] at 1\n"
    code, out, err = ask("logs", "17")
    assert (code, out, "rank 0 of 2; --rank all" in err) == (0, "at 0\n", True)
    assert ask("logs", "17", "--rank", "1", "--tail", "0")[1] == ""
    assert "in <module>" in ask("stacks", "17")[1]
    code, out, err = ask("wait", "17", "--timeout-s", "0.01")
    assert (code, out, "has not ended within 0.01 s" in err) == (124, "running\n", True)
    assert ask("cancel", "17")[:2] == (0, "cancelled\n")
    assert ask("status", "17")[1] == "cancelled, attempt 0: by you\n"
    assert ask("wait", "17")[:2] == (1, "cancelled\n")
    job.state = "done"
    assert ask("wait", "17")[:2] == (0, "done\n")
    assert ask("logs", "17", "--rank", "1", "--follow")[1] == "at 1\n"
    assert ask("logs", "17", "--rank", "2")[0] == 2
    for bad in ("x", "-1"):
        with pytest.raises(SystemExit):
            main(["job", "logs", "17", "--rank", bad])


def test_only_a_scheduler_takes_a_job_that_its_launcher_leaves(capsys):
    assert main(["run", "--detach", "os:getpid"]) == 2
    assert "HINT: --on slurm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rum", "x.py"], "did you mean unisono run?"),
        (["job", "statis", "17"], "did you mean unisono job status?"),
        (["job", "list"], "squeue"),
        (["topo"], "unisono run --dry-run"),
        (["run", "--script", "pbs", "x.py"], "mpiexec or torchrun in the batch script"),
        (["run", "--ranks", "two", "x.py"], "--ranks 2"),
        (["run", "--rankz", "2", "x.py"], "did you mean --ranks?"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_one_that_is(words, hint, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert hint in capsys.readouterr().err.partition("HINT: ")[2]


COMPLETED = {
    "unisono r": {"run", "report"},
    "unisono run --on m": {"mps", "mpi"},
    "unisono run --ranks 2 --compat he": {"heat"},
    "unisono run train.py --dry": {"--dry-run"},
    "unisono job logs 17 --fo": {"--follow"},
    "unisono completion z": {"zsh"},
    "unisono run --logs wo": {"work.py"},
}


@pytest.mark.parametrize("shell", ["bash", "fish"])  # zsh takes the script of bash
def test_a_shell_completes_commands_options_and_choices(shell, tmp_path, capsys):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "work.py").touch()
    assert main(["completion", shell]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    text = "source completion; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _unisono; "
    text += 'printf "%s\\n" "${COMPREPLY[@]}"'
    if shell == "fish":
        text = "source completion; complete -C $argv[1] | string split -f1 \\t"
    for typed, expected in COMPLETED.items():
        words = [program, "-c", text, *(["-"] if shell == "bash" else []), typed]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["run", "--rank", "2", "x.py"],  # options have their whole names only
        ["job"],
        ["job", "logs"],
    ],
)
def test_argparse_errors_are_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert "usage: unisono" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (["show.py", "--epochs", "3"], ["--epochs", "3"]),
        (["show.py", "data", "-v", "--lr=0.1"], ["data", "-v", "--lr=0.1"]),
        (["-m", "show", "--epochs", "3"], ["--epochs", "3"]),
        (["-m", "show", "data"], ["data"]),
        (["show.py", "--", "--epochs", "--", "--ranks"], ["--epochs", "--", "--ranks"]),
        (["show.py", "--ranks", "1"], []),  # nothing but options of ours: they stay ours
        (["--set", "name=show", "--env", "show=1", "-m", "show", "-v"], ["-v"]),
        (["--record", "show", "-m", "show", "--epochs", "3"], ["--epochs", "3"]),
    ],
)
def test_what_follows_the_script_is_for_the_script(words, got, tmp_path, monkeypatch, capfd):
    (tmp_path / "show.py").write_text("import sys\nprint('got', sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "--on", "inline", *words]) == 0
    assert f"got {got}" in capfd.readouterr().out


def test_options_behind_the_script_that_may_be_meant_for_either_are_refused(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["run", "train.py", "--epochs", "3", "--logs=here"])
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert "--logs=here is an option of unisono run, too" in message
    assert "unisono run ... train.py -- --epochs 3 --logs=here for the script" in message
    with pytest.raises(SystemExit):
        main(["run", "--rank", "2", "train.py"])
    message = capsys.readouterr().err
    assert message.endswith("HINT: did you mean --ranks?\n")
    with pytest.raises(SystemExit):
        main(["doctor", "--epochs"])
    assert "HINT" not in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "execute", interrupt)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_doctor_finds_this_machine_ready(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert {"python", "torch", "backends", "cores", "/dev/shm", "two ranks"} <= set(found)
    assert found["two ranks"]["status"] == "ok"


def test_a_check_that_breaks_is_a_fail_with_a_fix_that_can_be_typed(monkeypatch, capsys):
    @doctor.check("the moon")
    def check_the_moon():
        raise OSError("no moon today")

    @doctor.check("torch")
    def check_torch():
        raise ImportError("libtorch.so: file too short", name="torch._C")

    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_python, check_the_moon, check_torch])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ok    python" in out
    assert "FAIL  the moon     OSError: no moon today" in out
    assert "-m pip install --force-reinstall torch\n" in out


def test_the_doctor_looks_closer_at_a_place(monkeypatch, capsys):
    def refuse(_place):
        raise PlatformError.because("two ranks", "no GPU", "0 < 2", 'on="cpu"')

    monkeypatch.setattr(doctor, "CHECKS", [])
    assert main(["doctor", "--on", "inline"]) == 0
    assert "ok    on inline    1 of 1 ranks right" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_run_at", refuse)
    assert main(["doctor", "--on", "gpu"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  on gpu       PlatformError: two ranks (no GPU)" in out
    assert 'fix: on="cpu"' in out


def test_an_mpiexec_of_another_mpi_than_mpi4py_is_a_warning(monkeypatch, tmp_path):
    pytest.importorskip("mpi4py")
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.8'\n")
    other.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(other))
    monkeypatch.setattr(doctor, "_library_of_mpi4py", lambda: "MPICH Version: 5.0")
    check = doctor.check_mpi()
    assert (check.status, check.found.endswith("but mpi4py uses mpich")) == ("warn", True)
    monkeypatch.setenv("MPIEXEC", "/nowhere/mpiexec")
    check = doctor.check_mpi()
    assert (check.status, "unset MPIEXEC" in check.fix) == ("warn", True)
    monkeypatch.delenv("MPIEXEC")
    monkeypatch.setattr("unisono.launch.places.mpi.shutil.which", lambda _path: None)
    assert doctor.check_mpi().status == "skip"


def test_shared_memory_of_the_killed_is_counted_and_that_in_use_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SHM", tmp_path)
    used = tmp_path / "unisono-used"
    used.write_bytes(b"x")
    with used.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        assert doctor.check_shared_memory().status == "ok"
        (tmp_path / "mpich_shm_1_0").touch()
        check = doctor.check_shared_memory()
    assert "; 1 file of processes that were killed" in check.found
    assert check.fix.startswith(f"rm {tmp_path}/mpich_shm_* once")
