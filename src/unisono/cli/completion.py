"""`unisono completion`: a script for a shell that completes commands, options and their choices.

It is generated from the parser, so it knows what the command line knows.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")
_PLACES = ("cpu", "gpu", "mps", "mpi", "ray", "slurm", "inline")
"""Words for `--on`, which takes profiles, too."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a script that completes this command in a shell: "
        'eval "$(unisono completion bash)" in ~/.bashrc, the same with zsh in ~/.zshrc, or '
        "unisono completion fish > ~/.config/fish/completions/unisono.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Print the script."""
    from unisono.cli import build_parser

    table = dict(_words(build_parser()))
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](table))
    return 0


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the commands of a parser by name; none where it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _words(parser: argparse.ArgumentParser, typed: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield what may follow: after a command its words, after a command and an option its choices.

    A key is the command, or the command, a space and the option; "" is the program itself.
    """
    commands = subcommands(parser)
    options = [word for word in parser._option_string_actions if word.startswith("--")]
    positional = [
        str(choice)
        for action in parser._actions
        if not action.option_strings and not commands
        for choice in action.choices or ()
    ]
    yield typed, [*commands, *positional, *options]
    for option, action in parser._option_string_actions.items():
        choices = _PLACES if option == "--on" else action.choices
        if choices:
            yield f"{typed} {option}".strip(), [str(choice) for choice in choices]
        elif action.nargs != 0:
            yield f"{typed} {option}".strip(), []
    for name, command in commands.items():
        yield from _words(command, f"{typed} {name}".strip())


def _bash(table: Mapping[str, list[str]]) -> str:
    cases = "\n".join(
        f"    {shlex.quote(key)}) echo {shlex.quote(' '.join(words))};;"
        for key, words in table.items()
    )
    return f"""_unisono_words() {{
  case "$1" in
{cases}
    *) return 1;;
  esac
}}
_unisono() {{
  local at word typed="" current="${{COMP_WORDS[COMP_CWORD]}}" words
  for ((at = 1; at < COMP_CWORD; at++)); do
    word="${{COMP_WORDS[at]}}"
    [[ "$word" != -* ]] && _unisono_words "${{typed:+$typed }}$word" >/dev/null || continue
    typed="${{typed:+$typed }}$word"
  done
  words=$(_unisono_words "${{typed:+$typed }}${{COMP_WORDS[COMP_CWORD-1]}}") \\
    || words=$(_unisono_words "$typed")
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ ${{#COMPREPLY[@]}} -eq 0 && "$current" != -* ]] && COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _unisono unisono"""


def _zsh(table: Mapping[str, list[str]]) -> str:
    """Return the script of bash, which zsh runs with its own words of completion."""
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash(table)}"


def _fish(table: Mapping[str, list[str]]) -> str:
    lines: list[str] = []
    for key, words in table.items():
        *typed, last = key.split() or [""]
        if last.startswith("--"):
            if words:
                condition = f"__fish_seen_subcommand_from {typed[-1]}" if typed else "true"
                lines.append(_fish_line(condition, f"-l {last[2:]} -x -a", words))
            continue
        condition = f"__fish_seen_subcommand_from {last}" if last else "__fish_use_subcommand"
        plain = [word for word in words if not word.startswith("--")]
        if plain:
            lines.append(_fish_line(condition, "-f -a" if not last else "-a", plain))
        for option in words:
            if option.startswith("--"):
                lines.append(f"complete -c unisono -n {shlex.quote(condition)} -l {option[2:]}")
    return "\n".join(lines)


def _fish_line(condition: str, how: str, words: list[str]) -> str:
    return f"complete -c unisono -n {shlex.quote(condition)} {how} {shlex.quote(' '.join(words))}"
