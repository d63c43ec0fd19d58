"""The command that stands for `python` in other tests: as the real one, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")

ENDINGS = {
    "print('out'); import sys; print('err', file=sys.stderr)": (0, "out\n", "err"),
    "raise SystemExit(7)": (7, "", ""),
    "1 // 0": (1, "", "ZeroDivisionError"),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (-signal.SIGKILL, "", ""),
    "import atexit; atexit.register(print, 'last')": (0, "last\n", ""),
    "print(input() + '!')": (0, "Ada!\n", ""),
}


@pytest.mark.parametrize("code", ENDINGS)
def test_it_ends_and_speaks_as_python_does(warm_python, code):
    exit_code, out, err = ENDINGS[code]
    done = subprocess.run(
        [warm_python, "-c", code], input="Ada\n", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (exit_code, out), done.stderr
    assert err in done.stderr


def test_directory_variables_and_words_arrive(warm_python, tmp_path):
    (tmp_path / "beside.py").write_text("import os, sys\nsaid = os.environ['X'], sys.argv[1:]\n")
    (tmp_path / "script.py").write_text("import os, beside\nprint(os.getcwd(), *beside.said)\n")
    done = subprocess.run(
        [warm_python, "script.py", "-v", "a b"],
        cwd=tmp_path,
        env={**os.environ, "X": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{tmp_path} 1 ['-v', 'a b']\n", done.stderr


def test_signals_are_passed_on_and_its_death_is_the_death_of_both(warm_python):
    code = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"heard\\n"))
print("here", flush=True)
while True:
    time.sleep(0.01)
"""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [warm_python, "-c", code], stdout=subprocess.PIPE, text=True
        ) as shown:
            try:
                assert shown.stdout.readline() == "here\n"
                shown.send_signal(signal.SIGUSR1)
                assert shown.stdout.readline() == "heard\n"
                shown.send_signal(number)
                assert shown.wait(20) == -number
                assert shown.stdout.read() == ""  # the program behind it has closed its end, too
            finally:
                shown.kill()  # the block waits for its end
