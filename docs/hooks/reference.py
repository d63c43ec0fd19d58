"""The API reference as Markdown: every public name with its signature, docstring and members.

Public is what a package lists in `__all__`; the names of `unisono` itself are told once, where they
live. Names stand in the order of use: that in which the guides, written for a reader from top to
bottom, first write them in code. `site_pages.py` puts the pages into the site, and a test looks for
every name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import ForwardRef

import unisono
from unisono.compat.libraries import LIBRARIES
from unisono.compat.modules import module_names

EXTRA = ("unisono.comm.mpi_style",)
"""Public modules that their package does not list."""
_DOCS = Path(__file__).parents[1]
_GUIDES = {
    "unisono": ("../README.md", "cheat_sheet.md", "launch.md", "checkpoint.md"),
    "unisono.launch": ("../README.md", "launch.md", "launch_slurm.md", "coming_from_ddpw.md"),
    "unisono.comm": ("comm.md", "transports.md"),
    "unisono.comm.mpi_style": ("mpi_style.md",),
    "unisono.data_parallel": ("tutorials/data.md", "data_parallel.md", "loaders.md", "daso.md"),
    "unisono.graph_parallel": ("tutorials/graph.md", "graph_parallel.md"),
    "unisono.nn": ("tutorials/space.md", "distributed_layers.md"),
    "unisono.bayes": ("tutorials/error_bars.md", "bayes.md"),
    "unisono.train": ("checkpoint.md", "report.md"),
    "unisono.errors": ("../README.md", "launch.md", "comm.md", "checkpoint.md", "topology.md"),
}
"""The pages that teach a package, if others than the one of its name."""
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.S)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples?|Note|Notes):$")
_WIDE = 88


def pages() -> dict[str, str]:
    """Return the pages of the reference: path in the site and Markdown."""
    modules = [*packages(), *EXTRA]
    named = {name: module_page(importlib.import_module(name)) for name in modules}
    named["unisono.compat"] = compat_page()
    texts = {f"reference/{name.removeprefix('unisono.')}.md": text for name, text in named.items()}
    return {"reference/index.md": index_page(modules), **texts}


def packages() -> list[str]:
    """Return the packages that users import from; the command line is none of them."""
    found = [entry.name for entry in pkgutil.iter_modules(unisono.__path__) if entry.ispkg]
    return [f"unisono.{name}" for name in (*found, "errors") if name != "cli"]


def public_names(module: ModuleType) -> list[str]:
    """Return what a module offers: its `__all__`, else what it defines without an underscore."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [name for name, value in vars(module).items() if _is_defined_in(module, value)]
    return [name for name in listed if not name.startswith("_")]


def in_order_of_use(module: str, names: list[str]) -> list[str]:
    """Return names in the order in which the guides first write them in code, then the others."""
    pages = _GUIDES.get(module, (f"{module.rpartition('.')[2]}.md",))
    texts = [
        (_DOCS / page).read_text(encoding="utf-8") for page in pages if (_DOCS / page).exists()
    ]
    code = "\n".join(found for text in texts for found in _CODE.findall(text))

    def first_use(name: str) -> tuple[int, bool, str]:
        found = re.search(rf"\b{re.escape(name)}\b", code)
        return found.start() if found else len(code), name[0].islower(), name.lower()

    return sorted(names, key=first_use)


def index_page(modules: list[str]) -> str:
    """Return the page of `import unisono`: its names, and where each is described."""
    lines = [
        "# Reference",
        "",
        inspect.getdoc(unisono) or "",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    names = in_order_of_use("unisono", public_names(unisono))
    for name in sorted(names, key=lambda name: inspect.ismodule(getattr(unisono, name))):
        value = getattr(unisono, name)
        page = f"{name}.md" if inspect.ismodule(value) else _home_page(value, modules)
        link = page if inspect.ismodule(value) else f"{page}#{name.lower()}"
        lines.append(f"| [`unisono.{name}`]({link}) | {_first_sentence(value)} |")
    lines += ["", "Beside these:", ""]
    listed = {f"unisono.{name}" for name in public_names(unisono)}
    lines += [
        f"- [`{name}`]({name.removeprefix('unisono.')}.md): "
        + _first_sentence(importlib.import_module(name))
        for name in modules
        if name not in listed
    ]
    return "\n".join(lines) + "\n"


def module_page(module: ModuleType) -> str:
    """Return the page of a package: its own words, then each public name."""
    parts = [f"# {module.__name__}", to_markdown(inspect.getdoc(module) or "")]
    modules: list[tuple[str, ModuleType]] = []
    for name in in_order_of_use(module.__name__, public_names(module)):
        value = getattr(module, name)
        if inspect.ismodule(value):
            modules.append((name, value))
        else:
            parts.append(object_section(name, value))
    for name, inner in modules:
        parts += [f"## {name} (module)"]
        parts += [to_markdown(inspect.getdoc(inner) or "")]
        parts += [
            object_section(public, getattr(inner, public), level=3)
            for public in public_names(inner)
            if not _is_module(inner, public)
        ]
    return "\n\n".join(parts) + "\n"


def compat_page() -> str:
    """Return the page of other libraries' spellings: module by module, with the objects' homes."""
    compat = unisono.compat
    parts = ["# unisono.compat", to_markdown(inspect.getdoc(compat) or "")]
    packages = [library.package for library in LIBRARIES.values()]
    for package in packages:
        importlib.import_module(package)
    for path in (path for package in packages for path in module_names(package)):
        module = importlib.import_module(path)
        names = [name for name in public_names(module) if not _is_module(module, name)]
        if names:
            rows = [f"| `{name}` | `{_home(getattr(module, name))}` |" for name in names]
            table = "\n".join(["| name | object |", "|---|---|", *rows])
            parts += [f"## {path}", to_markdown(inspect.getdoc(module) or ""), table]
    return "\n\n".join(parts) + "\n"


def object_section(name: str, value: object, level: int = 2) -> str:
    """Return the section of one name; a class tells its fields and its methods too."""
    parts = ["#" * level + f" {name}"]
    if not callable(value):
        kind = type(value).__name__
        return "\n\n".join([*parts, f"A `{kind}`. {to_markdown(_own_doc(value))}"])
    parts += [_block(signature(name, value)), to_markdown(_own_doc(value))]
    if inspect.isclass(value):
        fields = [f"- `{field}`: {_one_line(doc)}" for field, doc in documented_fields(value)]
        if fields:
            parts += ["**Fields**", "\n".join(fields)]
        parts += [_member_text(member, found) for member, found in members(value)]
    return "\n\n".join(part for part in parts if part)


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Yield public methods and properties that unisono defines for a class, each once."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("unisono"):
            continue
        fields = vars(base).get("__annotations__", {})  # a default may well be a function
        for name, value in vars(base).items():
            is_method = inspect.isroutine(value) or isinstance(value, (property, classmethod))
            if is_method and not name.startswith("_") and name not in (seen | fields.keys()):
                seen.add(name)
                yield name, value


def documented_fields(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the annotated names of a class body that have a docstring under them."""
    for pair in itertools.pairwise(_class_bodies(cls.__module__).get(cls.__qualname__, [])):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ) if not name.startswith("_"):
                yield name, inspect.cleandoc(doc)


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return what stands in each top-level class of a module; `inspect` parses it all for each."""
    try:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def signature(name: str, value: object) -> str:
    """Return `name(arguments) -> result`, annotations as they are written; wrapped when long."""
    try:
        found = inspect.signature(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return name
    arguments: list[str] = []
    last = None
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and last not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            arguments.append("*")
        last = parameter.kind
        arguments.append(_argument(parameter))
    result = (
        "" if found.return_annotation is found.empty else f" -> {_type(found.return_annotation)}"
    )
    if inspect.isclass(value):
        result = ""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= _WIDE:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){result}"


def to_markdown(doc: str) -> str:
    """Turn a Google-style docstring into Markdown: lists of arguments, blocks of examples."""
    parts: list[str] = []
    section, lines = "", []
    for line in [*doc.splitlines(), "Note:"]:
        header = _SECTION.match(line)
        # What stands at the margin again, such as an example, is no longer part of a section.
        ends = header is not None or (section and line and not line[0].isspace())
        if ends:
            parts.append(_section_text(section, textwrap.dedent("\n".join(lines)).strip()))
            section, lines = header[1] if header else "", []
        if header is None:
            lines.append(line)
    return "\n\n".join(part for part in parts if part)


def _section_text(section: str, text: str) -> str:
    if not section or not text:
        paragraphs = text.split("\n\n")
        return "\n\n".join(_block(p) if p.startswith(">>>") else p for p in paragraphs)
    if section.startswith("Example"):
        return text if text.startswith("```") else _block(text)
    if section in ("Args", "Attributes", "Raises"):
        items = re.sub(r"\n[ \t]+", " ", text).splitlines()
        pairs = [item.partition(":") for item in items if item.strip()]
        text = "\n".join(f"- `{name.strip()}`: {said.strip()}" for name, _, said in pairs)
        return f"**{ {'Args': 'Arguments'}.get(section, section) }**\n\n{text}"
    return f"**{section}** {text}"


def _member_text(name: str, value: object) -> str:
    if isinstance(value, property):
        head, doc = name, inspect.getdoc(value) or ""
    else:
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        head, doc = signature(name, function), inspect.getdoc(function) or ""
    kind = {property: "property", classmethod: "class method", staticmethod: "static method"}
    label = kind.get(type(value), "method")
    return f"#### {name}\n\n{_block(head)}\n\n*{label}.* {to_markdown(doc)}"


def _argument(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        shown = repr(parameter.default)
        shown = "..." if " at 0x" in shown or shown.startswith("<") else shown
        text += f" = {shown}" if ": " in text else f"={shown}"
    return text


def _type(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return getattr(annotation, "__qualname__", None) or str(annotation)


def _own_doc(value: object) -> str:
    """Return the docstring of an object, not one of a builtin class it is an instance of."""
    doc = inspect.getdoc(value) or ""
    if not callable(value) and doc == (inspect.getdoc(type(value)) or ""):
        return doc if type(value).__module__.startswith("unisono") else ""
    return doc


def _block(text: str) -> str:
    return f"```python\n{text}\n```"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _first_sentence(value: object) -> str:
    doc = _own_doc(value) or (str(value) if isinstance(value, str) else "")
    return _one_line(doc.partition("\n\n")[0]).replace("|", "\\|")


def _home(value: object) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _home_page(value: object, modules: list[str]) -> str:
    module = getattr(value, "__module__", "")
    found = [name for name in modules if module.startswith(name)]
    return f"{max(found, key=len).removeprefix('unisono.')}.md" if found else "launch.md"


def _is_module(module: ModuleType, name: str) -> bool:
    return inspect.ismodule(getattr(module, name))


def _is_defined_in(module: ModuleType, value: object) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
